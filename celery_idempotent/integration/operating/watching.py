"""What leaves the process while a task's body runs: Python's audit events tell it, and nothing is patched.

The events know requests of :mod:`http.client`, and so of urllib, requests, urllib3 and botocore, mails of
:mod:`smtplib`, and programs that are started. Of whatever else uses sockets of Python (httpx, aiohttp, redis-py,
PyMySQL) they know that it connects, and of clients in C (libpq, gRPC) nothing. An audit hook stays for the life of the
process, so the first watcher adds it; it costs nothing while nobody watches.
"""

import hashlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from celery import Task, current_task

from celery_idempotent.engine import attempt
from celery_idempotent.printable import say
from celery_idempotent.protocol.record import BLANK, Status
from celery_idempotent.protocol.store import Store

logger = logging.getLogger(__name__)

EFFECTS = "celery_idempotent.effects"
"""The task of the records that tell what was seen."""

_DAY = 86_400_000
_HOUR = 3_600_000
_MOST = 1_000
"""How many different notes a process takes: hosts may be customers' own."""

_SECRET = re.compile(r"[^/]*[:;][^/]*|[^/]{24,}")
"""Parts of a path that may be a token."""

_HEAD = 65_536
"""Bytes of a request in which its head ends."""

_READS = {"GET", "HEAD", "OPTIONS", "TRACE"}
_OTHERS = {"MAIL", "RUN", "CONNECT"}
"""What is not HTTP."""

_KEY_HEADERS = ("idempoten", "paypal-request-id")


@dataclass(frozen=True, slots=True)
class SeenEffect:
    """Something that left the process, and the line of the author's that sent it. No body, no query, no credential."""

    task: str
    path: str
    line: int
    #: The step in whose call it happened; None outside of any.
    step: str | None
    #: Of HTTP; ``MAIL``; ``RUN`` for a program; ``CONNECT`` where nobody can see what is sent.
    method: str
    host: str
    #: The path of a request, without its query.
    target: str
    #: Whether a header carried an idempotency key.
    has_key: bool

    @property
    def is_read(self) -> bool:
        """Whether it changes nothing, as far as HTTP promises."""
        return self.method in _READS

    @property
    def alike(self) -> tuple[object, ...]:
        """What is told once: not the target, which may name a customer or a charge."""
        return self.task, self.path, self.line, self.step, self.method, self.host, self.has_key

    def __str__(self) -> str:
        place = f"in step {self.step!r}" if self.step else "outside any step"
        if self.method not in _OTHERS:
            place += " and " + ("with an idempotency key" if self.has_key else "without Idempotency-Key")
        return f"{self.task}, {shown(self.path)}:{self.line}: {self.method} {self.host}{self.target} {place}"


def shown(path: str) -> str:
    """A path as people read it."""
    return path.removeprefix(f"{os.getcwd()}/")


class SeenEffects(list[SeenEffect]):
    """What was seen, once per line. What only reads is in :attr:`reads`.

    ``thread`` is the one whose bodies count; None for all.
    """

    def __init__(self, thread: int | None = None) -> None:
        super().__init__()
        self.reads: list[SeenEffect] = []
        self._thread = thread
        self._known: set[tuple[object, ...]] = set()

    def see(self, seen: SeenEffect) -> None:
        """Keep it, unless the line has sent the like before."""
        if self._thread in (None, threading.get_ident()) and seen.alike not in self._known:
            self._known.add(seen.alike)
            (self.reads if seen.is_read else self).append(seen)


class _Heard(str):
    """The name of an event, which looks at the frame that raised what it is compared with."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, event: object) -> bool:
        _hear(str(self), sys._getframe(1))
        return False


# The hook is the dictionary's own method, which compares keys of one hash only: no line of Python runs at any other
# event. In the midst of sys.settrace(), Python 3.11 takes another thread's call for a second one of the same thread.
_heard: dict[str, None] = {}
_watchers: tuple[SeenEffects, ...] = ()
_changing = threading.Lock()
_has_hook = False


@contextmanager
def watch_effects(thread: int | None = None) -> Iterator[SeenEffects]:
    """Tell what the bodies of tasks send within the block, by line: ``with watch_effects() as seen: task.apply(...)``.

    Each line is told once: its task, path and line, the step, method, host and target, and whether it carried an
    idempotency key. What went out without a step or a key, a second attempt repeats. What changes nothing, by its HTTP
    method, is in ``seen.reads``. Only what the thread of a body does is seen; ``thread`` is the one to watch alone.
    """
    seen = SeenEffects(thread)
    _watch(lambda: (*_watchers, seen))
    try:
        yield seen
    finally:
        _watch(lambda: tuple(each for each in _watchers if each is not seen))


def _watch(change: Callable[[], tuple[SeenEffects, ...]]) -> None:
    global _watchers, _has_hook
    with _changing:
        _watchers = change()
        if _watchers and not _heard:
            _heard.update({_Heard(event): None for event in _EVENTS})
        elif not _watchers:
            _heard.clear()
        if not _has_hook:
            sys.addaudithook(_heard.get)
            _has_hook = True


def _hear(event: str, frame: FrameType) -> None:
    task = current_task._get_current_object()
    if task is None:
        return
    try:
        request = _EVENTS[event](frame.f_locals)
        seen = None if request is None else _seen(task, request, frame)
    except Exception:  # noqa: BLE001 - what a stranger's object raises must not reach the call that is heard
        return
    if seen is not None:
        for each in _watchers:
            each.see(seen)


Request = tuple[str, str, str, bool]


def _of_http(given: Mapping[str, Any]) -> Request | None:
    connection, data = given["self"], given["data"]
    if not isinstance(data, bytes | bytearray):
        return None
    first, *headers = bytes(data[:_HEAD]).partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    if re.fullmatch(r"[A-Z]+ (/|https?://|\*)\S* HTTP/1\.[01]", first) is None:
        return None  # the body of a request whose head was sent before
    method, target, _ = first.split(" ")
    names = [each.partition(":")[0].lower() for each in headers]
    has_key = any(part in name for name in names for part in _KEY_HEADERS)
    if tunnel := getattr(connection, "_tunnel_host", None):
        host = _host(tunnel, connection._tunnel_port)
    else:
        host = urlsplit(target).netloc.rpartition("@")[2] or _host(connection.host, connection.port)
    return method, host, _SECRET.sub("...", urlsplit(target).path), has_key


def _of_mail(given: Mapping[str, Any]) -> Request | None:
    data = given["s"]
    command = data if isinstance(data, bytes) else data.encode()
    return ("MAIL", str(given["self"]._host), "", False) if command[:5].lower() == b"data\r" else None


def _of_program(given: Mapping[str, Any]) -> Request:
    return "RUN", os.fsdecode(given["executable"] or given["args"][0]), "", False  # arguments may be secret


def _of_connection(given: Mapping[str, Any]) -> Request:
    """By the names that the standard library and drivers give to the address."""
    address = next(given[name] for name in ("address", "sa", "sockaddr", "socket_address") if name in given)
    return "CONNECT", _host(*address[:2]) if isinstance(address, tuple) else os.fsdecode(address), "", False


def _host(name: object, port: object) -> str:
    return f"{name}" if port in (80, 443) else f"{name}:{port}"


# What raises each event keeps in its variables what it is about: http/client.py, smtplib.py, subprocess.py and the
# callers of socket.connect().
_EVENTS: dict[str, Callable[[Mapping[str, Any]], Request | None]] = {
    "http.client.send": _of_http,
    "smtplib.send": _of_mail,
    "subprocess.Popen": _of_program,
    "socket.connect": _of_connection,
}
_TOLD_APART = {"http.client", "smtplib", "urllib3.connection"}
"""Whose connections are seen by what they send."""


def _seen(task: Task, request: Request, frame: FrameType | None) -> SeenEffect | None:
    """The nearest line of the package that the task is in, and the nearest step that it is called by, if any."""
    package = type(task).__module__.partition(".")[0]
    step: str | None = None
    line: tuple[str, int] | None = None
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if line is None:
            if module.startswith("celery_idempotent.stores") or (request[0] == "CONNECT" and module in _TOLD_APART):
                return None
            line = (frame.f_code.co_filename, frame.f_lineno) if module.partition(".")[0] == package else None
        if step is None and frame.f_code is attempt._called.__code__:
            step = frame.f_locals["step"].name
        frame = frame.f_back
    if line is None:
        return None
    method, host, target, has_key = request
    return SeenEffect(task.name, *line, step, method, host, target, has_key)


_written: dict[tuple[int, str], int] = {}


@contextmanager
def noting(app: str, open_store: Callable[[], Store]) -> Iterator[None]:
    """Write what the thread's body sends within the block to the store: each line's effects once an hour, for a day.

    Whatever becomes of that, the task is not told.
    """
    with watch_effects(threading.get_ident()) as seen:
        try:
            yield
        finally:
            try:
                for each in (*seen, *seen.reads):
                    _note(each, app, open_store())
            except Exception as error:  # noqa: BLE001 - nothing of this is the task's
                say(logger.warning, "effects_not_noted", reason=repr(error))


def _note(seen: SeenEffect, app: str, store: Store) -> None:
    what = json.dumps([app, *seen.alike])
    key, now = f"{EFFECTS}:{hashlib.sha256(what.encode()).hexdigest()}", store.now()
    written = _written.get((id(store), key))
    if (written is None and len(_written) >= _MOST) or (written is not None and now - written < _HOUR):
        return
    before = store.get(key)
    record = BLANK.but(
        key=key,
        status=Status.COMPLETED,
        revision=uuid4().hex,
        created_at=now,
        updated_at=now,
        task=EFFECTS,
        app=app,
        result=json.dumps(asdict(seen)),
        content_type="application/json",
        expires_at=(now + _DAY) // 1000,
    )
    store.swap(record, before.revision if before else None)
    _written[id(store), key] = now


def noted(store: Store) -> list[SeenEffect]:
    """What workers saw in the last day: what may be repeated first, by task and line."""
    now = store.now() // 1000
    found = []
    for record in store.scan(task=EFFECTS):
        with suppress(TypeError, ValueError):  # it is somebody else's, or another version's
            found += [SeenEffect(**json.loads(record.result or ""))] if (record.expires_at or 0) > now else []
    return sorted(found, key=lambda seen: (seen.is_read, seen.has_key, seen.task, seen.path, seen.line))
