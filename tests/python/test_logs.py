"""Output over a line that breaks: scenario 97."""

import asyncio
import json
import os
import subprocess
import urllib.request

from vercel.sandbox import SandboxApiError

from support import BoxCase

# Both streams, characters of one to four bytes, in pieces that cut them. The pauses keep the pieces apart:
# what is read at once is one record, and a client can only go on from whole records.
SCRIPT = r"""
my $s = "a\xc3\xa9\xe6\xbc\xa2\xf0\x9f\x98\x80" x 3000; my ($i, $k) = (0, 0);
while ($i < length $s) {
  my $n = 1 + ($k * 37) % 601; syswrite STDOUT, substr($s, $i, $n);
  syswrite STDERR, "e$k "; $i += $n; $k++; select undef, undef, undef, 0.002;
}
"""
OUT = "aé漢😀" * 3000


def run(request):
    return request.method == "POST" and request.path.endswith("/cmd")


class Logs(BoxCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        done = cls.sandbox.run_process("perl", ["-e", SCRIPT], capture_output=True)
        cls.err = done.stderr

    def test_s97_run(self):
        """S97 a run whose stream is cut anywhere goes on from its logs: nothing missing, nothing twice"""
        for cut in (1_500, 2_000, 10_007, 30_011, 60_000):
            with self.subTest(cut=cut):
                faulty = self.faulty()
                sandbox = self.through(faulty)
                faulty.fault(run, cut=cut)
                done = sandbox.run_process("perl", ["-e", SCRIPT], capture_output=True)
                self.assertEqual(done.returncode, 0)
                self.assertTrue(done.stdout == OUT, f"stdout differs: {len(done.stdout)} of {len(OUT)}")
                self.assertTrue(done.stderr == self.err, f"stderr differs: {len(done.stderr)} of {len(self.err)}")
                self.assertEqual(len([r for r in faulty.seen() if run(r)]), 1, "started once")

    def test_before_the_first_record(self):
        """a run whose first record never came is an error, and is not repeated: it may have begun"""
        for cut in (1, 100):
            with self.subTest(cut=cut):
                faulty = self.faulty()
                faulty.fault(run, cut=cut)
                with self.assertRaises(Exception) as raised:
                    self.through(faulty).run_process("perl", ["-e", SCRIPT], capture_output=True)
                self.assertNotIsInstance(raised.exception, AssertionError)
                self.assertEqual(len([r for r in faulty.seen() if run(r)]), 1)

    def test_s97_again_and_again(self):
        """S97 a log stream that is cut again and again, each time further on"""
        faulty = self.faulty()
        sandbox = self.through(faulty)
        faulty.fault(run, cut=5_000)
        for cut in (9_001, 15_013, 22_500, 31_111):
            faulty.fault("/logs", cut=cut)
        done = sandbox.run_process("perl", ["-e", SCRIPT], capture_output=True)
        self.assertEqual(done.returncode, 0)
        self.assertTrue(done.stdout == OUT and done.stderr == self.err)
        self.assertEqual(len(faulty.seen("/logs")), 5)

    def test_s97_live(self):
        """S97 a cut while the process still runs"""
        faulty = self.faulty()
        sandbox = self.through(faulty)
        faulty.fault("/logs", cut=60)
        process = sandbox.create_process("sh", ["-c", "echo äöü-1; echo äöü-2; until [ -e live ]; do sleep 0.02; done; echo end"])
        self.assertEqual(process.stdout.readline(), "äöü-1\n")
        self.assertEqual(process.stdout.readline(), "äöü-2\n")
        self.sandbox.fs.write_text("live", "")
        self.assertEqual(process.communicate(), ("end\n", ""))
        self.assertEqual(len(faulty.seen("/logs")), 2)

    def test_s97_async(self):
        """S97 the same with the asynchronous client"""
        faulty = self.faulty()

        async def body():
            client = self.async_client(faulty.url)
            try:
                sandbox = await client.get_sandbox(name=self.sandbox.name)
                faulty.fault(run, cut=3_000)
                faulty.fault("/logs", cut=12_345)
                return await sandbox.run_process("perl", ["-e", SCRIPT], capture_output=True)
            finally:
                await client.aclose()

        done = asyncio.run(body())
        self.assertTrue(done.stdout == OUT and done.stderr == self.err)

    def test_retries(self):
        """logs and waits are asked again after 502 and 503, twice and no more"""
        faulty = self.faulty()
        sandbox = self.through(faulty)
        faulty.fault("/logs", status=502)
        faulty.fault("/logs", status=503)
        process = sandbox.create_process("sh", ["-c", "echo x; exit 7"])
        self.assertEqual(process.stdout.read(), "x\n")
        faulty.fault(lambda r: "wait" in r.query, status=503)
        self.assertEqual(process.wait(), 7)
        again = sandbox.get_process(process.id)
        faulty.fault("/logs", times=3, status=502)
        with self.assertRaises(SandboxApiError):
            again.stdout.read()

    def test_merged(self):
        """stderr merged into stdout keeps both whole"""
        process = self.sandbox.create_process("perl", ["-e", SCRIPT], stderr=subprocess.STDOUT)
        out, err = process.communicate()
        self.assertIsNone(err)
        self.assertEqual(len(out), len(OUT) + len(self.err))

    def test_two_records(self):
        """a run's stream has exactly two command records, of one id, around its output"""
        session = self.sandbox.current_session_id
        url = f"{os.environ['BIVOUAC_URL']}/api/v2/sandboxes/sessions/{session}/cmd?wait=true&logs=true&teamId={self.team}"
        request = urllib.request.Request(url, method="POST", data=json.dumps(
            {"command": "sh", "args": ["-c", "echo o; sleep 0.1; echo e >&2"], "sudo": False, "wait": True, "logs": True}
        ).encode())
        request.add_header("authorization", f"Bearer {os.environ['BIVOUAC_TOKEN']}")
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            self.assertEqual(answer.headers["content-type"], "application/x-ndjson")
            raw = answer.read()
        self.assertTrue(raw.isascii() and raw.endswith(b"\n"))
        records = [json.loads(line) for line in raw.splitlines() if line.strip()]
        first, *middle, last = records
        self.assertEqual(first["command"]["id"], last["command"]["id"])
        self.assertEqual(first["command"]["sessionId"], session)
        self.assertIsNone(first["command"]["exitCode"])
        self.assertEqual(last["command"]["exitCode"], 0)
        self.assertEqual([r["stream"] for r in middle], ["stdout", "stderr"])
