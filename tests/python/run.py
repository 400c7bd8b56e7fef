"""Starts an engine of its own and runs the tests with the official Python client, unmodified.

    python run.py [MODULE | MODULE.CLASS.TEST ...]   with its address as an option, then all of tls/
    python run.py --tls [...]                          tls/ alone: the names that clients have built in

The second part runs in a network of its own that leads nowhere, under a list of names of its own: there
vercel.com is the engine, and nothing could reach the real one. Wants an interpreter with requirements.txt installed (script/test makes one below target/) and the engine
in BIVOUAC_TEST_BIN, or where cargo puts it. Prints TAP, which script/count.awk adds up.
"""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import engine  # noqa: E402
import support  # noqa: E402


class Tap(unittest.TestResult):
    """Prints one line for each test, and the sums at the end."""

    def __init__(self):
        super().__init__()
        self.count = self.passed = self.failed = 0

    def _line(self, ok, test, more="", trace=""):
        self.count += 1
        name = test.shortDescription() or str(test)
        print(f"{'ok' if ok else 'not ok'} {self.count} - {name}{more}", flush=True)
        for line in trace.splitlines():
            print(f"    {line}")

    def addSuccess(self, test):
        self.passed += 1
        self._line(True, test)

    def _bad(self, test, error):
        self.failed += 1
        self._line(False, test, trace=self._exc_info_to_string(error, test))

    def addError(self, test, error):
        super().addError(test, error)
        self._bad(test, error)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._bad(test, error)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self._bad(subtest, error)

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.failed += 1
        self._line(False, test, trace="this test was expected to fail")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._line(True, test, more=f" # SKIP {reason}")

    def close(self):
        print(f"1..{self.count}")
        for word, count in [("tests", self.count), ("pass", self.passed), ("fail", self.failed), ("cancelled", 0),
                            ("skipped", len(self.skipped)), ("todo", len(self.expectedFailures))]:
            print(f"# {word} {count}", flush=True)


NAMES = "127.0.0.1 localhost\n127.0.0.1 vercel.com oidc.vercel.com\n"
INSIDE = "--inside"


def suite(folder, names):
    loader = unittest.TestLoader()
    sys.path.insert(0, str(folder))
    return loader.loadTestsFromNames(names) if names else loader.discover(str(folder), pattern="test_*.py")


def run(tests, *flags, **options):
    result = Tap()
    with engine.Engine(*flags) as running:
        support.use(running, **options)
        tests.run(result)
    result.close()
    return 0 if result.count and not result.failed else 1


def apart(names):
    """Runs the tests of tls/ in namespaces of their own. Nobody else's /etc/hosts is touched."""
    with tempfile.NamedTemporaryFile("w", prefix="bivouac-test-hosts-") as hosts:
        hosts.write(NAMES)
        hosts.flush()
        os.chmod(hosts.name, 0o644)
        script = 'ip link set lo up && mount --bind "$0" /etc/hosts && exec "$@"'
        command = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-ec", script, hosts.name]
        return subprocess.run([*command, sys.executable, __file__, INSIDE, *names], check=False).returncode


def main(args):
    if args[:1] == [INSIDE]:
        # Whoever starts this by hand would serve their own machine's clients.
        links = _links()
        if links != ["lo"]:
            raise SystemExit(f"not in a network of its own: {links}")
        return run(suite(HERE / "tls", args[1:]), "--clients-tls", tls=True)
    if args[:1] == ["--tls"]:
        return apart(args[1:])
    code = run(suite(HERE, args))
    return code if args else (apart([]) or code)


def _links():
    """The network's links, from the kernel: /sys still shows the ones outside."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sorted(line.split(":")[0].strip() for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
