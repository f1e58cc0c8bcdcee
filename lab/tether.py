"""Run a module (`python -m` style) in a process that cannot outlive its parent.

The parent holds the other end of the child's standard input. However the parent ends, SIGKILL included,
the kernel closes that pipe; the child reads the end of file and kills its process group. No clean-up code has
to run.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
_PROGRAM = "a program"


def start(
    module: str, *args: str, log: IO[bytes] | int = subprocess.DEVNULL, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m module args...`, tied to this process, in a process group of its own.

    The own group keeps a terminal's Ctrl-C away from the child: the parent decides what stops first.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "lab.tether", module, *args],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
        cwd=ROOT,
        start_new_session=True,
    )


def start_program(
    *argv: str, log: IO[bytes] | int = subprocess.DEVNULL, user: str | None = None
) -> subprocess.Popen[bytes]:
    """The same of a program, run as ``user`` if one is given; its parent ends with the program's status."""
    return start(_PROGRAM, user or "", *argv, log=log)


def stop(child: subprocess.Popen[bytes], patience: float = 5.0) -> None:
    """Ask `child` to end, wait `patience` seconds, then kill its whole process group."""
    child.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
    finally:
        kill(child)


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kill `child` and its whole process group now."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin:
        child.stdin.close()


def unwind_on_signals() -> None:
    """Have SIGINT and SIGTERM leave this program's `with` blocks, which stop servers and delete folders."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell switches off for background jobs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end_with_parent() -> None:
    """Have this process, one of multiprocessing's, end when its parent does, however that ends."""
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: parent.join() or os._exit(1), daemon=True).start()


def _die_with_parent() -> None:
    os.read(0, 1)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _run(user: str, *argv: str) -> int:
    program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, user=user or None)
    signal.signal(signal.SIGTERM, lambda *_: program.terminate())
    return program.wait()


if __name__ == "__main__":
    threading.Thread(target=_die_with_parent, daemon=True).start()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == _PROGRAM:
        sys.exit(_run(*sys.argv[1:]))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
