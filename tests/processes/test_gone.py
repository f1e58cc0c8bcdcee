"""Whether a process is gone: said only where it is certain."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent.engine import processes
from celery_idempotent.engine.processes import is_gone, this_process
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What is kept of this machine is read again."""
    processes._forget()
    yield
    processes._forget()


@contextmanager
def _child(act: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A child that tells its name and then acts; killed at the end."""
    script = f"from celery_idempotent.engine.processes import this_process\nprint(this_process(), flush=True)\n{act}"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


def test_this_process_is_not_gone() -> None:
    """It can name itself, and it is alive."""
    assert this_process()
    assert not is_gone(this_process())


def test_living_process_is_not_gone_and_a_dead_one_is() -> None:
    """Before its parent has asked for its end, too: it cannot do anything any more."""
    with _child("import time; time.sleep(60)") as (child, name):
        assert name != this_process()
        assert not is_gone(name)
        child.send_signal(signal.SIGSTOP)
        assert not is_gone(name)
        child.kill()
        wait_until(lambda: is_gone(name), "a zombie is dead")
    assert is_gone(name)


def test_process_of_lambda_is_never_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machines can be copies of one, in which a pid of another one means nothing."""
    with _child("") as (child, name):
        child.wait()
    assert is_gone(name)
    processes._forget()
    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "charge")
    assert this_process() == ""
    assert not is_gone(name)


def test_process_whose_first_thread_has_ended_is_not_gone() -> None:
    """It looks like a zombie, and its other threads go on."""
    act = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with _child(act) as (child, name):
        stat = Path(f"/proc/{child.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "its first thread has ended")
        assert not is_gone(name)
        child.kill()
        wait_until(lambda: is_gone(name), "all its threads have ended")


def test_child_has_a_name_of_its_own() -> None:
    """A fork inherits what its parent knows of itself, and is another process."""
    parent, (read, write) = this_process(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, this_process().encode())
        os._exit(0)
    os.waitpid(child, 0)
    name = os.read(read, 200).decode()
    assert name not in ("", parent)
    assert is_gone(name)
    assert not is_gone(parent)


def test_name_does_not_depend_on_the_thread() -> None:
    """A claim made in one thread names the same process as one made in another."""
    names: list[str] = []
    thread = threading.Thread(target=lambda: names.append(this_process()))
    thread.start()
    thread.join()
    assert names == [this_process()]


def _changed(part: int, value: str) -> str:
    parts = this_process().split(":")
    parts[part] = value
    return ":".join(parts)


def test_pid_that_was_given_again_is_another_process() -> None:
    """It began at another time."""
    assert is_gone(_changed(2, "1"))


@pytest.mark.parametrize(
    "name",
    ["", ":", "x", "a:1:1", "a:b:c", "::", "machine:-1:5"],
)
def test_what_cannot_be_read_is_not_gone(name: str) -> None:
    """A record of somebody else's, or a damaged one."""
    assert not is_gone(name)


@pytest.mark.parametrize(
    ("part", "value"),
    [(0, "0" * 16), (1, "x"), (1, "-1"), (2, "x"), (2, ""), (1, "9" * 19), (1, "9" * 5000), (2, "9" * 5000)],
)
def test_name_with_a_part_of_another_kind_is_not_gone(part: int, value: str) -> None:
    """Another machine's, whatever its pid; or a pid or a beginning that is none."""
    assert not is_gone(_changed(part, value))


def _proc(
    root: Path,
    *,
    boot: str = "b",
    pids: str | None = "pid:[1]",
    times: str | None = "time:[1]",
    shown: int | None = None,
) -> None:
    (root / "sys/kernel/random").mkdir(parents=True)
    (root / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
    (root / "self").symlink_to(str(os.getpid() if shown is None else shown))
    for pid in {os.getpid(), os.getpid() if shown is None else shown}:
        own = root / str(pid)
        (own / "ns").mkdir(parents=True)
        if pids is not None:
            (own / "ns/pid").symlink_to(pids)
        if times is not None:
            (own / "ns/time").symlink_to(times)
        (own / "stat").write_text(Path("/proc/self/stat").read_text())


def _name_under(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(processes, "_PROC", root)
    processes._forget()
    return this_process()


def test_machine_is_told_by_its_boot_its_namespaces_and_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pid after a reboot, or in another container, is another process of which nothing is known."""
    differences: tuple[dict[str, Any], ...] = (
        {},
        {"boot": "c"},
        {"pids": "pid:[2]"},
        {"times": "time:[2]"},
        {"times": None},
    )
    machines = set()
    for place, different in enumerate(differences):
        _proc(tmp_path / str(place), **different)
        machines.add(_name_under(tmp_path / str(place), monkeypatch).split(":")[0])
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="a twin that was restored and renamed"))
    machines.add(_name_under(tmp_path / "0", monkeypatch).split(":")[0])
    assert len(machines) == len(differences) + 1
    assert "" not in machines


@pytest.mark.parametrize(
    "given",
    [{"boot": ""}, {"pids": None}, {"shown": 1}],
    ids=["no boot id", "no pid namespace", "/proc of another namespace"],
)
def test_machine_that_does_not_tell_leaves_the_lease(
    given: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process names nothing, and says of nobody that it is gone."""
    there = this_process()
    _proc(tmp_path / "p", **given)  # type: ignore[arg-type]
    assert not _name_under(tmp_path / "p", monkeypatch)
    assert not is_gone(there)
    assert not is_gone(f":{os.getpid()}:1")


def test_process_whose_beginning_is_hidden_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide the processes of other users; that one exists, the kernel itself says."""
    _proc(tmp_path / "p")
    own = _name_under(tmp_path / "p", monkeypatch)
    (tmp_path / "p" / str(os.getpid()) / "stat").unlink()
    assert not is_gone(own.rpartition(":")[0] + ":1")
