// A token with some rights in one namespace, with nothing but what `bivouac env` prints for it.
import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import { Sandbox, Snapshot } from '@vercel/sandbox'
import { box, out, refused, scope, test, unique } from '../lib.mjs'

const call = async (method, path, body) => {
  const { BIVOUAC_URL: url, BIVOUAC_TOKEN: token } = process.env
  const headers = { authorization: `Bearer ${token}`, 'content-type': 'application/json' }
  const response = await fetch(`${url}/api/bivouac/v1${path}`, { method, headers, body: body && JSON.stringify(body) })
  return { status: response.status, json: await response.json() }
}

/** A token. Hooks run in their order: whoever removes something with it takes it back behind that. */
async function token(namespaces, verbs) {
  const name = unique('sdk')
  const made = await call('POST', '/tokens', { name, namespaces, verbs })
  assert.equal(made.status, 201, JSON.stringify(made.json))
  return { name, secret: made.json.secret }
}

test('a scoped token has its namespace and no other', async (t) => {
  const { teamId, projectId } = scope()
  const elsewhere = { ...scope(), teamId }
  const hidden = await box(t, { ...elsewhere, persistent: false })
  const { name, secret } = await token([`${teamId}/${projectId}`], ['read', 'exec', 'write'])
  const credentials = { token: secret, teamId, projectId }
  const sandbox = await box(t, { ...credentials, name: unique('box') })
  t.after(() => call('DELETE', `/tokens/${name}`))
  assert.equal(await out(sandbox, 'echo hello'), 'hello')
  const snapshot = await sandbox.snapshot()
  assert.equal((await Snapshot.get({ ...credentials, snapshotId: snapshot.snapshotId })).snapshotId, snapshot.snapshotId)
  await refused(Sandbox.get({ ...credentials, projectId: elsewhere.projectId, name: hidden.name }), 404, 'not_found')
  await refused(Sandbox.create({ ...credentials, projectId: elsewhere.projectId }), 404, 'not_found')
  await refused(Sandbox.create({ ...credentials, networkPolicy: 'deny-all' }), 403, 'forbidden')
  await refused(sandbox.updateNetworkPolicy('deny-all'), 403)
  assert.equal(hidden.status, 'running')
})

test('the SDK under bivouac env of a scoped token', async () => {
  const { teamId, projectId } = scope()
  const { name, secret } = await token([`${teamId}/${projectId}`], ['read', 'exec', 'write'])
  const program = `
    import { Sandbox } from '@vercel/sandbox'
    const sandbox = await Sandbox.create({ persistent: false })
    const command = await sandbox.runCommand('echo', ['hi'])
    process.stdout.write(await command.stdout())
    await sandbox.delete()`
  const env = { ...process.env, BIVOUAC_TOKEN: secret }
  for (const of of ['VERCEL_OIDC_TOKEN', 'VERCEL_AUTH_TOKEN', 'VERCEL_TEAM_ID', 'VERCEL_PROJECT_ID']) delete env[of]
  // What env.rs prints, made here: the same unsigned JWT.
  const part = (value) => Buffer.from(JSON.stringify(value)).toString('base64url')
  env.VERCEL_OIDC_TOKEN = `${part({ alg: 'none', typ: 'JWT' })}.${part({ owner_id: teamId, project_id: projectId, token: secret })}.x`
  const run = () => spawnSync(process.execPath, ['--input-type=module', '-e', program], { env, encoding: 'utf8', cwd: import.meta.dirname })
  const done = run()
  assert.equal(done.status, 0, done.stderr)
  assert.equal(done.stdout, 'hi\n')
  await call('DELETE', `/tokens/${name}`)
  assert.notEqual(run().status, 0, 'a revoked token still works')
})
