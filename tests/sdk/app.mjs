// A tour of the official SDK against a local engine:
//
//   eval "$(bivouac env)"; node app.mjs
import { Sandbox } from '@vercel/sandbox'

const sandbox = await Sandbox.create({ env: { WHO: 'Bivouac' }, timeout: 600_000 })
console.log(`${sandbox.name} is ${sandbox.status}`)

// Output arrives while the command runs.
await sandbox.runCommand({
  cmd: 'sh',
  args: ['-c', 'for i in 1 2 3; do echo "$i: hello from $WHO"; sleep 0.2; done'],
  stdout: process.stdout,
  stderr: process.stderr,
})

await sandbox.writeFiles([{ path: 'notes/today.txt', content: 'It rained.\n' }])
const chunks = []
for await (const chunk of await sandbox.readFile({ path: 'notes/today.txt' })) chunks.push(chunk)
console.log(`read back: ${Buffer.concat(chunks.map((c) => Buffer.from(c))).toString().trim()}`)

// A stop keeps the files. The next command starts a new session from them.
await sandbox.stop()
console.log(`${sandbox.name} is ${sandbox.status}`)
const again = await sandbox.runCommand('cat', ['notes/today.txt'])
console.log(`after the resume: ${(await again.stdout()).trim()}`)

await sandbox.delete({ deleteOrphanSnapshots: true })
console.log('deleted')
