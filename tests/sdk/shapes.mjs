// What the clients' validators demand of an answer, as types: a request's method and path lead to it.
import assert from 'node:assert/strict'

const is = (kind, good) => (value, at) => assert.ok(good(value), `${at} must be ${kind}: ${JSON.stringify(value)}`)
const text = is('text', (v) => typeof v === 'string')
const int = is('a whole number', Number.isSafeInteger)
const bool = is('true or false', (v) => typeof v === 'boolean')
const time = is('milliseconds since 1970', (v) => Number.isSafeInteger(v) && v > 1e12 && v < 1e13)
const word = (...words) => is(words.join(' or '), (v) => words.includes(v))
const id = (prefix) => is(`an id ${prefix}_…`, (v) => typeof v === 'string' && v.startsWith(`${prefix}_`))

/** May be absent, but never null. */
const opt = (shape) => Object.assign((value, at) => shape(value, at), { optional: true })
/** Must be there, and may be null. */
const nullable = (shape) => (value, at) => value === null || shape(value, at)
const list = (shape) => (value, at) => {
  assert.ok(Array.isArray(value), `${at} must be a list`)
  value.forEach((item, i) => shape(item, `${at}[${i}]`))
}
const map = (shape) => (value, at) => Object.entries(value).forEach(([key, item]) => shape(item, `${at}.${key}`))
/** These keys and no others: an addition of ours is listed here, or it is a mistake. */
const object = (keys) => (value, at) => {
  assert.ok(value && typeof value === 'object' && !Array.isArray(value), `${at} must be an object`)
  for (const [key, shape] of Object.entries(keys)) {
    if (key in value) shape(value[key], `${at}.${key}`)
    else assert.ok(shape.optional, `${at}.${key} is missing`)
  }
  for (const key of Object.keys(value)) assert.ok(key in keys, `${at}.${key} is not known`)
}

const status = word('pending', 'running', 'stopping', 'stopped', 'failed', 'aborted', 'snapshotting')
const rule = { domain: text, match: opt(map(() => {})), matchDimensions: opt(list(text)) }
const policy = (value, at) => {
  if (value?.mode !== 'custom') return object({ mode: word('allow-all', 'deny-all') })(value, at)
  return object({
    mode: text,
    allowedDomains: opt(list(text)),
    allowedCIDRs: opt(list(text)),
    deniedCIDRs: opt(list(text)),
    injectionRules: opt(list(object({ ...rule, headerNames: list(text) }))),
    forwardRules: opt(list(object({ ...rule, forwardURL: text }))),
    responseRules: opt(list(object({ ...rule, statusCode: int }))),
  })(value, at)
}
const ours = { image: text, reason: opt(text) }
const mounts = map(object({ drive: text, mode: word('read-write', 'snapshot') }))
const drive = object({
  id: id('drive'), name: text, projectId: text, region: text, maxSizeBytes: int, createdAt: time, updatedAt: time,
  currentSessionId: opt(id('sbx')), currentSandboxName: opt(text), parentDriveId: opt(id('drive')), rootDriveId: opt(id('drive')),
  initialized: bool,
})
const session = object({
  id: id('sbx'), memory: int, vcpus: int, region: text, timeout: int, status, cwd: text, runtime: text,
  requestedAt: time, createdAt: time, updatedAt: time, startedAt: opt(time), requestedStopAt: opt(time), stoppedAt: opt(time),
  abortedAt: opt(time), snapshottedAt: opt(time), duration: opt(int), sourceSnapshotId: opt(id('snap')), interactivePort: opt(int),
  networkPolicy: opt(policy), activeCpuDurationMs: opt(int), sourceSandboxName: opt(text), projectId: opt(text), ...ours,
})
const sandbox = object({
  name: text, projectId: text, persistent: bool, createdAt: time, updatedAt: time, currentSessionId: id('sbx'), status, statusUpdatedAt: opt(time),
  region: opt(text), failoverRegions: opt(list(text)), networkId: opt(text), vcpus: opt(int), memory: opt(int), timeout: opt(int),
  cwd: opt(text), runtime: opt(text), networkPolicy: opt(policy), tags: opt(map(text)), snapshotExpiration: opt(int),
  keepLastSnapshots: opt(object({ count: int, expiration: opt(int), deleteEvicted: opt(bool) })), currentSnapshotId: opt(id('snap')),
  expiresAt: opt(time), totalActiveCpuDurationMs: opt(int), totalDurationMs: opt(int), mounts: opt(mounts), ...ours,
})
const route = object({ url: text, subdomain: text, port: int })
const commandOf = (owner) => object({
  id: id('cmd'), name: text, args: list(text), cwd: text, [owner]: id('sbx'), exitCode: nullable(int), startedAt: time,
  durationMs: opt(int), reason: opt(text), reasonText: opt(text), terminal: opt(text),
})
const snapshotOf = (owner) => object({
  id: id('snap'), [owner]: id('sbx'), region: text, status: word('created', 'deleted', 'failed'), sizeBytes: int, createdAt: time,
  updatedAt: time, expiresAt: opt(time), lastUsedAt: opt(time), creationMethod: opt(word('automatic', 'manual')),
  parentId: opt(id('snap')), sourceSandboxName: text, image: text,
})
const [command, command1] = [commandOf('sessionId'), commandOf('sandboxId')]
const [snapshot, snapshot1] = [snapshotOf('sourceSessionId'), snapshotOf('sourceSandboxId')]
const node = object({ snapshot, siblings: list(snapshot), count: is('digits, perhaps with a plus', (v) => /^\d+\+?$/.test(v)) })
const pages = object({ count: int, next: nullable(text) })
const pages1 = object({ count: int, next: nullable(time), prev: nullable(time) })
const view = object({ sandbox, session, routes: list(route), resumed: opt(bool) })
const empty = object({})
const team = object({
  id: text, slug: text, name: text, createdAt: time, updatedAt: time, membership: object({ role: text }), billing: object({ plan: text }),
})

/** A stream of JSON lines, text after text: the two records of a run around its output, or output alone. */
export function lines(body, { run, v1 }) {
  const records = body.split('\n').filter(Boolean).map((line) => JSON.parse(line))
  // eslint-disable-next-line no-control-regex
  assert.match(body, /^[\x00-\x7f]*$/, 'a stream must be ASCII')
  const shape = object({ command: v1 ? command1 : command })
  const output = object({ stream: word('stdout', 'stderr'), data: text })
  if (!run) return records.forEach((record, i) => output(record, `line ${i}`))
  assert.ok(records.length >= 2, body)
  const [first, last] = [records[0], records.at(-1)]
  for (const record of [first, last]) shape(record, 'record')
  assert.equal(first.command.exitCode, null)
  assert.equal(typeof last.command.exitCode, 'number')
  assert.equal(first.command.id, last.command.id)
  records.slice(1, -1).forEach((record, i) => output(record, `line ${i + 1}`))
  if (v1) assert.equal(records.length, 2, 'v1 has no output in its stream')
}

const S = String.raw`/v2/sandboxes/sessions/[^/]+`
const V1 = String.raw`/v1/sandboxes/[^/]+`
/** The first that fits counts. A function answers to a kind of body that is not JSON. */
const answers = [
  ['POST', '/v[23]/sandboxes', view],
  ['GET', '/v2/sandboxes', object({ sandboxes: list(sandbox), pagination: pages })],
  ['GET', '/v2/sandboxes/sessions', object({ sessions: list(session), pagination: pages })],
  ['GET', '/v2/sandboxes/snapshots', object({ snapshots: list(snapshot), pagination: pages })],
  ['GET', '/v2/sandboxes/snapshots/tree', object({ snapshots: list(node), anchor: opt(node), pagination: pages })],
  ['GET|DELETE', '/v2/sandboxes/snapshots/[^/]+', object({ snapshot })],
  ['GET', '/v2/sandboxes/drives', object({ drives: list(drive), pagination: pages })],
  ['GET|POST|DELETE', '/v2/sandboxes/drives/[^/]+(/fork)?', object({ drive })],
  ['POST', `${S}/stop`, object({ session, sandbox: opt(sandbox), snapshot: opt(snapshot) })],
  ['POST', `${S}/(extend-timeout|network-policy)`, object({ session })],
  ['POST', `${S}/snapshot`, object({ snapshot, session })],
  ['POST|GET', `${S}/cmd/[^/]+(/kill)?|${S}/cmd`, object({ command })],
  ['POST', `${S}/cmd/[^/]+/stdin`, object({ command: opt(command), bytesWritten: int })],
  ['POST', `${S}/fs/(mkdir|write)`, empty],
  ['POST', `${S}/interactive`, object({ url: text, token: text })],
  ['POST', '/v2/sandboxes/[^/]+/fork', view],
  ['GET', '/v2/sandboxes/[^/]+', view],
  ['PATCH', '/v2/sandboxes/[^/]+', object({ sandbox, routes: list(route) })],
  ['DELETE', '/v2/sandboxes/[^/]+', object({ sandbox })],
  ['POST', '/v1/sandboxes', object({ sandbox: session, routes: list(route) })],
  ['GET', '/v1/sandboxes', object({ sandboxes: list(session), pagination: pages1 })],
  ['GET', '/v1/sandboxes/snapshots', object({ snapshots: list(snapshot1), pagination: pages1 })],
  ['GET|DELETE', '/v1/sandboxes/snapshots/[^/]+', object({ snapshot: snapshot1 })],
  ['GET', V1, object({ sandbox: session, routes: list(route) })],
  ['POST', `${V1}/(stop|extend-timeout|network-policy)`, object({ sandbox: session })],
  ['POST', `${V1}/snapshot`, object({ snapshot: snapshot1, sandbox: session })],
  ['POST|GET', `${V1}/cmd(/[^/]+)?|${V1}/[^/]+/kill`, object({ command: command1 })],
  ['POST', `${V1}/fs/(mkdir|write)`, empty],
  ['GET', '/v2/user', object({ user: object({ id: text, username: text, defaultTeamId: nullable(text) }) })],
  ['GET', '/v2/teams', object({ teams: list(team), pagination: object({ count: int, next: nullable(int) }) })],
  ['GET', '/v2/teams/[^/]+', team],
  ['GET|POST', '/v2/projects/[^/]+|/v11/projects', object({ id: text, name: text, accountId: text })],
]

/** The shape of a good answer; nothing for a path that has none here. */
export function shape(method, path) {
  const fits = ([methods, pattern]) => methods.split('|').includes(method) && new RegExp(`^/api(${pattern})$`).test(path)
  return answers.find(fits)?.[2]
}

/** An error as every client reads it. */
export const error = (value) => {
  assert.equal(typeof value?.error?.code, 'string', JSON.stringify(value))
  assert.ok(value.error.message.length > 8, JSON.stringify(value))
}
/** A list of commands, which only the Python client asks for. */
export const commands = object({ commands: list(command) })
