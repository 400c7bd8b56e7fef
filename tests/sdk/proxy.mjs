// A proxy as a user of the SDK would run one for `forwardURL` rules, by the SDK's own helper. The tests start it on
// the far side of the world (world.mjs), with the environment of `bivouac env`; it prints a line per request.
import { createServer } from 'node:https'
import { defineSandboxProxy } from '@vercel/sandbox/proxy'

const { CERTIFICATE: cert, KEY: key, PROXY_PORT: port } = process.env
const tell = (what) => console.log(JSON.stringify(what))

async function took(request, meta) {
  const { method, url } = request
  const body = await request.text()
  tell({ meta, method, url, body, headers: Object.fromEntries(request.headers) })
  return Response.json({ from: 'the proxy', url }, { status: 201, headers: { 'x-proxy': meta.sandboxName } })
}

function refused(_request, error) {
  tell({ refused: error.message })
  return new Response(error.message, { status: 403 })
}

const proxy = defineSandboxProxy(took, refused)

createServer({ cert, key }, async (request, response) => {
  const body = []
  for await (const piece of request) body.push(piece)
  const { method, headers } = request
  const init = { method, headers, body: body.length > 0 ? Buffer.concat(body) : undefined }
  const answer = await proxy(new Request(`https://${headers.host}${request.url}`, init))
  response.writeHead(answer.status, Object.fromEntries(answer.headers))
  response.end(await answer.text())
}).listen(Number(port), () => console.log('ready'))
