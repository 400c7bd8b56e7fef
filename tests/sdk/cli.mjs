// Runs the official command line, unmodified, as a program of its own.
import { spawn } from 'node:child_process'
import { mkdtempSync, readFileSync, readdirSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { scope } from './lib.mjs'

const program = fileURLToPath(new URL('node_modules/sandbox/bin/sandbox.mjs', import.meta.url))

/**
 * An empty folder to stand in, and a namespace of its own, told by an unsigned JWT as `bivouac env`
 * prints one. Answers a function that runs `sandbox ARGS…`; the folder goes when the test ends.
 */
export function shell(t, { credentials = scope(), env = {} } = {}) {
  const folder = mkdtempSync(join(tmpdir(), 'bivouac-test-cli-'))
  t.after(() => rmSync(folder, { recursive: true, force: true }))
  const claims = { owner_id: credentials.teamId, project_id: credentials.projectId, token: credentials.token }
  const part = (value) => Buffer.from(JSON.stringify(value)).toString('base64url')
  const jwt = `${part({ alg: 'none', typ: 'JWT' })}.${part(claims)}.x`
  const run = (...args) => start(folder, { VERCEL_AUTH_TOKEN: jwt, VERCEL_OIDC_TOKEN: jwt, ...env }, args)
  const inTerminal = (...args) =>
    new Terminal(variables(folder, { VERCEL_AUTH_TOKEN: jwt, VERCEL_OIDC_TOKEN: jwt, ...env }), folder, args)
  return Object.assign(run, { folder, credentials, inTerminal, report: () => reports(folder) })
}

/** The program in a terminal, as a person starts it: 120 columns, 40 lines. */
class Terminal {
  shown = ''
  #child

  constructor(env, cwd, args) {
    const argv = [fileURLToPath(new URL('terminal.py', import.meta.url)), process.execPath, program, ...args]
    this.#child = spawn('python3', argv, { cwd, env, stdio: ['pipe', 'pipe', 'inherit'] })
    this.#child.stdout.setEncoding('utf8').on('data', (text) => (this.shown += text))
    this.ended = new Promise((resolve, reject) => {
      this.#child.once('error', reject)
      this.#child.once('close', (code, signal) => resolve(code ?? signal))
    })
  }

  type = (keys) => this.#child.stdin.write(`${JSON.stringify({ keys })}\n`)
  resize = (cols, rows) => this.#child.stdin.write(`${JSON.stringify({ size: [cols, rows] })}\n`)
  kill = () => this.#child.kill('SIGKILL')

  /** Waits until the terminal shows it. */
  async sees(text, deadline = 60_000) {
    const end = Date.now() + deadline
    while (!this.shown.includes(text)) {
      if (Date.now() > end) throw new Error(`the terminal never showed ${JSON.stringify(text)}:\n${this.shown}`)
      await new Promise((resolve) => setTimeout(resolve, 20))
    }
  }
}

function variables(folder, env) {
  const vars = {
    ...process.env,
    NO_COLOR: '1',
    // It keeps the answers that it could not use there.
    TMPDIR: folder,
    HOME: folder,
    XDG_DATA_HOME: join(folder, 'share'),
    ...env,
  }
  for (const name of ['NODE_TEST_CONTEXT', 'FORCE_COLOR', 'CI']) delete vars[name]
  for (const name of Object.keys(env)) if (env[name] === undefined) delete vars[name]
  return vars
}

function start(folder, env, args) {
  const vars = variables(folder, env)
  const child = spawn(process.execPath, [program, ...args], { cwd: folder, env: vars, stdio: ['ignore', 'pipe', 'pipe'] })
  const result = { args, stdout: '', stderr: '' }
  for (const stream of ['stdout', 'stderr']) child[stream].setEncoding('utf8').on('data', (text) => (result[stream] += text))
  return new Promise((resolve, reject) => {
    child.once('error', reject)
    child.once('close', (code, signal) => resolve({ ...result, code: code ?? signal }))
  })
}

/** The answers that it did not understand and told where it keeps them. */
function reports(folder) {
  return readdirSync(folder).filter((f) => f.endsWith('.http')).map((f) => readFileSync(join(folder, f), 'utf8'))
}

/** Rows of a printed table by the words of its head. */
export function table(text) {
  const [head, ...lines] = text.split('\n').filter((line) => line.trim())
  const names = [...head.matchAll(/\S+(?: \S+)*/g)].map((m) => [m[0], m.index])
  return lines.map((line) =>
    Object.fromEntries(names.map(([name, from], i) => [name, line.slice(from, names[i + 1]?.[1]).trim()])),
  )
}
