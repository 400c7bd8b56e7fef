"""What the tests share: clients of a namespace of their own, sandboxes that go again, a faulty line."""

import faulthandler
import json
import os
import secrets
import threading
import time
import unittest
import urllib.error
import urllib.request
from contextlib import ExitStack

from vercel.sandbox import SandboxApiError, SandboxClient, SandboxCredentials, SandboxServiceOptions
from vercel.sandbox.sync import SandboxServiceOptions as SyncSandboxServiceOptions
from vercel.sandbox.sync import SyncSandboxClient

import line

# A test that hangs fails after so long.
DEADLINE = 120


# The engine that the tests talk to.
engine = None


def use(running, tls=False):
    """Takes over what `bivouac env` prints: the client reads some of it, we the rest."""
    global engine
    engine = running
    os.environ.update(running.environment(*(["--tls"] if tls else [])))


def base_url():
    return os.environ["BIVOUAC_URL"] + "/api"


def unique(prefix):
    """A name that no other test has."""
    return f"{prefix}-{secrets.token_hex(5)}"


class Case(unittest.TestCase):
    """A test class with a namespace of its own."""

    @classmethod
    def setUpClass(cls):
        cls.team, cls.project = unique("team"), unique("prj")

    def setUp(self):
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)

    @classmethod
    def credentials(cls):
        return SandboxCredentials(token=os.environ["BIVOUAC_TOKEN"], team_id=cls.team, project_id=cls.project)

    @classmethod
    def new_client(cls, url=None):
        """A synchronous client."""
        return SyncSandboxClient.create(
            options=SyncSandboxServiceOptions(base_url=url or base_url(), credentials_factory=cls.credentials)
        )

    def client(self, url=None):
        """A synchronous client that is closed with the test."""
        client = self.new_client(url)
        self.stack.callback(client.close)
        return client

    def async_client(self, url=None):
        """An asynchronous client; the caller closes it."""

        async def credentials():
            return self.credentials()

        return SandboxClient.create(
            options=SandboxServiceOptions(base_url=url or base_url(), credentials_factory=credentials)
        )

    def faulty(self):
        """A line to the engine that writes down what passes, and breaks when told to."""
        return self.stack.enter_context(line.Line(os.environ["BIVOUAC_URL"]))

    def box(self, client=None, **options):
        """A sandbox that is deleted, with its snapshots, when the test ends."""
        client = client or self.client()
        sandbox = client.create_sandbox(**options)
        self.stack.callback(remove, sandbox)
        return sandbox

    def refused(self, status, code=None):
        """The `with` of a call that the engine must refuse."""
        return _Refused(self, status, code)

    def until(self, what, probe):
        """Asks until `probe` answers something true."""
        end = time.monotonic() + 60
        while True:
            value = probe()
            if value:
                return value
            self.assertLess(time.monotonic(), end, f"gave up waiting for {what}")
            time.sleep(0.02)

    def raw(self, method, path, body=None):
        """A call without the client: status and JSON."""
        url = f"{base_url()}{path}{'&' if '?' in path else '?'}teamId={self.team}"
        request = urllib.request.Request(url, method=method)
        request.add_header("authorization", f"Bearer {os.environ['BIVOUAC_TOKEN']}")
        data = None
        if body is not None:
            request.add_header("content-type", "application/json")
            data = json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, data, timeout=DEADLINE) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def run(self, result=None):
        # A hang ends the run with every thread's stack: script/test would only see its own limit.
        faulthandler.dump_traceback_later(DEADLINE, exit=True)
        try:
            return super().run(result)
        finally:
            faulthandler.cancel_dump_traceback_later()


class BoxCase(Case):
    """A test class whose tests share one sandbox."""

    options = {}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.shared_client = cls.new_client()
        cls.addClassCleanup(cls.shared_client.close)
        cls.sandbox = cls.shared_client.create_sandbox(persistent=False, execution_time_limit=1800, **cls.options)
        cls.addClassCleanup(remove, cls.sandbox)

    def through(self, faulty):
        """The shared sandbox, seen through a faulty line."""
        return self.client(faulty.url).get_sandbox(name=self.sandbox.name)

    def sh(self, text, sandbox=None, **options):
        """Runs a line of shell that must succeed; what it printed."""
        done = (sandbox or self.sandbox).run_process("sh", ["-c", text], capture_output=True, **options)
        self.assertEqual(done.returncode, 0, f"{text}: {done.stderr}")
        return done.stdout


class _Refused:
    def __init__(self, case, status, code):
        self.case, self.status, self.code = case, status, code

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.case.assertIsInstance(error, SandboxApiError, f"not refused by the engine: {error!r}")
        self.error = error
        self.case.assertEqual(error.status_code, self.status, f"{error} {error.data}")
        if self.code:
            self.case.assertEqual(error.code, self.code, str(error.data))
        return True


def remove(sandbox):
    """Deletes a sandbox that may be gone already."""
    try:
        sandbox.destroy(delete_orphan_snapshots=True)
    except SandboxApiError as error:
        if error.status_code != 404:
            raise


def in_thread(body):
    """Runs `body` in a thread; calling what this answers waits for it and gives its result."""
    box = {}

    def work():
        try:
            box["value"] = body()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def join():
        thread.join(DEADLINE)
        if thread.is_alive():
            raise TimeoutError("the thread did not end")
        if "error" in box:
            raise box["error"]
        return box["value"]

    return join
