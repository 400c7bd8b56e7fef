"""Standard input: scenarios 95 and 96, and what the line may do to it."""

import base64
import hashlib
import os
import subprocess
import threading

from vercel.sandbox import SandboxStdinError

from support import BoxCase


class Stdin(BoxCase):
    def cat(self, sandbox=None, command="cat", args=None):
        return (sandbox or self.sandbox).create_process(command, args, stdin=subprocess.PIPE)

    def sums(self, sandbox=None):
        """A process that tells the length and the sum of what it was given."""
        return self.cat(sandbox, "sh", ["-c", "tee n | sha256sum; wc -c < n"])

    def test_s95_input(self):
        """S95 input of a run, with the offsets of the protocol"""
        faulty = self.faulty()
        done = self.through(faulty).run_process("cat", input=b"hello", capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (0, "hello"))
        sent = [request.json for request in faulty.seen("/stdin")]
        self.assertEqual(sent[0], {}, "a probe")
        self.assertEqual(sent[1], {"data": base64.b64encode(b"hello").decode(), "offset": 0})
        self.assertEqual(sent[2], {"offset": 5, "close": True})

    def test_empty_input(self):
        """empty input, and none at all, are an end of file at once"""
        for options, text in (({"input": b""}, ""), ({}, ""), ({"input": "é"}, "é")):
            done = self.sandbox.run_process("cat", capture_output=True, **options)
            self.assertEqual((done.returncode, done.stdout), (0, text))

    def test_s96_two_mebibytes(self):
        """S96 two mebibytes in pieces of every size arrive whole and in order"""
        faulty = self.faulty()
        process = self.sums(self.through(faulty))
        data = os.urandom(2 << 20)
        at, piece = 0, 1
        while at < len(data):
            process.stdin.write(data[at : at + piece])
            at, piece = at + piece, piece * 7
        process.stdin.close()
        out, _ = process.communicate()
        self.assertEqual(out.split()[0], hashlib.sha256(data).hexdigest())
        self.assertEqual(out.split()[-1], str(len(data)))
        offset = 0
        for request in faulty.seen("/stdin"):
            if "data" in request.json:
                self.assertEqual(request.json["offset"], offset)
                offset += len(base64.b64decode(request.json["data"]))
        self.assertEqual(offset, len(data))

    def test_s96_after_the_end(self):
        """S96 a write after the process's end is a broken pipe"""
        process = self.cat(command="true")
        process.wait()
        with self.assertRaises(BrokenPipeError):
            process.stdin.write(b"late")
        process.stdin.close()

    def test_input_that_nobody_reads(self):
        """a run whose program leaves before its input is no error"""
        done = self.sandbox.run_process("true", input=os.urandom(1 << 20), capture_output=True)
        self.assertEqual(done.returncode, 0)

    def test_closed_by_the_program(self):
        """a program that closes its input and runs on is a broken pipe"""
        process = self.cat(command="sh", args=["-c", "exec 0<&-; echo closed; sleep 600"])
        self.assertEqual(process.stdout.readline(), "closed\n")
        with self.assertRaises((BrokenPipeError, SandboxStdinError)):
            for _ in range(64):
                process.stdin.write(b"x" * 65536)
        process.kill()

    def test_conversation(self):
        """a program that answers line by line"""
        process = self.cat(command="sh", args=["-c", 'while read -r line; do echo "got $line"; done; echo end'])
        for word in ("one", "two", "drei"):
            process.stdin.write(f"{word}\n".encode())
            self.assertEqual(process.stdout.readline(), f"got {word}\n")
        process.stdin.close()
        self.assertEqual(process.stdout.read(), "end\n")

    def test_found_again(self):
        """a handle that was looked up goes on where the input is"""
        process = self.cat()
        process.stdin.write(b"one ")
        again = self.sandbox.get_process(process.id)
        again.stdin.write(b"two ")
        self.assertEqual(self.sandbox.get_process(process.id).communicate(b"three")[0], "one two three")

    def test_without_stdin(self):
        """a process that was started without input has none to write to"""
        process = self.sandbox.create_process("sleep", ["600"])
        self.assertIsNone(process.stdin)
        with self.assertRaises(SandboxStdinError) as raised:
            self.sandbox.get_process(process.id).stdin.write(b"x")
        self.assertEqual(raised.exception.cause.code, "command_stdin_unavailable")
        process.kill()

    def test_lost_answer(self):
        """an answer that was lost: the client sends the piece again, the program reads it once"""
        faulty = self.faulty()
        process = self.sums(self.through(faulty))
        data = os.urandom(700_000)
        faulty.fault(lambda r: r.path.endswith("/stdin") and b"data" in r.body, times=2, lose=True)
        process.stdin.write(data)
        process.stdin.close()
        out, _ = process.communicate()
        self.assertEqual(out.split()[0], hashlib.sha256(data).hexdigest())
        offsets = [r.json["offset"] for r in faulty.seen("/stdin") if "data" in r.json]
        self.assertEqual(offsets, [0, 0, 0, 524_288])

    def test_lost_close(self):
        """an answer to a close that was lost: the second try finds the process gone and is content"""
        faulty = self.faulty()
        process = self.cat(self.through(faulty))
        process.stdin.write(b"x")
        faulty.fault(lambda r: r.path.endswith("/stdin") and b"close" in r.body, lose=True)
        process.stdin.close()
        self.assertEqual(process.communicate()[0], "x")

    def test_proxies_on_the_way(self):
        """502, 503 and 429 on the way are repeated, in order"""
        faulty = self.faulty()
        process = self.sums(self.through(faulty))
        data = os.urandom(1_100_000)
        for status in (502, 503, 429):
            faulty.fault(lambda r: r.path.endswith("/stdin") and b"data" in r.body, status=status, headers={"retry-after": "0.1"})
        process.stdin.write(data)
        process.stdin.close()
        self.assertEqual(process.communicate()[0].split()[0], hashlib.sha256(data).hexdigest())

    def test_offsets(self):
        """the engine's side: what it has is skipped, a gap is refused, nothing is doubled"""
        process = self.cat()
        session = self.sandbox.current_session_id
        path = f"/v2/sandboxes/sessions/{session}/cmd/{process.id}/stdin"
        text = lambda data: base64.b64encode(data).decode()  # noqa: E731
        status, answer = self.raw("POST", path, {"data": text(b"abc"), "offset": 0})
        self.assertEqual((status, answer["bytesWritten"]), (200, 3))
        status, answer = self.raw("POST", path, {"data": text(b"abcdef"), "offset": 0})
        self.assertEqual((status, answer["bytesWritten"]), (200, 6))
        status, answer = self.raw("POST", path, {"data": text(b"bc"), "offset": 1})
        self.assertEqual((status, answer["bytesWritten"]), (200, 6))
        status, _ = self.raw("POST", path, {"data": text(b"x"), "offset": 7})
        self.assertEqual(status, 409)
        status, answer = self.raw("POST", path, {})
        self.assertEqual((status, answer["bytesWritten"]), (200, 6))
        self.assertEqual(self.raw("POST", path, {"offset": 6, "close": True})[0], 200)
        self.assertEqual(process.wait(), 0)
        self.assertEqual(process.stdout.read(), "abcdef")
        self.assertEqual(self.raw("POST", path, {"data": text(b"x")})[0], 404)

    def test_slow_reader(self):
        """a program that reads nothing for half a minute: the engine says how far it got, nothing is lost"""
        faulty = self.faulty()
        process = self.cat(self.through(faulty), "sh", ["-c", "until [ -e slow ]; do sleep 0.05; done; sha256sum"])
        data = os.urandom(900_000)

        def read_on():
            self.until("the engine to give up on one write", lambda: any(r.status == 504 for r in faulty.seen("/stdin")))
            self.sandbox.fs.write_text("slow", "")

        reader = threading.Thread(target=read_on, daemon=True)
        reader.start()
        process.stdin.write(data)
        process.stdin.close()
        reader.join(60)
        self.assertEqual(process.communicate()[0].split()[0], hashlib.sha256(data).hexdigest())
