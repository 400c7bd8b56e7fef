"""Files: scenario 98, and both ways in and out."""

import hashlib
import os

from vercel.sandbox import (
    SandboxFilesystemCommandError,
    SandboxFilesystemWriteError,
    SandboxPathNotFoundError,
    SandboxUploadSizeMismatchError,
)

from support import BoxCase


class Files(BoxCase):
    def setUp(self):
        super().setUp()
        self.fs = self.sandbox.fs

    def test_s98_missing(self):
        """S98 what is not there is told as that"""
        with self.assertRaises(SandboxPathNotFoundError) as raised:
            self.fs.read_bytes("no/such")
        self.assertEqual(raised.exception.cause.status_code, 404)
        with self.assertRaises(SandboxPathNotFoundError):
            self.fs.read_text("/no/such")
        with self.assertRaises(SandboxPathNotFoundError), self.fs.open("no", "rb") as file:
            file.read()
        self.assertFalse(self.fs.exists("no/such"))
        self.assertFalse(self.fs.is_file("no/such") or self.fs.is_dir("no/such"))

    def test_s98_folders(self):
        """S98 folders: nested, again, one level only"""
        self.fs.mkdir("deep/er/and/deeper")
        self.fs.mkdir("deep/er/and/deeper")
        self.assertTrue(self.fs.is_dir("deep/er/and/deeper"))
        self.assertEqual(self.sh("stat -c %U deep/er"), self.sh("id -un"))
        with self.assertRaises(Exception) as raised:
            self.fs.mkdir("not/there", recursive=False)
        self.assertEqual(getattr(raised.exception, "status_code", None) or raised.exception.cause.status_code, 400)
        self.fs.mkdir("flat", recursive=False)
        self.assertTrue(self.fs.exists("flat") and not self.fs.is_file("flat"))

    def test_both_ways(self):
        """text and bytes go in and come out as they were"""
        for path in ("plain", "a/new/folder/f", "/tmp/absolute", "ünï/çödé 漢", f"long/{'n' * 120}/{'m' * 120}", "with space/'quotes'"):
            data = os.urandom(3_000)
            self.fs.write_bytes(path, data)
            self.assertEqual(self.fs.read_bytes(path), data, path)
        self.fs.write_text("text", "ä\r\n漢")
        self.assertEqual(self.fs.read_text("text"), "ä\r\n漢")
        self.fs.write_bytes("plain", b"")
        self.assertEqual(self.fs.read_bytes("plain"), b"")
        self.fs.write_text("rel", "there", cwd="/tmp")
        self.assertEqual(self.fs.read_text("rel", cwd="/tmp"), "there")
        self.assertEqual(self.sh("cat /tmp/rel"), "there")

    def test_modes_and_owner(self):
        """mode bits are kept; what was written is the user's"""
        self.fs.write_text("run.sh", "#!/bin/sh\necho ran\n", mode=0o755)
        self.assertEqual(self.sh("./run.sh"), "ran\n")
        self.fs.write_text("secret", "x", mode=0o600)
        self.assertEqual(self.sh("stat -c '%a %U' secret"), f"600 {self.sh('id -un')}")

    def test_large(self):
        """twenty megabytes of noise, whole and in pieces"""
        data = os.urandom(20_000_000)
        self.fs.write_bytes("large", data)
        self.assertEqual(self.sh("sha256sum large").split()[0], hashlib.sha256(data).hexdigest())
        whole = hashlib.sha256()
        with self.fs.open("large", "rb") as file:
            while piece := file.read(100_001):
                whole.update(piece)
        self.assertEqual(whole.hexdigest(), hashlib.sha256(data).hexdigest())

    def test_streams(self):
        """files that are written and read in pieces"""
        with self.fs.open("stream", "wb") as file:
            for i in range(100):
                file.write(bytes([i]) * 1000)
        self.assertEqual(self.fs.read_bytes("stream"), b"".join(bytes([i]) * 1000 for i in range(100)))
        with self.fs.open("lines", "w", permissions=0o640) as file:
            file.write("one\nzwei ä\n")
        with self.fs.open("lines") as file:
            self.assertEqual(list(file), ["one\n", "zwei ä\n"])
        self.assertEqual(self.sh("stat -c %a lines"), "640\n")

    def test_size_that_was_promised(self):
        """a stream that ends early is no file"""
        with self.assertRaises(SandboxUploadSizeMismatchError):
            with self.fs.open("short", "wb", size=10) as file:
                file.write(b"12345")
        self.assertFalse(self.fs.exists("short"))
        with self.fs.open("exact", "wb", size=5) as file:
            file.write(b"12345")
        self.assertEqual(self.fs.read_bytes("exact"), b"12345")

    def test_batch(self):
        """many files in one request"""
        faulty = self.faulty()
        fs = self.through(faulty).fs
        with fs.batch(cwd="/tmp/batch") as batch:
            for i in range(50):
                batch.write_text(f"d{i % 5}/f{i}", str(i), mode=0o644)
        self.assertEqual(len(faulty.seen("/fs/write")), 1)
        request = faulty.seen("/fs/write")[0]
        self.assertEqual(request.headers.get("Content-Type") or request.headers.get("content-type"), "application/gzip")
        self.assertEqual(self.sh("cat /tmp/batch/d*/f* | wc -c"), "90\n")

    def test_listing(self):
        """a folder's entries and their kinds"""
        self.sh("mkdir -p ls/d && touch ls/f 'ls/ö x' && ln -s f ls/l && mkfifo ls/p")
        found = {entry.path: entry.kind for entry in self.fs.listdir("ls")}
        self.assertEqual(found, {"d": "directory", "f": "file", "ö x": "file", "l": "symlink", "p": "other"})
        with self.assertRaises(SandboxFilesystemCommandError):
            self.fs.listdir("no")

    def test_remove_and_rename(self):
        """remove and rename, and what they refuse"""
        self.sh("mkdir -p rm/d && touch rm/f rm/d/g")
        self.fs.rename("rm/f", "rm/h")
        self.assertTrue(self.fs.is_file("rm/h") and not self.fs.exists("rm/f"))
        with self.assertRaises(SandboxFilesystemCommandError):
            self.fs.remove("rm/d")
        with self.assertRaises(SandboxFilesystemCommandError):
            self.fs.remove("rm/no")
        self.fs.remove("rm/no", missing_ok=True)
        self.fs.remove("rm", recursive=True)
        self.assertFalse(self.fs.exists("rm"))

    def test_refusals(self):
        """what cannot be written or read says so"""
        self.sh("mkdir -p folder")
        with self.assertRaises(SandboxFilesystemWriteError) as raised:
            self.fs.write_text("folder", "x")
        self.assertEqual(raised.exception.cause.status_code // 100, 4)
        with self.assertRaises(Exception) as raised:
            self.fs.read_bytes("folder")
        self.assertEqual(getattr(raised.exception, "status_code", None) or raised.exception.cause.status_code, 400)
