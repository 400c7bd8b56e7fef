// What the tests share: sandboxes that are removed afterwards, names, namespaces, deadlines.
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { Writable } from 'node:stream'
import nodeTest from 'node:test'
import { setTimeout as pause } from 'node:timers/promises'
import { APIError, Sandbox } from '@vercel/sandbox'

const MINUTE = 60_000

/** A test with a deadline. */
export const test = (name, body, options = {}) => nodeTest(name, { timeout: 2 * MINUTE, ...options }, body)

/** A name that no other test has. */
export const unique = (prefix) => `${prefix}-${randomBytes(5).toString('hex')}`

/** Credentials of a namespace that no other test has. */
export function scope() {
  assert.ok(process.env.BIVOUAC_TOKEN, 'run the tests by run.mjs, or under eval "$(bivouac env)"')
  return { token: process.env.BIVOUAC_TOKEN, teamId: unique('team'), projectId: unique('prj') }
}

/** A sandbox that is deleted, with its snapshots, when the test ends. */
export async function box(t, options = {}) {
  const sandbox = await Sandbox.create(options)
  t.after(() => remove(sandbox))
  return sandbox
}

/** Deletes a sandbox that may be gone already. */
export async function remove(sandbox) {
  try {
    await sandbox.delete({ deleteOrphanSnapshots: true })
  } catch (error) {
    if (error.response?.status !== 404) throw error
  }
}

/** Runs a line of shell. */
export const sh = (sandbox, line, more = {}) => sandbox.runCommand({ cmd: 'sh', args: ['-c', line], ...more })

/** Standard output of a line of shell that must succeed. */
export async function out(sandbox, line, more = {}) {
  const command = await sh(sandbox, line, more)
  assert.equal(command.exitCode, 0, `${line}: ${await command.output('both')}`)
  return (await command.stdout()).trimEnd()
}

/** The APIError of a call that must be refused. */
export async function refused(promise, status, code) {
  let error
  try {
    await promise
  } catch (caught) {
    error = caught
  }
  assert.ok(error, 'the call was not refused')
  assert.ok(error instanceof APIError || error.name === 'APIError' || error.response, `not an API error: ${error.stack}`)
  assert.equal(error.response.status, status, `${error.message} ${JSON.stringify(error.json)}`)
  if (code) assert.equal(error.json?.error?.code, code, JSON.stringify(error.json))
  return error
}

/** Asks until `probe` answers something true. */
export async function until(what, probe, deadline = MINUTE) {
  const end = Date.now() + deadline
  for (;;) {
    const value = await probe()
    if (value) return value
    assert.ok(Date.now() < end, `gave up waiting for ${what}`)
    await pause(50)
  }
}

/** A stream that keeps what it is given, and when. */
export class Sink extends Writable {
  text = ''
  first = null
  #waiting = []
  _write(chunk, _encoding, done) {
    this.text += chunk
    this.first ??= Date.now()
    this.#waiting.splice(0).forEach((wake) => wake())
    done()
  }
  /** Resolves when the text holds `part`. */
  async holds(part) {
    while (!this.text.includes(part)) await new Promise((wake) => this.#waiting.push(wake))
  }
}
