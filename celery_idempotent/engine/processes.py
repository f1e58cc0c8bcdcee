"""Which process this is, and whether another one is gone: provably, or not at all.

A process is told by the machine it runs on, its pid and when it began. The machine is the boot of its kernel, its pid
and time namespaces and its name; where one of them cannot be read, or differs, nothing is known of the process, and
only its lease counts. A pid that is given again belongs to a process that began at another time, which counts from the
boot and so does not depend on a clock that people set (proc_pid_stat(5), field 22).

What this cannot see: two copies of one running machine, restored from one snapshot, have the same boot, pids and
beginnings; give them names of their own. AWS Lambda can make such copies, so there nothing is known of a process. And
one that was checkpointed and is restored within the same boot has its pid and another beginning.
"""

import os
import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


def this_process() -> str:
    """This process, for others to tell whether it is gone; empty where that could not be told."""
    return _named(os.getpid())


@cache
def _named(pid: int) -> str:
    stat = _stat(pid)
    return f"{_machine()}:{pid}:{stat.begun}" if stat and _machine() else ""


def _forget() -> None:
    # A child can have the pid of an ancestor that is gone, and other namespaces than its parent.
    _named.cache_clear()
    _machine.cache_clear()


os.register_at_fork(after_in_child=_forget)


def is_gone(process: str) -> bool:
    """Whether ``process``, as :func:`this_process` named it, has certainly ended; in doubt it has not."""
    machine, _, rest = process.partition(":")
    named = _PID_AND_BEGINNING.fullmatch(rest)
    if not machine or machine != _machine() or named is None:
        return False
    pid, begun = named.groups()
    try:
        os.kill(int(pid), 0)  # /proc can be mounted so that it hides the processes of other users
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it exists, and is somebody else's; or that is no pid
    stat = _stat(int(pid))
    return stat is not None and (stat.is_dead or stat.begun != int(begun))


@cache
def _machine() -> str:
    """What a pid means something on; empty where ``/proc`` does not tell, or tells of other pids than ours."""
    if "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
        return ""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        pids = os.readlink(_PROC / "self/ns/pid")
        shown = os.readlink(_PROC / "self")
    except OSError:
        return ""
    if not boot or shown != str(os.getpid()):
        return ""
    try:
        times = os.readlink(_PROC / "self/ns/time")  # what beginnings are counted in
    except OSError:
        times = ""  # Linux before 5.6 has one for all
    return sha256("\0".join((boot, pids, times, os.uname().nodename)).encode()).hexdigest()[:16]


class _Stat(NamedTuple):
    """What the kernel says of a process."""

    #: Dead, and only its parent has not asked for its end yet: with one thread left, which is not one any more.
    is_dead: bool
    #: Its beginning, in ticks since the boot.
    begun: int


def _stat(pid: int) -> _Stat | None:
    """None if it cannot be read."""
    try:
        # The name before it, in parentheses, can hold anything.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return _Stat(fields[_STATE] in "ZX" and fields[_THREADS] == "1", int(fields[_BEGUN]))
    except (OSError, ValueError, IndexError):
        return None


_PID_AND_BEGINNING = re.compile("([0-9]{1,19}):([0-9]{1,19})")

_STATE, _THREADS, _BEGUN = 0, 17, 19
"""Places in it, from the state on: fields 3, 20 and 22 of proc_pid_stat(5)."""
