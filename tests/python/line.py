"""A line between a client and the engine that keeps a record and breaks on purpose.

Everything that reaches the client comes from the engine: only timing, loss and repetition are ours, and
answers of the kind that a proxy on the way would give (502, 503, 429). Standard library only.
"""

import http.client
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


@dataclass
class Request:
    """One request that passed."""

    method: str
    path: str
    query: dict
    headers: dict
    body: bytes
    status: int | None = None

    @property
    def json(self):
        return json.loads(self.body)

    def __str__(self):
        return f"{self.method} {self.path}"


@dataclass
class Fault:
    """What happens to the next requests that `match`."""

    match: object
    times: int
    # Close after so many bytes of the answer's body.
    cut: int | None = None
    # The engine gets the request; its answer is lost.
    lose: bool = False
    # Answer with this status instead of asking the engine.
    status: int | None = None
    headers: dict = field(default_factory=dict)
    # Called before the request is passed on.
    before: object = None


class Line:
    """Listens on an address of its own: `url` is the base URL to give to a client."""

    def __init__(self, target):
        parts = urlsplit(target)
        self.target = (parts.hostname, parts.port)
        self.requests = []
        self.faults = []
        self.lock = threading.Lock()

    def __enter__(self):
        line = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 0
            disable_nagle_algorithm = True

            def log_message(self, *_):
                pass

            def handle_one_request(self):
                try:
                    super().handle_one_request()
                except (ConnectionError, TimeoutError):
                    self.close_connection = True

            def serve(self):
                line.serve(self)

            do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = serve

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}/api"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def fault(self, match, times=1, **what):
        """Breaks the next `times` requests whose "METHOD path" `match` finds (a function or a text in it)."""
        find = match if callable(match) else lambda request: match in f"{request}"
        fault = Fault(find, times, **what)
        with self.lock:
            self.faults.append(fault)
        return fault

    def seen(self, part=""):
        """The requests so far whose "METHOD path" has `part` in it."""
        with self.lock:
            return [request for request in self.requests if part in str(request)]

    def _take(self, request):
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times > 0 and fault.match(request):
                    fault.times -= 1
                    return fault
        return None

    def serve(self, handler):
        url = urlsplit(handler.path)
        body = _body(handler)
        request = Request(handler.command, url.path, parse_qs(url.query), dict(handler.headers), body)
        fault = self._take(request)
        if fault and fault.before:
            fault.before(request)
        if fault and fault.status:
            request.status = fault.status
            self._refuse(handler, fault)
            return
        upstream = http.client.HTTPConnection(*self.target, timeout=120)
        try:
            headers = {k: v for k, v in handler.headers.items() if k.lower() not in ("host", "connection", "transfer-encoding", "content-length")}
            chunked = "transfer-encoding" in handler.headers
            # What came in pieces goes on in pieces: the engine has to take both.
            pieces = iter([body[: len(body) // 2], body[len(body) // 2 :]]) if chunked and len(body) > 1 else body or None
            if handler.command in ("POST", "PATCH", "PUT") and not body:
                headers["content-length"] = "0"
            upstream.request(handler.command, handler.path, pieces, headers, encode_chunked=chunked)
            answer = upstream.getresponse()
            request.status = answer.status
            if fault and fault.lose:
                answer.read()
                handler.close_connection = True
                return
            self._pass(handler, answer, fault.cut if fault else None)
        finally:
            upstream.close()

    @staticmethod
    def _refuse(handler, fault):
        text = json.dumps({"error": {"code": "line", "message": "the line broke"}}).encode()
        handler.send_response(fault.status)
        for name, value in {"content-type": "application/json", **fault.headers}.items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    @staticmethod
    def _pass(handler, answer, cut):
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                handler.send_header(name, value)
        if answer.status == 204:
            handler.end_headers()
            return
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        left = cut
        while piece := answer.read1(65536):
            if left is not None:
                piece = piece[:left]
                left -= len(piece)
            if piece:
                handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if left == 0:
                # No last chunk: the client sees a connection that broke.
                handler.close_connection = True
                return
        handler.wfile.write(b"0\r\n\r\n")


def _body(handler):
    if "chunked" in handler.headers.get("transfer-encoding", ""):
        whole = b""
        while size := int(handler.rfile.readline().split(b";")[0], 16):
            whole += handler.rfile.read(size)
            handler.rfile.readline()
        handler.rfile.readline()
        return whole
    return handler.rfile.read(int(handler.headers.get("content-length") or 0))
