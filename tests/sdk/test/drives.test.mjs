import assert from 'node:assert/strict'
import { Drive, Sandbox } from '@vercel/sandbox'
import { box, out, refused, remove, scope, sh, test } from '../lib.mjs'

const SIZE = 1 << 30

/** Drives of a namespace of their own, deleted when the test ends. */
function drives(t) {
  const credentials = scope()
  const made = []
  t.after(async () => {
    for (const drive of made) await drive.delete().catch((error) => assert.equal(error.response?.status, 404, error.stack))
  })
  const get = async (name, more = {}) => {
    const drive = await Drive.getOrCreate({ ...credentials, name, maxSize: SIZE, ...more })
    made.push(drive)
    return drive
  }
  return { credentials, get }
}

test('S75 drives: get or create, list, delete', async (t) => {
  const { credentials, get } = drives(t)
  const drive = await get('data')
  assert.match(drive.driveId, /^drive_/)
  assert.equal((await get('data')).driveId, drive.driveId)
  assert.equal(drive.maxSize, SIZE)
  assert.equal(drive.region, 'iad1')
  await refused(Drive.getOrCreate({ ...credentials, name: 'data', maxSize: 2 * SIZE }), 409, 'conflict')
  await refused(Drive.getOrCreate({ ...credentials, name: 'data', region: 'sfo1' }), 409, 'conflict')
  for (const name of ['b', 'c']) await get(name)
  const listed = await Drive.list({ ...credentials, sortBy: 'name', sortOrder: 'asc', limit: 2 })
  assert.deepEqual((await listed.toArray()).map((d) => d.name), ['b', 'c', 'data'])
  const some = await Drive.list({ ...credentials, sortBy: 'name', sortOrder: 'asc', namePrefix: 'da' })
  assert.deepEqual((await some.toArray()).map((d) => d.name), ['data'])
  await drive.delete()
  await refused(drive.delete(), 404, 'not_found')
  assert.deepEqual((await (await Drive.list({ ...credentials, sortBy: 'name' })).toArray()).map((d) => d.name).sort(), ['b', 'c'])
})

test('S76 a drive goes from one sandbox to the next', async (t) => {
  const { credentials, get } = drives(t)
  const drive = await get('data')
  const early = Sandbox.create({ ...credentials, mounts: { '/data': drive.snapshot() } })
  await refused(early, 400, 'drive_not_initialized')
  const a = await box(t, { ...credentials, name: 'a', mounts: { '/data': drive } })
  assert.deepEqual(a.mounts, { '/data': { drive: 'data', mode: 'read-write' } })
  await out(a, 'echo one > /data/f')
  const error = await refused(Sandbox.create({ ...credentials, mounts: { '/x': drive } }), 409, 'conflict')
  assert.match(error.json.error.message, /'a'/)
  assert.equal((await get('data')).currentSandboxName, 'a')
  await refused(drive.delete(), 409, 'conflict')
  const view = await box(t, { ...credentials, persistent: false, mounts: { '/data': drive.snapshot() } })
  await out(a, 'echo two > /data/f')
  assert.equal(await out(view, 'cat /data/f; echo mine > /data/f; cat /data/f'), 'one\nmine')
  assert.equal(await out(a, 'cat /data/f'), 'two')
  await a.stop()
  const b = await box(t, { ...credentials, name: 'b', persistent: false, mounts: { '/data': drive } })
  assert.equal(await out(b, 'cat /data/f; echo three >> /data/f'), 'two')
  // The first one comes back with its drive as soon as it is free.
  await refused(sh(a, 'true'), 409, 'conflict')
  await remove(b)
  assert.equal(await out(a, 'cat /data/f'), 'two\nthree')
  // From its next start on without.
  await a.update({ mounts: {} })
  await a.stop()
  assert.equal(await out(a, 'ls -A /data'), '')
  await Promise.all([remove(a), remove(view)])
})
