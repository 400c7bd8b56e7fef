"""Commands, and commands as another user."""

import io
import subprocess

from vercel.sandbox import ProcessSignal, SandboxUserAlreadyExistsError

from support import BoxCase, in_thread


class Processes(BoxCase):
    options = {"env": {"A": "create", "B": "create"}}

    def test_run(self):
        """a run: output, exit code, id"""
        done = self.sandbox.run_process("sh", ["-c", "echo o; echo e >&2; exit 3"], capture_output=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (3, "o\n", "e\n"))
        self.assertEqual(done.args, ("sh", "-c", "echo o; echo e >&2; exit 3"))
        with self.assertRaises(subprocess.CalledProcessError):
            self.sandbox.run_process("false", check=True)

    def test_no_args(self):
        """a command without arguments"""
        self.assertEqual(self.sandbox.run_process("pwd", capture_output=True).stdout.strip(), self.sandbox.cwd)

    def test_streams(self):
        """output goes to the caller's own streams, stderr merged if it is asked for"""
        out = io.StringIO()
        self.sandbox.run_process("sh", ["-c", "echo a; echo b >&2"], stdout=out, stderr=subprocess.STDOUT)
        self.assertEqual(sorted(out.getvalue().split()), ["a", "b"])

    def test_environment_and_folder(self):
        """environments merge; folders are taken from the session's"""
        self.assertEqual(self.sh("echo $A $B $C", env={"B": "call", "C": "call"}), "create call call\n")
        self.assertEqual(self.sh("pwd", cwd="/tmp"), "/tmp\n")
        self.sh("mkdir -p sub")
        self.assertEqual(self.sh("pwd", cwd="sub"), f"{self.sandbox.cwd}/sub\n")
        with self.refused(400):
            self.sandbox.run_process("pwd", cwd="/no/such/folder")

    def test_root(self):
        """sudo is root"""
        self.assertEqual(self.sh("id -u", sudo=True), "0\n")
        self.assertNotEqual(self.sh("id -u"), "0\n")

    def test_no_such_program(self):
        """a shell line is no program"""
        for start in (self.sandbox.run_process, self.sandbox.create_process):
            with self.refused(400, "executable_not_found"):
                start("echo hi")

    def test_kill_after(self):
        """a run that takes too long is killed"""
        done = self.sandbox.run_process("sleep", ["600"], kill_after=0.3, capture_output=True)
        self.assertEqual(done.returncode, 137)

    def test_signals(self):
        """signals end a process with 128 and their number"""
        for send, code in [
            (lambda p: p.terminate(), 143),
            (lambda p: p.kill(), 137),
            (lambda p: p.send_signal(ProcessSignal.SIGINT), 130),
            (lambda p: p.send_signal("HUP"), 129),
            (lambda p: p.send_signal(10), 138),
        ]:
            process = self.sandbox.create_process("sleep", ["600"])
            self.assertIsNone(process.returncode)
            send(process)
            self.assertEqual(process.wait(), code)

    def test_trapped_signal(self):
        """a signal that the program handles is only that"""
        process = self.sandbox.create_process("sh", ["-c", 'trap "echo got; exit 5" USR1; echo up; while :; do sleep 0.05; done'])
        self.assertEqual(process.stdout.readline(), "up\n")
        process.send_signal(ProcessSignal.SIGUSR1)
        self.assertEqual(process.wait(), 5)
        self.assertEqual(process.stdout.read(), "got\n")

    def test_kill_after_the_end(self):
        """a signal to a process that is gone does not wait and changes nothing"""
        process = self.sandbox.create_process("true")
        self.assertEqual(process.wait(), 0)
        try:
            process.kill()
        except Exception as error:
            self.assertEqual(error.status_code // 100, 4, error)
        self.assertEqual(process.refresh().returncode, 0)

    def test_live_output(self):
        """output arrives while the process runs"""
        process = self.sandbox.create_process("sh", ["-c", "echo first; until [ -e go ]; do sleep 0.02; done; echo second; echo e >&2"])
        self.assertEqual(process.stdout.readline(), "first\n")
        self.assertIsNone(process.refresh().returncode)
        self.sandbox.fs.write_text("go", "")
        self.assertEqual(process.communicate(), ("second\n", "e\n"))
        self.assertEqual(process.returncode, 0)

    def test_list_and_get(self):
        """processes are listed, newest first, and found by their id"""
        first = self.sandbox.create_process("true")
        second = self.sandbox.create_process("sh", ["-c", "echo x; exit 4"])
        second.wait()
        ids = [p.id for p in self.sandbox.query_processes()]
        self.assertLess(ids.index(second.id), ids.index(first.id))
        again = self.sandbox.get_process(second.id, wait=True)
        self.assertEqual((again.name, again.args, again.returncode), ("sh", ["-c", "echo x; exit 4"], 4))
        self.assertEqual(again.stdout.read(), "x\n")
        with self.refused(404):
            self.sandbox.get_process("cmd_nope")

    def test_on_start(self):
        """the handle that a run gives away at its start can end it"""
        done = self.sandbox.run_process("sleep", ["600"], on_start=lambda p: p.kill(), capture_output=True)
        self.assertEqual(done.returncode, 137)

    def test_text(self):
        """a megabyte of text in odd pieces, both ways"""
        script = (
            'my $s = "\\xc3\\xa9\\xe6\\xbc\\xa2\\xf0\\x9f\\x98\\x80" x 120000; my $i = 0;'
            "while ($i < length $s) { my $n = 1 + ($i * 7) % 8191; syswrite STDOUT, substr($s, $i, $n); $i += $n }"
        )
        whole = "é漢😀" * 120_000
        done = self.sandbox.run_process("perl", ["-e", script], capture_output=True)
        self.assertTrue(done.stdout == whole, "the run's output differs")
        self.assertTrue(self.sandbox.get_process(done.id).stdout.read() == whole, "the replay differs")

    def test_no_text(self):
        """what is not text is replaced, the same way in each replay"""
        done = self.sandbox.run_process("printf", ["a\\xffb\\xc3"], capture_output=True)
        self.assertRegex(done.stdout, "^a\ufffdb\ufffd+$")
        self.assertEqual(self.sandbox.get_process(done.id).stdout.read(), done.stdout)

    def test_many(self):
        """many runs at once"""
        calls = [in_thread(lambda i=i: self.sandbox.run_process("sh", ["-c", f"echo {i}; exit {i}"], capture_output=True)) for i in range(16)]
        for i, call in enumerate(calls):
            done = call()
            self.assertEqual((done.returncode, done.stdout), (i, f"{i}\n"))


class Users(BoxCase):
    def test_user(self):
        """a user of the sandbox: its own commands, home and files"""
        alice = self.sandbox.create_user("alice")
        self.assertEqual(alice.run_process("id", ["-un"], capture_output=True).stdout, "alice\n")
        self.assertEqual(alice.run_process("pwd", capture_output=True).stdout.strip(), alice.home_dir)
        alice.fs.write_text("mine", "hers")
        self.assertEqual(alice.run_process("stat", ["-c", "%U", "mine"], capture_output=True).stdout, "alice\n")
        self.assertEqual(alice.fs.read_text("mine"), "hers")
        done = alice.run_process("sh", ["-c", "cat; exit 6"], input=b"in", capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (6, "in"))
        with self.assertRaises(SandboxUserAlreadyExistsError):
            self.sandbox.create_user("alice")
        again = self.sandbox.as_user("alice")
        self.assertEqual(again.run_process("id", ["-un"], sudo=True, capture_output=True).stdout, "root\n")

    def test_end_of_a_user_s_process(self):
        """signals and time limits reach what runs as another user"""
        bob = self.sandbox.create_user("bob")
        self.assertEqual(bob.run_process("sleep", ["600"], kill_after=0.5, capture_output=True).returncode, 137)
        process = bob.create_process("sh", ["-c", "echo up; sleep 600"])
        self.assertEqual(process.stdout.readline(), "up\n")
        process.kill()
        self.assertEqual(process.wait(), 137)
        self.until("the process to be gone", lambda: self.sh("pgrep -u bob sleep || true") == "")
