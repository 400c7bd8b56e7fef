"""A TLS origin that answers with bytes as they were given, right or wrong, and writes down what it gets.
Arguments: certificate, folder, address. `answers.json` of the folder has the bytes by path."""
import json
import os
import socket
import ssl
import sys
import threading

PEM, ROOT, ADDRESS = sys.argv[1:4]
with open(os.path.join(ROOT, "answers.json")) as f:
    ANSWERS = json.load(f)
LOCK = threading.Lock()


def note(number, data):
    with LOCK, open(os.path.join(ROOT, "got"), "a") as f:
        f.write(json.dumps({"connection": number, "data": data.decode("latin-1")}) + "\n")


def serve(stream, number):
    buffer = b""

    def until(what):
        nonlocal buffer
        while what not in buffer:
            piece = stream.recv(65536)
            if not piece:
                raise EOFError
            note(number, piece)
            buffer += piece
        found, _, buffer = buffer.partition(what)
        return found

    def exactly(size):
        nonlocal buffer
        while len(buffer) < size:
            piece = stream.recv(65536)
            if not piece:
                raise EOFError
            note(number, piece)
            buffer += piece
        buffer = buffer[size:]

    try:
        stream = tls.wrap_socket(stream, server_side=True)
        while True:
            head = until(b"\r\n\r\n").lower()
            path = head.split(b" ", 2)[1].split(b"?")[0].decode()
            fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
            if fields.get(b"transfer-encoding") == b"chunked":
                size = 1
                while size:
                    size = int(until(b"\r\n"), 16)
                    exactly(size + 2)
            exactly(int(fields.get(b"content-length", 0)))
            answer = ANSWERS.get(path, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nplain")
            stream.sendall(answer.encode("latin-1"))
            if path.startswith("/end"):
                return stream.unwrap()
            if b" 101 " in answer.encode("latin-1"):
                until(b"nothing that is ever sent")
    except (OSError, EOFError):
        pass
    finally:
        stream.close()


tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(PEM)
listener = socket.create_server((ADDRESS, 443), reuse_port=True)
open(os.path.join(ROOT, "got"), "w").close()
open(os.path.join(ROOT, "ready"), "w").close()
count = 0
while True:
    accepted = listener.accept()[0]
    count += 1
    threading.Thread(target=serve, args=(accepted, count), daemon=True).start()
