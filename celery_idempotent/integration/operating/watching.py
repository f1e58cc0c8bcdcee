"""What leaves the process while a task's body runs: Python's audit events tell it, and nothing is patched.

The events know requests of :mod:`http.client`, and so of urllib, requests, urllib3 and botocore, mails of
:mod:`smtplib`, and programs that are started. Of whatever else uses sockets of Python (httpx, aiohttp, redis-py,
PyMySQL) they know that it connects, and of clients in C (libpq, gRPC) nothing. An audit hook stays for the life of the
process, so the first watcher adds it; it looks at nothing while nobody watches.
"""

import hashlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from traceback import walk_stack
from types import FrameType
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from celery import Celery, Task, current_task

from celery_idempotent.engine import attempt
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.operation import is_forgotten
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

_HEAD = re.compile(rb"([A-Z]+) ((?:/|https?://|\*)\S*) HTTP/1\.[01](\r\n.*?)??\r\n\r\n", re.DOTALL)
_KEY = re.compile(rb"\n[^:\n]*(idempoten|paypal-request-id)[^:\n]*:", re.IGNORECASE)

_EVENTS = ("http.client.send", "smtplib.send", "subprocess.Popen", "socket.connect")
_SILENT = ("celery_idempotent.stores",)
_TOLD_APART = ("http.client", "smtplib", "urllib3.connection")
"""Whose connections are seen by what they send."""


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
    #: The path of a request of HTTP, without its query.
    target: str
    #: Whether a header carried an idempotency key.
    has_key: bool

    @property
    def is_read(self) -> bool:
        """Whether it changes nothing, as far as HTTP promises."""
        return self.method in {"GET", "HEAD", "OPTIONS", "TRACE"}

    @property
    def alike(self) -> tuple[object, ...]:
        """What is told once: not the target, which may name a customer or a charge."""
        return self.task, self.path, self.line, self.step, self.method, self.host, self.has_key

    def __str__(self) -> str:
        place = f"in step {self.step!r}" if self.step else "outside any step"
        if self.target:  # of HTTP
            place += " and " + ("with an idempotency key" if self.has_key else "without Idempotency-Key")
        return f"{self.task}, {shown(self.path)}:{self.line}: {self.method} {self.host}{self.target} {place}"


def shown(path: str) -> str:
    """A path as people read it."""
    return path.removeprefix(f"{os.getcwd()}/")


class SeenEffects(list[SeenEffect]):
    """What was seen, once per line; what only reads is in :attr:`reads`."""

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
        task = current_task._get_current_object() if _watchers else None
        if task is not None:
            with suppress(Exception):  # what a stranger's object raises must not reach the call that is heard
                _tell(task, str(self), sys._getframe(1))
        return False


_watchers: dict[int, SeenEffects] = {}


@cache
def _listen() -> None:
    # The hook is the dictionary's own method, which compares keys of one hash only: no line of Python runs at any
    # other event. In the midst of sys.settrace(), Python 3.11 takes another thread's call for one of the same thread.
    heard: dict[str, None] = {_Heard(event): None for event in _EVENTS}
    sys.addaudithook(heard.get)


@contextmanager
def watch_effects(thread: int | None = None) -> Iterator[SeenEffects]:
    """Tell what the bodies of tasks send within the block, by line: ``with watch_effects() as seen: task.apply(...)``.

    Each line is told once: its task, path and line, the step, method, host and target, and whether it carried an
    idempotency key. What went out without a step or a key, a second attempt repeats. What changes nothing, by its HTTP
    method, is in ``seen.reads``. Only what the thread of a body does is seen; ``thread`` is the one to watch alone.
    """
    _listen()
    seen = SeenEffects(thread)
    _watchers[id(seen)] = seen
    try:
        yield seen
    finally:
        del _watchers[id(seen)]


def _tell(task: Task, event: str, frame: FrameType) -> None:
    """Tell watchers what the nearest line of the task's package sent, unless it was by way of this library's stores."""
    request = _request(event, frame.f_locals)
    if request is None:
        return
    method, host, target, has_key = request
    silent = _SILENT if method != "CONNECT" else (*_SILENT, *_TOLD_APART)
    frames = [each for each, _ in walk_stack(frame)]
    modules = [str(each.f_globals.get("__name__")) for each in frames]
    package = type(task).__module__.partition(".")[0]
    nearest = next((at for at, each in enumerate(modules) if each.partition(".")[0] == package), None)
    if nearest is None or any(each.startswith(silent) for each in modules[:nearest]):
        return
    place = frames[nearest].f_code.co_filename, frames[nearest].f_lineno
    step = next((each.f_locals["step"].name for each in frames if each.f_code is attempt._called.__code__), None)
    for each in [*_watchers.values()]:
        each.see(SeenEffect(task.name, *place, step, method, host, target, has_key))


def _request(event: str, given: Mapping[str, Any]) -> tuple[str, str, str, bool] | None:
    """The method, host, target and whether there is a key, by the variables of the function that raised the event."""
    match event:
        case "http.client.send" if isinstance(given["data"], bytes | bytearray):
            return _of_http(given["self"], given["data"])
        case "smtplib.send" if given["s"][:5].lower() == b"data\r":
            return "MAIL", str(given["self"]._host), "", False
        case "subprocess.Popen":
            return "RUN", os.fsdecode(given["executable"] or given["args"][0]), "", False  # arguments may be secret
        case "socket.connect":
            address = next(given[name] for name in ("address", "sa", "sockaddr", "socket_address") if name in given)
            host = _host(*address[:2]) if isinstance(address, tuple) else os.fsdecode(address)
            return "CONNECT", host, "", False
    return None


def _of_http(connection: Any, data: bytes | bytearray) -> tuple[str, str, str, bool] | None:
    head = _HEAD.match(data)
    if head is None:
        return None  # the body of a request whose head was sent before
    method, target = head[1].decode(), urlsplit(head[2].decode("latin-1"))
    if tunnel := getattr(connection, "_tunnel_host", None):
        host = _host(tunnel, connection._tunnel_port)
    else:
        host = target.netloc.rpartition("@")[2] or _host(connection.host, connection.port)
    return method, host, _SECRET.sub("...", target.path) or "/", _KEY.search(head[3] or b"") is not None


def _host(name: object, port: object) -> str:
    return f"{name}" if port in (80, 443) else f"{name}:{port}"


_due: dict[tuple[int, str], float] = {}
"""By store and key, when a note is to be written again."""


@contextmanager
def noting(app: Celery) -> Iterator[None]:
    """Note in the store what the thread's body sends within the block: each line's effects once an hour, for a day."""
    with watch_effects(threading.get_ident()) as seen:
        try:
            yield
        finally:
            try:
                for each in (*seen, *seen.reads):
                    _note(each, app.main or "", runtime_of(app).store)
            except Exception as error:  # noqa: BLE001 - nothing of this is the task's
                say(logger.warning, "effects_not_noted", reason=repr(error))


def _note(seen: SeenEffect, app: str, store: Store) -> None:
    digest = hashlib.sha256(json.dumps([app, *seen.alike]).encode()).hexdigest()
    key, now = f"{EFFECTS}:{digest}", store.now()
    if now < _due.get((id(store), key), 0 if len(_due) < _MOST else inf):
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
    _due[id(store), key] = now + _HOUR


def noted(store: Store) -> list[SeenEffect]:
    """What workers saw in the last day: what may be repeated first, by task and line."""
    now, seen = store.now(), list[SeenEffect]()
    for record in store.scan(task=EFFECTS):
        if not is_forgotten(record, now):
            with suppress(TypeError, ValueError):  # it is somebody else's, or another version's
                seen.append(SeenEffect(**json.loads(record.result or "")))
    return sorted(seen, key=lambda each: (each.is_read, each.has_key, each.task, each.path, each.line))
