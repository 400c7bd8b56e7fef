import assert from 'node:assert/strict'
import { Sandbox, Snapshot } from '@vercel/sandbox'
import { box, out, refused, remove, scope, sh, test, unique, until } from '../lib.mjs'

test('S42 more time', async (t) => {
  const sandbox = await box(t, { timeout: 5_000, persistent: false })
  const session = sandbox.currentSession()
  const before = session.timeout
  await sandbox.extendTimeout(60_000)
  assert.equal(sandbox.currentSession().timeout, before + 60_000)
  assert.equal(await out(sandbox, 'sleep 6; echo alive'), 'alive')
  assert.equal(sandbox.currentSession().sessionId, session.sessionId, 'it was resumed, not extended')
  await refused(sandbox.extendTimeout(90_000_000), 400, 'sandbox_timeout_invalid')
})

test('S43 the time is over', async (t) => {
  const sandbox = await box(t, { timeout: 1_500 })
  await sandbox.writeFiles([{ path: 'f', content: 'kept' }])
  const stopped = await until('the end', async () => {
    const now = await Sandbox.get({ name: sandbox.name })
    return now.status === 'stopped' && now
  })
  assert.ok(stopped.currentSnapshotId)
  assert.equal(await out(sandbox, 'cat f'), 'kept')
})

test('S44 stop', async (t) => {
  const sandbox = await box(t)
  const stopped = await sandbox.stop()
  assert.equal(stopped.status, 'stopped')
  assert.equal(stopped.snapshot.status, 'created')
  assert.equal(sandbox.currentSnapshotId, stopped.snapshot.id)
  const again = await sandbox.stop()
  assert.equal(again.status, 'stopped')
})

test('S45 a command after a stop resumes', async (t) => {
  let resumed = 0
  const sandbox = await Sandbox.create({ onResume: async () => void (resumed += 1) })
  t.after(() => remove(sandbox))
  await sandbox.writeFiles([{ path: 'f', content: 'kept' }])
  const first = sandbox.currentSession().sessionId
  await sandbox.stop()
  assert.equal(await out(sandbox, 'cat f'), 'kept')
  assert.notEqual(sandbox.currentSession().sessionId, first)
  assert.equal(resumed, 1)
})

test('S46 two commands after a stop make one session', async (t) => {
  const sandbox = await box(t)
  await sandbox.stop()
  // Two clients: within one the SDK shares the resume itself.
  const other = await Sandbox.get({ name: sandbox.name })
  const texts = await Promise.all([out(sandbox, 'echo 1'), out(sandbox, 'echo 2'), out(other, 'echo 3')])
  assert.deepEqual(texts, ['1', '2', '3'])
  assert.equal(sandbox.currentSession().sessionId, other.currentSession().sessionId)
  const sessions = await (await sandbox.listSessions()).toArray()
  assert.equal(sessions.length, 2)
})

test('S47 a command while it stops', async (t) => {
  const sandbox = await box(t)
  await sh(sandbox, 'head -c 30000000 /dev/urandom > big; echo kept > f')
  const other = await Sandbox.get({ name: sandbox.name })
  const stopping = other.stop()
  await until('the stop to begin', async () => (await Sandbox.get({ name: sandbox.name })).status !== 'running')
  assert.equal(await out(sandbox, 'cat f'), 'kept')
  await stopping
})

test('S48 get does not wake, unless it is asked to', async (t) => {
  const sandbox = await box(t)
  await sandbox.stop()
  assert.equal((await Sandbox.get({ name: sandbox.name })).status, 'stopped')
  assert.equal((await Sandbox.get({ name: sandbox.name })).status, 'stopped')
  assert.equal((await Sandbox.get({ name: sandbox.name, resume: true })).status, 'running')
})

test('S49 get or create', async (t) => {
  const name = unique('goc')
  let created = 0
  const options = { name, onCreate: async () => void (created += 1) }
  const first = await Sandbox.getOrCreate(options)
  t.after(() => remove(first))
  assert.equal(created, 1)
  await first.writeFiles([{ path: 'f', content: 'x' }])
  const second = await Sandbox.getOrCreate(options)
  assert.equal(created, 1)
  assert.equal(second.currentSession().sessionId, first.currentSession().sessionId)
  // Its snapshot is deleted under it: it is made anew.
  const stopped = await first.stop()
  await (await Snapshot.get({ snapshotId: stopped.snapshot.id })).delete()
  const third = await Sandbox.getOrCreate({ ...options, resume: true })
  assert.equal(created, 2)
  assert.notEqual((await third.runCommand('cat', ['f'])).exitCode, 0)
})

test('S50 nothing is kept without persistence', async (t) => {
  const sandbox = await box(t, { persistent: false })
  await sandbox.writeFiles([{ path: 'f', content: 'x' }])
  const stopped = await sandbox.stop()
  assert.equal(stopped.snapshot, undefined)
  assert.equal(sandbox.currentSnapshotId, undefined)
  assert.notEqual((await sandbox.runCommand('cat', ['f'])).exitCode, 0)
})

test('S51 a snapshot and what comes of it', async (t) => {
  const sandbox = await box(t)
  await sandbox.writeFiles([{ path: 'f', content: 'snapped' }])
  const snapshot = await sandbox.snapshot()
  assert.match(snapshot.snapshotId, /^snap_/)
  assert.equal((await Sandbox.get({ name: sandbox.name })).status, 'stopped')
  const copy = await box(t, { source: { type: 'snapshot', snapshotId: snapshot.snapshotId } })
  assert.equal(await out(copy, 'cat f'), 'snapped')
  assert.equal(copy.currentSession().sourceSnapshotId, snapshot.snapshotId)
  assert.equal((await Snapshot.get({ snapshotId: snapshot.snapshotId })).status, 'created')
  const listed = await (await Snapshot.list({ limit: 50 })).toArray()
  assert.ok(listed.some((s) => s.id === snapshot.snapshotId))
  await snapshot.delete()
  assert.equal(snapshot.status, 'deleted')
})

test('S52 how long a snapshot is kept', async (t) => {
  const sandbox = await box(t)
  assert.equal((await sandbox.snapshot({ expiration: 0 })).expiresAt, undefined)
  const day = await sandbox.snapshot({ expiration: 86_400_000 })
  assert.ok(Math.abs(day.expiresAt.getTime() - day.createdAt.getTime() - 86_400_000) < 5_000)
})

test('S53 only the newest snapshot is kept', async (t) => {
  const sandbox = await box(t, { keepLastSnapshots: { count: 1 } })
  await sandbox.stop()
  await out(sandbox, 'echo x > f')
  const second = await sandbox.stop()
  const kept = (await (await sandbox.listSnapshots()).toArray()).filter((s) => s.status === 'created')
  assert.deepEqual(kept.map((s) => s.id), [second.snapshot.id])
})

test('S54 the tree of snapshots', async (t) => {
  const sandbox = await box(t)
  const ids = []
  for (let i = 0; i < 3; i += 1) {
    await out(sandbox, `echo ${i} >> f`)
    ids.unshift((await sandbox.stop()).snapshot.id)
  }
  const tree = await Snapshot.tree({ snapshotId: ids[0] })
  const nodes = await tree.toArray()
  // The one that was asked for stands in front of its ancestors, as the anchor or as the first.
  const chain = tree.anchor && tree.anchor.snapshot.id !== nodes[0].snapshot.id ? [tree.anchor, ...nodes] : nodes
  assert.deepEqual(chain.map((n) => n.snapshot.id), ids)
  assert.deepEqual(chain.map((n) => n.snapshot.parentId), [...ids.slice(1), undefined])
  for (const node of chain) assert.equal(typeof node.count, 'string')
})

test('S55 a fork', async (t) => {
  const source = await box(t, { env: { A: 'source' }, ports: [3000], tags: { k: 'v' } })
  await source.writeFiles([{ path: 'f', content: 'forked' }])
  await source.stop()
  await out(source, 'true')
  const fork = await Sandbox.fork({ sourceSandbox: source.name })
  t.after(() => remove(fork))
  assert.equal(await out(fork, 'cat f; echo $A'), 'forkedsource')
  assert.deepEqual(fork.tags, { k: 'v' })
  assert.equal(fork.routes[0].port, 3000)
  assert.notEqual(fork.routes[0].subdomain, source.routes[0].subdomain)
  const other = await Sandbox.fork({ sourceSandbox: source.name, env: { B: 'fork' } })
  t.after(() => remove(other))
  assert.equal(await out(other, 'echo $A-$B'), '-fork')
  assert.equal((await Sandbox.get({ name: source.name })).status, 'running')
})

test('S56 a fork of nothing', async () => {
  await refused(Sandbox.fork({ sourceSandbox: unique('nope') }), 404)
})

test('S57 lists page by themselves', async (t) => {
  const credentials = scope()
  const names = []
  for (let i = 0; i < 5; i += 1) names.unshift((await box(t, { ...credentials, persistent: false })).name)
  const page = await Sandbox.list({ ...credentials, limit: 2 })
  assert.equal(page.sandboxes.length, 2)
  const seen = []
  for await (const sandbox of page) seen.push(sandbox.name)
  assert.deepEqual(seen, names)
})

test('S58 lists filter', async (t) => {
  const credentials = scope()
  for (const [name, env] of [['apple', 'x'], ['avocado', 'y'], ['pear', 'x']]) {
    await box(t, { ...credentials, name, tags: { env }, persistent: false })
  }
  const byName = await Sandbox.list({ ...credentials, namePrefix: 'a', sortBy: 'name' })
  assert.deepEqual((await byName.toArray()).map((s) => s.name).sort(), ['apple', 'avocado'])
  const byTag = await Sandbox.list({ ...credentials, tags: { env: 'x' } })
  assert.deepEqual((await byTag.toArray()).map((s) => s.name).sort(), ['apple', 'pear'])
})

test('S59 sessions and snapshots of one sandbox', async (t) => {
  const credentials = scope()
  const [one, two] = [await box(t, credentials), await box(t, credentials)]
  await one.stop()
  await out(one, 'true')
  await two.stop()
  const sessions = await (await one.listSessions()).toArray()
  assert.equal(sessions.length, 2)
  assert.equal(sessions[0].id, one.currentSession().sessionId, 'newest first')
  const snapshots = await (await one.listSnapshots()).toArray()
  assert.deepEqual(snapshots.map((s) => s.id), [one.currentSnapshotId])
})

test('S60 updates of ports and time', async (t) => {
  const sandbox = await box(t, { timeout: 60_000, persistent: false })
  await sandbox.update({ ports: [4000] })
  assert.match(sandbox.domain(4000), /^https:\/\/[a-z0-9-]+\.vercel\.run$/)
  await sandbox.update({ timeout: 120_000 })
  assert.equal(sandbox.timeout, 120_000)
  const now = await Sandbox.get({ name: sandbox.name })
  assert.equal(now.currentSession().timeout, 120_000)
})

test('S61 what can be cleared', async (t) => {
  const sandbox = await box(t, { tags: { a: 'b' }, keepLastSnapshots: { count: 2 }, persistent: false })
  await sandbox.update({ networkId: null, keepLastSnapshots: null, tags: {} })
  const now = await Sandbox.get({ name: sandbox.name })
  assert.equal(now.keepLastSnapshots, undefined)
  assert.equal(now.networkId, undefined)
  assert.deepEqual(now.tags ?? {}, {})
})

test('S62 delete', async (t) => {
  const credentials = scope()
  const sandbox = await Sandbox.create(credentials)
  const snapshot = await sandbox.snapshot()
  await out(sandbox, 'true')
  await sandbox.delete()
  await refused(Sandbox.get({ ...credentials, name: sandbox.name }), 404)
  assert.equal((await Snapshot.get({ ...credentials, snapshotId: snapshot.snapshotId })).status, 'created')
  const other = await Sandbox.create(credentials)
  t.after(() => remove(other))
  const orphan = await other.snapshot()
  await other.delete({ deleteOrphanSnapshots: true })
  await until('the orphan to go', async () => {
    try {
      return (await Snapshot.get({ ...credentials, snapshotId: orphan.snapshotId })).status === 'deleted'
    } catch (error) {
      return error.response?.status === 404
    }
  })
})
