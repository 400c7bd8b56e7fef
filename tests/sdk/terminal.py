"""Runs a program in a terminal, for tests: python3 pty.py PROGRAM ARGS…

Reads lines of JSON: {"keys": text} types, {"size": [cols, rows]} resizes. What the terminal shows goes to
standard output as it is. Ends with the program's exit code, or 128 and the number of its signal.
"""

import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios


def resize(fd, cols, rows):
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def main():
    child, master = pty.fork()
    if child == 0:
        # The size is there before the program looks.
        resize(0, 120, 40)
        os.execvp(sys.argv[1], sys.argv[1:])
    orders, pending = sys.stdin.fileno(), b""
    watched = [master, orders]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if master in ready:
            try:
                shown = os.read(master, 65536)
            except OSError:
                shown = b""
            if not shown:
                break
            os.write(1, shown)
        if orders in ready:
            more = os.read(orders, 65536)
            if not more:
                watched.remove(orders)
            pending += more
            *lines, pending = pending.split(b"\n")
            for line in lines:
                order = json.loads(line)
                if "size" in order:
                    resize(master, *order["size"])
                if "keys" in order:
                    os.write(master, order["keys"].encode())
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


main()
