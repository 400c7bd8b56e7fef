// First files that are fetched: scenarios 9 and 10, from a forge on the far side of the world.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { Sandbox } from '@vercel/sandbox'
import { box, out, refused, sh, test as plain, unique } from '../lib.mjs'
import { missing, name, server } from '../world.mjs'

const test = (title, body) => plain(title, body, { skip: missing })

/** A forge with one repository of three commits, a private copy of it, one with a submodule, and archives. */
async function forge(t, host, address, port) {
  const root = mkdtempSync(join(tmpdir(), 'forge-'))
  t.after(() => rmSync(root, { recursive: true }))
  const quiet = { GIT_CONFIG_GLOBAL: '/dev/null', GIT_CONFIG_SYSTEM: '/dev/null', PATH: process.env.PATH }
  const run = (cwd, command, ...args) => execFileSync(command, args, { cwd, env: quiet, encoding: 'utf8' }).trim()
  const git = (cwd, ...args) =>
    run(cwd, 'git', '-c', 'user.name=t', '-c', 'user.email=t@example.com', '-c', 'init.defaultBranch=main', '-c', 'protocol.file.allow=always', ...args)
  const work = join(root, 'work')
  mkdirSync(work)
  git(work, 'init', '--quiet')
  const commits = []
  for (const version of ['one', 'two', 'three']) {
    writeFileSync(join(work, 'version.txt'), `${version}\n`)
    git(work, 'add', '.')
    git(work, 'commit', '--quiet', '-m', version)
    commits.push(git(work, 'rev-parse', 'HEAD'))
  }
  git(work, 'tag', 'v2', commits[1])
  git(work, 'branch', 'old', commits[0])
  mkdirSync(join(root, 'private'))
  git(root, 'clone', '--quiet', '--bare', work, 'repo.git')
  git(root, 'clone', '--quiet', '--bare', work, 'private/repo.git')
  const outer = join(root, 'outer')
  mkdirSync(outer)
  git(outer, 'init', '--quiet')
  git(outer, 'submodule', '--quiet', 'add', join(root, 'repo.git'), 'inner')
  git(outer, 'config', '-f', '.gitmodules', 'submodule.inner.url', `https://${host}:${port}/repo.git`)
  git(outer, 'commit', '--quiet', '-a', '-m', 'with a submodule')
  git(root, 'clone', '--quiet', '--bare', outer, 'outer.git')
  for (const [flag, ending] of [['-z', 'tar.gz'], ['-J', 'tar.xz'], ['--no-auto-compress', 'tar']]) {
    run(root, 'tar', '-c', flag, '--exclude=.git', '-f', `files.${ending}`, '-C', work, '.')
  }
  writeFileSync(join(root, 'broken.tar.gz'), 'no archive')
  await name(host, address)
  const script = new URL('../forge.mjs', import.meta.url).pathname
  const took = await server(t, [host], script, { FORGE_PORT: String(port), FORGE_ROOT: root, LOGIN: 'reader:s9-pass' })
  return { url: `https://${host}:${port}`, commits, took }
}

test('S9 a git source: depth, branch, tag and commit', async (t) => {
  const { url, commits } = await forge(t, 's9.test', '203.0.113.231', 8609)
  const version = (sandbox) => out(sandbox, 'cat version.txt; git rev-parse HEAD; git rev-list --count HEAD')
  const source = (more) => ({ source: { type: 'git', url: `${url}/repo.git`, ...more }, persistent: false })
  assert.equal(await version(await box(t, source({}))), `three\n${commits[2]}\n3`)
  assert.equal(await version(await box(t, source({ depth: 1 }))), `three\n${commits[2]}\n1`)
  assert.equal(await version(await box(t, source({ depth: 1, revision: 'v2' }))), `two\n${commits[1]}\n1`)
  assert.equal(await version(await box(t, source({ revision: 'old' }))), `one\n${commits[0]}\n1`)
  assert.equal(await version(await box(t, source({ revision: commits[1] }))), `two\n${commits[1]}\n2`)
  const outer = await box(t, { source: { type: 'git', url: `${url}/outer.git` }, persistent: false })
  assert.equal(await out(outer, 'cat inner/version.txt'), 'three')
})

test('S9 a private repository: the login is never inside', async (t) => {
  const { url, took } = await forge(t, 's9p.test', '203.0.113.232', 8610)
  const login = { username: 'reader', password: 's9-pass' }
  const source = { type: 'git', url: `${url}/private/repo.git` }
  const sandbox = await box(t, { source: { ...source, ...login }, networkPolicy: 'deny-all', persistent: false })
  assert.equal(await out(sandbox, 'cat version.txt'), 'three')
  assert.ok(took.some(({ authorization }) => authorization?.startsWith('Basic ')))
  const held = await sh(sandbox, "grep -rl 's9-pass\\|cmVhZGVyOnM5LXBhc3M' /vercel /tmp /proc/self/environ ~ 2>/dev/null")
  assert.equal(await held.stdout(), '')
  // The sandbox's own policy is in force now.
  assert.notEqual((await sh(sandbox, 'git fetch')).exitCode, 0)
  const wrong = { source: { ...source, username: 'reader', password: 'no' }, name: unique('s9') }
  const error = await refused(Sandbox.create(wrong), 400)
  assert.match(error.json.error.message, /could not be fetched: .*(401|Authentication|could not read)/)
  await refused(Sandbox.get({ name: wrong.name }), 404)
})

test('S9 what the remote said is told, and nothing is left', async (t) => {
  const { url } = await forge(t, 's9e.test', '203.0.113.233', 8611)
  for (const [source, words] of [
    [{ type: 'git', url: `${url}/nothing.git` }, /not found|404/i],
    [{ type: 'git', url: `${url}/repo.git`, revision: 'no-such' }, /no-such/],
    [{ type: 'tarball', url: `${url}/nothing.tar.gz` }, /404/],
    [{ type: 'tarball', url: `${url}/broken.tar.gz` }, /could not be fetched/],
  ]) {
    const wanted = { source, name: unique('s9e') }
    const error = await refused(Sandbox.create(wanted), 400)
    assert.match(error.json.error.message, words)
    await refused(Sandbox.get({ name: wanted.name }), 404)
  }
})

test('S10 a tarball source', async (t) => {
  const { url } = await forge(t, 's10.test', '203.0.113.234', 8612)
  for (const ending of ['tar.gz', 'tar.xz', 'tar']) {
    const source = { type: 'tarball', url: `${url}/files.${ending}` }
    const sandbox = await box(t, { source, persistent: false })
    assert.equal(await out(sandbox, 'cat version.txt; stat -c %U version.txt'), 'three\nvercel-sandbox', ending)
  }
})
