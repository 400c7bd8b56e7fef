import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { mkdtemp, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before } from 'node:test'
import { Sandbox } from '@vercel/sandbox'
import { out, refused, remove, test, unique } from '../lib.mjs'

let sandbox
before(async () => {
  sandbox = await Sandbox.create({ persistent: false, timeout: 1_800_000 })
})
after(() => remove(sandbox))

test('S33 files of every kind come back equal', async () => {
  const files = [
    { path: 'relative.txt', content: 'relative' },
    { path: '/etc/absolute.conf', content: 'absolute' },
    { path: 'a/b/c/d/e/deep.txt', content: 'deep' },
    { path: `${'d'.repeat(99)}/${'f'.repeat(100)}`, content: 'long' },
    { path: 'n\u00e9/漢字 😀.txt', content: 'é漢😀' },
    { path: 'run.sh', content: '#!/bin/sh\necho ran\n', mode: 0o755 },
    { path: 'empty', content: '' },
    { path: 'binary', content: randomBytes(20_000_000) },
    { path: './x/../dots.txt', content: 'dots' },
  ]
  await sandbox.writeFiles(files)
  for (const { path, content } of files) {
    const read = await sandbox.readFileToBuffer({ path })
    assert.ok(read, `${path} is missing`)
    assert.ok(read.equals(Buffer.from(content)), `${path} differs`)
  }
  assert.equal(await out(sandbox, './run.sh'), 'ran')
  assert.equal(await out(sandbox, 'stat -c %a run.sh relative.txt'), '755\n644')
  const sum = createHash('sha256').update(files[7].content).digest('hex')
  assert.equal(await out(sandbox, 'sha256sum < binary'), `${sum}  -`)
})

test('S34 written files belong to the user', async () => {
  await sandbox.writeFiles([{ path: 'own34/f', content: 'x' }, { path: '/opt/own34', content: 'x' }])
  const user = await out(sandbox, 'id -un')
  assert.notEqual(user, 'root')
  assert.equal(await out(sandbox, 'stat -c %U own34 own34/f /opt/own34'), `${user}\n${user}\n${user}`)
  await out(sandbox, 'echo more >> own34/f && rm own34/f')
})

test('S35 reads', async () => {
  assert.equal(await sandbox.readFile({ path: 'missing35' }), null)
  assert.equal(await sandbox.readFileToBuffer({ path: 'missing35/deeper' }), null)
  await refused(sandbox.readFile({ path: '/etc' }), 400)
  const bytes = randomBytes(300_000)
  await sandbox.writeFiles([{ path: '/tmp/b35', content: bytes }])
  assert.ok((await sandbox.readFileToBuffer({ path: 'b35', cwd: '/tmp' })).equals(bytes))
})

test('S36 a download', async () => {
  const folder = await mkdtemp(join(tmpdir(), 'sdk36-'))
  try {
    await sandbox.writeFiles([{ path: 'd36', content: 'down' }])
    const local = await sandbox.downloadFile({ path: 'd36' }, { path: join(folder, 'x/y/f') }, { mkdirRecursive: true })
    assert.equal(await readFile(local, 'utf8'), 'down')
    assert.equal(await sandbox.downloadFile({ path: 'missing36' }, { path: join(folder, 'g') }), null)
  } finally {
    await rm(folder, { recursive: true })
  }
})

test('S37 folders', async () => {
  const name = unique('m37')
  await sandbox.mkDir(name)
  await refused(sandbox.mkDir(name), 400)
  await refused(sandbox.mkDir(`${name}x/y`), 400)
  await sandbox.fs.mkdir(`${name}x/y`, { recursive: true })
  assert.equal(await out(sandbox, `stat -c '%F %U' ${name} ${name}x/y | sort -u`), `directory ${await out(sandbox, 'id -un')}`)
})

test('S38 the file system facade', async () => {
  const { fs } = sandbox
  const root = await fs.mkdtemp('/tmp/m38-')
  const at = (name) => `${root}/${name}`
  await fs.writeFile(at('f'), 'hello')
  assert.equal(await fs.readFile(at('f'), 'utf8'), 'hello')
  await fs.appendFile(at('f'), ' world')
  const stat = await fs.stat(at('f'))
  assert.equal(stat.size, 11)
  assert.ok(stat.isFile() && !stat.isDirectory())
  await fs.mkdir(at('d'))
  await fs.symlink('f', at('l'))
  assert.equal(await fs.readlink(at('l')), 'f')
  assert.ok((await fs.lstat(at('l'))).isSymbolicLink())
  assert.equal(await fs.realpath(at('l')), at('f'))
  const entries = await fs.readdir(root, { withFileTypes: true })
  assert.deepEqual(entries.map((e) => [e.name, e.isFile(), e.isDirectory(), e.isSymbolicLink()]).sort(), [
    ['d', false, true, false],
    ['f', true, false, false],
    ['l', false, false, true],
  ])
  assert.deepEqual((await fs.readdir(root)).sort(), ['d', 'f', 'l'])
  await fs.chmod(at('f'), 0o600)
  assert.equal((await fs.stat(at('f'))).mode & 0o777, 0o600)
  await fs.copyFile(at('f'), at('g'))
  await fs.truncate(at('g'), 5)
  assert.equal(await fs.readFile(at('g'), 'utf8'), 'hello')
  await fs.rename(at('g'), at('d/h'))
  assert.equal(await fs.exists(at('g')), false)
  assert.equal(await fs.exists(at('d/h')), true)
  await assert.rejects(fs.rmdir(at('d')), (e) => e.code === 'ENOTEMPTY')
  await fs.rm(at('d'), { recursive: true })
  const x = at('x')
  const calls = [fs.stat, fs.lstat, fs.readFile, fs.readdir, fs.rm, fs.unlink, fs.access, (p) => fs.rename(p, at('y'))]
  for (const call of calls) {
    await assert.rejects(call.call(fs, x), (e) => e.code === 'ENOENT', String(call))
  }
})

test('S39 users and groups', async () => {
  const name = `u${unique('x').slice(-8)}`
  const user = await sandbox.createUser(name)
  assert.equal(await (await user.runCommand('id', ['-un'])).stdout(), `${name}\n`)
  assert.equal(await (await sandbox.asUser(name).runCommand('pwd')).stdout(), `/home/${name}\n`)
  await assert.rejects(sandbox.createUser(name), /already exists/)
  await user.writeFiles([{ path: 'f', content: 'x' }])
  assert.equal((await user.readFileToBuffer({ path: 'f' })).toString(), 'x')
  const group = `g${name.slice(1)}`
  const { sharedDir } = await sandbox.createGroup(group)
  assert.equal(await out(sandbox, `sudo stat -c '%a %G' ${sharedDir}`), `2770 ${group}`)
  await sandbox.addUserToGroup(name, group)
  assert.equal((await user.runCommand('touch', [`${sharedDir}/f`])).exitCode, 0)
  await sandbox.removeUserFromGroup(name, group)
})
