// Ports of sandboxes as the SDK's users reach them: `domain(port)` and `routes[].url`, under `bivouac env`.
import assert from 'node:assert/strict'
import http from 'node:http'
import { box, test, until } from '../lib.mjs'

const SERVER = `
const http = require('node:http')
http.createServer(async (request, response) => {
  let size = 0
  for await (const piece of request) size += piece.length
  if (request.url === '/away') return response.writeHead(302, { location: '/there' }).end()
  if (request.url === '/stream') {
    for (let i = 0; i < 3; i++) {
      response.write('piece ' + i + '\\n')
      await new Promise((resolve) => setTimeout(resolve, 20))
    }
    return response.end()
  }
  const { method, url, headers } = request
  response.setHeader('content-type', 'application/json')
  response.end(JSON.stringify({ method, url, headers, size, port: +process.argv[2] }))
}).listen(+process.argv[2], '0.0.0.0')
`

async function serve(sandbox, port) {
  await sandbox.writeFiles([{ path: 'server.cjs', content: SERVER }])
  await sandbox.runCommand({ cmd: 'node', args: ['server.cjs', String(port)], detached: true })
  return until(`port ${port}`, async () => {
    const response = await fetch(`${sandbox.domain(port)}/ready`)
    if (response.ok) return response.json()
    await response.arrayBuffer()
  })
}

test('S40 S41 a server inside is reached by its domain and its url', async (t) => {
  const sandbox = await box(t, { ports: [3000], persistent: false })
  const seen = await serve(sandbox, 3000)
  assert.equal(seen.url, '/ready')
  assert.equal(seen.headers['x-bivouac-token'], undefined, 'the token is not shown to the program')
  assert.throws(() => sandbox.domain(4000), /No route for port 4000/)
  const [route] = sandbox.routes
  for (const base of [sandbox.domain(3000), route.url]) {
    const response = await fetch(`${base}/a/b?c=%2F`, { method: 'POST', body: 'x'.repeat(300_000), headers: { authorization: 'Basic dTpw' } })
    assert.equal(response.status, 200, base)
    const told = await response.json()
    assert.deepEqual([told.method, told.url, told.size, told.port], ['POST', '/a/b?c=%2F', 300_000, 3000])
    assert.equal(told.headers.authorization, 'Basic dTpw')
    assert.match(told.headers.host, new RegExp(`^${route.subdomain}\\.localhost`))
    assert.equal((await (await fetch(`${base}/away`)).json()).url, '/there')
    assert.equal(await (await fetch(`${base}/stream`)).text(), 'piece 0\npiece 1\npiece 2\n')
  }
  // Others stay out: the same request without the shim.
  const { hostname, port } = new URL(process.env.BIVOUAC_URL)
  const status = await new Promise((resolve, reject) => {
    const headers = { host: `${route.subdomain}.localhost:${port}` }
    http.get({ hostname, port, path: '/', headers }, (answer) => resolve(answer.resume().statusCode)).on('error', reject)
  })
  assert.equal(status, 401)
})

test('S60 a port that is added later is reached at once, and one that is taken away is not', async (t) => {
  const sandbox = await box(t, { ports: [3000], persistent: false })
  await serve(sandbox, 3000)
  const old = sandbox.domain(3000)
  await sandbox.update({ ports: [4000] })
  const seen = await serve(sandbox, 4000)
  assert.equal(seen.port, 4000)
  const gone = await fetch(`${old}/x`)
  assert.equal(gone.status, 404)
})
