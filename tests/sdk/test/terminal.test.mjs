// The official command line's interactive verbs, in a real terminal.
import assert from 'node:assert/strict'
import { setTimeout as pause } from 'node:timers/promises'
import { Sandbox } from '@vercel/sandbox'
import { shell } from '../cli.mjs'
import { remove, sh, test } from '../lib.mjs'

/** A sandbox that the program made; gone when the test ends. */
async function made(t, sandbox, name, ...options) {
  const result = await sandbox('create', '--name', name, ...options)
  assert.equal(result.code, 0, result.stderr)
  const found = await get(sandbox, name)
  t.after(() => remove(found))
  return found
}

const get = (sandbox, name) => Sandbox.get({ ...sandbox.credentials, name })

/** A terminal that is killed when the test ends. */
function terminal(t, sandbox, ...args) {
  const terminal = sandbox.inTerminal(...args)
  t.after(terminal.kill)
  return terminal
}

/** The prompt that the command line sets: the folder in it. */
const PROMPT = '/vercel/sandbox/'

test('S84 connect: prompt, echo, size, exit code', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x')
  for (const verb of ['connect', 'ssh']) {
    const person = terminal(t, sandbox, verb, 'x')
    await person.sees(PROMPT)
    person.type('echo $((40+2)) $TERM\r')
    await person.sees('42 xterm-256color')
    assert.ok(person.shown.includes('echo $((40+2))'), 'what is typed is echoed')
    person.type('stty size\r')
    await person.sees('40 120')
    person.resize(132, 50)
    // The signal travels beside the keys.
    for (let i = 0; i < 100 && !person.shown.includes('50 132'); i++) {
      person.type('stty size\r')
      await pause(100)
    }
    await person.sees('50 132')
    // Ctrl-C is the program's.
    person.type('sleep 1000\r')
    await person.sees('sleep 1000')
    await pause(300)
    person.type('\x03')
    person.type('echo alive-$((2+2))\r')
    await person.sees('alive-4')
    person.type('exit 3\r')
    assert.equal(await person.ended, 3, person.shown)
    assert.match(person.shown, /connection to ▲ x closed/)
  }
})

test('S85 exec -i as root, with a folder and a variable', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x')
  const person = terminal(t, sandbox, 'exec', '-i', '--sudo', '-e', 'FOO=b a=r', '-w', '/tmp', 'x', '--', 'sh')
  await person.sees('/tmp/')
  person.type('id -un; pwd; echo "<$FOO>"; echo "$HOME"; exit\r')
  assert.equal(await person.ended, 0, person.shown)
  for (const line of ['root', '/tmp', '<b a=r>', '/root']) assert.ok(person.shown.includes(`\n${line}\r`), `${line} ${person.shown}`)
  const missing = terminal(t, sandbox, 'exec', '-i', 'x', '--', 'no-such-thing')
  assert.equal(await missing.ended, 127, missing.shown)
  assert.match(missing.shown, /no-such-thing/)
  const refused = await sandbox('exec', '-i', 'x', '--', 'sh')
  assert.match(refused.stderr, /requires a terminal \(TTY\)/)
})

test('S86 a connection outlives the timeout', async (t) => {
  const sandbox = shell(t)
  const found = await made(t, sandbox, 'x', '--timeout', '20s')
  const person = terminal(t, sandbox, 'connect', 'x')
  await person.sees(PROMPT)
  const end = Date.now() + 25_000
  while (Date.now() < end) await pause(100)
  person.type('echo still-$((3+3))\r')
  await person.sees('still-6')
  assert.equal((await get(sandbox, 'x')).status, 'running')
  person.type('exit\r')
  assert.equal(await person.ended, 0, person.shown)
  assert.ok(found)
})

test('a stopped sandbox is started by connect, and a client that vanishes leaves nothing', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x')
  assert.equal((await sandbox('stop', 'x')).code, 0)
  const person = terminal(t, sandbox, 'connect', 'x')
  await person.sees(PROMPT)
  person.type('sleep 4242\r')
  const found = await get(sandbox, 'x')
  const runs = async () => (await sh(found, "pgrep -f 'sleep 424[2]'")).exitCode === 0
  const until = async (wanted) => {
    const end = Date.now() + 60_000
    while ((await runs()) !== wanted) {
      assert.ok(Date.now() < end, `it ${wanted ? 'never ran' : 'still runs'}`)
      await pause(100)
    }
  }
  await until(true)
  person.kill()
  await until(false)
})

test('much output is whole, and typed text is not lost', async (t) => {
  const sandbox = shell(t)
  await made(t, sandbox, 'x')
  const many = terminal(t, sandbox, 'exec', '-i', 'x', '--', 'seq', '1', '100000')
  assert.equal(await many.ended, 0)
  const wanted = Array.from({ length: 100_000 }, (_, i) => `${i + 1}\n`).join('')
  // Node's raw mode adds a carriage return of its own.
  const shown = many.shown.replaceAll('\r', '')
  assert.ok(shown.includes(wanted), `${shown.length} of ${wanted.length}`)
  const cat = terminal(t, sandbox, 'exec', '-i', 'x', '--', 'sh', '-c', 'stty -echo -icanon; echo ready; head -c 200000 | cksum')
  await cat.sees('ready')
  cat.type('abcde\r\n'.repeat(40_000).slice(0, 200_000))
  assert.equal(await cat.ended, 0)
  assert.match(cat.shown, /\d+ 200000/)
})
