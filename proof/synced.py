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
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from celery_idempotent.stores import open_store
from celery_idempotent.testing.contract import a_record
from proof.targets import Site

__all__ = ["is_synced_first", "is_synced_first_by_its_writer"]

_CALLS = "trace=fsync,fdatasync,read,recvfrom,recvmsg,pwrite64,write,writev,sendto,sendmsg"
_SYNC = re.compile(r"(fsync|fdatasync)\(")
_ANSWER = re.compile(r"(write|writev|sendto|sendmsg)\((\d+)")
_SYNCED = re.compile(r"= 0$")

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
        with _traced(site.server.pids) as calls:
            assert store.swap(record, None) == record
    asked = next(index for index, call in enumerate(calls) if record.revision in call)
    thread = calls[asked].split()[0]
    own = [call for call in calls[asked:] if call.startswith(f"{thread} ")]
    connection = re.search(r"\((\d+)", own[0])
    assert connection is not None
    answered = next(
        index for index, call in enumerate(own) if (found := _ANSWER.search(call)) and found[2] == connection[1]
    )
    return any(map(_is_sync, own[:answered]))


def is_synced_first_by_its_writer(site: Site) -> bool:
    """Whether a process that writes a record into a file syncs it after its last write and before it goes on."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _SWAP, site.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    with _traced([writer.pid]) as calls:
        said, _ = writer.communicate("!")
    done = next(index for index, call in enumerate(calls) if "write(1, " in call and said.strip() in call)
    last_write = max(index for index, call in enumerate(calls[:done]) if "pwrite64(" in call)
    return any(map(_is_sync, calls[last_write:done]))


def _is_sync(call: str) -> bool:
    return bool(_SYNC.search(call) and _SYNCED.search(call))


@contextmanager
def _traced(pids: Sequence[int]) -> Iterator[list[str]]:
    """The system calls of the processes within the block; filled in at its end."""
    calls: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "calls"
        attached = [argument for pid in pids for argument in ("-p", str(pid))]
        tracer = subprocess.Popen(
            ["strace", "-f", "-s", "10000", "-o", str(out), "-e", _CALLS, *attached],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _await(tracer, len(pids))
            yield calls
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.communicate()
        calls += out.read_text(errors="replace").splitlines()


def _await(tracer: "subprocess.Popen[str]", processes: int) -> None:
    assert tracer.stderr is not None
    for _ in range(processes):
        said = tracer.stderr.readline()
        if "attached" not in said:
            raise RuntimeError(f"strace: {said}")
