"""Whether a write is on disk before it is acknowledged: what killing a process cannot show.

``strace`` watches the server while one record is written. Between reading the request and sending the answer the
server must have synced a file. SQLite has no server: there the writer itself is watched, from its first write to
the end of the swap.
"""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from celery_idempotent.stores import open_store
from celery_idempotent.testing.contract import a_record
from lab.proof.targets import Site

__all__ = ["is_synced_first", "is_synced_first_by_its_writer"]

_CALLS = "trace=fsync,fdatasync,read,recvfrom,recvmsg,pwrite64,write,writev,sendto,sendmsg"
_DESCRIPTOR = re.compile(r"\w+\((\d+)")
_SYNCED = re.compile(r"(?:fsync|fdatasync)\(\d+\) += 0$")
_ANSWER = re.compile(r"(?:write|writev|sendto|sendmsg)\((\d+)")

_SWAP = """
import os, sys
from celery_idempotent.stores import open_store
from celery_idempotent.testing.contract import a_record
store = open_store(sys.argv[1])
os.write(1, b"ready\\n")
os.read(0, 1)
record = a_record()
assert store.swap(record, None) == record
os.write(1, record.revision.encode() + b"\\n")
"""


def is_synced_first(site: Site) -> bool:
    """Whether the server of a store syncs a file between the request to write a record and the answer."""
    assert site.server is not None
    record = a_record()
    with closing(open_store(site.url)) as store:
        store.swap(a_record(), None)  # connects
        with _traced(site.server.pids) as threads:
            assert store.swap(record, None) == record
    calls = _naming(record.revision, threads)
    request = next(index for index, call in enumerate(calls) if record.revision in call)
    connection = _DESCRIPTOR.search(calls[request])
    assert connection is not None, calls[request]
    answer = next(index for index, call in enumerate(calls) if index > request and _answers(call, connection[1]))
    return any(map(_SYNCED.match, calls[request:answer]))


def is_synced_first_by_its_writer(site: Site) -> bool:
    """Whether a process that writes a record into a file syncs it after its last write and before it goes on."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _SWAP, site.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    with _traced([writer.pid]) as threads:
        revision, _ = writer.communicate("!")
    calls = _naming(revision.strip(), threads)
    done = next(index for index, call in enumerate(calls) if _answers(call, "1"))
    last_write = max(index for index, call in enumerate(calls[:done]) if call.startswith("pwrite64("))
    return any(map(_SYNCED.match, calls[last_write:done]))


def _naming(revision: str, threads: Iterable[Sequence[str]]) -> Sequence[str]:
    """The calls of the thread that met the revision."""
    return next(calls for calls in threads if any(revision in call for call in calls))


def _answers(call: str, descriptor: str) -> bool:
    found = _ANSWER.match(call)
    return found is not None and found[1] == descriptor


@contextmanager
def _traced(pids: Sequence[int]) -> Iterator[list[Sequence[str]]]:
    """The system calls of each thread of the processes within the block; filled in at its end."""
    threads: list[Sequence[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "calls"
        attached = [argument for pid in pids for argument in ("-p", str(pid))]
        tracer = subprocess.Popen(
            ["strace", "-ff", "-s", "10000", "-o", str(out), "-e", _CALLS, *attached],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _await(tracer, len(pids))
            yield threads
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.communicate()
        threads += [path.read_text(errors="replace").splitlines() for path in Path(folder).iterdir()]


def _await(tracer: "subprocess.Popen[str]", processes: int) -> None:
    assert tracer.stderr is not None
    for _ in range(processes):
        said = tracer.stderr.readline()
        if "attached" not in said:
            raise RuntimeError(f"strace: {said}")
