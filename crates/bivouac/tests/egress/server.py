"""A server in the world that answers nobody without the token: git's smart protocol by `git http-backend`,
and the three registries' files. Arguments: certificate, root folder, address."""
import hashlib
import http.server
import json
import os
import ssl
import subprocess
import sys
import threading

PEM, ROOT, ADDRESS = sys.argv[1:4]
TOKEN = os.environ["WANTED_TOKEN"]


def digest(path, kind):
    with open(path, "rb") as f:
        return hashlib.new(kind, f.read()).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def say(self, status, body, kind="application/octet-stream", more=()):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        for name, value in more:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(b"")

    def do_POST(self):
        if self.headers.get("transfer-encoding") == "chunked":
            body = b""
            while True:
                size = int(self.rfile.readline().split(b";")[0], 16)
                body += self.rfile.read(size)
                self.rfile.readline()
                if size == 0:
                    break
        else:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer(body)

    def answer(self, body):
        if self.headers.get("authorization") != TOKEN:
            return self.say(401, b"who are you?\n", more=[("www-authenticate", 'Basic realm="x"')])
        path, _, query = self.path.partition("?")
        host = self.headers.get("host", "").split(":")[0]
        if path.startswith("/repo.git"):
            return self.git(path, query, body)
        if path == "/npm/inside":
            file = os.path.join(ROOT, "npm/inside-1.0.0.tgz")
            dist = {"tarball": "https://%s/npm/inside-1.0.0.tgz" % host, "shasum": digest(file, "sha1")}
            version = {"name": "inside", "version": "1.0.0", "main": "i.js", "dist": dist}
            text = {"name": "inside", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
            return self.say(200, json.dumps(text).encode(), "application/json")
        if path.rstrip("/") == "/pip/simple/inside":
            name = "inside-1.0.0-py3-none-any.whl"
            sum256 = digest(os.path.join(ROOT, "pip/simple/inside", name), "sha256")
            text = '<a href="/pip/simple/inside/%s#sha256=%s">%s</a>' % (name, sum256, name)
            return self.say(200, text.encode(), "text/html")
        if path == "/index/config.json":
            text = {"dl": "https://%s/crates/{crate}-{version}.crate" % host}
            return self.say(200, json.dumps(text).encode(), "application/json")
        if path == "/index/de/mo/demo":
            line = {"name": "demo", "vers": "0.1.0", "deps": [], "features": {}, "yanked": False,
                    "cksum": digest(os.path.join(ROOT, "crates/demo-0.1.0.crate"), "sha256")}
            return self.say(200, json.dumps(line).encode() + b"\n", "text/plain")
        file = os.path.normpath(ROOT + path)
        if file.startswith(ROOT) and os.path.isfile(file) and not file.endswith(".pem"):
            with open(file, "rb") as f:
                return self.say(200, f.read())
        self.say(404, b"nothing here\n")

    def git(self, path, query, body):
        env = dict(os.environ, GIT_PROJECT_ROOT=ROOT, GIT_HTTP_EXPORT_ALL="1", PATH_INFO=path, QUERY_STRING=query,
                   REQUEST_METHOD=self.command, REMOTE_USER="t", REMOTE_ADDR="127.0.0.1",
                   CONTENT_TYPE=self.headers.get("content-type", ""), CONTENT_LENGTH=str(len(body)),
                   GIT_PROTOCOL=self.headers.get("git-protocol", ""),
                   HTTP_CONTENT_ENCODING=self.headers.get("content-encoding", ""),
                   GIT_CONFIG_COUNT="1", GIT_CONFIG_KEY_0="safe.directory", GIT_CONFIG_VALUE_0="*")
        done = subprocess.run(["git", "http-backend"], input=body, env=env, stdout=subprocess.PIPE)
        head, _, out = done.stdout.partition(b"\r\n\r\n")
        status, more, kind = 200, [], "text/plain"
        for line in head.decode().split("\r\n"):
            name, _, value = line.partition(": ")
            if name.lower() == "status":
                status = int(value.split()[0])
            elif name.lower() == "content-type":
                kind = value
            elif name:
                more.append((name, value))
        self.say(status, out, kind, more)


class Server(http.server.ThreadingHTTPServer):
    allow_reuse_port = True


server = Server((ADDRESS, 443), Handler)
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(PEM)
server.socket = tls.wrap_socket(server.socket, server_side=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
with open(os.path.join(ROOT, "ready"), "w") as f:
    f.write("yes")
threading.Event().wait()
