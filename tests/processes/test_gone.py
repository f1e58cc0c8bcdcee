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


def test_living_process_is_not_gone_and_a_dead_one_is() -> None:
    """Also before its parent has asked for its end: it cannot do anything any more."""
    assert not is_gone(this_process())
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
    assert (this_process(), is_gone(name)) == ("", False)


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


def test_child_has_a_name_of_its_own_and_a_thread_has_not() -> None:
    """A fork inherits what its parent knows of itself, and is another process."""
    parent, (read, write), names = this_process(), os.pipe(), []
    child = os.fork()
    if child == 0:
        os.write(write, this_process().encode())
        os._exit(0)
    os.waitpid(child, 0)
    name = os.read(read, 200).decode()
    thread = threading.Thread(target=lambda: names.append(this_process()))
    thread.start()
    thread.join()
    assert name not in ("", parent)
    assert (is_gone(name), is_gone(parent), names) == (True, False, [parent])


def test_pid_that_was_given_again_is_another_process_and_what_cannot_be_read_is_not_gone() -> None:
    """Another machine's, whatever its pid; a damaged record, or a pid or a beginning that is none."""
    machine, pid, begun = this_process().split(":")
    assert is_gone(f"{machine}:{pid}:1")
    pids = [f"{machine}:{each}:{begun}" for each in ("x", "-1", "9" * 19, "9" * 5000)]
    beginnings = [f"{machine}:{pid}:{each}" for each in ("x", "", "9" * 5000)]
    others = ["", ":", "x", "a:1:1", "a:b:c", "::", "machine:-1:5", f"{'0' * 16}:{pid}:{begun}"]
    assert [each for each in (*others, *pids, *beginnings) if is_gone(each)] == []


def _name_under(root: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> str:
    """This process's name, where ``/proc`` tells that of the machine."""
    told: dict[str, Any] = {"boot": "b", "pids": "pid:[1]", "times": "time:[1]", "shown": os.getpid(), **given}
    (root / "sys/kernel/random").mkdir(parents=True)
    (root / "sys/kernel/random/boot_id").write_text(f"{told['boot']}\n")
    (root / "self").symlink_to(str(told["shown"]))
    for pid in {os.getpid(), told["shown"]}:
        (root / f"{pid}/ns").mkdir(parents=True)
        for name, space in (("pid", told["pids"]), ("time", told["times"])):
            if space is not None:
                (root / f"{pid}/ns/{name}").symlink_to(space)
        (root / f"{pid}/stat").write_text(Path("/proc/self/stat").read_text())
    monkeypatch.setattr(processes, "_PROC", root)
    processes._forget()
    return this_process()


def test_machine_is_told_by_boot_namespaces_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pid after a reboot, or in another container, is another process of which nothing is known."""
    others: list[dict[str, Any]] = [{}, {"boot": "c"}, {"pids": "pid:[2]"}, {"times": "time:[2]"}, {"times": None}]
    names = [_name_under(tmp_path / str(place), monkeypatch, **each) for place, each in enumerate(others)]
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="a twin that was restored and renamed"))
    names.append(_name_under(tmp_path / "twin", monkeypatch))
    machines = {each.split(":")[0] for each in names}
    assert len(machines) == len(names)
    assert "" not in machines


@pytest.mark.parametrize(
    "given", [{"boot": ""}, {"pids": None}, {"shown": 1}], ids=["boot", "namespace", "another /proc"]
)
def test_machine_that_does_not_tell_leaves_the_lease(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process names nothing, and says of nobody that it is gone."""
    there = this_process()
    assert not _name_under(tmp_path / "p", monkeypatch, **given)
    assert not is_gone(there)
    assert not is_gone(f":{os.getpid()}:1")


def test_process_whose_beginning_is_hidden_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide the processes of other users; that one exists, the kernel itself says."""
    own = _name_under(tmp_path / "p", monkeypatch)
    (tmp_path / "p" / str(os.getpid()) / "stat").unlink()
    assert not is_gone(own.rpartition(":")[0] + ":1")
