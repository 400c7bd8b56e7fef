// The world behind the engine's namespace, by the control socket of `bivouac-world`: names, what origins got,
// what left on the wire, and servers of a test's own on the far side.
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { createConnection } from 'node:net'
import { createInterface } from 'node:readline'

/** Why a test that needs the world cannot run; undefined when it can. */
export const missing = process.env.BIVOUAC_TEST_WORLD ? undefined : 'needs the world that run.mjs makes'

/** Asks one thing. */
async function ask(what) {
  const socket = createConnection(process.env.BIVOUAC_TEST_WORLD)
  try {
    socket.write(`${JSON.stringify(what)}\n`)
    for await (const line of createInterface({ input: socket })) {
      const answer = JSON.parse(line)
      assert.equal(answer.error, undefined, `the world: ${answer.error}`)
      return answer
    }
    throw new Error('the world has ended')
  } finally {
    socket.destroy()
  }
}

/** Makes a name resolve. */
export const name = (host, ...addresses) => ask({ name: host, addresses })

/** What servers got that holds the marker, oldest first; headers by name. */
export async function seen(marker) {
  const { seen: list } = await ask({ seen: marker })
  return list.map((one) => ({ ...one, headers: Object.fromEntries(one.headers) }))
}

/** How many packets left for an address. */
export const packets = async (address) => (await ask({ packets: address })).packets

/** How many times the name server was asked. */
export const queries = async (host) => (await ask({ queries: host })).queries

/**
 * A program of a test's own on the side of the origins. It gets the certificate for `names` in its environment,
 * says on its first line that it is ready, and a JSON text on each line after. Ends when the test does.
 */
export async function server(t, names, script, env = {}) {
  const { prefix, certificate, key } = await ask({ server: names })
  const [command, ...rest] = [...prefix, process.execPath, script]
  const child = spawn(command, rest, {
    env: { ...process.env, ...env, CERTIFICATE: certificate, KEY: key },
    stdio: ['ignore', 'pipe', 'inherit'],
  })
  const ended = new Promise((resolve) => child.once('exit', resolve))
  t.after(() => (child.kill(), ended))
  const lines = []
  await new Promise((ready, fail) => {
    const reader = createInterface({ input: child.stdout })
    reader.once('line', () => (ready(), reader.on('line', (line) => lines.push(JSON.parse(line)))))
    child.once('exit', (code) => fail(new Error(`${script} ended: ${code}`)))
  })
  return lines
}
