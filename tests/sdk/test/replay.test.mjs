// Every request of recorded.jsonl, which real clients made, sent again to the engine: each answer must have
// the shape that the client's validator demands. Names between dollar signs stand for ids and generated names;
// `gives` says which answer they come from. Files of an archive are listed and packed anew.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import http from 'node:http'
import { Writable } from 'node:stream'
import { pipeline } from 'node:stream/promises'
import { createGzip } from 'node:zlib'
import tar from 'tar-stream'
import { commands, error, lines, shape } from '../shapes.mjs'
import { test, unique } from '../lib.mjs'

const TOKEN = process.env.BIVOUAC_TOKEN
const URL_ = new URL(process.env.BIVOUAC_URL)

/**
 * What this version refuses although the clients send it: the clear error that they get, and the issue that
 * brings it. With a `field`, the request is sent a second time without it, so that the rest goes on.
 */
const LATER = [
  { why: 'a copy of a drive that nobody has written', field: 'mounts', when: ({ row }) => row.seq === 3, refused: [400, 'drive_not_initialized'] },
  { why: 'mounts of a drive that is not there', field: 'mounts', when: ({ row }) => row.seq === 121, refused: [404, 'not_found'] },
  { why: 'sources of hosts that do not exist', field: 'source', when: ({ json }) => ['git', 'tarball'].includes(json?.source?.type), refused: [400, 'source_unavailable'] },
  { why: "the stand-in's own place of a terminal's socket", when: ({ path }) => path.startsWith('/pty/'), refused: [404, 'not_found'] },
  { why: '#3 images that are not built', field: 'image', when: ({ json }, images) => json?.image && !images(json.image), refused: [404, 'not_found'] },
]

/** Answers that are no success, by the request's number, and why: status, code, reason. */
const OTHERWISE = {
  8: [400, 'bad_request', 'the folder app does not exist'],
  19: [400, 'executable_not_found', 'there is no program named explode'],
  23: [404, 'not_found', 'nobody wrote /tmp/x.txt'],
  24: [404, 'not_found', 'the file is missing: the client answers null'],
  47: [410, 'sandbox_stopped', 'the client resumes and goes on'],
  57: [410, 'snapshot_not_found', 'the snapshot is deleted'],
  59: [410, 'sandbox_stopped', 'the client resumes and goes on'],
  65: [404, 'not_found', 'nothing has that name'],
  66: [404, 'not_found', 'the client makes it then'],
  73: [410, 'snapshot_not_found', 'the client makes the sandbox anew'],
  76: [400, 'bad_request', 'the name is taken'],
  92: [410, 'sandbox_stopped', 'the session was stopped'],
  109: [400, 'bad_request', 'a millisecond is no extension'],
  110: [404, 'not_found', 'the stand-in answered a read with JSON, to see what the client makes of it'],
  116: [404, 'not_found', 'the sandbox is in another project'],
  135: [404, 'not_found', 'the file is missing: the client says so'],
  136: [404, 'not_found', 'the client makes it then'],
  194: [404, 'not_found', 'nothing has that name'],
  221: [404, 'not_found', 'the file is missing'],
  233: [400, 'bad_request', 'the name is taken'],
  265: [404, 'not_found', 'the file is missing'],
  276: [410, 'sandbox_stopped', 'the client resumes and goes on'],
  290: [410, 'sandbox_stopped', 'the client resumes and goes on'],
}

const recorded = readFileSync(new URL('../recorded.jsonl', import.meta.url), 'utf8').trim().split('\n').map((l) => JSON.parse(l))

async function pack(files) {
  const archive = tar.pack()
  for (const { name, mode, content } of files) archive.entry({ name, mode: parseInt(mode, 8), uid: 0, gid: 0 }, content)
  archive.finalize()
  const pieces = []
  await pipeline(archive, createGzip(), new Writable({ write: (piece, _, done) => (pieces.push(piece), done()) }))
  return Buffer.concat(pieces)
}

/** Sends it as it was recorded. Resolves with the head of the answer; its body is read beside. */
function send({ method, path, headers, body }) {
  const options = { host: URL_.hostname, port: URL_.port, method, path, headers: { ...headers, authorization: `Bearer ${TOKEN}` } }
  if (body && !headers['transfer-encoding']) options.headers['content-length'] = Buffer.byteLength(body)
  return new Promise((resolve, reject) => {
    const request = http.request(options, (answer) => {
      let first
      const begun = new Promise((done) => (first = done))
      const whole = new Promise((done, fail) => {
        const pieces = []
        answer.on('data', (piece) => (pieces.push(piece), first(String(piece))))
        answer.on('end', () => (first(''), done(Buffer.concat(pieces))))
        answer.on('error', fail)
      })
      whole.catch(() => {})
      resolve({ status: answer.statusCode, type: answer.headers['content-type'], begun, whole })
    })
    request.on('error', reject)
    request.end(body)
  })
}

class Replay {
  names = new Map()
  pending = []
  counts = { good: 0, refused: 0, later: {} }

  constructor(team, images) {
    this.team = team
    this.images = images
  }

  fill(text) {
    return text.replaceAll('team_local', this.team).replace(/\$[a-z]+[_-][0-9a-f]+\$/g, (name) => {
      assert.ok(this.names.has(name), `nothing gave ${name}`)
      return this.names.get(name)
    })
  }

  async request(row) {
    const query = row.query?.map((q) => this.fill(q)).join('&')
    const path = this.fill(row.path)
    const body = row.files ? await pack(row.files) : row.body === undefined ? undefined : this.fill(row.body)
    const json = typeof body === 'string' && body.startsWith('{') ? JSON.parse(body) : undefined
    return { row, method: row.method, path, sent: query ? `${path}?${query}` : path, headers: row.headers, body, json }
  }

  async play(row) {
    const request = await this.request(row)
    const later = LATER.filter(({ when }) => when(request, this.images))
    if (later.length > 0) {
      for (const { why } of later) this.counts.later[why] = (this.counts.later[why] ?? 0) + 1
      await this.refused(await send({ ...request, path: request.sent }), ...later.map(({ refused }) => refused))
      const fields = later.map(({ field }) => field)
      if (!fields.every(Boolean)) return
      for (const field of fields) delete request.json[field]
      request.body = JSON.stringify(request.json)
    }
    const answer = await send({ ...request, path: request.sent })
    if (OTHERWISE[row.seq]) {
      this.counts.refused += 1
      return this.refused(answer, OTHERWISE[row.seq])
    }
    if (answer.status < 200 || answer.status > 299) assert.fail(`${answer.status} ${await answer.whole}`)
    const value = await this.good(request, answer)
    for (const [name, from] of Object.entries(row.gives ?? {})) {
      const found = from.split('.').reduce((at, key) => at?.[key], value)
      assert.equal(typeof found, 'string', `${from} is missing`)
      this.names.set(name, found)
    }
    this.counts.good += 1
  }

  async refused(answer, ...expected) {
    const body = String(await answer.whole)
    assert.ok(expected.some(([status]) => status === answer.status), `${answer.status} ${body}`)
    const value = JSON.parse(body)
    error(value)
    assert.ok(expected.some(([, code]) => code === value.error.code), body)
  }

  /** Checks a good answer and tells its value, of a stream the first record. */
  async good({ row, method, path, sent, json }, answer) {
    const v1 = path.startsWith('/api/v1/')
    const run = path.endsWith('/cmd') && method === 'POST' && (json?.wait || sent.includes('wait=true'))
    if (run || path.endsWith('/logs')) {
      assert.equal(answer.type, 'application/x-ndjson')
      const checked = answer.whole.then((body) => lines(String(body), { run, v1 }))
      // A log is followed, and a command that reads its input is fed, while the replay goes on.
      if (path.endsWith('/logs') || json.attachStdin) this.pending.push(checked.catch((e) => Promise.reject(this.name(row, e))))
      else await checked
      return run ? JSON.parse((await answer.begun).split('\n')[0]) : undefined
    }
    if (path.endsWith('/fs/read')) {
      assert.match(answer.type, /application\/octet-stream/)
      return undefined
    }
    const value = JSON.parse(String(await answer.whole))
    if (path === '/health') return value
    const wanted = method === 'GET' && path.endsWith('/cmd') ? commands : shape(method, path)
    assert.ok(wanted, 'no shape is known for this path')
    wanted(value, 'answer')
    return value
  }

  name(row, failure) {
    return `${row.seq} ${row.client} ${row.step}: ${row.method} ${row.path}: ${failure.message}`
  }
}

async function ask(method, path) {
  const answer = await send({ method, path, headers: {} })
  return JSON.parse(String(await answer.whole))
}

test('the recorded requests of every client', async (t) => {
  const team = unique('replay')
  const built = (await ask('GET', '/api/bivouac/v1/engine')).images
  const replay = new Replay(team, (image) => image.startsWith('vercel/sandbox/') && built.some((name) => name.startsWith('universal')))
  t.after(async () => {
    for (const project of ['prj_local', 'prj_jwt', 'vercel-sandbox-default-project']) {
      const { sandboxes } = await ask('GET', `/api/v2/sandboxes?teamId=${team}&project=${project}&limit=50`)
      const gone = sandboxes.map(({ name }) => ask('DELETE', `/api/v2/sandboxes/${name}?teamId=${team}&projectId=${project}&deleteOrphanSnapshots=true`))
      await Promise.all(gone)
    }
  })
  const failures = []
  for (const row of recorded) {
    try {
      await replay.play(row)
    } catch (failure) {
      failures.push(replay.name(row, failure))
    }
  }
  for (const { status, reason } of await Promise.allSettled(replay.pending)) if (status === 'rejected') failures.push(reason)
  assert.deepEqual(failures, [])
  const { good, refused, later } = replay.counts
  t.diagnostic(`${recorded.length} requests: ${good} answered well, ${refused} refused as they must be, later: ${JSON.stringify(later)}`)
})
