import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { Sandbox as Sandbox1, Snapshot as Snapshot1 } from 'sdk1'
import { Sandbox as Sandbox2 } from 'sdk2'
import { Sink, refused, remove, scope, test, unique } from '../lib.mjs'

test('S79 the second generation', async (t) => {
  const sandbox = await Sandbox2.create({ name: unique('second'), ports: [3000] })
  t.after(() => remove(sandbox))
  const command = await sandbox.runCommand('sh', ['-c', 'echo two; exit 2'])
  assert.equal(command.exitCode, 2)
  assert.equal(await command.stdout(), 'two\n')
  await sandbox.writeFiles([{ path: 'f', content: Buffer.from('kept') }])
  await sandbox.update({ tags: { a: 'b' }, timeout: 600_000 })
  assert.deepEqual(sandbox.tags, { a: 'b' })
  const snapshot = await sandbox.snapshot()
  assert.match(snapshot.snapshotId, /^snap_/)
  const fork = await Sandbox2.fork({ sourceSandbox: sandbox.name })
  t.after(() => remove(fork))
  assert.equal(await (await fork.runCommand('cat', ['f'])).stdout(), 'kept')
  const stopped = await fork.stop()
  assert.equal(stopped.status, 'stopped')
  assert.equal(await (await fork.runCommand('cat', ['f'])).stdout(), 'kept')
})

test('S80 the first generation', async (t) => {
  const credentials = scope()
  const sandbox = await Sandbox1.create({ ...credentials, timeout: 120_000, ports: [3000] })
  assert.match(sandbox.sandboxId, /^sbx_/)
  const command = await sandbox.runCommand('sh', ['-c', 'echo one; echo err >&2; exit 1'])
  assert.equal(command.exitCode, 1)
  assert.equal(await command.stdout(), 'one\n')
  assert.equal(await command.stderr(), 'err\n')
  await sandbox.mkDir('made')
  await sandbox.writeFiles([{ path: 'made/f', content: Buffer.from('kept') }])
  assert.equal((await sandbox.readFileToBuffer({ path: 'made/f' })).toString(), 'kept')
  assert.equal(await sandbox.readFileToBuffer({ path: 'missing' }), null)
  const before = sandbox.timeout
  await sandbox.extendTimeout(60_000)
  assert.equal(sandbox.timeout, before + 60_000)
  const detached = await sandbox.runCommand({ cmd: 'sleep', args: ['600'], detached: true })
  await detached.kill('SIGTERM')
  assert.equal((await detached.wait()).exitCode, 143)
  const again = await Sandbox1.get({ ...credentials, sandboxId: sandbox.sandboxId })
  assert.equal(again.status, 'running')
  const listed = await Sandbox1.list({ ...credentials, since: Date.now() - 3_600_000, until: Date.now() + 60_000 })
  assert.deepEqual(listed.json.sandboxes.map((s) => s.id), [sandbox.sandboxId])
  const none = await Sandbox1.list({ ...credentials, until: Date.now() - 3_600_000 })
  assert.deepEqual(none.json.sandboxes, [])
  const snapshot = await sandbox.snapshot()
  assert.match(snapshot.snapshotId, /^snap_/)
  const copy = await Sandbox1.create({ ...credentials, source: { type: 'snapshot', snapshotId: snapshot.snapshotId } })
  t.after(() => copy.stop())
  assert.equal((await copy.readFileToBuffer({ path: 'made/f' })).toString(), 'kept')
  await copy.stop({ blocking: true })
  assert.equal(copy.status, 'stopped')
})

test('S80 the first generation: commands', async (t) => {
  const sandbox = await Sandbox1.create({ ...scope(), env: { A: 'create', B: 'create' } })
  t.after(() => sandbox.stop())
  const [stdout, stderr] = [new Sink(), new Sink()]
  const rich = await sandbox.runCommand({
    cmd: 'sh', args: ['-c', 'pwd; echo $A $B; id -u; echo e >&2'], cwd: '/tmp', env: { B: 'call' }, sudo: true, stdout, stderr,
  })
  assert.equal(rich.exitCode, 0)
  assert.equal(stdout.text, '/tmp\ncreate call\n0\n')
  assert.equal(stderr.text, 'e\n')
  assert.deepEqual((await rich.output('both')).split('\n').sort(), ['', '/tmp', '0', 'create call', 'e'])
  const text = 'é漢😀'.repeat(30_000)
  await sandbox.writeFiles([{ path: 'text', content: Buffer.from(text) }])
  assert.ok((await (await sandbox.runCommand('cat', ['text'])).stdout()) === text, 'the log differs')
  const running = await sandbox.runCommand({ cmd: 'sh', args: ['-c', 'echo here; until [ -e go ]; do sleep 0.02; done; exit 5'], detached: true })
  assert.equal((await sandbox.getCommand(running.cmdId)).exitCode, null)
  for await (const line of running.logs()) {
    assert.deepEqual(line, { stream: 'stdout', data: 'here\n' })
    await sandbox.writeFiles([{ path: 'go', content: Buffer.from('') }])
  }
  assert.equal((await running.wait()).exitCode, 5)
  await refused(sandbox.runCommand('echo hi'), 400)
  await refused(sandbox.getCommand('cmd_nope'), 404)
})

test('S80 the first generation: files', async (t) => {
  const sandbox = await Sandbox1.create(scope())
  t.after(() => sandbox.stop())
  const content = randomBytes(3_000_000)
  await sandbox.writeFiles([
    { path: 'bytes', content },
    { path: '/opt/absolute', content: Buffer.from('absolute') },
    { path: 'deep/er/file', content: Buffer.from('') },
  ])
  assert.ok((await sandbox.readFileToBuffer({ path: 'bytes' })).equals(content))
  assert.equal((await sandbox.readFileToBuffer({ path: 'absolute', cwd: '/opt' })).toString(), 'absolute')
  assert.equal((await sandbox.readFileToBuffer({ path: 'deep/er/file' })).length, 0)
  const pieces = []
  for await (const piece of await sandbox.readFile({ path: 'bytes' })) pieces.push(piece)
  assert.ok(Buffer.concat(pieces).equals(content))
  assert.equal(await sandbox.readFile({ path: 'missing' }), null)
  await refused(sandbox.mkDir('deep'), 400)
})

test('S80 the first generation: policy, snapshots, the end', async (t) => {
  const credentials = scope()
  const networkPolicy = { allow: { 'api.example.com': [{ transform: [{ headers: { authorization: 'Bearer S' } }] }], '*': [] } }
  const sandbox = await Sandbox1.create({ ...credentials, networkPolicy, resources: { vcpus: 2 } })
  assert.deepEqual(Object.keys(sandbox.networkPolicy.allow), ['api.example.com', '*'])
  await sandbox.updateNetworkPolicy({ allow: ['a.com'], subnets: { deny: ['10.0.0.0/8'] } })
  assert.deepEqual(sandbox.networkPolicy, { allow: ['a.com'], subnets: { deny: ['10.0.0.0/8'] } })
  await sandbox.updateNetworkPolicy('deny-all')
  assert.equal(sandbox.networkPolicy, 'deny-all')
  const snapshot = await sandbox.snapshot({ expiration: 86_400_000 })
  assert.equal(snapshot.sourceSandboxId, sandbox.sandboxId)
  assert.equal(snapshot.expiresAt - snapshot.createdAt, 86_400_000)
  assert.equal(sandbox.status, 'stopped')
  // A run of the first generation is not resumed.
  await refused(sandbox.runCommand('true'), 410, 'sandbox_stopped')
  const found = await Snapshot1.get({ ...credentials, snapshotId: snapshot.snapshotId })
  assert.equal(found.status, 'created')
  const listed = await Snapshot1.list({ ...credentials, limit: 5 })
  assert.deepEqual(listed.json.snapshots.map((s) => s.id), [snapshot.snapshotId])
  assert.deepEqual(listed.json.pagination, { count: 1, next: null, prev: null })
  await found.delete()
  const source = { type: 'snapshot', snapshotId: snapshot.snapshotId }
  await refused(Sandbox1.create({ ...credentials, source }), 410, 'snapshot_not_found')
  await refused(Sandbox1.get({ ...credentials, sandboxId: 'sbx_nope' }), 404)
  // Pages go on by points in time.
  const ids = [sandbox.sandboxId]
  for (let i = 0; i < 2; i += 1) {
    const next = await Sandbox1.create(credentials)
    t.after(() => next.stop())
    ids.unshift(next.sandboxId)
  }
  const seen = []
  for (let until; ; ) {
    const page = (await Sandbox1.list({ ...credentials, limit: 1, until })).json
    seen.push(...page.sandboxes.map((s) => s.id))
    if (page.pagination.next === null) break
    until = page.pagination.next
  }
  assert.deepEqual(seen, ids)
})
