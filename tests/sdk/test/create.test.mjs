import assert from 'node:assert/strict'
import os from 'node:os'
import { Sandbox } from '@vercel/sandbox'
import { box, out, refused, remove, scope, test, unique } from '../lib.mjs'

test('S1 create with credentials', async (t) => {
  const sandbox = await box(t, scope())
  assert.equal(sandbox.status, 'running')
  assert.equal(sandbox.persistent, true)
  assert.match(sandbox.name, /^[a-zA-Z0-9_-]+$/)
})

test('S2 create with a token alone is refused by the client', async () => {
  let sent = 0
  const fetch = () => ((sent += 1), Promise.reject(new Error('sent')))
  await assert.rejects(Sandbox.create({ token: 'local', fetch }), /teamId, projectId/)
  assert.equal(sent, 0)
})

test('S3 create with nothing but the environment', async (t) => {
  const urls = []
  const fetch = (url, init) => (urls.push(String(url)), globalThis.fetch(url, init))
  const sandbox = await Sandbox.create({ fetch })
  t.after(() => remove(sandbox))
  assert.equal(sandbox.status, 'running')
  const team = new URL(urls[0]).searchParams.get('teamId')
  assert.equal(team, process.env.VERCEL_TEAM_ID)
  const claims = JSON.parse(Buffer.from(process.env.VERCEL_OIDC_TOKEN.split('.')[1], 'base64url'))
  assert.equal(team, claims.owner_id)
})

test('S6 an unknown image is a 404', async () => {
  await refused(Sandbox.create({ image: 'no/such:image' }), 404, 'not_found')
})

test('S7 a name is taken once', async (t) => {
  const name = unique('twice')
  await box(t, { name })
  const error = await refused(Sandbox.create({ name }), 400)
  assert.match(error.message, /already exists/)
})

test('S8 names that are none', async () => {
  await refused(Sandbox.create({ name: 'a/b' }), 400)
  await refused(Sandbox.create({ name: 'x'.repeat(129) }), 400)
})

test('S11 create from a deleted snapshot is a 410', async (t) => {
  const sandbox = await box(t)
  const snapshot = await sandbox.snapshot()
  await snapshot.delete()
  const source = { type: 'snapshot', snapshotId: snapshot.snapshotId }
  await refused(Sandbox.create({ source }), 410, 'snapshot_not_found')
})

test('S12 virtual CPUs', async (t) => {
  await refused(Sandbox.create({ resources: { vcpus: 3 } }), 400)
  const sandbox = await box(t, { resources: { vcpus: 4 } })
  assert.equal(sandbox.vcpus, 4)
  assert.equal(sandbox.memory, 8192)
  // A count above the host's is accepted; nproc shows the host's.
  assert.equal(await out(sandbox, 'nproc'), String(Math.min(4, os.availableParallelism())))
})

test('S13 fifteen ports, not sixteen', async (t) => {
  const ports = Array.from({ length: 16 }, (_, i) => 3000 + i)
  await refused(Sandbox.create({ ports }), 400)
  const sandbox = await box(t, { ports: ports.slice(1) })
  assert.equal(sandbox.routes.length, 15)
  assert.equal(new Set(sandbox.routes.map((r) => r.subdomain)).size, 15)
})

test('S14 a timeout under a second', async () => {
  await refused(Sandbox.create({ timeout: 999 }), 400)
})

test('S40 the address of a port', async (t) => {
  const sandbox = await box(t, { ports: [3000] })
  const route = sandbox.routes.find((r) => r.port === 3000)
  assert.equal(sandbox.domain(3000), `https://${route.subdomain}.vercel.run`)
  assert.throws(() => sandbox.domain(4000), /No route for port 4000/)
})

test('S78 every getter works on a plain sandbox', async (t) => {
  const sandbox = await box(t)
  const session = sandbox.currentSession()
  for (const thing of [sandbox, session]) {
    const names = []
    for (let kind = Object.getPrototypeOf(thing); kind !== Object.prototype; kind = Object.getPrototypeOf(kind)) {
      names.push(...Object.entries(Object.getOwnPropertyDescriptors(kind)).filter(([, d]) => d.get).map(([name]) => name))
    }
    assert.ok(names.length > 10, names.join())
    for (const name of names) {
      if (name === 'client') continue
      assert.notEqual(thing[name], null, name)
    }
  }
  assert.equal(sandbox.sourceSnapshotId, undefined)
  assert.equal(sandbox.currentSnapshotId, undefined)
  assert.ok(sandbox.createdAt instanceof Date && sandbox.createdAt.getTime() > Date.now() - 3_600_000)
  assert.equal(sandbox.cwd, '/vercel/sandbox')
})
