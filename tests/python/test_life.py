"""Sandboxes from create to delete: scenarios 94 and 100, resume, fork, snapshots, lists."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from datetime import timedelta

from vercel.api import session
from vercel.sandbox import (
    GitSource,
    NetworkPolicy,
    NetworkPolicyKeyValueMatcher,
    NetworkPolicyMatcher,
    NetworkPolicyRequestMatcher,
    NetworkPolicyResponse,
    NetworkPolicyRule,
    NetworkPolicySubnets,
    NetworkPolicyTransform,
    SandboxApiError,
    SandboxQueryByCreatedAt,
    SandboxQueryByName,
    SandboxResources,
    SandboxServiceOptions,
    SandboxStreamError,
    SnapshotRetention,
    SnapshotSource,
    TagFilter,
)
from vercel.sandbox import create_sandbox as create_async
from vercel.sandbox.sync import SandboxServiceOptions as SyncSandboxServiceOptions
from vercel.sandbox.sync import create_sandbox as create_sync

import support
from engine import ROOT
from support import Case, base_url, in_thread, unique


def run(sandbox, text, **options):
    return sandbox.run_process("sh", ["-c", text], capture_output=True, **options)


class Life(Case):
    def test_s94_context_manager(self):
        """S94 a sandbox in a context manager runs, and is stopped and deleted behind it"""
        faulty = self.faulty()
        client = self.client(faulty.url)
        with client.create_sandbox() as sandbox:
            self.assertEqual(sandbox.status, "running")
            self.assertTrue(sandbox.persistent)
            self.assertEqual(run(sandbox, "echo here").stdout, "here\n")
            session_id, name = sandbox.current_session_id, sandbox.name
        stop, delete = faulty.seen()[-2:]
        self.assertEqual(str(stop), f"POST /api/v2/sandboxes/sessions/{session_id}/stop")
        self.assertEqual(str(delete), f"DELETE /api/v2/sandboxes/{name}")
        self.assertEqual(delete.query["deleteOrphanSnapshots"], ["true"])
        with self.refused(404, "not_found"):
            client.get_sandbox(name=name)
        self.assertEqual({s.status for s in client.query_snapshots(name=name)} - {"deleted"}, set())

    def test_s94_async(self):
        """S94 the same with the asynchronous client, and with the session of the package"""

        async def body():
            options = SandboxServiceOptions(base_url=base_url(), credentials_factory=credentials)
            async with session(service_options=[options]):
                async with create_async(name=unique("async")) as sandbox:
                    done = await sandbox.run_process("echo", ["x"], capture_output=True)
                    self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "x\n", ""))
                    return sandbox.name

        async def credentials():
            return self.credentials()

        name = asyncio.run(body())
        with self.refused(404):
            self.client().get_sandbox(name=name)

    def test_default_credentials(self):
        """the variables of `bivouac env` are credentials enough: only the address is an option"""
        with session(service_options=[SyncSandboxServiceOptions(base_url=base_url())]):
            with create_sync(persistent=False) as sandbox:
                self.assertEqual(sandbox.project_id, os.environ["VERCEL_PROJECT_ID"])
                self.assertEqual(sandbox.current_session.project_id, os.environ["VERCEL_PROJECT_ID"])
                self.assertEqual(run(sandbox, "echo ok").stdout, "ok\n")

    def test_keep(self):
        """destroy=False leaves a stopped sandbox with its files"""
        client = self.client()
        with client.create_sandbox(destroy=False) as sandbox:
            sandbox.fs.write_text("kept", "yes")
            name = sandbox.name
        again = client.get_sandbox(name=name)
        self.addCleanup(again.destroy, delete_orphan_snapshots=True)
        self.assertEqual(again.status, "stopped")
        self.assertIsNotNone(again.current_snapshot_id)
        self.assertEqual(again.fs.read_text("kept"), "yes")

    def test_wrong_token(self):
        """a wrong token is a 401 and makes nothing"""
        from vercel.sandbox import SandboxCredentials
        from vercel.sandbox.sync import SyncSandboxClient

        wrong = SandboxCredentials(token="nope", team_id=self.team, project_id=self.project)
        client = SyncSandboxClient.create(
            options=SyncSandboxServiceOptions(base_url=base_url(), credentials_factory=lambda: wrong)
        )
        self.addCleanup(client.close)
        with self.refused(401, "unauthorized"):
            client.create_sandbox(name="never")
        with self.refused(404):
            self.client().get_sandbox(name="never")

    def test_refusals(self):
        """what the engine refuses: a name that is taken, a bad name, an unknown image, too few milliseconds"""
        client = self.client()
        box = self.box(client, name=unique("taken"), persistent=False)
        with self.refused(400, "bad_request") as refused:
            client.create_sandbox(name=box.name)
        self.assertIn("already exists", str(refused.error))
        with self.refused(400):
            client.create_sandbox(name="a/b")
        with self.refused(404, "not_found"):
            client.create_sandbox(image="no/such/image:1")
        with self.refused(400):
            client.create_sandbox(execution_time_limit=0.5)

    def test_a_source_that_is_not_there(self):
        """a source that is not there is refused in words, and nothing is made"""
        client = self.client()
        before = len(list(client.query_sandboxes()))
        with self.refused(400, "source_unavailable") as refused:
            client.create_sandbox(source=GitSource(url="https://git.invalid/repo.git"))
        self.assertIn("https://git.invalid/repo.git could", str(refused.error).replace("'", ""))
        self.assertEqual(len(list(client.query_sandboxes())), before)

    def test_drives(self):
        """a drive is made once, has one writer, and what is on it outlives the sandbox; a fork goes its own way"""
        client = self.client()
        drive, created = client.get_or_create_drive(name="d", max_size_bytes=1 << 30)
        self.assertTrue(created)
        again, created = client.get_or_create_drive(name="d")
        self.assertEqual((again.id, created), (drive.id, False))
        self.assertEqual(client.get_drive(name_or_id=drive.id).name, "d")
        box = self.box(client, persistent=False, mounts={"/data": "d"})
        box.run_process("sh", ["-c", "echo kept > /data/f"], check=True)
        with self.refused(409, "conflict"):
            client.create_sandbox(persistent=False, mounts={"/x": "d"})
        copy = client.fork_drive(source="d", name="e")
        self.assertEqual(copy.max_size_bytes, 1 << 30)
        support.remove(box)
        other = self.box(client, persistent=False, mounts={"/data": "d", "/e": "e"})
        read = other.run_process("cat", ["/data/f", "/e/f"], capture_output=True)
        self.assertEqual(read.stdout, "kept\nkept\n")
        support.remove(other)
        for name in ("d", "e"):
            client.delete_drive(name=name)

    def test_region(self):
        """a region is kept, and VERCEL_REGION is the fallback"""
        self.assertEqual(self.box(persistent=False, region="fra1").region, "fra1")
        os.environ["VERCEL_REGION"] = "sfo1"
        self.addCleanup(os.environ.pop, "VERCEL_REGION")
        self.assertEqual(self.box(persistent=False).region, "sfo1")

    def test_no_retry_of_create(self):
        """this client does not repeat a create: a 503 is seen, once"""
        faulty = self.faulty()
        client = self.client(faulty.url)
        faulty.fault("POST /api/v3/sandboxes", status=503)
        with self.refused(503):
            client.create_sandbox(name=unique("once"))
        self.assertEqual(len(faulty.seen("POST")), 1)

    def test_options(self):
        """what a create is told is what the sandbox says"""
        box = self.box(
            execution_time_limit=timedelta(minutes=10),
            resources=SandboxResources(vcpus=4),
            env={"A": "1"},
            tags={"k": "v"},
            ports=[3000],
            network_policy=NetworkPolicy.deny_all(),
            snapshot_expiration=0,
            snapshot_retention=SnapshotRetention(count=2),
            persistent=True,
        )
        self.assertEqual(box.execution_time_limit, timedelta(minutes=10))
        self.assertEqual((box.vcpus, box.memory), (4, 8192))
        self.assertEqual(dict(box.tags), {"k": "v"})
        self.assertEqual(box.network_policy.mode, "deny-all")
        self.assertEqual([route.port for route in box.routes], [3000])
        self.assertEqual(run(box, "echo $A").stdout, "1\n")

    def test_s100_update_order(self):
        """S100 update: first the time, then the policy, the rest last; the next session has the new environment"""
        faulty = self.faulty()
        box = self.box(self.client(faulty.url), execution_time_limit=300, env={"A": "old"})
        before = len(faulty.seen())
        session_id = box.current_session_id
        box.update(execution_time_limit=600, network_policy=NetworkPolicy.deny_all(), env={"A": "new"}, tags={"t": "1"})
        sent = faulty.seen()[before:]
        base = f"/api/v2/sandboxes/sessions/{session_id}"
        self.assertEqual(
            [str(request) for request in sent],
            [f"POST {base}/extend-timeout", f"POST {base}/network-policy", f"PATCH /api/v2/sandboxes/{box.name}"],
        )
        self.assertEqual(sent[0].json, {"duration": 300_000})
        self.assertEqual(sent[1].json, {"mode": "deny-all"})
        self.assertEqual(box.current_session.execution_time_limit, timedelta(minutes=10))
        self.assertEqual(box.current_session.network_policy.mode, "deny-all")
        self.assertEqual(dict(box.tags), {"t": "1"})
        self.assertEqual(run(box, "echo $A").stdout, "old\n", "a running session keeps what it began with")
        box.stop()
        self.assertEqual(run(box, "echo $A").stdout, "new\n")
        self.assertNotEqual(box.current_session_id, session_id)
        self.assertEqual(box.current_session.network_policy.mode, "deny-all")
        self.assertEqual(box.current_session.execution_time_limit, timedelta(minutes=10))

    def test_update_fails_whole(self):
        """a policy that is refused ends an update before anything is kept"""
        box = self.box(persistent=False, tags={"a": "b"})
        with self.assertRaises(SandboxApiError) as raised:
            box.update(network_policy=NetworkPolicy.custom({"foo*.com": []}), tags={"c": "d"})
        self.assertIn(raised.exception.status_code, (400, 422))
        self.assertEqual(dict(self.client().get_sandbox(name=box.name).tags), {"a": "b"})

    def test_update_clears(self):
        """None and {} clear what they are meant for"""
        box = self.box(persistent=False, tags={"a": "b"}, snapshot_retention=SnapshotRetention(count=3))
        box.update(snapshot_retention=None, tags={}, network_id=None, mounts={})
        self.assertEqual(dict(box.tags or {}), {})
        self.assertIsNone(box.snapshot_retention)

    def test_policy_read_back(self):
        """a custom policy is read back in the form that this client takes"""
        box = self.box(persistent=False)
        policy = NetworkPolicy.custom({"example.com": [], "*.example.org": []})
        done = box.update_network_policy(policy)
        self.assertEqual(done.network_policy.mode, "custom")
        self.assertEqual(sorted(done.network_policy.allowed_domains), ["*.example.org", "example.com"])
        again = self.client().get_sandbox(name=box.name)
        self.assertEqual(again.current_session.network_policy.mode, "custom")

    def test_policy_rules(self):
        """rules are read back with what they look at, and without their secrets"""
        faulty = self.faulty()
        box = self.box(self.client(faulty.url), persistent=False)
        match = NetworkPolicyRequestMatcher(
            path=NetworkPolicyMatcher.starts_with("/v1/"),
            method=["GET"],
            query=[NetworkPolicyKeyValueMatcher(key=NetworkPolicyMatcher.exact("k"))],
        )
        rules = [
            NetworkPolicyRule(transform=[NetworkPolicyTransform(headers={"x-key": "SECRET"})], match=match),
            NetworkPolicyRule(forward_url="https://proxy.example.org/in"),
            NetworkPolicyRule(response=NetworkPolicyResponse(status_code=403, body="no", content_type="text/plain")),
        ]
        subnets = NetworkPolicySubnets(allow=["192.0.2.0/24"], deny=["10.0.0.0/8"])
        policy = box.update_network_policy(NetworkPolicy.custom({"api.example.com": rules}, subnets)).network_policy
        (injection,), (forward,), (response,) = policy.injection_rules, policy.forward_rules, policy.response_rules
        self.assertEqual((injection.domain, injection.header_names), ("api.example.com", ("x-key",)))
        self.assertEqual(sorted(injection.match_dimensions), ["method", "path", "query"])
        self.assertEqual((forward.forward_url, forward.match_dimensions), ("https://proxy.example.org/in", ()))
        self.assertEqual(response.status_code, 403)
        self.assertEqual((policy.subnets.allow, policy.subnets.deny), (("192.0.2.0/24",), ("10.0.0.0/8",)))
        self.assertNotIn("SECRET", json.dumps(self.raw("GET", f"/v2/sandboxes/{box.name}?projectId={self.project}")[1]))


class Resume(Case):
    def test_replay(self):
        """after a stop every call starts a session and is repeated once"""
        faulty = self.faulty()
        box = self.box(self.client(faulty.url))
        box.fs.write_text("f", "before")
        first = box.current_session_id
        box.stop()
        self.assertEqual(box.status, "stopped")
        before = len(faulty.seen())
        self.assertEqual(run(box, "cat f").stdout, "before")
        sent = faulty.seen()[before:]
        self.assertEqual(sent[0].status, 410)
        self.assertEqual((sent[1].method, sent[1].query["resume"]), ("GET", ["true"]))
        self.assertEqual(len(sent), 3, [str(request) for request in sent])
        self.assertNotEqual(box.current_session_id, first)
        box.stop()
        self.assertEqual(box.fs.read_text("f"), "before")
        box.stop()
        box.fs.mkdir("a/b")
        box.stop()
        self.assertTrue(box.fs.is_dir("a/b"))
        box.stop()
        box.update_network_policy(NetworkPolicy.deny_all())
        self.assertEqual(box.current_session.network_policy.mode, "deny-all")

    def test_shared_resume(self):
        """parallel calls after a stop share one new session"""
        faulty = self.faulty()
        box = self.box(self.client(faulty.url))
        box.stop()
        before = len(faulty.seen("GET"))
        calls = [in_thread(lambda i=i: run(box, f"echo {i}").stdout) for i in range(4)]
        self.assertEqual([call() for call in calls], [f"{i}\n" for i in range(4)])
        self.assertEqual(len(list(box.list_sessions())), 2)
        self.assertGreaterEqual(len(faulty.seen("GET")), before + 1)

    def test_while_stopping(self):
        """a call during a stop waits for it and goes on in the next session"""
        box = self.box()
        box.fs.write_bytes("big", os.urandom(8 << 20))
        path = f"/v2/sandboxes/sessions/{box.current_session_id}"
        stopping = in_thread(self.client().get_sandbox(name=box.name).stop)
        # A command that began before would be ended by the stop.
        self.until("the stop to begin", lambda: self.raw("GET", path)[1]["session"]["status"] != "running")
        text = run(box, "wc -c < big").stdout
        stopping()
        self.assertEqual(text.strip(), str(8 << 20))

    def test_get_or_create(self):
        """get_or_create makes a sandbox once, and starts it again when it is stopped"""
        client, name = self.client(), unique("goc")
        first, created = client.get_or_create_sandbox(name=name)
        self.assertTrue(created)
        self.addCleanup(lambda: client.get_sandbox(name=name).destroy(delete_orphan_snapshots=True))
        first.fs.write_text("f", "x")
        first.stop()
        second, created = client.get_or_create_sandbox(name=name)
        self.assertFalse(created)
        self.assertEqual(second.status, "running")
        self.assertEqual(second.fs.read_text("f"), "x")
        second.stop()
        snapshot = second.current_snapshot_id
        client.get_snapshot(snapshot_id=snapshot).delete()
        third, created = client.get_or_create_sandbox(name=name)
        self.assertTrue(created, "its snapshot is gone: made anew")
        self.assertFalse(third.fs.exists("f"))
        self.assertNotEqual(second.current_session_id, first.current_session_id)

    def test_get_does_not_resume(self):
        """get reports a stopped sandbox and leaves it so; resume starts it"""
        client = self.client()
        box = self.box(client)
        box.stop()
        self.assertEqual(client.get_sandbox(name=box.name).status, "stopped")
        with client.resume_sandbox(name=box.name) as resumed:
            self.assertEqual(client.get_sandbox(name=box.name).status, "running")
            self.assertEqual(run(resumed, "echo up").stdout, "up\n")

    def test_stop_during_a_run(self):
        """a stop during a blocking run is a stream error, and the run is never repeated"""
        faulty = self.faulty()
        box = self.box(self.client(faulty.url))
        started = threading.Event()
        running = in_thread(
            lambda: box.run_process("sh", ["-c", "echo x >> ran; sleep 600"], on_start=lambda _: started.set(), stdout=-3, stderr=-3)
        )
        self.assertTrue(started.wait(60))
        self.until("the command to have begun", lambda: self.client().get_sandbox(name=box.name).fs.exists("ran"))
        self.client().get_sandbox(name=box.name).stop()
        with self.assertRaises(SandboxStreamError) as raised:
            running()
        self.assertEqual(raised.exception.code, "sandbox_stopped")
        self.assertEqual(box.fs.read_text("ran"), "x\n")

    def test_extend(self):
        """a session's time grows by what was asked"""
        box = self.box(persistent=False, execution_time_limit=300)
        done = box.extend_execution_time_limit(60)
        self.assertEqual(done.execution_time_limit, timedelta(seconds=360))

    def test_second_stop(self):
        """a second stop is no error"""
        box = self.box()
        box.stop()
        box.stop()
        self.assertEqual(box.status, "stopped")


class Copies(Case):
    def test_snapshot(self):
        """a snapshot ends the session; sandboxes start from it; it can be shown, listed and deleted"""
        client = self.client()
        box = self.box(client)
        box.fs.write_text("f", "kept")
        snapshot = box.snapshot()
        self.assertEqual(snapshot.status, "created")
        self.assertEqual(self.client().get_sandbox(name=box.name).status, "stopped")
        copy = self.box(client, source=SnapshotSource(snapshot_id=snapshot.id))
        self.assertEqual(copy.fs.read_text("f"), "kept")
        self.assertIn(snapshot.id, [s.id for s in client.query_snapshots(name=box.name)])
        self.assertEqual(client.get_snapshot(snapshot_id=snapshot.id).id, snapshot.id)
        self.assertGreater(snapshot.size_bytes, 0)
        copy.destroy(delete_orphan_snapshots=True)
        snapshot.delete()
        self.assertEqual(snapshot.status, "deleted")
        with self.refused(410, "snapshot_not_found"):
            client.create_sandbox(source=SnapshotSource(snapshot_id=snapshot.id))

    def test_snapshot_expiration(self):
        """a snapshot lives as long as it was told"""
        box = self.box()
        self.assertIsNone(box.snapshot(expiration=0).expires_at)
        snapshot = box.snapshot(expiration=timedelta(days=1))
        self.assertAlmostEqual(snapshot.expires_at - snapshot.created_at, 86_400_000, delta=60_000)

    def test_fork(self):
        """a fork has the files and the configuration of its source, and its own afterwards"""
        client = self.client()
        box = self.box(client, env={"A": "1", "B": "2"}, tags={"t": "1"})
        box.fs.write_text("f", "source")
        box.stop()
        fork = client.fork_sandbox(source_sandbox=box.name, name=unique("fork"), env={"A": "other"})
        self.addCleanup(fork.destroy, delete_orphan_snapshots=True)
        self.assertEqual(fork.fs.read_text("f"), "source")
        self.assertEqual(dict(fork.tags), {"t": "1"})
        self.assertEqual(run(fork, "echo $A$B").stdout, "other\n")
        fork.fs.write_text("f", "fork")
        self.assertEqual(box.fs.read_text("f"), "source")
        with self.refused(404):
            client.fork_sandbox(source_sandbox=unique("nobody"))

    def test_lists(self):
        """lists go through all pages, filter and sort"""
        client = self.client()
        prefix = unique("l")
        names = [f"{prefix}-{i}" for i in range(5)]
        for i, name in enumerate(names):
            self.box(client, name=name, persistent=False, tags={"odd": str(i % 2)})
        newest = [s.name for s in client.query_sandboxes(page_size=2)]
        self.assertEqual([n for n in newest if n.startswith(prefix)], names[::-1])
        query = SandboxQueryByName(name_prefix=prefix, sort_order="asc")
        self.assertEqual([s.name for s in client.query_sandboxes(query=query, page_size=2)], names)
        query = SandboxQueryByCreatedAt(tag=TagFilter(key="odd", value="1"), sort_order="asc")
        self.assertEqual([s.name for s in client.query_sandboxes(query=query)], [names[1], names[3]])

    def test_sessions_of_one(self):
        """a sandbox's sessions and snapshots are its own"""
        client = self.client()
        one, other = self.box(client), self.box(client)
        one.stop()
        run(one, "true")
        ids = [s.id for s in one.list_sessions()]
        self.assertEqual(len(ids), 2)
        self.assertEqual(ids[0], one.current_session_id, "newest first")
        self.assertEqual(len(list(other.list_sessions())), 1)
        self.assertEqual(len(list(one.list_snapshots())), 1)
        self.assertEqual(list(other.list_snapshots()), [])
        self.assertEqual([s.id for s in client.query_sessions(name=one.name, page_size=1, sort_order="asc")], ids[::-1])


class Readme(Case):
    def test_readme(self):
        """the example of the README runs as printed"""
        text = (ROOT / "README.md").read_text()
        (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
        done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stdout), (0, "a\nb\n\n"), done.stderr)


class Variables(Case):
    def test_env_tls_of_another_engine(self):
        """bivouac env --tls of an engine without --clients-tls is an error that says what to start"""
        done = support.engine.told("--tls")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("serve --clients-tls", done.stderr)
