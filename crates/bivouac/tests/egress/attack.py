"""What the tests run inside a sandbox: connections that no ordinary client makes.

Prints one JSON object. Nothing here decides whether something was right.
"""
import json
import os
import socket
import ssl
import struct
import sys
import time

LIMIT = 8.0


def unescape(text):
    return text.encode("latin-1").decode("unicode_escape").encode("latin-1")


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def connect(address, port):
    s = socket.socket(family(address), socket.SOCK_STREAM)
    s.settimeout(LIMIT)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.connect((address, port))
    return s


def drain(s, limit=LIMIT, until=None):
    """Everything until the other side closes, `until` was seen, or the limit; and how it ended."""
    got, end = b"", time.monotonic() + limit
    while time.monotonic() < end:
        s.settimeout(max(0.05, end - time.monotonic()))
        try:
            piece = s.recv(65536)
        except (socket.timeout, ssl.SSLWantReadError):
            return got, "silent"
        except OSError as e:
            return got, "reset:" + type(e).__name__
        if not piece:
            return got, "closed"
        got += piece
        if until and until in got:
            return got, "open"
    return got, "silent"


def issuer(der):
    if der is None:
        return None
    if b"root of the test world" in der:
        return "world"
    if b"Bivouac" in der or b"bivouac" in der:
        return "sandbox"
    return "other"


def context(alpn=None, lowest=None, highest=None):
    c = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    c.check_hostname = False
    c.verify_mode = ssl.CERT_NONE
    if alpn:
        c.set_alpn_protocols(alpn)
    if lowest:
        c.minimum_version = lowest
        c.set_ciphers("ALL:@SECLEVEL=0")
    if highest:
        c.maximum_version = highest
    return c


def result(**more):
    def plain(v):
        return v.decode("latin-1") if isinstance(v, bytes) else v

    print(json.dumps({k: plain(v) for k, v in more.items()}))


def tcp(address, port, data, limit="4"):
    try:
        s = connect(address, int(port))
        s.sendall(unescape(data))
        got, end = drain(s, float(limit))
        result(connected=True, got=got, end=end)
    except OSError as e:
        result(connected=False, error=type(e).__name__, errno=e.errno)


def tls(address, port, sni, data, alpn="", until=""):
    """`sni` may be `-`: none. `data` is sent once the handshake is done."""
    try:
        s = connect(address, int(port))
        names = [a for a in alpn.split(",") if a]
        t = context(names).wrap_socket(s, server_hostname=None if sni == "-" else sni)
    except OSError as e:
        return result(handshake=False, error=type(e).__name__, text=str(e))
    who = issuer(t.getpeercert(True))
    try:
        t.sendall(unescape(data))
        got, end = drain(t, 6.0, unescape(until) if until else None)
    except OSError as e:
        got, end = b"", "reset:" + type(e).__name__
    result(handshake=True, issuer=who, alpn=t.selected_alpn_protocol(), got=got, end=end)


def versions(address, sni, highest):
    top = {"1.0": ssl.TLSVersion.TLSv1, "1.1": ssl.TLSVersion.TLSv1_1}[highest]
    try:
        c = context(lowest=ssl.TLSVersion.TLSv1, highest=top)
        t = c.wrap_socket(connect(address, 443), server_hostname=sni)
        result(handshake=True, issuer=issuer(t.getpeercert(True)))
    except (OSError, ValueError) as e:
        result(handshake=False, error=type(e).__name__, text=str(e))


def client_hello(sni):
    """The bytes of a ClientHello record, and the engine to go on with."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    engine = context(["http/1.1"]).wrap_bio(into, out, server_hostname=sni)
    try:
        engine.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return into, out, engine, out.read()


def body_of(record):
    """Handshake message of one record."""
    return record[5:]


def extensions(message):
    """Offset of the extensions' length in a ClientHello message."""
    at = 4 + 2 + 32
    at += 1 + message[at]
    at += 2 + struct.unpack(">H", message[at:at + 2])[0]
    at += 1 + message[at]
    return at


def rebuild(message, extra=b"", drop=None, replace=None):
    """The message with extensions added, dropped or replaced, lengths mended."""
    at = extensions(message)
    end = at + 2 + struct.unpack(">H", message[at:at + 2])[0]
    kept, i = b"", at + 2
    while i < end:
        kind, size = struct.unpack(">HH", message[i:i + 4])
        whole = message[i:i + 4 + size]
        if replace and kind == replace[0]:
            whole = struct.pack(">HH", kind, len(replace[1])) + replace[1]
        if kind != drop:
            kept += whole
        i += 4 + size
    kept += extra
    body = message[4:at] + struct.pack(">H", len(kept)) + kept
    return b"\x01" + struct.pack(">I", len(body))[1:] + body


def name_list(*names):
    inner = b"".join(b"\x00" + struct.pack(">H", len(n)) + n for n in names)
    return struct.pack(">H", len(inner)) + inner


def record(message):
    return b"\x16\x03\x01" + struct.pack(">H", len(message)) + message


def hello(address, sni, variant, argument=""):
    """A patched ClientHello; whether the server answers with a ServerHello, and whose certificate."""
    into, out, engine, first = client_hello(sni)
    message = body_of(first)
    pieces = None
    if variant == "whole":
        sent = record(message)
    elif variant == "bytes":
        whole = record(message)
        pieces = [whole[i:i + 1] for i in range(len(whole))]
    elif variant == "records":
        pieces = [record(message[i:i + 7]) for i in range(0, len(message), 7)]
    elif variant == "ech":
        extra = struct.pack(">HH", 0xFE0D, 64) + b"\x00\x00\x01\x00\x01\x07" + bytes(58)
        sent = record(rebuild(message, extra=extra))
    elif variant == "two-names":
        sent = record(rebuild(message, replace=(0, name_list(sni.encode(), unescape(argument)))))
    elif variant == "two-extensions":
        inner = name_list(unescape(argument))
        sent = record(rebuild(message, extra=struct.pack(">HH", 0, len(inner)) + inner))
    elif variant == "name":
        sent = record(rebuild(message, replace=(0, name_list(unescape(argument)))))
    elif variant == "no-name":
        sent = record(rebuild(message, drop=0))
    elif variant == "huge":
        pad = struct.pack(">HH", 0xABCD, 20000) + bytes(20000)
        big = rebuild(message, extra=pad)
        pieces = [record(big[i:i + 16000]) for i in range(0, len(big), 16000)]
    elif variant == "slow":
        whole = record(message)
        s = connect(address, 443)
        begin, end = time.monotonic(), "open"
        for i in range(len(whole)):
            try:
                s.sendall(whole[i:i + 1])
                s.settimeout(0.5)
                if s.recv(1) == b"":
                    end = "closed"
                    break
            except socket.timeout:
                continue
            except OSError:
                end = "reset"
                break
            if time.monotonic() - begin > 30:
                break
        return result(end=end, seconds=time.monotonic() - begin)
    try:
        s = connect(address, 443)
        for piece in pieces or [sent]:
            s.sendall(piece)
            if pieces and len(pieces) > 100:
                time.sleep(0.001)
        s.settimeout(6)
        got = b""
        while len(got) < 5:
            piece = s.recv(65536)
            if not piece:
                break
            got += piece
    except OSError as e:
        return result(answered=False, error=type(e).__name__)
    kind = got[0] if got else None
    if kind != 22:
        return result(answered=False, kind=kind)
    # The hello was patched, so the handshake cannot end; TLS 1.3 hides the certificate. Who signed it is
    # seen by the origin's own record.
    result(answered=True, kind=kind)


def varint_headers(fields):
    out = b""
    for name, value in fields:
        name, value = unescape(name), unescape(value)

        def string(b):
            if len(b) < 127:
                return bytes([len(b)]) + b
            rest, more = len(b) - 127, b""
            while rest >= 128:
                more += bytes([rest % 128 + 128])
                rest //= 128
            return b"\x7f" + more + bytes([rest]) + b

        out += b"\x10" + string(name) + string(value)
    return out


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def h2(address, sni, requests):
    """`requests`: JSON list of {headers: [[name, value]…], end: bool, data?: text, trailers?: […]}; each a
    stream of one connection. Answers per stream: status bytes seen, data, or how it was refused."""
    try:
        t = context(["h2"]).wrap_socket(connect(address, 443), server_hostname=sni)
    except OSError as e:
        return result(handshake=False, error=type(e).__name__)
    t.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    stream = 1
    streams = {}
    for request in json.loads(requests):
        data = request.get("data")
        trailers = request.get("trailers")
        end = data is None and trailers is None
        t.sendall(frame(1, 4 | (1 if end else 0), stream, varint_headers(request["headers"])))
        if data is not None:
            t.sendall(frame(0, 0 if trailers else 1, stream, unescape(data)))
        if trailers is not None:
            t.sendall(frame(1, 5, stream, varint_headers(trailers)))
        streams[stream] = {"headers": "", "data": "", "end": None}
        stream += 2
    buffer, goaway = b"", None
    end = time.monotonic() + 6
    closed = None
    while time.monotonic() < end and any(s["end"] is None for s in streams.values()):
        t.settimeout(max(0.05, end - time.monotonic()))
        try:
            piece = t.recv(65536)
        except OSError as e:
            closed = type(e).__name__
            break
        if not piece:
            closed = "closed"
            break
        buffer += piece
        while len(buffer) >= 9:
            size = int.from_bytes(buffer[:3], "big")
            if len(buffer) < 9 + size:
                break
            kind, flags = buffer[3], buffer[4]
            number = int.from_bytes(buffer[5:9], "big") & 0x7FFFFFFF
            payload, buffer = buffer[9:9 + size], buffer[9 + size:]
            if kind == 4 and not flags & 1:
                t.sendall(frame(4, 1, 0, b""))
            if kind == 7:
                goaway = int.from_bytes(payload[4:8], "big")
            if number in streams:
                s = streams[number]
                if kind == 1:
                    s["headers"] += payload.decode("latin-1")
                    # The static table of HPACK: 8 is ":status 200".
                    s["status"] = status_of(payload) or s.get("status")
                if kind == 0:
                    s["data"] += payload.decode("latin-1")
                if kind == 3:
                    s["end"] = "reset:%d" % int.from_bytes(payload, "big")
                elif kind in (0, 1) and flags & 1:
                    s["end"] = "end"
    result(handshake=True, goaway=goaway, closed=closed, streams=[streams[k] for k in sorted(streams)])


HUFFMAN_DIGITS = {"0": "00000", "1": "00001", "2": "00010", "3": "011001", "4": "011010", "5": "011011",
                  "6": "011100", "7": "011101", "8": "011110", "9": "011111"}


def status_of(block):
    """The status of a header block whose first field it is."""
    static = {8: 200, 9: 204, 10: 206, 11: 304, 12: 400, 13: 404, 14: 500}
    if not block:
        return None
    if block[0] & 0x80:
        return static.get(block[0] & 0x7F)
    # Literal with the name of entry 8 to 14: a length and three digits, perhaps in Huffman's code.
    size, text = block[1] & 0x7F, block[2:2 + (block[1] & 0x7F)]
    if not block[1] & 0x80:
        return int(text) if text.isdigit() else None
    bits = "".join(format(b, "08b") for b in text[:size])
    digits = ""
    while len(digits) < 3:
        for digit, code in HUFFMAN_DIGITS.items():
            if bits.startswith(code):
                digits, bits = digits + digit, bits[len(code):]
                break
        else:
            return None
    return int(digits)


def dns(server, name, kind, how="udp", port="53"):
    number = {"A": 1, "NS": 2, "CNAME": 5, "NULL": 10, "PTR": 12, "MX": 15, "TXT": 16, "AAAA": 28, "SRV": 33,
              "SVCB": 64, "HTTPS": 65, "ANY": 255}[kind]
    labels = b"".join(bytes([len(l)]) + l for l in unescape(name).split(b".") if l)
    # One additional record: EDNS, 1232 bytes.
    edns = b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"
    query = struct.pack(">6H", 0x1234, 0x0100, 1, 0, 0, 1) + labels + b"\0" + struct.pack(">2H", number, 1) + edns
    try:
        if how == "tcp":
            s = connect(server, int(port))
            s.sendall(struct.pack(">H", len(query)) + query)
            got, end = b"", time.monotonic() + 5
            while len(got) < 2 or len(got) < 2 + struct.unpack(">H", got[:2])[0]:
                piece = s.recv(65536)
                if not piece or time.monotonic() > end:
                    break
                got += piece
            got, source = got[2:], server
        else:
            s = socket.socket(family(server), socket.SOCK_DGRAM)
            s.settimeout(5)
            s.connect((server, int(port)))
            s.send(query)
            got, source = s.recv(65536), server
    except OSError as e:
        return result(answered=False, error=type(e).__name__)
    if len(got) < 12:
        return result(answered=False, error="short", got=got)
    counts = struct.unpack(">6H", got[:12])
    at, answers = 12, []

    def skip(i):
        while True:
            n = got[i]
            if n >= 192:
                return i + 2
            i += 1
            if n == 0:
                return i
            i += n

    for _ in range(counts[2]):
        at = skip(at) + 4
    ede = None
    for section, count in enumerate(counts[3:]):
        for _ in range(count):
            at = skip(at)
            kind, _, ttl, size = struct.unpack(">HHIH", got[at:at + 10])
            data = got[at + 10:at + 10 + size]
            at += 10 + size
            if section == 0:
                text = data.hex()
                if kind == 1:
                    text = socket.inet_ntop(socket.AF_INET, data)
                if kind == 28:
                    text = socket.inet_ntop(socket.AF_INET6, data)
                answers.append({"kind": kind, "ttl": ttl, "data": text})
            if kind == 41:
                i = 0
                while i + 4 <= len(data):
                    option, length = struct.unpack(">HH", data[i:i + 4])
                    if option == 15:
                        info = data[i + 4:i + 4 + length]
                        ede = {"code": struct.unpack(">H", info[:2])[0], "text": info[2:].decode("utf-8", "replace")}
                    i += 4 + length
    result(answered=True, code=counts[1] & 15, cut=bool(counts[1] & 0x200), answers=answers, ede=ede, size=len(got))


def udp(address, port, text, limit="2"):
    s = socket.socket(family(address), socket.SOCK_DGRAM)
    s.settimeout(float(limit))
    begin = time.monotonic()
    try:
        s.connect((address, int(port)))
        s.send(unescape(text))
        got = s.recv(65536)
        result(answered=True, got=got)
    except OSError as e:
        result(answered=False, error=type(e).__name__, seconds=time.monotonic() - begin)


def hold(address, port, sni, first, every="0.1", seconds="30"):
    """Keeps a connection and writes to it until it breaks. Prints a line at each step, unbuffered."""
    s = connect(address, int(port))
    if sni != "-":
        s = context().wrap_socket(s, server_hostname=sni)
    print("open", flush=True)
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < float(seconds):
            s.sendall(unescape(first))
            s.settimeout(5)
            if not s.recv(65536):
                print("closed", flush=True)
                return
            print("alive", flush=True)
            time.sleep(float(every))
        print("never", flush=True)
    except OSError as e:
        print("broken " + type(e).__name__, flush=True)


def batch(attempts):
    """Many requests side by side: JSON list of {address, port, sni?, host, path}. Which got a 200."""
    from concurrent.futures import ThreadPoolExecutor

    def one(a):
        try:
            s = connect(a["address"], a["port"])
            if a.get("sni"):
                s = context(["http/1.1"]).wrap_socket(s, server_hostname=a["sni"])
            head = "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % (a["path"], a["host"])
            s.sendall(head.encode())
            return drain(s, 8.0)[0].startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    with ThreadPoolExecutor(16) as pool:
        print(json.dumps(list(pool.map(one, json.loads(attempts)))))


def leaf(address, sni):
    """The certificate that is shown for a name, as PEM."""
    t = context(["http/1.1"]).wrap_socket(connect(address, 443), server_hostname=sni)
    result(pem=ssl.DER_cert_to_PEM_cert(t.getpeercert(True)))


def flood(address, port, count, seconds):
    """So many connections that say nothing, for so long or until all are closed. A line when all are open."""
    import resource
    import select

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held, refused = [], 0
    for _ in range(int(count)):
        try:
            held.append(connect(address, int(port)))
        except OSError:
            refused += 1
    print(json.dumps({"open": len(held), "refused": refused}), flush=True)
    poll = select.poll()
    for s in held:
        poll.register(s, select.POLLIN)
    living, end = {s.fileno(): s for s in held}, time.monotonic() + float(seconds)
    while living and time.monotonic() < end:
        for fd, _ in poll.poll(200):
            poll.unregister(fd)
            living.pop(fd).close()
    print(json.dumps({"left": len(living)}), flush=True)


def mint(address, base, count):
    """Handshakes for so many names below one, side by side: how many were answered, in what time."""
    from concurrent.futures import ThreadPoolExecutor

    def one(i):
        try:
            context(["http/1.1"]).wrap_socket(connect(address, 443), server_hostname="m%d.%s" % (i, base)).close()
            return 1
        except OSError:
            return 0

    begin = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        made = sum(pool.map(one, range(int(count))))
    result(made=made, seconds=time.monotonic() - begin)


def h2flood(address, sni, kind):
    """One flood on one HTTP/2 connection: whether the other side ended it."""
    t = context(["h2"]).wrap_socket(connect(address, 443), server_hostname=sni)
    block = varint_headers([(":method", "GET"), (":scheme", "https"), (":authority", sni), (":path", "/flooded")])
    if kind == "reset":
        pieces = [frame(1, 5, n, block) + frame(3, 0, n, b"\0\0\0\x08") for n in range(1, 8001, 2)]
    elif kind == "continuation":
        pieces = [frame(1, 1, 1, block)] + [frame(9, 0, 1, varint_headers([("x", "y" * 120)] * 8))] * 400
    elif kind == "bomb":
        entry = b"\x40\x01x\x7f" + b"\x81\x1e" + b"y" * 4000
        pieces = [frame(1, 5, 1, block + entry + b"\xbe" * 12000)]
    elif kind == "ping":
        pieces = [frame(6, 0, 0, bytes(8))] * 50000
    else:
        pieces = [frame(4, 0, 0, b"\0\x03\0\0\0\x64")] * 50000
    ended = None
    try:
        t.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        t.settimeout(20)
        for i in range(0, len(pieces), 200):
            t.sendall(b"".join(pieces[i:i + 200]))
    except OSError as e:
        ended = type(e).__name__
    got, end = drain(t, 3.0)
    reset = goaway = False
    while len(got) >= 9:
        size = int.from_bytes(got[:3], "big")
        reset = reset or got[3] == 3
        goaway = goaway or got[3] == 7
        got = got[9 + size:]
    result(ended=ended or end, reset=reset, goaway=goaway)


def echoes(address, port, seconds, file):
    """Connects again and again, three at a time, and writes down for each echo when it was asked for and
    when it came, in nanoseconds of the clock."""
    import threading

    until, pairs = time.monotonic() + float(seconds), []

    def work():
        while time.monotonic() < until and not os.path.exists(file + ".stop"):
            try:
                s = connect(address, int(port))
                s.settimeout(0.5)
                s.recv(4096)
                for _ in range(30):
                    begin = time.time_ns()
                    s.sendall(b"x")
                    if not s.recv(4096):
                        break
                    pairs.append((begin, time.time_ns()))
                    time.sleep(0.002)
                s.close()
            except OSError:
                time.sleep(0.002)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    print("going", flush=True)
    for worker in workers:
        worker.join()
    with open(file, "w") as f:
        json.dump(pairs, f)
    print("done", flush=True)


if __name__ == "__main__":
    {"tcp": tcp, "tls": tls, "hello": hello, "h2": h2, "dns": dns, "udp": udp, "versions": versions,
     "hold": hold, "batch": batch, "leaf": leaf, "flood": flood, "mint": mint, "h2flood": h2flood,
     "echoes": echoes}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)
