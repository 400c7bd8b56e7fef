// Runtimes and images by their names. Without `bivouac image build universal` they are refused, with the way out.
import assert from 'node:assert/strict'
import { Sandbox } from '@vercel/sandbox'
import { Sandbox as Sandbox1 } from 'sdk1'
import { box, out, refused, scope, test } from '../lib.mjs'

const engine = `${process.env.BIVOUAC_URL}/api/bivouac/v1/engine`
const answer = await fetch(engine, { headers: { authorization: `Bearer ${process.env.BIVOUAC_TOKEN}` } })
const { images } = await answer.json()
const universal = images.some((image) => image.startsWith('universal'))

/** Whether `options` can be served here; if not, it must be refused in words that help. */
async function served(options) {
  if (universal) return true
  const error = await refused(Sandbox.create(options), 404, 'not_found')
  assert.match(error.message, /`bivouac image build universal`/)
  return false
}

const first = async (sandbox, ...command) => (await (await sandbox.runCommand(command[0], command.slice(1))).stdout()).trim()

for (const [runtime, command, version] of [
  ['node22', ['node', '-v'], /^v22\./],
  ['node24', ['node', '-v'], /^v24\./],
  ['node26', ['node', '-v'], /^v26\./],
]) {
  test(`S4 the runtime ${runtime}`, async (t) => {
    const urls = []
    const fetch = (url, init) => (urls.push(new URL(url).pathname), globalThis.fetch(url, init))
    const options = { runtime, fetch, persistent: false }
    // The `host` image takes these words too, with what the host has.
    const sandbox = await box(t, options)
    assert.equal(urls[0], '/api/v2/sandboxes')
    assert.equal(sandbox.runtime, runtime)
    if (universal) assert.match(await first(sandbox, ...command), version)
  })
}

for (const [image, command, version] of [
  ['vercel/sandbox/node:22', ['node', '-v'], /^v22\./],
  ['vercel/sandbox/node:26', ['node', '-v'], /^v26\./],
  ['vercel/sandbox/universal', ['node', '-v'], /^v2\d\./],
  ['vercel/sandbox/python:3.13', ['python3', '--version'], /^Python 3\.13\./],
]) {
  test(`S5 the image ${image}`, async (t) => {
    if (!(await served({ image }))) return
    const sandbox = await box(t, { image, persistent: false })
    assert.match(await first(sandbox, ...command), version)
    assert.equal(await out(sandbox, 'id -un; pwd'), 'vercel-sandbox\n/vercel/sandbox')
  })
}

test('S5 a version that nobody has is a 404 that lists what there is', async () => {
  const error = await refused(Sandbox.create({ image: 'vercel/sandbox/python:3.14' }), 404, 'not_found')
  assert.match(error.message, /vercel\/sandbox\/node:22/)
})

test('S80 the first generation and its runtime', async (t) => {
  const sandbox = await Sandbox1.create({ ...scope(), runtime: 'node24' })
  t.after(() => sandbox.stop())
  const version = await first(sandbox, 'node', '-v')
  assert.match(version, universal ? /^v24\./ : /^v\d+\./)
})
