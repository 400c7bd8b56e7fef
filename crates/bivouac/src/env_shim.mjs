// Points the official Vercel Sandbox clients at a Bivouac engine: `bivouac env` loads this file into
// Node with NODE_OPTIONS=--import=…. Those clients have a fixed address and read `globalThis.fetch`
// when they are loaded, so this wraps it first:
//
//   https://vercel.com/api…           -> $BIVOUAC_URL/api…
//   https://oidc.vercel.com/…         -> $BIVOUAC_URL/…
//   https://<subdomain>.vercel.run/…  -> $BIVOUAC_URL/…, with Host: <subdomain>.localhost:PORT
//   http://<subdomain>.localhost:PORT -> the same, for the engine's own port only
//   https://<host of BIVOUAC_URL>/health -> $BIVOUAC_URL/health
//
// Requests for a port carry $BIVOUAC_TOKEN in a header of our own, because ports are private; the engine takes it
// out before the program sees the request. WebSockets are not fetched: they take a link (`bivouac open --print`),
// or that header.
//
// Every other request is passed on as it is. Nothing else in the process is touched, and nothing is
// loaded before the first request that needs it.

const engine = parse(process.env.BIVOUAC_URL);
const mark = Symbol.for("bivouac.fetch");

if (engine && typeof globalThis.fetch === "function" && !globalThis.fetch[mark]) {
  const real = globalThis.fetch;
  const wrapped = function fetch(input, init) {
    const url = parse(typeof input === "object" && input !== null && "url" in input ? input.url : input);
    const route = url && find(url);
    if (!route) return Reflect.apply(real, this, arguments);
    if (route.host) return preview(url, route.host, input, init);
    // A dispatcher in `init` only names a pool of connections and its time limits; it is kept,
    // because the SDK's own has no limit for the silence of a body.
    const request = isRequest(input) ? new Request(route.target, input) : route.target;
    return init === undefined ? real(request) : real(request, init);
  };
  Object.defineProperty(wrapped, mark, { value: true });
  Object.defineProperty(globalThis, "fetch", {
    value: wrapped, configurable: true, enumerable: true, writable: true,
  });
}

function parse(text) {
  if (text === undefined || text === null) return undefined;
  try {
    return text instanceof URL ? text : new URL(String(text));
  } catch {
    return undefined;
  }
}

function isRequest(input) {
  return typeof input === "object" && input !== null && !(input instanceof URL) && "url" in input;
}

// Where a request goes instead; nothing for one that is not ours.
function find(url) {
  const name = url.hostname;
  if (url.protocol === "https:" && url.port === "") {
    if (name === "vercel.com" && /^\/api(\/|$)/.test(url.pathname)) return { target: direct(url) };
    if (name === "oidc.vercel.com") return { target: direct(url) };
    // Whether the host of a terminal is well: asked without the port.
    if (name === engine.hostname && url.pathname === "/health") return { target: direct(url) };
    const run = /^([a-z0-9-]+)\.vercel\.run$/.exec(name);
    if (run) return { host: local(run[1]) };
  }
  if (url.protocol === "http:" && name.endsWith(".localhost") && port(url) === port(engine)) {
    return { host: local(name.slice(0, -".localhost".length)) };
  }
  return undefined;
}

function port(url) {
  return url.port || (url.protocol === "https:" ? "443" : "80");
}

function local(subdomain) {
  return `${subdomain}.localhost:${port(engine)}`;
}

function direct(url) {
  return engine.origin + engine.pathname.replace(/\/$/, "") + url.pathname + url.search;
}

// A request to a port of a sandbox. The engine finds the sandbox by the Host header, which fetch
// does not let anybody set; so this one goes through node:http.
async function preview(url, host, input, init, hops = 0) {
  const { body, ...rest } = init ?? {};
  const source = body ?? (isRequest(input) ? input.body : undefined);
  const request = new Request(url, {
    ...(isRequest(input) ? shape(input) : {}), ...rest, ...(source ? { body: source, duplex: "half" } : {}),
  });
  request.signal.throwIfAborted();
  const whole = source && !isStream(source) ? Buffer.from(await request.arrayBuffer()) : undefined;
  const answer = await send(url, host, request, whole);
  const location = answer.headers.location;
  if (location && [301, 302, 303, 307, 308].includes(answer.statusCode)) {
    if (request.redirect === "error") {
      answer.destroy();
      throw new TypeError("fetch failed", { cause: new Error("unexpected redirect") });
    }
    if (request.redirect === "follow") {
      answer.destroy();
      return follow(url, new URL(location, url), answer.statusCode, request, whole, source, hops);
    }
  }
  return respond(url, answer, request, hops);
}

function shape(request) {
  const { method, headers, redirect, signal } = request;
  return { method, headers, redirect, signal };
}

function isStream(body) {
  return typeof body === "object" && body !== null &&
    (typeof body.getReader === "function" || typeof body[Symbol.asyncIterator] === "function");
}

async function send(url, host, request, whole) {
  const http = await import(engine.protocol === "https:" ? "node:https" : "node:http");
  const headers = { "accept-encoding": "identity", ...Object.fromEntries(request.headers), host };
  // To the engine alone: a redirect to elsewhere does not come through here.
  if (process.env.BIVOUAC_TOKEN) headers["x-bivouac-token"] = process.env.BIVOUAC_TOKEN;
  if (whole) headers["content-length"] = String(whole.length);
  const hostname = engine.hostname.replace(/^\[|\]$/g, "");
  const options = {
    hostname, port: port(engine), path: url.pathname + url.search, method: request.method, headers,
  };
  return new Promise((resolve, reject) => {
    const outgoing = http.request(options, resolve);
    const abort = () => outgoing.destroy(request.signal.reason);
    request.signal.addEventListener("abort", abort, { once: true });
    outgoing.on("close", () => request.signal.removeEventListener("abort", abort));
    outgoing.on("error", (error) => {
      reject(request.signal.aborted ? request.signal.reason : new TypeError("fetch failed", { cause: error }));
    });
    if (whole || !request.body) outgoing.end(whole);
    else pipe(request.body, outgoing).catch((error) => outgoing.destroy(error));
  });
}

async function pipe(body, outgoing) {
  for await (const piece of body) {
    if (!outgoing.write(piece)) {
      await new Promise((resolve, reject) => {
        const done = () => {
          outgoing.off("drain", done).off("close", done);
          if (outgoing.destroyed) reject(new Error("the connection was closed"));
          else resolve();
        };
        outgoing.on("drain", done).on("close", done);
      });
    }
  }
  outgoing.end();
}

function follow(from, to, status, request, whole, source, hops) {
  const fail = (why) => new TypeError("fetch failed", { cause: new Error(why) });
  if (hops >= 20) throw fail("redirect count exceeded");
  const headers = new Headers(request.headers);
  const init = { method: request.method, headers, signal: request.signal };
  if ((status === 303 && init.method !== "HEAD") || (status < 303 && init.method === "POST")) {
    init.method = "GET";
    for (const name of ["content-length", "content-type", "content-encoding"]) headers.delete(name);
  } else if (source) {
    if (!whole) throw fail("a streamed body cannot be sent a second time");
    init.body = whole;
  }
  if (from.origin !== to.origin) {
    for (const name of ["authorization", "cookie", "host"]) headers.delete(name);
  }
  const route = find(to);
  return route?.host ? preview(to, route.host, to, init, hops + 1) : globalThis.fetch(to, init);
}

async function respond(url, answer, request, hops) {
  const headers = new Headers();
  for (let i = 0; i < answer.rawHeaders.length; i += 2) {
    headers.append(answer.rawHeaders[i], answer.rawHeaders[i + 1]);
  }
  const status = answer.statusCode;
  const empty = request.method === "HEAD" || [204, 205, 304].includes(status);
  if (empty) answer.resume();
  const abort = () => answer.destroy(request.signal.reason);
  request.signal.addEventListener("abort", abort, { once: true });
  answer.on("close", () => request.signal.removeEventListener("abort", abort));
  const body = empty ? null : await web(answer, headers.get("content-encoding"));
  const response = new Response(body, { status, statusText: answer.statusMessage, headers });
  Object.defineProperty(response, "url", { value: url.href });
  Object.defineProperty(response, "redirected", { value: hops > 0 });
  return response;
}

// The body, decoded if the server compressed it without being asked.
async function web(answer, coding) {
  const { Readable, pipeline } = await import("node:stream");
  const decoders = { gzip: "createGunzip", "x-gzip": "createGunzip", br: "createBrotliDecompress", deflate: "createInflate" };
  const decoder = decoders[coding?.trim().toLowerCase()];
  if (!decoder) return Readable.toWeb(answer);
  const zlib = await import("node:zlib");
  return Readable.toWeb(pipeline(answer, zlib[decoder](), () => {}));
}
