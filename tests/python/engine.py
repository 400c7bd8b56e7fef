"""An engine of the tests' own. Needs the standard library only."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def program():
    """The executable to test."""
    places = [os.environ.get("BIVOUAC_TEST_BIN"), *(ROOT / "target" / p / "bivouac" for p in ("ci", "release", "debug"))]
    for place in places:
        if place and Path(place).is_file():
            return str(place)
    raise SystemExit("no bivouac executable: build it, or set BIVOUAC_TEST_BIN")


class Engine:
    """`bivouac serve` in a folder of its own; ends, with its sandboxes, at the end of the `with`."""

    def __init__(self, *flags):
        self.flags = flags
        self.child = None

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="bivouac-test-python-"))
        self.data = self.folder / "data"
        self.env = {
            **os.environ,
            "BIVOUAC_DATA_DIR": str(self.data),
            "BIVOUAC_IMAGES": os.environ.get("BIVOUAC_IMAGES") or str(Path(tempfile.gettempdir()) / "bivouac-tests-images"),
            "BIVOUAC_STOP_SANDBOXES": "1",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }
        for name in ("BIVOUAC_URL", "BIVOUAC_TOKEN", "NODE_OPTIONS", "NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE"):
            self.env.pop(name, None)
        try:
            self._start()
        except BaseException:
            self._end(show=True)
            raise
        return self

    def __exit__(self, kind, error, trace):
        self._end(show=kind is not None)

    def restart(self):
        """Another process on the same folder, after one that was killed: its sandboxes run on."""
        self.child.kill()
        self.child.wait()
        self._start()

    def _start(self):
        with open(self.folder / "serve.log", "ab") as log:
            self.child = subprocess.Popen(
                [program(), "serve", "--listen", "127.0.0.1:0", *self.flags],
                env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )
        deadline = time.monotonic() + 120
        while not self._answers():
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the engine was not ready")
            time.sleep(0.02)

    def _answers(self):
        try:
            told = json.loads((self.data / "engine.json").read_text())
            if told["pid"] != self.child.pid:
                return False
            with urllib.request.urlopen(f"http://{told['address']}/health", timeout=5) as answer:
                return answer.status == 200
        except (OSError, ValueError, urllib.error.URLError):
            return False

    def told(self, *flags):
        """`bivouac env`, as it ends."""
        command = [program(), "env", "--format", "json", *flags]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)

    def environment(self, *flags):
        """What `bivouac env` prints."""
        done = self.told(*flags)
        if done.returncode != 0:
            raise RuntimeError(f"bivouac env: {done.stderr}")
        return json.loads(done.stdout)

    def _stop(self):
        if self.child and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(60)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()

    def _end(self, show):
        self._stop()
        log = self.folder / "serve.log"
        if show and log.exists():
            print("--- the engine's log", log.read_text(errors="replace")[-6000:], sep="\n", file=sys.stderr)
        # The pool stays mounted behind an engine on purpose; behind a test it must not.
        mounts = [line.split(" ")[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for point in reversed([m for m in mounts if m.startswith(str(self.folder))]):
            subprocess.run(["umount", point], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
