// The firewall as the official SDK's users see it: scenarios 63–74, against origins that the world plays. Each test
// has names and addresses of its own, so that what the world records is its alone.
import assert from 'node:assert/strict'
import { createServer, request as httpRequest } from 'node:http'
import { Sandbox as Sandbox2 } from 'sdk2'
import { Sandbox } from '@vercel/sandbox'
import { box, out, remove, sh, test as plain, unique, until } from '../lib.mjs'
import { missing, name, packets, queries, seen, server } from '../world.mjs'

const test = (title, body) => plain(title, body, { skip: missing })
const curl = (url, ...more) => ['curl', '-sS', '-m', '10', ...more, url].map((word) => `'${word}'`).join(' ')
const CA = '/usr/local/share/ca-certificates/vercel-proxy-ca.pem'

/** What the origin got, as the sandbox saw it in the answer. */
const get = async (sandbox, url, ...more) => JSON.parse(await out(sandbox, curl(url, ...more)))

/** curl must not get an answer of the origin. */
async function fails(sandbox, url, ...more) {
  const command = await sh(sandbox, curl(url, '-f', ...more))
  assert.notEqual(command.exitCode, 0, `${url} was reached: ${await command.stdout()}`)
}

/** Names of this test at an address of its own. */
async function origin(address, ...hosts) {
  for (const host of hosts) await name(host, address)
}

test('S63 deny-all: neither connections nor names', async (t) => {
  await origin('203.0.113.163', 's63.test')
  const sandbox = await box(t, { networkPolicy: 'deny-all', persistent: false })
  const resolve = `python3 -c 'import socket; print(socket.gethostbyname("s63.test"))'`
  await fails(sandbox, 'https://s63.test/')
  await fails(sandbox, 'https://203.0.113.163/', '-k')
  await fails(sandbox, 'http://203.0.113.163/')
  assert.notEqual((await sh(sandbox, resolve)).exitCode, 0, 'the name resolved')
  assert.equal(await queries('s63.test'), 0)
  assert.equal(await packets('203.0.113.163'), 0)
  // The same is seen when it is let out.
  await sandbox.update({ networkPolicy: 'allow-all' })
  assert.equal(await out(sandbox, resolve), '203.0.113.163')
  assert.equal((await get(sandbox, 'https://s63.test/')).sni, 's63.test')
  assert.ok((await queries('s63.test')) > 0)
  assert.ok((await packets('203.0.113.163')) > 0)
})

test('S64 an allowed name: by TLS only', async (t) => {
  await origin('203.0.113.164', 'example.com')
  await origin('203.0.113.165', 'example.org')
  const sandbox = await box(t, { networkPolicy: { allow: ['example.com'] }, persistent: false })
  const answer = await get(sandbox, 'https://example.com/s64')
  assert.equal(answer.sni, 'example.com')
  await fails(sandbox, 'https://example.org/s64')
  await fails(sandbox, 'http://example.com/s64')
  // Neither the other's address nor a lie about it helps.
  await fails(sandbox, 'https://example.org/s64', '-k', '--resolve', 'example.org:443:203.0.113.164')
  assert.equal((await seen('/s64')).length, 1)
  assert.equal(await packets('203.0.113.165'), 0)
})

test('S65 a wildcard: any depth below, not the apex', async (t) => {
  await origin('203.0.113.166', 's65.test', 'sub.s65.test', 'a.b.s65.test', 'nots65.test')
  const sandbox = await box(t, { networkPolicy: { allow: ['*.s65.test'] }, persistent: false })
  for (const host of ['sub.s65.test', 'a.b.s65.test']) assert.equal((await get(sandbox, `https://${host}/`)).sni, host)
  for (const host of ['s65.test', 'nots65.test']) await fails(sandbox, `https://${host}/`)
})

test('S66 an empty policy and denials alone are deny-all', async (t) => {
  await origin('203.0.113.167', 's66.test')
  const sandbox = await box(t, { networkPolicy: {}, persistent: false })
  for (const networkPolicy of [{}, { allow: {} }, { allow: [] }, { subnets: { deny: ['192.0.2.0/24'] } }]) {
    await sandbox.update({ networkPolicy })
    await fails(sandbox, 'https://s66.test/')
    await fails(sandbox, 'http://203.0.113.167/')
  }
  assert.equal(await queries('s66.test'), 0)
  assert.equal(await packets('203.0.113.167'), 0)
  await sandbox.update({ networkPolicy: { allow: ['s66.test'] } })
  assert.equal((await get(sandbox, 'https://s66.test/')).sni, 's66.test')
})

test('S67 addresses: allowed ones by any protocol, denials win', async (t) => {
  const sandbox = await box(t, { networkPolicy: { subnets: { allow: ['1.1.1.1/32'] } }, persistent: false })
  assert.equal((await get(sandbox, 'http://1.1.1.1/s67')).origin, '1.1.1.1:80')
  assert.equal((await get(sandbox, 'https://1.1.1.1/s67', '-k')).origin, '1.1.1.1:443')
  await fails(sandbox, 'http://1.1.1.2/s67')
  await sandbox.update({ networkPolicy: { subnets: { allow: ['1.1.1.0/24'], deny: ['1.1.1.1/32'] } } })
  await fails(sandbox, 'http://1.1.1.1/s67-denied')
  assert.equal((await get(sandbox, 'http://1.1.1.2/s67')).origin, '1.1.1.2:80')
  assert.deepEqual(await seen('/s67-denied'), [])
})

test('S68 transform: the origin sees the header, the sandbox never holds it', async (t) => {
  const secret = unique('secret')
  await origin('203.0.113.168', 's68.test')
  const headers = { authorization: `Bearer ${secret}`, 'x-added': 'yes' }
  const networkPolicy = { allow: { 's68.test': [{ transform: [{ headers }] }] } }
  const sandbox = await box(t, { networkPolicy, persistent: false })
  // `/status` so that the origin's answer, which would tell the headers, is no place where it comes from.
  await out(sandbox, curl('https://s68.test/status/200?s68', '-H', 'Authorization: Bearer mine', '-H', 'x-kept: kept'))
  const [got] = await seen('?s68')
  assert.deepEqual([got.headers.authorization, got.headers['x-added'], got.headers['x-kept']], [`Bearer ${secret}`, 'yes', 'kept'])
  assert.deepEqual(await seen('Bearer mine'), [])

  // The pattern does not match itself. One is planted in each place, and is all that is found.
  const pattern = `[${secret[0]}]${secret.slice(1)}`
  await sandbox.writeFiles([{ path: '/tmp/planted', content: `x ${secret} y` }])
  const holder = await sandbox.runCommand({ cmd: 'sleep', args: ['600'], env: { PLANTED: secret }, detached: true })
  const shown = await sandbox.runCommand({ cmd: 'sh', args: ['-c', 'sleep 600; :', `a-${secret}`], detached: true })
  const files = await out(sandbox, `grep -rsl --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr '${pattern}' / || :`, { sudo: true })
  assert.equal(files, '/tmp/planted')
  const etc = await out(sandbox, `grep -rsl '${pattern}' /usr/local || :`, { sudo: true })
  assert.equal(etc, '')
  const environments = await out(sandbox, `cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep '${pattern}' | sort -u`, { sudo: true })
  assert.equal(environments, `PLANTED=${secret}`)
  const processes = await out(sandbox, `ps axww -o args | grep '${pattern}'`, { sudo: true })
  assert.equal(processes, `sh -c sleep 600; : a-${secret}`)
  assert.equal((await sh(sandbox, `env | grep '${pattern}'`)).exitCode, 1)
  for (const command of [holder, shown]) await command.kill('SIGKILL')
})

test('S69 a match: the header on that path only, both reach the origin', async (t) => {
  await origin('203.0.113.169', 's69.test')
  const rule = { match: { path: { startsWith: '/v1/' } }, transform: [{ headers: { 'x-key': 'S69' } }] }
  const sandbox = await box(t, { networkPolicy: { allow: { 's69.test': [rule] } }, persistent: false })
  assert.equal((await get(sandbox, 'https://s69.test/v1/x')).headers['x-key'], 'S69')
  assert.equal((await get(sandbox, 'https://s69.test/v2/x')).headers['x-key'], undefined)
  // A detour is the same path.
  assert.equal((await get(sandbox, 'https://s69.test/v2/../v1/y', '--path-as-is')).target, '/v1/y')
})

test('S70 the first of two rules', async (t) => {
  await origin('203.0.113.170', 's70.test')
  const rules = [
    { match: { path: { startsWith: '/a' } }, transform: [{ headers: { 'x-first': '1' } }] },
    { transform: [{ headers: { 'x-second': '2' } }] },
  ]
  const sandbox = await box(t, { networkPolicy: { allow: { 's70.test': rules } }, persistent: false })
  const sent = async (path) => {
    const { headers } = await get(sandbox, `https://s70.test${path}`)
    return [headers['x-first'], headers['x-second']]
  }
  assert.deepEqual(await sent('/a/b'), ['1', undefined])
  assert.deepEqual(await sent('/b'), [undefined, '2'])
})

test('S71 certificates: the origin\'s own, or the sandbox\'s that every client accepts', async (t) => {
  await origin('203.0.113.171', 'plain71.test', 'ruled71.test')
  const body = `${'a'.repeat(40)}\trefs/heads/main\n`
  const refs = (path, text) => ({ match: { path: { exact: path } }, response: { statusCode: 200, body: text, contentType: 'text/plain' } })
  const rules = [refs('/repo/info/refs', body), refs('/repo/HEAD', 'ref: refs/heads/main\n'), { transform: [{ headers: { 'x-key': 'S71' } }] }]
  const sandbox = await box(t, { networkPolicy: { allow: { 'plain71.test': [], 'ruled71.test': rules } }, persistent: false })
  const shown = async (host) => {
    const script = `const s = require('tls').connect({ host: '${host}', port: 443, servername: '${host}', rejectUnauthorized: false }, () => {
      const { issuer, issuerCertificate } = s.getPeerCertificate(true)
      console.log(JSON.stringify({ issuer: issuer.CN, sum: issuerCertificate?.fingerprint256 })); s.end() })`
    return JSON.parse(await out(sandbox, `node -e "$SCRIPT"`, { env: { SCRIPT: script } }))
  }
  const sum = await out(sandbox, `node -p 'new (require("crypto").X509Certificate)(require("fs").readFileSync("${CA}")).fingerprint256'`)
  assert.equal((await shown('plain71.test')).issuer, 'root of the test world')
  const ruled = await shown('ruled71.test')
  assert.notEqual(ruled.issuer, 'root of the test world')
  assert.equal(ruled.sum, sum)
  const url = 'https://ruled71.test/x'
  assert.equal((await get(sandbox, url)).headers['x-key'], 'S71')
  const clients = {
    node: [`node -e "$SCRIPT"`, `fetch('${url}').then((r) => r.text()).then(console.log)`],
    python: [`python3 -c "$SCRIPT"`, `import urllib.request; print(urllib.request.urlopen('${url}').read().decode())`],
  }
  for (const [client, [line, SCRIPT]] of Object.entries(clients)) {
    assert.equal(JSON.parse(await out(sandbox, line, { env: { SCRIPT } })).headers['x-key'], 'S71', client)
  }
  assert.match(await out(sandbox, 'git ls-remote https://ruled71.test/repo'), /^a{40}\s+refs\/heads\/main$/m)
  // Who does not trust it is told by its client, and no request goes out.
  await fails(sandbox, 'https://ruled71.test/distrust', '--cacert', '/dev/null')
  assert.deepEqual(await seen('/distrust'), [])
})

test('S72 a response rule: the origin is not contacted', async (t) => {
  await origin('203.0.113.172', 's72.test')
  const response = { statusCode: 418, body: '{"no":"coffee"}', contentType: 'application/json', headers: { 'x-why': 'teapot' } }
  const rule = { match: { path: { startsWith: '/brew' } }, response }
  const sandbox = await box(t, { networkPolicy: { allow: { 's72.test': [rule] } }, persistent: false })
  const answer = await out(sandbox, curl('https://s72.test/brew?s72', '-i', '--http1.1'))
  assert.match(answer, /^HTTP\/1\.1 418 /)
  assert.match(answer, /^x-why: teapot\r?$/im)
  assert.match(answer, /^content-type: application\/json\r?$/im)
  assert.ok(answer.endsWith('{"no":"coffee"}'), answer)
  assert.deepEqual(await seen('?s72'), [])
  assert.equal(await packets('203.0.113.172'), 0)
  assert.equal((await get(sandbox, 'https://s72.test/other')).target, '/other')
})

test('S73 forwardURL: the proxy gets the request and its headers', async (t) => {
  await origin('203.0.113.173', 's73.test')
  await origin('203.0.113.174', 'proxy73.test')
  const rule = { match: { path: { startsWith: '/api' } }, forwardURL: 'https://proxy73.test/hook' }
  const sandbox = await box(t, { networkPolicy: { allow: { 's73.test': [rule] } }, persistent: false })
  const forged = ['-H', 'vercel-forwarded-host: evil.test', '-H', 'vercel-sandbox-oidc-token: forged']
  const answer = await get(sandbox, 'https://s73.test/api/x?s73=1', '-d', 'the body', ...forged)
  assert.match(answer.origin, /^203\.0\.113\.174:443$/)
  const [got, ...more] = await seen('s73=1')
  assert.deepEqual(more, [])
  assert.deepEqual([got.sni, got.method, got.body], ['proxy73.test', 'POST', 'the body'])
  assert.ok(got.target.startsWith('/hook'), got.target)
  const told = ['host', 'scheme', 'port', 'path'].map((part) => got.headers[`vercel-forwarded-${part}`])
  assert.deepEqual(told, ['s73.test', 'https', '443', '/api/x?s73=1'])
  const claims = JSON.parse(Buffer.from(got.headers['vercel-sandbox-oidc-token'].split('.')[1], 'base64url'))
  assert.deepEqual([claims.aud, claims.sandbox_name], ['https://proxy73.test/hook', sandbox.name])
  assert.equal(await packets('203.0.113.173'), 0)
})

/** The engine, for a program that cannot reach its loopback: at the address that the far side sees. */
async function reachable(t) {
  const engine = new URL(process.env.BIVOUAC_URL)
  const relay = createServer((request, response) => {
    const { method, url, headers } = request
    const onward = httpRequest({ host: engine.hostname, port: engine.port, method, path: url, headers: { ...headers, host: engine.host } }, (answer) => {
      response.writeHead(answer.statusCode, answer.headers)
      answer.pipe(response)
    })
    onward.on('error', () => response.destroy())
    request.pipe(onward)
  })
  await new Promise((ready) => relay.listen(0, '198.51.100.1', ready))
  t.after(() => (relay.closeAllConnections(), relay.close()))
  return `http://198.51.100.1:${relay.address().port}`
}

test('S73 forwardURL: the proxy helper of the SDK takes our tokens as they are', async (t) => {
  await origin('203.0.113.175', 's73h.test')
  await origin('203.0.113.176', 'proxy73h.test', 'other73h.test')
  const script = new URL('../proxy.mjs', import.meta.url).pathname
  const env = { PROXY_PORT: '8600', BIVOUAC_URL: await reachable(t), BIVOUAC_TOKEN: '' }
  const took = await server(t, ['proxy73h.test', 'other73h.test'], script, env)
  const rules = (forwardURL) => ({ allow: { 's73h.test': [{ forwardURL }] } })
  const sandbox = await box(t, { networkPolicy: rules('https://proxy73h.test:8600/hook/'), persistent: false })
  const answer = await out(sandbox, curl('https://s73h.test/api/x?a=1&b=2', '-i', '--http1.1', '-d', 'the body', '-H', 'x-mine: yes'))
  assert.match(answer, /^HTTP\/1\.1 201 /, `${answer} ${JSON.stringify(took)}`)
  assert.match(answer, new RegExp(`^x-proxy: ${sandbox.name}\\r?$`, 'im'))
  const [{ meta, headers, ...request }] = await until('the line of the proxy', () => took.length > 0 && took)
  assert.deepEqual(request, { method: 'POST', url: 'https://s73h.test/api/x?a=1&b=2', body: 'the body' })
  assert.equal(headers['x-mine'], 'yes')
  assert.deepEqual(meta, {
    host: 'proxy73h.test:8600',
    teamId: process.env.VERCEL_TEAM_ID,
    projectId: process.env.VERCEL_PROJECT_ID,
    sandboxId: sandbox.currentSession().sessionId,
    sandboxName: sandbox.name,
  })
  assert.equal((await get(sandbox, 'https://s73h.test/')).url, 'https://s73h.test/')

  // The helper does judge: what the sandbox sends itself, past the rule, has no token that it takes.
  await sandbox.update({ networkPolicy: 'allow-all' })
  const forged = ['host: s73h.test', 'scheme: https', 'port: 443', 'path: /'].flatMap((h) => ['-H', `vercel-forwarded-${h}`])
  const part = (value) => Buffer.from(JSON.stringify(value)).toString('base64url')
  const claims = { iss: `https://oidc.vercel.com/${meta.teamId}`, aud: 'https://proxy73h.test:8600/hook', team_id: 'x' }
  const token = `${part({ alg: 'RS256', typ: 'JWT' })}.${part(claims)}.${Buffer.alloc(256, 1).toString('base64url')}`
  const status = await out(sandbox, curl('https://proxy73h.test:8600/hook', '-o', '/dev/null', '-w', '%{http_code}', ...forged, '-H', `vercel-sandbox-oidc-token: ${token}`))
  assert.equal(status, '403')
  assert.equal(await packets('203.0.113.175'), 0)
})

test('S74 a policy changes while a command runs', async (t) => {
  const secret = unique('secret')
  await origin('203.0.113.177', 's74.test')
  const sandbox = await box(t, { networkPolicy: 'deny-all', persistent: false })
  const loop = `until [ -e stop74 ]; do ${curl('https://s74.test/status/200?s74', '-o', '/dev/null', '-w', '%{http_code}\\n')} 2>/dev/null || :; done`
  const running = await sh(sandbox, loop, { detached: true })
  await fails(sandbox, 'https://s74.test/')
  assert.deepEqual(await seen('?s74'), [])
  const rules = [{ transform: [{ headers: { authorization: `Bearer ${secret}` } }] }]
  const told = await sandbox.updateNetworkPolicy({ allow: { 's74.test': rules } })
  assert.deepEqual(told.allow['s74.test'][0].transform, [{ headers: { authorization: '<redacted>' } }])
  await until('an answer under the new policy', async () => (await seen('?s74')).length > 2)
  for (const { headers } of await seen('?s74')) assert.equal(headers.authorization, `Bearer ${secret}`)
  // This call is for the running session alone: the sandbox keeps what its next ones begin with.
  const again = await Sandbox.get({ name: sandbox.name })
  const shown = again.currentSession().networkPolicy
  assert.deepEqual(shown.allow['s74.test'][0].transform, [{ headers: { authorization: '<redacted>' } }])
  assert.equal(again.networkPolicy, 'deny-all')
  await sandbox.updateNetworkPolicy({ allow: ['s74.test'] })
  const before = (await seen('?s74')).length
  await until('one without the header', async () => (await seen('?s74')).length > before + 1)
  assert.equal((await seen('?s74')).at(-1).headers.authorization, undefined)
  await sandbox.updateNetworkPolicy('deny-all')
  const closed = (await seen('?s74')).length
  await fails(sandbox, 'https://s74.test/')
  assert.equal((await seen('?s74')).length, closed)
  await sandbox.writeFiles([{ path: 'stop74', content: '' }])
  assert.equal((await running.wait()).exitCode, 0)
})

test('S79 the second generation changes a policy', async (t) => {
  await origin('203.0.113.179', 's79.test')
  const sandbox = await Sandbox2.create({ networkPolicy: 'deny-all' })
  t.after(() => remove(sandbox))
  await fails(sandbox, 'https://s79.test/')
  await sandbox.updateNetworkPolicy({ allow: { 's79.test': [{ transform: [{ headers: { 'x-key': 'S79' } }] }] } })
  assert.equal((await get(sandbox, 'https://s79.test/')).headers['x-key'], 'S79')
  assert.equal(sandbox.currentSession().networkPolicy.allow['s79.test'][0].transform[0].headers['x-key'], '<redacted>')
  await sandbox.update({ networkPolicy: 'deny-all' })
  await fails(sandbox, 'https://s79.test/')
})
