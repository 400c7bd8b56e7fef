// A forge as sources come from: git by its own `http-backend`, and files. The tests start it on the far side of the
// world (world.mjs). Below /private it wants LOGIN (`user:password`); it prints a line per request.
import { spawn } from 'node:child_process'
import { createReadStream } from 'node:fs'
import { createServer } from 'node:https'
import { join, normalize } from 'node:path'

const { CERTIFICATE: cert, KEY: key, FORGE_PORT: port, FORGE_ROOT: root, LOGIN } = process.env
const wanted = `Basic ${Buffer.from(LOGIN ?? '').toString('base64')}`

/** What a CGI program answers, as an answer of HTTP. */
function relay(program, response) {
  let head = Buffer.alloc(0)
  program.stdout.on('data', function first(piece) {
    head = Buffer.concat([head, piece])
    const end = head.indexOf('\r\n\r\n')
    if (end < 0) return
    program.stdout.off('data', first)
    const fields = head.subarray(0, end).toString().split('\r\n').map((line) => line.split(/: (.*)/, 2))
    const { Status: status = '200', ...headers } = Object.fromEntries(fields)
    response.writeHead(Number.parseInt(status), headers)
    response.write(head.subarray(end + 4))
    program.stdout.pipe(response)
  })
}

createServer({ cert, key }, (request, response) => {
  const { pathname, search } = new URL(request.url, 'https://forge')
  const authorization = request.headers.authorization
  console.log(JSON.stringify({ path: pathname, authorization }))
  if (pathname.startsWith('/private') && authorization !== wanted) {
    response.writeHead(401, { 'www-authenticate': 'Basic realm="forge"' }).end('who are you?\n')
    return
  }
  if (!pathname.includes('.git/')) {
    createReadStream(join(root, normalize(pathname)))
      .on('error', () => response.writeHead(404).end('no such file\n'))
      .pipe(response)
    return
  }
  const env = {
    PATH: process.env.PATH,
    GIT_PROJECT_ROOT: root,
    GIT_HTTP_EXPORT_ALL: '1',
    PATH_INFO: pathname,
    QUERY_STRING: search.slice(1),
    REQUEST_METHOD: request.method,
    CONTENT_TYPE: request.headers['content-type'] ?? '',
    HTTP_CONTENT_ENCODING: request.headers['content-encoding'] ?? '',
    GIT_PROTOCOL: request.headers['git-protocol'] ?? '',
    REMOTE_USER: authorization ? 'reader' : '',
  }
  const program = spawn('git', ['http-backend'], { env, stdio: ['pipe', 'pipe', 'inherit'] })
  request.pipe(program.stdin)
  relay(program, response)
}).listen(Number(port), () => console.log('ready'))
