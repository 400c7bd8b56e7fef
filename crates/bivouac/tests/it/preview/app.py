# A program for tests of routes: says what it was sent, and does what real and bad programs do.
import base64, hashlib, json, socketserver, struct, sys, threading, time

ALIVE = 0
LOCK = threading.Lock()


class Handler(socketserver.StreamRequestHandler):
    def setup(self):
        global ALIVE
        super().setup()
        with LOCK:
            ALIVE += 1

    def finish(self):
        global ALIVE
        with LOCK:
            ALIVE -= 1
        try:
            super().finish()
        except OSError:
            pass

    def handle(self):
        try:
            while self.one():
                pass
        except OSError:
            pass

    def one(self):
        line = self.rfile.readline(65536)
        if not line:
            return False
        head = [line]
        while True:
            line = self.rfile.readline(65536)
            head.append(line)
            if line in (b"\r\n", b""):
                break
        self.head = [part.decode("latin-1").rstrip("\r\n") for part in head[:-1]]
        self.method, self.target, _ = self.head[0].split(" ", 2)
        self.headers = {}
        for part in self.head[1:]:
            name, value = part.split(":", 1)
            self.headers.setdefault(name.lower(), value.strip())
        action = self.target.split("?")[0].strip("/").replace("-", "_") or "echo"
        return getattr(self, "do_" + action, self.do_echo)()

    def body(self):
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            out, trailers = b"", []
            while True:
                size = int(self.rfile.readline().split(b";")[0], 16)
                out += self.rfile.read(size)
                if size == 0:
                    break
                self.rfile.readline()
            while True:
                line = self.rfile.readline().rstrip(b"\r\n")
                if not line:
                    break
                trailers.append(line.decode())
            return out, trailers
        return self.rfile.read(int(self.headers.get("content-length", "0"))), []

    def say(self, body, status="200 OK", extra=""):
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        self.wfile.write(head.encode() + (b"" if self.method == "HEAD" else body))
        return True

    def do_echo(self):
        body, trailers = self.body()
        told = {"head": self.head, "length": len(body), "sha256": hashlib.sha256(body).hexdigest(),
                "trailers": trailers, "peer": self.client_address[0]}
        return self.say(json.dumps(told).encode(), extra="Content-Type: application/json\r\nX-Own: 1\r\n")

    def do_alive(self):
        return self.say(str(ALIVE).encode())

    def do_cookies(self):
        return self.say(b"ok", extra="Set-Cookie: a=1\r\nSet-Cookie: _bivouac=x; Path=/\r\nAlt-Svc: h3=\":1\"\r\n")

    def do_not_modified(self):
        self.wfile.write(b"HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n")
        return True

    def do_range(self):
        return self.say(b"bcd", "206 Partial Content", "Content-Range: bytes 1-3/5\r\n")

    def do_events(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        number = 0
        while True:
            self.wfile.write(f"data: {number}\n\n".encode())
            number += 1
            time.sleep(0.05)

    def do_trailers(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"
                         b"5\r\nhello\r\n0\r\nX-Sum: 5\r\n\r\n")
        return True

    def do_big(self):
        size = int(self.target.split("=")[1])
        self.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
        piece = bytes(range(256)) * 256
        while size:
            part = piece[:size]
            self.wfile.write(part)
            size -= len(part)
        return True

    def do_take(self):
        size, sha = int(self.headers["content-length"]), hashlib.sha256()
        while size:
            part = self.rfile.read(min(size, 65536))
            sha.update(part)
            size -= len(part)
        return self.say(sha.hexdigest().encode())

    def do_continue(self):
        assert self.headers["expect"].lower() == "100-continue"
        self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self.do_echo()

    def do_decline(self):
        self.say(b"no", "413 Content Too Large", "Connection: close\r\n")
        return False

    def do_hints(self):
        self.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        return self.say(b"after hints")

    def do_no_length(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        return False

    def do_old(self):
        self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nold")
        return False

    def do_early_close(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this")
        return False

    def do_bad_chunk(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nXYZ\r\n")
        return False

    def do_silent_close(self):
        return False

    def do_garbage(self):
        self.wfile.write(b"this is no HTTP at all\r\n\r\n")
        return False

    def do_huge_head(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Huge: " + b"x" * 2_000_000 + b"\r\n\r\n")
        return False

    def do_two_lengths(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\nokMORE")
        return False

    def do_switch(self):
        self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
        return False

    def do_ws(self):
        key = self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.wfile.write(("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                          f"Sec-WebSocket-Accept: {accept}\r\nX-Host: {self.headers['host']}\r\n\r\n").encode())
        while True:
            two = self.rfile.read(2)
            if len(two) < 2:
                return False
            code, size = two[0] & 15, two[1] & 127
            if size == 126:
                size = struct.unpack(">H", self.rfile.read(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", self.rfile.read(8))[0]
            mask = self.rfile.read(4)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(size)))
            head = bytes([0x80 | code])
            if size < 126:
                head += bytes([size])
            elif size < 65536:
                head += struct.pack(">BH", 126, size)
            else:
                head += struct.pack(">BQ", 127, size)
            self.wfile.write(head + data)
            if code == 8:
                return False


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 512


Server((sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
