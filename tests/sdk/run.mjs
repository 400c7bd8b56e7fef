// Starts an engine of its own, points the official SDK at it with `bivouac env`, and runs the tests: all of it
// in a network namespace without an uplink, behind which `bivouac-world` plays every name and address
// (crates/testkit). Nothing that a test does can leave the machine.
//
//   node run.mjs [test files]        an engine of its own (BIVOUAC_TEST_BIN, or the one cargo built)
//   node run.mjs --here [test files] the engine that the environment already points at; tests that need the
//                                    world are skipped
//
// Tests get BIVOUAC_TEST_WORLD, the world's control socket: see world.mjs.
import { spawn, spawnSync } from 'node:child_process'
import { closeSync, existsSync, mkdtempSync, openSync, readFileSync, readdirSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { createInterface } from 'node:readline'
import { setTimeout as pause } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'

const here = dirname(fileURLToPath(import.meta.url))
const args = process.argv.slice(2)
const outside = args[0] === '--here' && args.shift()
const files = args.length
  ? args
  : readdirSync(join(here, 'test')).filter((f) => f.endsWith('.test.mjs')).map((f) => join(here, 'test', f))

function program() {
  const target = join(here, '../../target')
  const places = [process.env.BIVOUAC_TEST_BIN, process.env.BIVOUAC_BIN, ...['ci', 'release', 'debug'].map((p) => join(target, p, 'bivouac'))]
  const found = places.find((p) => p && existsSync(p))
  if (!found) throw new Error('no bivouac executable: build it, or set BIVOUAC_TEST_BIN')
  return found
}

/** The world: how to start a program in it, flags for `serve`, its control socket. Ends with its input. */
async function world(bin) {
  const path = join(dirname(bin), 'bivouac-world')
  if (!existsSync(path)) {
    const profile = { debug: '', release: ' --release' }[dirname(bin).split('/').pop()] ?? ` --profile ${dirname(bin).split('/').pop()}`
    throw new Error(`no ${path}: build it with\n  cargo build -p bivouac-testkit --bin bivouac-world${profile}`)
  }
  const child = spawn(path, [], { stdio: ['pipe', 'pipe', 'inherit'] })
  for await (const line of createInterface({ input: child.stdout })) return { child, ...JSON.parse(line) }
  throw new Error(`${path} ended before it was ready: it needs root, ip, unshare and nsenter`)
}

function end(child) {
  if (child.exitCode !== null || child.signalCode !== null) return Promise.resolve()
  return new Promise((resolve) => {
    const hard = setTimeout(() => child.kill('SIGKILL'), 60_000)
    child.once('exit', () => (clearTimeout(hard), resolve()))
    child.kill('SIGTERM')
  })
}

async function engine(bin, folder, { prefix, args: flags }) {
  const data = join(folder, 'data')
  const env = {
    ...process.env,
    BIVOUAC_DATA_DIR: data,
    BIVOUAC_IMAGES: process.env.BIVOUAC_IMAGES ?? join(tmpdir(), 'bivouac-tests-images'),
    BIVOUAC_STOP_SANDBOXES: '1',
    XDG_CACHE_HOME: join(folder, 'cache'),
  }
  for (const name of ['BIVOUAC_URL', 'BIVOUAC_TOKEN', 'NODE_OPTIONS']) delete env[name]
  const log = openSync(join(folder, 'serve.log'), 'a')
  // The issuer that the SDK's own proxy helper insists on; `bivouac env` brings its requests to the engine.
  const serve = ['serve', '--listen', '127.0.0.1:0', '--issuer', 'https://oidc.vercel.com', ...flags]
  const child = spawn(prefix[0], [...prefix.slice(1), bin, ...serve], { env, stdio: ['ignore', log, log] })
  closeSync(log)
  const deadline = Date.now() + 120_000
  for (;;) {
    try {
      const told = JSON.parse(readFileSync(join(data, 'engine.json'), 'utf8'))
      const address = told.address.replace(/^http:\/\//, '')
      // The prefix ends in exec(2), so the process is the engine.
      const asked = ['curl', '-sf', '-o', '/dev/null', '-m', '10', `http://${address}/health`]
      if (told.pid === child.pid && spawnSync(prefix[0], [...prefix.slice(1), ...asked]).status === 0) break
    } catch {
      // Not there yet.
    }
    if (child.exitCode !== null || Date.now() > deadline) {
      await end(child)
      throw new Error(`the engine was not ready\n${readFileSync(join(folder, 'serve.log'), 'utf8').slice(-4000)}`)
    }
    await pause(20)
  }
  const printed = spawnSync(prefix[0], [...prefix.slice(1), bin, 'env', '--format', 'json'], { env, encoding: 'utf8' })
  if (printed.status !== 0) {
    await end(child)
    throw new Error(`bivouac env: ${printed.stderr}`)
  }
  return { child, data, vars: JSON.parse(printed.stdout) }
}

function test(vars, prefix = []) {
  const env = { ...process.env, ...vars }
  // The runner's own variable would make a nested run report to it instead of to people.
  delete env.NODE_TEST_CONTEXT
  const [command, ...rest] = [...prefix, process.execPath, '--test', '--test-concurrency=2', '--test-reporter=spec', ...files]
  const child = spawn(command, rest, { env, stdio: 'inherit', cwd: here })
  return new Promise((resolve) => child.once('exit', (code, signal) => resolve(signal ? 1 : code)))
}

let code = 1
if (outside) {
  code = await test({})
} else {
  const folder = mkdtempSync(join(tmpdir(), 'bivouac-test-sdk-'))
  let running, around
  try {
    const bin = program()
    around = await world(bin)
    running = await engine(bin, folder, around)
    code = await test({ ...running.vars, BIVOUAC_TEST_WORLD: around.socket }, around.prefix)
  } catch (error) {
    console.error(String(error.message))
  }
  if (running) await end(running.child)
  if (around) {
    const ended = new Promise((resolve) => around.child.once('exit', resolve))
    around.child.stdin.end()
    await ended
  }
  if (code !== 0 && existsSync(join(folder, 'serve.log'))) {
    console.error(`--- the engine's log\n${readFileSync(join(folder, 'serve.log'), 'utf8').slice(-6000)}`)
  }
  // The pool stays mounted behind an engine on purpose; behind a test it must not.
  const mounts = readFileSync('/proc/self/mounts', 'utf8').split('\n').map((l) => l.split(' ')[1]).filter((p) => p?.startsWith(folder))
  for (const point of mounts.reverse()) spawnSync('umount', [point])
  rmSync(folder, { recursive: true, force: true })
}
process.exitCode = code
