// Traps of the contract that no scenario of its own covers: docs/COMPATIBILITY.md has the table. Faults are put
// between the real client and the real engine by a `fetch` of the test's own.
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { Sandbox, Snapshot } from '@vercel/sandbox'
import { Sandbox as Sandbox2 } from 'sdk2'
import { Sink, box, out, refused, remove, scope, sh, test, unique } from '../lib.mjs'

/** A fetch that lets `before` answer in the engine's place, and tells what was sent. */
function between(before) {
  const sent = []
  const fetch = async (url, init) => {
    const call = { method: init?.method ?? 'GET', path: new URL(url).pathname, query: new URL(url).searchParams }
    sent.push(call)
    return (await before?.(call, () => globalThis.fetch(url, init))) ?? globalThis.fetch(url, init)
  }
  return { fetch, sent, of: (method, part) => sent.filter((c) => c.method === method && c.path.includes(part)) }
}

const failure = (status, headers = {}) =>
  new Response(JSON.stringify({ error: { code: 'test_fault', message: 'A fault of the test.' } }), { status, headers })

test('S77 the client repeats what failed on the way, and the engine bears it', async (t) => {
  let [faults, headers, status] = [0, {}, 503]
  const net = between(({ path }) => (path.endsWith('/cmd') && faults-- > 0 ? failure(status, headers) : undefined))
  const sandbox = await box(t, { fetch: net.fetch, persistent: false })
  faults = 2
  assert.equal(await out(sandbox, 'echo twice'), 'twice')
  assert.equal(net.of('POST', '/cmd').length, 3)
  ;[faults, headers, status] = [1, { 'retry-after': '1' }, 429]
  assert.equal(await out(sandbox, 'echo later'), 'later')
  ;[faults, headers] = [1, { 'retry-after': '60' }]
  await refused(sh(sandbox, 'true'), 429, 'test_fault')
  assert.equal(net.of('POST', '/cmd').length, 6)
})

test('a create whose answer was lost is repeated, and made once', async (t) => {
  const credentials = scope()
  let lost = false
  const net = between(async ({ method, path }, go) => {
    if (method !== 'POST' || lost || !path.endsWith('/sandboxes')) return undefined
    lost = true
    await (await go()).text()
    throw new TypeError('fetch failed')
  })
  const name = unique('lost')
  const error = await refused(Sandbox.create({ ...credentials, name, fetch: net.fetch }), 400)
  t.after(async () => remove(await Sandbox.get({ ...credentials, name })))
  assert.match(error.message, /already exists/)
  assert.equal(net.of('POST', '/sandboxes').length, 2)
  const all = await (await Sandbox.list(credentials)).toArray()
  assert.deepEqual(all.map((s) => s.name), [name])
  // That is why people use this: it finds what the lost answer made.
  const found = await Sandbox.getOrCreate({ ...credentials, name })
  assert.equal(found.status, 'running')
})

test('a refusal names the sandbox and the session that it is about', async (t) => {
  const sandbox = await box(t, { persistent: false })
  const { sessionId } = sandbox.currentSession()
  const ofSession = await refused(sandbox.runCommand('no such program'), 400, 'executable_not_found')
  assert.equal(ofSession.sessionId, sessionId)
  assert.match(ofSession.message, /^Status code 400 is not ok: executable 'no such program' not found/)
  const ofSandbox = await refused(Sandbox.get({ name: 'a/b' }), 404, 'not_found')
  assert.match(ofSandbox.message, /Sandbox 'a\/b' was not found/)
})

test('names that are fixed words of the paths are refused', async () => {
  for (const name of ['sessions', 'snapshots', 'drives']) await refused(Sandbox.create({ name }), 400, 'bad_request')
})

test('options that nobody knows are passed on and ignored', async (t) => {
  const sandbox = await box(t, { __private: { a: [1] }, __interactive: true, persistent: false })
  assert.equal(typeof sandbox.interactivePort, 'number')
  const again = await Sandbox.get({ name: sandbox.name, __includeSystemRoutes: true, __other: 'x' })
  assert.equal(again.name, sandbox.name)
  assert.deepEqual(again.routes, [])
})

test('lists say project, everything else projectId', async (t) => {
  const net = between()
  const credentials = { ...scope(), fetch: net.fetch }
  const sandbox = await box(t, credentials)
  await sandbox.stop()
  await (await sandbox.listSessions()).toArray()
  await (await sandbox.listSnapshots()).toArray()
  await (await Sandbox.list(credentials)).toArray()
  await Snapshot.tree({ ...credentials, snapshotId: sandbox.currentSnapshotId })
  await Sandbox.get({ ...credentials, name: sandbox.name })
  const asked = net.sent.filter(({ method }) => method === 'GET')
  assert.equal(asked.length, 5)
  for (const { query, path } of asked) {
    const one = query.get('project') ?? query.get('projectId')
    assert.equal(one, credentials.projectId, path)
  }
})

test('an update does not wake what is stopped, and is in force at its next start', async (t) => {
  const sandbox = await box(t, { timeout: 60_000 })
  await sandbox.stop()
  await sandbox.update({ timeout: 120_000, resources: { vcpus: 4 }, tags: { a: 'b' }, ports: [4000], networkPolicy: 'deny-all' })
  const now = await Sandbox.get({ name: sandbox.name })
  assert.equal(now.status, 'stopped')
  assert.equal(await out(sandbox, 'echo awake'), 'awake')
  const session = sandbox.currentSession()
  assert.deepEqual([session.timeout, session.vcpus, session.memory], [120_000, 4, 8192])
  assert.equal(sandbox.networkPolicy, 'deny-all')
  assert.equal(sandbox.routes[0].port, 4000)
})

test('a policy is read back in other words than it was sent, and without its secrets', async (t) => {
  const answers = []
  const net = between(async (_, go) => {
    const answer = await go()
    if (answer.headers.get('content-type')?.includes('json')) answers.push(await answer.clone().text())
    return answer
  })
  const rules = [{ match: { path: { startsWith: '/v1/' } }, transform: [{ headers: { authorization: 'Bearer S3CRET' } }] }]
  const networkPolicy = { allow: { 'api.example.com': rules, '*': [] }, subnets: { deny: ['10.0.0.0/8'] } }
  const sandbox = await box(t, { fetch: net.fetch, networkPolicy, persistent: false })
  const shown = (of) => of.networkPolicy.allow['api.example.com'][0]
  assert.deepEqual(shown(sandbox).transform, [{ headers: { authorization: '<redacted>' } }])
  assert.deepEqual(sandbox.networkPolicy.subnets, { deny: ['10.0.0.0/8'] })
  await sandbox.update({ networkPolicy: { allow: ['example.com', '*.example.org'] } })
  const now = await Sandbox.get({ name: sandbox.name })
  assert.deepEqual(now.networkPolicy, { allow: ['example.com', '*.example.org'] })
  await sandbox.update({ networkPolicy: 'deny-all' })
  assert.equal((await Sandbox.get({ name: sandbox.name })).networkPolicy, 'deny-all')
  assert.ok(answers.length >= 3)
  for (const text of answers) assert.ok(!text.includes('S3CRET'), text)
})

test('root keeps the environment and the path, and has a home of its own', async (t) => {
  const sandbox = await box(t, { env: { KEPT: 'yes' }, persistent: false })
  const [user, root] = [await out(sandbox, 'echo "$PATH"'), await out(sandbox, 'echo "$HOME $KEPT $PATH"', { sudo: true })]
  assert.equal(root, `/root yes ${user}`)
})

test('signals to what has ended, and numbers instead of names', async (t) => {
  const sandbox = await box(t, { persistent: false })
  const command = await sandbox.runCommand({ cmd: 'sleep', args: ['600'], detached: true })
  await command.kill(10)
  assert.equal((await command.wait()).exitCode, 138)
  await command.kill('SIGKILL')
  assert.equal((await sandbox.getCommand(command.cmdId)).exitCode, 138)
})

test('an upload to a session that is gone is refused, not cut', async (t) => {
  // The engine must read what it refuses: a client that is cut off while it writes takes that for a broken
  // connection and not for the 410 that lets it resume.
  const net = between()
  const sandbox = await box(t, { fetch: net.fetch })
  await sandbox.stop()
  const content = randomBytes(8_000_000)
  await sandbox.writeFiles([{ path: 'big', content }])
  assert.equal(net.of('POST', '/fs/write').length, 2, 'once in vain, once after the resume')
  assert.ok((await sandbox.readFileToBuffer({ path: 'big' })).equals(content))
})

test('a deleted snapshot is still in the lists and says so', async (t) => {
  const sandbox = await box(t)
  const snapshot = await sandbox.snapshot()
  await snapshot.delete()
  const listed = (await sandbox.listSnapshots()).snapshots
  assert.deepEqual(listed.map((s) => [s.id, s.status]), [[snapshot.snapshotId, 'deleted']])
  assert.equal((await Snapshot.get({ snapshotId: snapshot.snapshotId })).status, 'deleted')
})

test('a tree goes on where its page ended', async (t) => {
  const sandbox = await box(t)
  const ids = []
  for (let i = 0; i < 4; i += 1) {
    await out(sandbox, `echo ${i} >> f`)
    ids.unshift((await sandbox.stop()).snapshot.id)
  }
  const seen = []
  for await (const node of await Snapshot.tree({ snapshotId: ids[0], limit: 2 })) seen.push(node.snapshot.id)
  assert.deepEqual([...new Set(seen)], ids)
  const up = await (await Snapshot.tree({ snapshotId: ids.at(-1), sortOrder: 'asc' })).toArray()
  assert.deepEqual([...new Set(up.map((n) => n.snapshot.id))], [...ids].reverse())
})

test('lists tell when the time is over', async (t) => {
  const credentials = scope()
  const sandbox = await box(t, { ...credentials, timeout: 600_000, persistent: false })
  const [listed] = (await Sandbox.list(credentials)).sandboxes
  assert.ok(Math.abs(listed.expiresAt - Date.now() - 600_000) < 120_000, String(listed.expiresAt))
  await sandbox.stop()
  assert.equal((await Sandbox.list(credentials)).sandboxes[0].expiresAt, undefined)
})

test('a runtime word is asked of v2, and told to clients that demand one', async (t) => {
  const net = between()
  const sandbox = await Sandbox2.create({ fetch: net.fetch, persistent: false })
  t.after(() => remove(sandbox))
  assert.deepEqual(net.of('POST', '/sandboxes').map((c) => c.path), ['/api/v2/sandboxes'])
  assert.equal(typeof sandbox.currentSession().runtime, 'string')
  await refused(Sandbox2.create({ runtime: 'node18' }), 400, 'bad_request')
})

test('a silent command outlives the lines that keep its stream alive', async (t) => {
  const sandbox = await box(t, { persistent: false })
  const stdout = new Sink()
  // Longer than the engine leaves a stream silent.
  const command = await sandbox.runCommand({ cmd: 'sh', args: ['-c', 'echo begun; sleep 17; echo end'], stdout })
  assert.equal(command.exitCode, 0)
  assert.equal(stdout.text, 'begun\nend\n')
})
