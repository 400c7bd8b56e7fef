import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import { Sandbox } from '@vercel/sandbox'
import { box, out, test } from '../lib.mjs'

test('the tour of the README runs as printed', async () => {
  const app = fileURLToPath(new URL('../app.mjs', import.meta.url))
  const env = { ...process.env }
  delete env.NODE_TEST_CONTEXT
  const child = spawn(process.execPath, [app], { env, stdio: ['ignore', 'pipe', 'pipe'] })
  let [text, errors] = ['', '']
  child.stdout.on('data', (d) => (text += d))
  child.stderr.on('data', (d) => (errors += d))
  const code = await new Promise((resolve) => child.once('close', resolve))
  assert.equal(code, 0, errors)
  const lines = text.trim().split('\n')
  const name = lines[0].split(' ')[0]
  assert.deepEqual(lines, [
    `${name} is running`,
    '1: hello from Bivouac',
    '2: hello from Bivouac',
    '3: hello from Bivouac',
    'read back: It rained.',
    `${name} is stopped`,
    'after the resume: It rained.',
    'deleted',
  ])
  await assert.rejects(Sandbox.get({ name }), (error) => error.response.status === 404)
})

test('the tour without persistence', async (t) => {
  const sandbox = await box(t, { persistent: false })
  await sandbox.writeFiles([{ path: 'f', content: 'x' }])
  assert.equal(await out(sandbox, 'cat f'), 'x')
  const stopped = await sandbox.stop()
  assert.equal(stopped.snapshot, undefined)
  const after = await sandbox.runCommand('cat', ['f'])
  assert.notEqual(after.exitCode, 0)
})
