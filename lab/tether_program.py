"""Run a program as the child of this process, which `tether` ties to its parent; ends with the program's status."""

from __future__ import annotations

import signal
import subprocess
import sys


def main(user: str, *argv: str) -> int:
    """Run `argv`, as `user` unless that is empty, until it ends."""
    program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, user=user or None)
    signal.signal(signal.SIGTERM, lambda *_: program.terminate())
    return program.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
