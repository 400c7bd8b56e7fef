// The official command line `sandbox`, as a program of its own: exit codes and both streams.
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { existsSync, readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { Sandbox, Snapshot } from '@vercel/sandbox'
import { shell, table } from '../cli.mjs'
import { out, remove, test, unique } from '../lib.mjs'
import { missing, name, packets } from '../world.mjs'

const MINUTE = 60_000

/** It must have ended well. */
function good(result) {
  assert.equal(result.code, 0, `sandbox ${result.args.join(' ')}\n${result.stdout}${result.stderr}`)
  return result
}

/** It must have ended with `code` and said `words` on stderr. */
function bad(result, words, code = 1) {
  assert.equal(result.code, code, `sandbox ${result.args.join(' ')}\n${result.stdout}${result.stderr}`)
  assert.match(result.stderr, words)
  return result
}

/** A sandbox that the program made; gone when the test ends. */
async function made(t, sandbox, name, ...options) {
  const result = good(await sandbox('create', '--name', name, ...options))
  t.after(() => dispose(sandbox, name))
  return result
}

async function dispose(sandbox, name) {
  try {
    await remove(await Sandbox.get({ ...sandbox.credentials, name }))
  } catch (error) {
    if (error.response?.status !== 404) throw error
  }
}

const get = (sandbox, name) => Sandbox.get({ ...sandbox.credentials, name })

test('S81 create', async (t) => {
  // With nothing but what `bivouac env` printed.
  const { VERCEL_TEAM_ID: teamId, VERCEL_PROJECT_ID: projectId, BIVOUAC_TOKEN: token } = process.env
  const { VERCEL_AUTH_TOKEN, VERCEL_OIDC_TOKEN } = process.env
  const sandbox = shell(t, { credentials: { token, teamId, projectId }, env: { VERCEL_AUTH_TOKEN, VERCEL_OIDC_TOKEN } })
  const name = unique('s81')
  const { stdout, stderr } = await made(t, sandbox, name)
  assert.equal(stdout, name)
  assert.match(stderr, /✅ Sandbox {2}created\./)
  for (const line of [`team: ${teamId}`, 'region: iad1', `project: ${projectId}`, `connect with: sandbox ssh ${name}`]) {
    assert.ok(stderr.includes(line), stderr)
  }
  bad(await sandbox('create', '--name', name), /A sandbox with the name '.*' already exists for this project\./)
  assert.equal((await get(sandbox, name)).status, 'running')
})

test('S81 create with every option that this version can serve', async (t) => {
  const sandbox = shell(t)
  const { stdout } = await made(t, sandbox, 'full', '--timeout', '10m', '--vcpus', '4', '-p', '3000', '-e', 'A=1', '--tag', 'env=dev',
    '--snapshot-expiration', '7d', '--keep-last-snapshots', '2', '--keep-last-snapshots-for', 'none', '--region', 'fra1',
    '--failover-regions', 'sfo1', '--allowed-domain', '*.example.org', '--denied-cidr', '10.0.0.0/8', '--silent')
  assert.equal(stdout, '')
  const box = await get(sandbox, 'full')
  assert.deepEqual(
    [box.timeout, box.vcpus, box.memory, box.routes[0].port, box.region, box.snapshotExpiration, box.persistent],
    [600_000, 4, 8192, 3000, 'fra1', 7 * 86_400_000, true],
  )
  assert.deepEqual(box.tags, { env: 'dev' })
  assert.deepEqual(box.keepLastSnapshots, { count: 2, expiration: 0, deleteEvicted: true })
  assert.deepEqual(box.networkPolicy, { allow: ['*.example.org'], subnets: { deny: ['10.0.0.0/8'] } })
  assert.equal(await out(box, 'echo $A'), '1')
  const refusals = [
    ['--vcpus', '3', /Invalid resources\.vcpus: must be 1 or an even number/],
    ['--snapshot', 'snap_nope', /Snapshot snap_nope was not found/],
    ['--image', 'no/such', /There is no image 'no\/such' here\./],
    ['--mount', 'data:/data', /Drive 'data' was not found in this project\./],
    ['--name', 'a b', /Invalid name: only letters, digits/],
  ]
  await Promise.all(refusals.map(async ([option, value, words]) => bad(await sandbox('create', option, value), words)))
  assert.deepEqual(table(good(await sandbox('ls', '--all')).stdout).map((r) => r.NAME), ['full'], 'a refusal left something')
})

test('S82 exec', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x')
  const seven = await sandbox('exec', 'x', '--', 'sh', '-c', 'echo o; echo e >&2; exit 7')
  assert.equal(seven.code, 7)
  assert.equal(seven.stdout, 'o\n')
  assert.match(seven.stderr, /^\$ sh -c .*\ne\n$/s)
  const rich = await sandbox('exec', '--sudo', '-w', '/tmp', '-e', 'K=v', 'x', '--', 'sh', '-c', 'id -u; pwd; echo $K')
  assert.equal(good(rich).stdout, '0\n/tmp\nv\n')
  bad(await sandbox('exec', '--timeout', '1s', 'x', '--', 'sleep', '600'), /killed \(SIGKILL, exit code 137\)/, 137)
  bad(await sandbox('exec', 'x', '--', 'echo hi'), /executable 'echo hi' not found/)
  bad(await sandbox('exec', '-w', '/nope', 'x', '--', 'true'), /working directory '\/nope' cannot be entered: No such file/)
  // Text of every length of characters, through this client's own splitting of lines.
  const script = 'my $s = "\\xc3\\xa9\\xe6\\xbc\\xa2\\xf0\\x9f\\x98\\x80" x 20000; while (length $s) { syswrite STDOUT, substr($s, 0, 1 + int(rand 999), "") }'
  const long = good(await sandbox('exec', 'x', '--', 'perl', '-e', script))
  assert.ok(long.stdout === 'é漢😀'.repeat(20_000), 'stdout differs')
  // Exec wakes what was stopped.
  good(await sandbox('stop', 'x'))
  assert.equal(good(await sandbox('exec', 'x', '--', 'echo', 'awake')).stdout, 'awake\n')
})

test('S83 exec in nothing', async (t) => {
  const sandbox = shell(t)
  const result = bad(await sandbox('exec', 'nope', '--', 'true'), /Sandbox 'nope' was not found in this project\./)
  assert.match(result.stderr, /status code: 404 Not Found/)
  assert.match(result.stderr, /hint: run sandbox ls --all/)
  assert.equal(result.stdout, '')
})

test('S87 ls', async (t) => {
  const sandbox = shell(t)
  assert.deepEqual(table(good(await sandbox('ls')).stdout), [])
  await made(t, sandbox, 'apple', '--tag', 'env=x')
  await made(t, sandbox, 'avocado', '--tag', 'env=y', '--timeout', '2h')
  await made(t, sandbox, 'pear', '--tag', 'env=x')
  good(await sandbox('stop', 'pear'))
  const names = async (...args) => table(good(await sandbox('ls', ...args)).stdout).map((row) => row.NAME)
  assert.deepEqual(await names(), ['avocado', 'apple'])
  assert.deepEqual(await names('--all'), ['pear', 'avocado', 'apple'])
  assert.deepEqual(await names('--tag', 'env=x'), ['apple'])
  assert.deepEqual(await names('--name-prefix', 'a', '--sort-by', 'name', '--sort-order', 'asc'), ['apple', 'avocado'])
  const rows = table(good(await sandbox('ls', '--all')).stdout)
  assert.deepEqual(rows.map((r) => r.STATUS), ['stopped', 'running', 'running'])
  assert.match(rows[1].TIMEOUT, /^in (2 hours|119 minutes)$/)
  assert.match(rows[0].SNAPSHOT, /^snap_/)
  // Its hint leads to the next page.
  const first = good(await sandbox('ls', '--all', '--limit', '2')).stdout
  const cursor = /More results: sandbox ls --all --limit 2 --cursor (\S+)/.exec(first)?.[1]
  assert.ok(cursor, first)
  assert.deepEqual(await names('--all', '--limit', '2', '--cursor', cursor), ['apple'])
  bad(await sandbox('ls', '--cursor', 'nonsense'), /Invalid cursor/)
})

test('S88 cp', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x')
  const bytes = randomBytes(300_000)
  writeFileSync(join(sandbox.folder, 'up'), bytes)
  good(await sandbox('cp', 'up', 'x:/tmp/f'))
  good(await sandbox('cp', 'x:/tmp/f', 'down'))
  assert.ok(readFileSync(join(sandbox.folder, 'down')).equals(bytes))
  // Upstream's own choice: a missing file is told and is no failure.
  bad(await sandbox('cp', 'x:/missing', 'none'), /File not found: \/missing in sandbox x\./, 0)
  assert.ok(!existsSync(join(sandbox.folder, 'none')))
  bad(await sandbox('cp', 'x:/etc', 'none'), /is a (directory|folder)/i)
  bad(await sandbox('cp', 'up', 'nope:/tmp/f'), /Sandbox 'nope' was not found/)
  // A copy does not wake what is stopped.
  good(await sandbox('stop', 'x'))
  assert.notEqual((await sandbox('cp', 'x:/tmp/f', 'late')).stderr, '')
})

test('S89 run', async (t) => {
  const sandbox = shell(t)
  t.after(() => dispose(sandbox, 'x'))
  const all = async () => table(good(await sandbox('ls', '--all')).stdout).map((r) => [r.NAME, r.STATUS])
  const once = await sandbox('run', '--rm', '--', 'sh', '-c', 'echo once; exit 3')
  assert.equal(once.code, 3, once.stderr)
  assert.match(once.stdout, /once\n$/)
  assert.deepEqual(await all(), [])
  const first = good(await sandbox('run', '--name', 'x', '--', 'sh', '-c', 'echo kept > f; echo one'))
  assert.equal(first.stdout, 'xone\n')
  assert.deepEqual(await all(), [['x', 'running']])
  // The second time it is there already, and used.
  assert.equal(good(await sandbox('run', '--name', 'x', '--stop', '--', 'cat', 'f')).stdout, 'kept\n')
  assert.deepEqual(await all(), [['x', 'stopped']])
})

test('S90 snapshot', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x')
  bad(await sandbox('snapshot', 'x'), /Snapshotting will stop the current session.*Confirm with --stop/s)
  assert.equal((await get(sandbox, 'x')).status, 'running')
  good(await sandbox('exec', 'x', '--', 'sh', '-c', 'echo snapped > f'))
  const told = good(await sandbox('snapshot', 'x', '--stop', '--expiration', '2d'))
  const id = /snap_\w+/.exec(told.stdout + told.stderr)?.[0]
  const snapshot = await Snapshot.get({ ...sandbox.credentials, snapshotId: id })
  assert.equal(snapshot.expiresAt - snapshot.createdAt, 2 * 86_400_000)
  bad(await sandbox('snapshot', 'x', '--stop'), /Sandbox x is not available \(status: stopped\)/)
  await made(t, sandbox, 'copy', '--snapshot', id)
  assert.equal(good(await sandbox('exec', 'copy', '--', 'cat', 'f')).stdout, 'snapped\n')
})

test('S91 config', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x')
  await made(t, sandbox, 'source')
  const id = /snap_\w+/.exec(good(await sandbox('snapshot', 'source', '--stop')).stderr)?.[0]
  const listed = async () => Object.fromEntries(table(good(await sandbox('config', 'list', 'x')).stdout).map((r) => [r.FIELD, r.VALUE]))
  assert.deepEqual(await listed(), {
    Region: 'iad1', 'Failover regions': '-', 'Secure Compute network': '-', vCPUs: '2', Timeout: '5 minutes', Persistent: 'true',
    'Network policy': 'allow-all', Ports: '-', 'Snapshot expiration': '-', 'Keep last snapshots': '-', 'Current snapshot': '-',
    Tags: '-', Mounts: '-',
  })
  for (const [what, ...value] of [
    ['vcpus', '4'],
    ['timeout', '30m'],
    ['ports', '-p', '4000', '-p', '5000'],
    ['tags', '--tag', 'a=b'],
    ['persistent', 'false'],
    ['network-policy', '--network-policy', 'deny-all'],
    ['mounts'],
    ['keep-last-snapshots', '3'],
    ['current-snapshot', id],
  ]) {
    const told = good(await sandbox('config', what, 'x', ...value))
    assert.match(told.stderr, /✅ (Configuration|Ports|Tags|Network policy) updated for sandbox x/, what)
  }
  assert.deepEqual(await listed(), {
    Region: 'iad1', 'Failover regions': '-', 'Secure Compute network': '-', vCPUs: '4', Timeout: '30 minutes',
    Persistent: 'false', 'Network policy': 'deny-all', Ports: '4000, 5000', 'Snapshot expiration': '-',
    'Keep last snapshots': 'count=3, delete-evicted-snapshots=true', 'Current snapshot': id, Tags: 'a=b', Mounts: '-',
  })
  assert.ok((await get(sandbox, 'x')).currentSession().timeout >= 30 * MINUTE, 'the running session got no more time')
  bad(await sandbox('config', 'mounts', 'x', '--mount', 'data:/data'), /Drive 'data' was not found in this project/)
  bad(await sandbox('config', 'failover-regions', 'x', 'iad1'), /region/i)
  bad(await sandbox('config', 'list', 'nope'), /Sandbox 'nope' was not found/)
})

test('S91 config network-policy: in force at once', async (t) => {
  const sandbox = shell(t)
  for (const host of ['in.s91.test', 'out.s91.test']) await name(host, '203.0.113.191')
  await made(t, sandbox, 'x', '--network-policy', 'deny-all')
  const reached = async (host) => {
    const line = `curl -s -o /dev/null -m 10 https://${host}/`
    return (await sandbox('exec', 'x', '--', 'sh', '-c', line)).code === 0
  }
  const both = async () => [await reached('in.s91.test'), await reached('out.s91.test')]
  const id = (await get(sandbox, 'x')).currentSession().sessionId
  assert.deepEqual(await both(), [false, false])
  assert.equal(await packets('203.0.113.191'), 0)
  good(await sandbox('config', 'network-policy', 'x', '--allowed-domain', 'in.s91.test'))
  assert.deepEqual(await both(), [true, false])
  good(await sandbox('config', 'network-policy', 'x', '--network-policy', 'allow-all'))
  assert.deepEqual(await both(), [true, true])
  good(await sandbox('config', 'network-policy', 'x', '--allowed-domain', 'in.s91.test', '--denied-cidr', '203.0.113.191/32'))
  assert.deepEqual(await both(), [false, false])
  assert.equal((await get(sandbox, 'x')).currentSession().sessionId, id, 'a new session')
}, { skip: missing })

test('S92 fork, stop, rm', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x', '-e', 'A=1')
  good(await sandbox('exec', 'x', '--', 'sh', '-c', 'echo forked > f'))
  good(await sandbox('stop', 'x'))
  t.after(() => dispose(sandbox, 'copy'))
  const told = good(await sandbox('fork', 'x', '--name', 'copy'))
  assert.equal(told.stdout, 'copy')
  assert.match(told.stderr, /forked from x\./)
  assert.equal(good(await sandbox('exec', 'copy', '--', 'sh', '-c', 'cat f; echo $A')).stdout, 'forked\n1\n')
  bad(await sandbox('fork', 'nope'), /Sandbox 'nope' was not found/)
  const stopped = good(await sandbox('stop', 'x', 'copy'))
  assert.equal(stopped.stderr.match(/✔ Sandbox stopped\./g).length, 2, stopped.stderr)
  assert.match(stopped.stderr, /snapshot: snap_/)
  // Again: it is stopped already.
  good(await sandbox('stop', 'copy'))
  bad(await sandbox('stop', 'x', 'nope'), /✖ Sandbox 'nope' was not found/)
  const sessions = table(good(await sandbox('sessions', 'ls', 'x', '--all')).stdout)
  assert.deepEqual(sessions.map((r) => r.STATUS), ['stopped'])
  good(await sandbox('rm', 'x', 'copy'))
  assert.deepEqual(table(good(await sandbox('ls', '--all')).stdout), [])
  bad(await sandbox('rm', 'x'), /Sandbox 'x' was not found/)
})

test('S92 snapshots', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x')
  good(await sandbox('stop', 'x'))
  good(await sandbox('exec', 'x', '--', 'sh', '-c', 'echo more > f'))
  good(await sandbox('stop', 'x'))
  const rows = async (...args) => table(good(await sandbox('snapshots', ...args)).stdout)
  const listed = await rows('ls', '--name', 'x')
  assert.deepEqual(listed.map((r) => r.STATUS), ['created', 'created'])
  const [newest, oldest] = listed.map((r) => r.ID)
  assert.equal((await rows('get', newest))[0].ID, newest)
  const tree = good(await sandbox('snapshots', 'tree', 'x')).stdout
  assert.ok(tree.indexOf(newest) >= 0 && tree.indexOf(newest) < tree.indexOf(oldest), tree)
  assert.match(tree, new RegExp(`${newest}.*current`))
  good(await sandbox('snapshots', 'rm', oldest))
  assert.deepEqual((await rows('ls')).map((r) => [r.ID, r.STATUS]), [[newest, 'created'], [oldest, 'deleted']])
  bad(await sandbox('snapshots', 'rm', oldest), /is in status "deleted" and cannot be deleted/)
  bad(await sandbox('snapshots', 'rm', 'snap_nope'), /Snapshot 'snap_nope' was not found/)
  // With its last snapshot the sandbox loses its files: that is told, and not hidden by a fresh one.
  good(await sandbox('snapshots', 'rm', newest))
  bad(await sandbox('exec', 'x', '--', 'true'), /Snapshot snap_\w+ was not found: it was deleted/)
})

test('S92 rm with its snapshots', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x')
  good(await sandbox('stop', 'x'))
  good(await sandbox('rm', 'x', '--delete-orphan-snapshots'))
  assert.deepEqual(table(good(await sandbox('snapshots', 'ls')).stdout).map((r) => r.STATUS), ['deleted'])
})

test('S92 drives', async (t) => {
  const sandbox = shell(t)
  good(await sandbox('drives', 'get-or-create', 'd', '--max-size', '1073741824'))
  good(await sandbox('drives', 'get-or-create', 'd'))
  await made(t, sandbox, 'x', '--mount', 'd:/data')
  good(await sandbox('exec', 'x', '--', 'sh', '-c', 'echo kept > /data/f'))
  const [row] = table(good(await sandbox('drives', 'ls')).stdout)
  assert.equal(row.NAME, 'd')
  assert.equal(row['ATTACHED SANDBOX'], 'x')
  assert.equal((await sandbox('drives', 'rm', 'd')).code, 1, 'one that is attached was deleted')
  good(await sandbox('rm', 'x'))
  good(await sandbox('drives', 'rm', 'd'))
  assert.deepEqual(table(good(await sandbox('drives', 'ls')).stdout), [])
})

test('S93 an opaque token and no scope', async (t) => {
  const token = process.env.BIVOUAC_TOKEN
  const nothing = { VERCEL_AUTH_TOKEN: undefined, VERCEL_OIDC_TOKEN: undefined }
  const credentials = { token, teamId: 'local', projectId: 'vercel-sandbox-default-project' }
  const sandbox = shell(t, { credentials, env: nothing })
  const name = unique('s93')
  t.after(() => dispose(sandbox, name))
  const told = good(await sandbox('create', '--token', token, '--name', name))
  assert.ok(told.stderr.includes('team: local') && told.stderr.includes('project: vercel-sandbox-default-project'), told.stderr)
  const rows = table(good(await sandbox('ls', '--token', token, '--name-prefix', name, '--sort-by', 'name')).stdout)
  assert.deepEqual(rows.map((r) => r.NAME), [name])
  // With both said nothing is asked, and any name is a namespace.
  const { teamId, projectId } = shell(t).credentials
  const scoped = ['--token', token, '--scope', teamId, '--project', projectId]
  assert.deepEqual(table(good(await sandbox('ls', '--all', ...scoped)).stdout), [])
  // A team alone: its default project.
  assert.deepEqual(table(good(await sandbox('ls', '--all', '--token', token, '--scope', teamId)).stdout), [])
  bad(await sandbox('ls', '--token', 'nonsense'), /The token is not this engine's, or it has expired or was revoked;/)
  bad(await sandbox('ls', '--token', 'nonsense', '--scope', teamId, '--project', projectId), /The token is not this engine's/)
})
