"""`serve --clients-tls`: official clients without any option, under the names that they have built in.

Runs where those names lead to the engine and nothing leads anywhere else: see run.py.
"""

import asyncio
import http.client
import json
import os
import sys
import shutil
import socket
import ssl
import subprocess
import tempfile
import unittest
import urllib.error
import urllib.request
from pathlib import Path

from vercel.api import session
from vercel.sandbox import create_sandbox as create_async
from vercel.sandbox.sync import create_sandbox

import support
from engine import ROOT, program

SDK = ROOT / "tests" / "sdk"
# The environment of a client: what `bivouac env --tls` prints, and no shim.
CLIENT = ("VERCEL_OIDC_TOKEN", "VERCEL_AUTH_TOKEN", "VERCEL_TEAM_ID", "VERCEL_PROJECT_ID", "VERCEL_TELEMETRY_DISABLED",
          "SANDBOX_SKIP_VERSION_CHECK", "NODE_EXTRA_CA_CERTS")


class Names(unittest.TestCase):
    def node(self, *command, **variables):
        """A Node program of tests/sdk with that environment alone."""
        self.assertTrue((SDK / "node_modules").is_dir(), "tests/sdk is not installed: npm ci there, or script/test clients")
        home = tempfile.mkdtemp(prefix="bivouac-test-home-")
        self.addCleanup(shutil.rmtree, home)
        env = {"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": home, "NO_COLOR": "1"}
        env.update({name: os.environ[name] for name in CLIENT})
        env.update(variables)
        env = {name: value for name, value in env.items() if value is not None}
        return subprocess.run(["node", *map(str, command)], cwd=SDK, env=env, capture_output=True, text=True, timeout=120)

    def context(self):
        context = ssl.create_default_context(cafile=os.environ["NODE_EXTRA_CA_CERTS"])
        # What Python 3.13 asks of every certificate.
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    def ask(self, path, host="vercel.com", token=True, method="GET", name=None):
        """One request over TLS to `host`, in the name of `name`."""
        connection = http.client.HTTPSConnection(host, timeout=60, context=self.context())
        self.addCleanup(connection.close)
        headers = {"host": name or host}
        if token:
            headers["authorization"] = f"Bearer {os.environ['BIVOUAC_TOKEN']}"
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def test_variables(self):
        """bivouac env --tls names the certificates and no shim, and is content with /etc/hosts"""
        done = support.engine.told("--tls")
        told = json.loads(done.stdout)
        self.assertNotIn("NODE_OPTIONS", told)
        self.assertEqual(done.stderr, "")
        ca = Path(told["NODE_EXTRA_CA_CERTS"]).read_text()
        self.assertEqual(ca.count("BEGIN CERTIFICATE"), 1)
        self.assertNotIn("PRIVATE", ca)
        bundle = Path(told["SSL_CERT_FILE"]).read_text()
        self.assertTrue(bundle.endswith(ca))
        self.assertGreater(bundle.count("BEGIN CERTIFICATE"), 1, "the system's own certificates stay")
        key = support.engine.data / "clients-tls" / "ca.key"
        self.assertEqual(key.stat().st_mode & 0o777, 0o600)

    def test_hosts_hint(self):
        """bivouac env --tls says which line /etc/hosts lacks, and does not write it"""
        with tempfile.NamedTemporaryFile("w") as hosts:
            hosts.write("127.0.0.1 localhost vercel.com\n")
            hosts.flush()
            script = 'mount --bind "$0" /etc/hosts && exec "$@"'
            done = subprocess.run(
                ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, hosts.name, program(), "env", "--tls"],
                env=support.engine.env, capture_output=True, text=True, timeout=60,
            )
            self.assertEqual(Path(hosts.name).read_text(), "127.0.0.1 localhost vercel.com\n")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("/etc/hosts needs the line: 127.0.0.1 oidc.vercel.com\n", done.stderr)

    def test_javascript(self):
        """the JavaScript SDK, with nothing but NODE_EXTRA_CA_CERTS and a token"""
        done = self.node("app.mjs")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertRegex(lines[0], " is running$")
        self.assertIn("3: hello from Bivouac", lines)
        self.assertEqual(lines[-2:], ["after the resume: It rained.", "deleted"])

    def test_javascript_generations(self):
        """the SDKs 2.9.2 and 1.10.2, the same way"""
        script = """
          const { Sandbox } = await import(process.argv[1]);
          const c = { token: process.env.VERCEL_AUTH_TOKEN, teamId: process.env.VERCEL_TEAM_ID, projectId: process.env.VERCEL_PROJECT_ID };
          const sandbox = await Sandbox.create(c);
          const done = await sandbox.runCommand('echo', ['here']);
          console.log(done.exitCode, (await done.stdout()).trim());
          await sandbox.stop();
        """
        for package in ("sdk2", "sdk1"):
            with self.subTest(package=package):
                done = self.node("--input-type=module", "-e", script, package)
                self.assertEqual((done.returncode, done.stdout), (0, "0 here\n"), done.stderr)

    def test_command_line(self):
        """the official command line, the same way"""
        sandbox = SDK / "node_modules" / "sandbox" / "bin" / "sandbox.mjs"
        name = support.unique("cli")
        made = self.node(sandbox, "create", "--name", name)
        self.assertEqual(made.returncode, 0, made.stderr)
        done = self.node(sandbox, "exec", name, "--", "sh", "-c", "echo out; exit 7")
        self.assertEqual((done.returncode, done.stdout), (7, "out\n"), done.stderr)
        gone = self.node(sandbox, "rm", name)
        self.assertEqual(gone.returncode, 0, gone.stderr)

    def test_terminals(self):
        """terminals of the official command line and of the Python client, by a WebSocket under that name"""
        sandbox = SDK / "node_modules" / "sandbox" / "bin" / "sandbox.mjs"
        name = support.unique("tty")
        self.assertEqual(self.node(sandbox, "create", "--name", name).returncode, 0)
        home = tempfile.mkdtemp(prefix="bivouac-test-home-")
        self.addCleanup(shutil.rmtree, home)
        env = {"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": home, **{key: os.environ[key] for key in CLIENT}}
        command = [sys.executable, SDK / "terminal.py", "node", sandbox, "exec", "-i", name, "--", "sh", "-c",
                   "echo the-$((1+1)); stty size; exit 7"]
        done = subprocess.run([*map(str, command)], cwd=SDK, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=120)
        self.assertEqual(done.returncode, 7, done.stdout + done.stderr)
        self.assertIn("the-2", done.stdout)
        self.assertIn("40 120", done.stdout)
        self.assertEqual(self.node(sandbox, "rm", name).returncode, 0)
        with session(), create_sandbox(persistent=False) as box:
            with box.open_interactive("sh", ["-c", "echo the-$((1+1)); exit 5"]) as pty:
                shown = b""
                while piece := pty.stream.read(65536):
                    shown += piece
                self.assertEqual((shown, pty.wait()), (b"the-2\r\n", 5))

    def test_javascript_without_trust(self):
        """without the certificate the JavaScript SDK refuses to talk"""
        done = self.node("app.mjs", NODE_EXTRA_CA_CERTS=None)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, "UNABLE_TO_VERIFY_LEAF_SIGNATURE|UNABLE_TO_GET_ISSUER_CERT|self-signed")

    def test_python(self):
        """the Python client, with nothing but SSL_CERT_FILE and a token"""
        with session():
            with create_sandbox(env={"A": "1"}) as sandbox:
                done = sandbox.run_process("sh", ["-c", "cat; echo $A"], input=b"in", capture_output=True)
                self.assertEqual((done.returncode, done.stdout), (0, "in1\n"))
                sandbox.fs.write_text("f", "é")
                self.assertEqual(sandbox.fs.read_text("f"), "é")

    def test_python_async(self):
        """the asynchronous Python client, the same way"""

        async def body():
            async with session(), create_async(persistent=False) as sandbox:
                return (await sandbox.run_process("echo", ["x"], capture_output=True)).stdout

        self.assertEqual(asyncio.run(body()), "x\n")

    def test_python_without_trust(self):
        """without the certificate the Python client refuses to talk"""
        script = "from vercel.api import session\nfrom vercel.sandbox.sync import create_sandbox\nwith session(): create_sandbox()"
        env = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("CERTIFICATE_VERIFY_FAILED", done.stderr)

    def test_alpn(self):
        """HTTP/2 and HTTP/1.1, as the client likes"""
        for offered, chosen in ((["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), ([], None)):
            context = self.context()
            if offered:
                context.set_alpn_protocols(offered)
            with socket.create_connection(("vercel.com", 443), timeout=60) as plain:
                with context.wrap_socket(plain, server_hostname="vercel.com") as tls:
                    self.assertEqual(tls.selected_alpn_protocol(), chosen)
        self.assertEqual(self.ask("/api/v2/user")[0], 200)

    def test_http2(self):
        """many requests over one HTTP/2 connection, and a stream that is read as it comes"""
        script = """
          import { connect } from 'node:http2'
          const client = connect('https://vercel.com')
          const ask = (path, method = 'GET', body) => new Promise((resolve, reject) => {
            const stream = client.request({ ':path': path, ':method': method, 'content-type': 'application/json',
              authorization: `Bearer ${process.env.VERCEL_AUTH_TOKEN}` })
            let status, text = ''
            stream.on('response', (h) => (status = h[':status'])).on('data', (d) => (text += d)).on('error', reject)
            stream.on('end', () => resolve([status, text]))
            stream.end(body)
          })
          const scope = 'teamId=local&projectId=local'
          const all = await Promise.all(Array.from({ length: 50 }, () => ask('/api/v2/user')))
          const [made, text] = await ask(`/api/v3/sandboxes?${scope}`, 'POST', '{"projectId":"local","persistent":false}')
          const { session, sandbox } = JSON.parse(text)
          const run = JSON.stringify({ command: 'seq', args: ['20000'], wait: true, logs: true })
          const [ran, lines] = await ask(`/api/v2/sandboxes/sessions/${session.id}/cmd?${scope}`, 'POST', run)
          const records = lines.split('\\n').filter((l) => l.trim()).map((l) => JSON.parse(l))
          const out = records.filter((r) => r.stream === 'stdout').map((r) => r.data).join('')
          const [gone] = await ask(`/api/v2/sandboxes/${sandbox.name}?${scope}`, 'DELETE')
          client.close()
          console.log(JSON.stringify([new Set(all.map(([s]) => s)).size, all[0][0], made, ran, gone, out.split('\\n').length,
            records.at(-1).command.exitCode]))
        """
        done = self.node("--input-type=module", "-e", script)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout), [1, 200, 200, 200, 200, 20001, 0])

    def test_the_token_is_needed(self):
        """the names do not open the door: without the token it is a 401"""
        self.assertEqual(self.ask("/api/v2/user", token=False)[0], 401)

    def test_what_is_not_ours(self):
        """anything else on those names is a 404 that says who answers"""
        for host, path in (("vercel.com", "/"), ("vercel.com", "/login"), ("vercel.com", "/.well-known/openid-configuration"),
                           ("oidc.vercel.com", "/"), ("oidc.vercel.com", "/api/v2/user")):
            status, answer = self.ask(path, host)
            self.assertEqual((status, answer["error"]["code"]), (404, "not_found"), f"{host}{path}")
            self.assertIn("bivouac", answer["error"]["message"])
        self.assertEqual(self.ask("/api/v2/user", name="api.vercel.com")[0], 421)
        self.assertEqual(self.ask("/api/no/such", "vercel.com")[0], 404)

    def test_issuer(self):
        """the issuer's documents are the engine's own, word for word"""
        for path in ("/.well-known/jwks", "/.well-known/openid-configuration"):
            status, answer = self.ask(path, "oidc.vercel.com", token=False)
            try:
                with urllib.request.urlopen(os.environ["BIVOUAC_URL"] + path, timeout=60) as plain:
                    own = plain.status, json.loads(plain.read())
            except urllib.error.HTTPError as error:
                own = error.code, json.loads(error.read())
            self.assertEqual((status, answer), own)

    def test_other_names(self):
        """no certificate for any other name, none without a name"""
        for name in ("api.vercel.com", "example.com", None):
            context = self.context()
            context.check_hostname = False
            with socket.create_connection(("127.0.0.1", 443), timeout=60) as plain:
                with self.assertRaises(ssl.SSLError):
                    context.wrap_socket(plain, server_hostname=name)

    def test_noise(self):
        """plain HTTP and noise on the port end that connection, nothing else"""
        for noise in (b"GET / HTTP/1.1\r\nhost: vercel.com\r\n\r\n", os.urandom(500), b"\x16\x03\x01\xff\xff" + b"\0" * 100):
            with socket.create_connection(("127.0.0.1", 443), timeout=60) as plain:
                plain.sendall(noise)
                plain.shutdown(socket.SHUT_WR)
                while plain.recv(4096):
                    pass
        self.assertEqual(self.ask("/api/v2/user")[0], 200)

    def test_second_engine(self):
        """a second engine is refused, says why, and leaves nothing"""
        folder = Path(tempfile.mkdtemp(prefix="bivouac-test-second-"))
        self.addCleanup(shutil.rmtree, folder)
        env = {**support.engine.env, "BIVOUAC_DATA_DIR": str(folder / "data")}
        command = [program(), "serve", "--listen", "127.0.0.1:0", "--clients-tls"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("needs 127.0.0.1:443, and something else listens there", done.stderr)
        self.assertFalse((folder / "data" / "clients-tls").exists() or (folder / "data" / "bivouac.db").exists())

    def test_not_permitted(self):
        """without the right to the port it is refused, and says what to do"""
        folder = Path(tempfile.mkdtemp(prefix="bivouac-test-second-"))
        self.addCleanup(shutil.rmtree, folder)
        env = {**support.engine.env, "BIVOUAC_DATA_DIR": str(folder / "data")}
        command = ["setpriv", "--bounding-set=-net_bind_service", program(), "serve", "--listen", "127.0.0.1:0", "--clients-tls"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("CAP_NET_BIND_SERVICE", done.stderr)

    def test_zz_restart(self):
        """a killed engine leaves the port free, and the next one has the same certificate: told once is enough"""
        before = Path(os.environ["NODE_EXTRA_CA_CERTS"]).read_text()
        with session(), create_sandbox(persistent=False) as sandbox:
            process = sandbox.create_process("sh", ["-c", "echo up; until [ -e go ]; do sleep 0.05; done; echo end"])
            self.assertEqual(process.stdout.readline(), "up\n")
            support.engine.restart()
            told = support.engine.environment("--tls")
            self.assertEqual(Path(told["NODE_EXTRA_CA_CERTS"]).read_text(), before)
            sandbox.fs.write_text("go", "")
            self.assertEqual(process.stdout.read(), "end\n", "the stream is taken up where it was cut")
            self.assertEqual(process.wait(), 0)
