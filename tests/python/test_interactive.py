"""Interactive sessions: scenario 99."""

import time

from support import DEADLINE, BoxCase


class Interactive(BoxCase):
    def read_until(self, pty, words):
        """Reads on until the terminal has shown the words."""
        shown, end = b"", time.monotonic() + DEADLINE
        while words not in shown:
            self.assertLess(time.monotonic(), end, shown)
            piece = pty.stream.read(65536)
            self.assertTrue(piece, shown)
            shown += piece
        return shown

    def test_s99_output_and_exit_code(self):
        """S99 output bytes arrive, and the exit code"""
        line = "stty size; printf 'caf\\303\\251 \\377\\n'; exit 9"
        with self.sandbox.open_interactive("sh", ["-c", line], cols=99, rows=33) as pty:
            shown = b""
            while piece := pty.stream.read(65536):
                shown += piece
            self.assertEqual(pty.wait(), 9)
        self.assertEqual(shown, b"33 99\r\ncaf\xc3\xa9 \xff\r\n")

    def test_s99_typing_and_size(self):
        """S99 what is typed is echoed, and a resize is seen"""
        with self.sandbox.open_interactive("sh", env={"PS1": "ready> "}) as pty:
            self.read_until(pty, b"ready> ")
            pty.stream.write(b"echo $((40+2))\r")
            self.read_until(pty, b"42\r\n")
            pty.resize(132, 50)
            pty.stream.write(b"sleep 0.5; stty size; exit 3\r")
            self.read_until(pty, b"50 132\r\n")
            self.assertEqual(pty.wait(), 3)
