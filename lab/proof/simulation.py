"""An hour of a fleet in seconds: the library in Celery's own requests and tracer, in virtual time, on a virtual SQS.

Store, broker and network are virtual, and so is the worker: it receives messages, hands them to its pool processes and
stops as Celery's does. All else is what production runs: claims, heartbeats, the keeper, postponement, recovery.
"""

import logging
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import log2
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.exceptions import Reject, Retry
from celery.signals import task_received
from celery.utils.imports import symbol_by_name
from celery.worker.state import task_reserved
from kombu.exceptions import OperationalError
from kombu.transport import TRANSPORT_ALIASES, virtual

from celery_idempotent import IdempotentTask, Policy, current_attempt
from celery_idempotent.engine import claim, delivery
from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.errors import OutcomeUnknown, StoreUnavailable
from celery_idempotent.integration.broker import holding, recovery
from celery_idempotent.integration.headers import CONFLICTS_HEADER
from celery_idempotent.integration.messages import postpone
from celery_idempotent.integration.settings import Runtime, StoreHandle
from celery_idempotent.integration.task import guard
from celery_idempotent.integration.task import task as task_module
from celery_idempotent.protocol.operation import Written, decide
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreWrapper
from lab.proof.table import Row
from lab.proof.verdicts import FINAL, PROMISES, Promise
from lab.proof.virtual import EPOCH, Machine, Process, Thread, World, here, monotonic, wait

LEASE = VISIBILITY = 60.0
_RETURNED_IN = 10.0
"""Seconds for which kombu hides what it gives back."""
_POOL = 2
_LOSS = 0.005
"""Of so many requests, and of so many replies, nobody hears again."""
_SETTINGS = {
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "task_publish_retry": False,
    "broker_pool_limit": 500,
    "broker_transport_options": {"visibility_timeout": VISIBILITY},
}
STRIKES = ("worker killed", "process killed", "warm", "cold", "suspended", "date", "store", "broker")
"""What happens to a worker: deaths, shutdowns, a machine that stands or gets another date, and what it cannot reach."""


class NoAnswer(OSError):
    """The request is lost, or late, or the reply is."""


class Host(Process):
    """A process of a worker, and what the library has once in each. ``runs`` is the key of its body."""

    def __init__(self, fleet: "Fleet", machine: Machine, worker: str = "") -> None:
        super().__init__(machine)
        self.fleet, self.name, self.runs, self.lost_at = fleet, str(len(fleet.hosts)), "", 0.0
        self.worker = worker or self.name
        self.opened, self.heartbeat = StoreHandle(None, Store(fleet.store), Breaker("virtual")), Heartbeat()
        fleet.hosts[self.name] = self

    def ask(self, server: str, act: Callable[[], Any]) -> Any:
        """What ``act`` gives, there; ``NoAnswer`` where the network keeps it."""
        draw, answer = self.fleet.draw, None
        wait(draw.uniform(0.001, 0.02))
        fate = draw.random()
        is_sent = fate > _LOSS and not self.machine.hindered(server, self.fleet.world.now)
        if is_sent:
            answer = act()
            wait(draw.uniform(0.001, 0.02))
        elif fate < _LOSS / 2:
            self.fleet.world.after(draw.uniform(0, 20), act)
        if not is_sent or fate > 1 - _LOSS:
            self.lost_at = self.fleet.world.now
            wait(2)
            raise NoAnswer
        return answer


class Store(StoreWrapper):
    """The store, as whoever asks reaches it."""

    def get(self, key: str) -> Record | None:
        return self._asked(partial(self.store.get, key))

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._asked(partial(here().fleet.swap, here(), new, expected))

    def _asked(self, act: Callable[[], Any]) -> Record | None:
        try:
            found: Record | None = here().ask("store", act)
        except NoAnswer as error:
            raise StoreUnavailable("virtual", "request", "no answer") from error
        return found


@dataclass(frozen=True)
class Sent:
    """A message that waits until it is visible, and how often it was received."""

    raw: Any
    visible_at: float
    received: int = 0


class Queue:
    """The messages at SQS, by what it calls a receipt, and the worker that has each."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet, self._tags = fleet, map(str, count())
        self.messages: dict[str, Sent] = {}
        self.holders: dict[str, Worker] = {}
        self._coming: list[tuple[float, str]] = []

    def send(self, raw: Any) -> None:
        """Take a message, perhaps twice, and perhaps show it late."""
        draw = self._fleet.draw
        self._fleet.note_sent(raw["headers"])
        for _ in range(1 + (draw.random() < 0.01)):
            late = draw.uniform(0, 30) if draw.random() < 0.02 else 0
            self._put(next(self._tags), Sent(raw, 0), raw["properties"].get("DelaySeconds", 0) + late)

    def receive(self) -> str | None:
        while self._coming and self._coming[0][0] <= self._fleet.world.now:
            visible_at, tag = heappop(self._coming)
            if tag in self.messages and self.messages[tag].visible_at == visible_at:
                sent, received = self.messages.pop(tag), next(self._tags)
                self._fleet.note_redelivery(tag, sent)
                self._put(received, replace(sent, received=sent.received + 1), VISIBILITY)
                return received
        return None

    def hide(self, tag: str, seconds: float) -> bool:
        """Show it in so many seconds, if it is in flight still."""
        is_in_flight = tag in self.messages and self.messages[tag].visible_at > self._fleet.world.now
        if is_in_flight:
            self._put(tag, self.messages[tag], seconds)
        return is_in_flight

    def _put(self, tag: str, sent: Sent, seconds: float) -> None:
        self.messages[tag] = hidden = replace(sent, visible_at=self._fleet.world.now + seconds)
        heappush(self._coming, (hidden.visible_at, tag))


class Sqs(virtual.Channel):
    """A channel of kombu's to SQS, and boto's client in one with it."""

    visibility_timeout = VISIBILITY
    predefined_queues: Mapping[str, Any] = {}

    def sqs(self, queue: Any) -> "Sqs":
        return self

    def _put(self, queue: str, message: Any, **_: Any) -> None:
        here().ask("broker", partial(here().fleet.queue.send, message))

    def _size(self, queue: str) -> int:
        return 0

    def get_queue_attributes(self, **_: Any) -> Any:
        return here().ask("broker", lambda: {"Attributes": {"VisibilityTimeout": VISIBILITY}})

    def change_message_visibility_batch(self, *, Entries: Any, **_: Any) -> Any:  # noqa: N803
        hide = here().fleet.queue.hide

        def change() -> Any:
            gone = [each["Id"] for each in Entries if not hide(each["ReceiptHandle"], each["VisibilityTimeout"])]
            return {"Failed": [{"Id": each, "Code": "MessageNotInflight"} for each in gone]}

        return here().ask("broker", change)

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        self._let_go(delivery_tag, partial(here().fleet.queue.messages.pop, delivery_tag, None))

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        give_back = partial(here().fleet.queue.hide, delivery_tag, _RETURNED_IN)
        self._let_go(delivery_tag, give_back) if requeue else self.basic_ack(delivery_tag)

    def _let_go(self, tag: str, act: Callable[[], Any]) -> None:
        here().fleet.queue.holders.pop(tag, None)
        here().ask("broker", act)


class Transport(virtual.Transport):
    """What kombu connects by."""

    Channel = Sqs
    driver_type = "sqs"
    connection_errors = recoverable_connection_errors = (NoAnswer,)


TRANSPORT_ALIASES["virtual"] = f"{__name__}:Transport"


class Worker:
    """A main process, which receives and holds messages, and pool processes, which execute them."""

    def __init__(self, fleet: "Fleet", slot: int, machine: Machine) -> None:
        self.fleet, self.slot, self.machine, self.stops = fleet, slot, machine, ""
        self.main = Host(fleet, machine)
        self.free = [self._child() for _ in range(_POOL)]
        self.running: dict[Host, Any] = {}
        self.waiting: deque[Any] = deque()
        # What the keeper looks for.
        self.app, self.connection = fleet.app, fleet.app.connection_for_read()
        self.task_consumer = SimpleNamespace(channel=self.connection.channel())
        self.keeper = holding.Keeper(self)
        Thread(self._run, process=self.main).start()

    def _child(self) -> Host:
        return Host(self.fleet, self.machine, self.main.worker)

    def _run(self) -> None:
        self.keeper.start(self)
        while not self.stops:
            if len(self.running) + len(self.waiting) >= 2 * _POOL or not self._receive():
                wait(self.fleet.draw.uniform(0.5, 1.5))
        for request in list(self.running.values()) if self.stops == "cold" else ():
            request.cancel(self)
        while self.running:
            wait(0.5)
        self.keeper.shutdown(self)
        returned = [tag for tag, holder in self.fleet.queue.holders.items() if holder is self]
        for tag in returned:
            with suppress(NoAnswer):
                self.task_consumer.channel.basic_reject(tag, requeue=True)
        wait(self.fleet.draw.uniform(5, 20))
        self.fleet.note_shutdown(self, returned)
        self.fleet.world.after(0, partial(self.fleet.end, self))

    def _receive(self) -> bool:
        tag = None
        with suppress(NoAnswer):
            tag = self.main.ask("broker", self.fleet.queue.receive)
        if tag is not None:
            self.fleet.queue.holders[tag] = self
            request = self._request(tag, self.fleet.queue.messages[tag].raw)
            task_received.send(sender=self, request=request)
            task_reserved(request)
            self.waiting.append(request)
            self._begin()
        return tag is not None

    def _request(self, tag: str, raw: Any) -> Any:
        info = {**raw["properties"]["delivery_info"], "sqs_queue": "celery"}
        properties = {**raw["properties"], "delivery_info": info, "delivery_tag": tag}
        message = virtual.Message({**raw, "properties": properties}, self.task_consumer.channel)
        task, options = self.app.tasks[raw["headers"]["task"]], {"hostname": "celery@fleet", "app": self.app}
        settle = {"on_ack": message.ack_log_error, "on_reject": message.reject_log_error}
        return symbol_by_name(task.Request)(message, task=task, connection_errors=(NoAnswer,), **options, **settle)

    def _begin(self) -> None:
        while self.free and self.waiting and not self.stops:
            self.waiting.popleft().execute_using_pool(self)

    def apply_async(self, target: Any, args: Any, accept_callback: Any, callback: Any, **_: Any) -> None:
        """As a pool of Celery's: have a process that is free execute a request."""
        child = self.free.pop()
        self.running[child] = callback.__self__
        thread = Thread(self._execute, (child, partial(target, *args, app=self.app), callback), process=child)
        accept_callback(thread, monotonic())
        thread.start()

    def _execute(self, child: Host, act: Callable[[], Any], callback: Any) -> None:
        began, returned = self.fleet.world.now, None
        with suppress(SystemExit):  # it was told to end
            returned = act()
        self.fleet.note_delivery(child, began, returned)
        child.runs = ""
        del self.running[child]
        self.free.append(child)
        if returned:
            Thread(callback, (returned,), process=self.main).start()
        Thread(self._begin, process=self.main).start()

    def terminate_job(self, thread: Thread, signal: int) -> None:
        self.fleet.world.after(0, lambda: thread.dead or thread.throw(SystemExit()))

    def lose(self) -> None:
        """Have a pool process killed, with what it runs."""
        for child, request in list(self.running.items())[:1]:
            child.kill()
            del self.running[child]
            self.free.append(self._child())
            try:
                raise WorkerLostError("killed")
            except WorkerLostError:
                Thread(request.on_failure, (ExceptionInfo(),), process=self.main).start()

    def kill(self) -> None:
        hosts = [self.main, *self.free, *self.running]
        for each in hosts:
            each.is_dead = True
        for each in hosts:
            each.kill()
        self.keeper._let_go(self)


@dataclass(frozen=True)
class Operation:
    """One intended effect: what is promised of it, and the seconds of its body before and after it."""

    promise: Promise
    before: float
    after: float
    effects: list[str] = field(default_factory=list)


class Fleet:
    """Everything there is, what happens to it, and what is seen."""

    def __init__(self, seed: object, *, workers: int = 50, minutes: float = 60, operations: int = 1000) -> None:
        self.world, self.length = World(seed), minutes * 60
        self.draw = self.world.random
        self.store, self.queue = MemoryStore(lambda: round((EPOCH + self.world.now) * 1000)), Queue(self)
        self.workers: list[Worker | None] = [None] * workers
        self.hosts: dict[str, Host] = {}
        self.operations = [self._operation() for _ in range(operations)]
        self.app = self._app()
        self.counts: Counter[str] = Counter()
        self.history: list[str] = []
        self.problems: list[str] = []
        self._owners: dict[str, Host] = {}
        self._unfinished: Counter[str] = Counter()
        self._redelivered: set[str] = set()
        self._first_sent: dict[str, float] = {}

    def _operation(self) -> Operation:
        longest = self.draw.choices((2, 30, 600), (5, 3, 2))[0]
        before, after = self.draw.uniform(0, longest / 2), self.draw.uniform(0, longest / 2)
        return Operation(self.draw.choice(list(PROMISES.values())), before, after)

    def _app(self) -> Celery:
        app = Celery("fleet", set_as_current=False, broker="virtual://", config_source=_SETTINGS)

        def body(number: int) -> int:
            return self._act(number)

        for each in PROMISES.values():
            options = {"base": IdempotentTask, "idempotent": each.policy, "shared": False, "lazy": False}
            app.task(name=each.name, **options)(body)
        return app

    def _act(self, number: int) -> int:
        """The body."""
        operation, attempt = self.operations[number], current_attempt()
        here().runs = attempt.key
        wait(operation.before)
        if operation.promise.keyed:
            attempt.step("charge", lambda step: operation.effects.append(step.key))
        else:
            operation.effects.append(str(len(operation.effects)))
        self._note(f"{here().name} has the effect of {number}")
        wait(operation.after)
        return number

    def run(self) -> "Fleet":
        """All of it, and then what it takes until every message is settled, or two hours."""
        with self.world.replacing(), _by_process():
            client = Host(self, Machine(self.world))
            for slot in range(len(self.workers)):
                self._start(slot, Machine(self.world))
                self._strike_later(slot)
            for number in range(len(self.operations)):
                first = self.draw.uniform(0, self.length)
                for copy in range(self.draw.choices((1, 2, 3), (4, 4, 2))[0]):
                    publisher = Thread(self._publish, (number, copy), process=client)
                    self.world.after(first + copy * self.draw.uniform(0, 60), publisher.start)
            self.world.run(self.length)
            while self.queue.messages and self.world.now < self.length + 7200:
                self.world.run(self.world.now + 60)
            self._audit()
            for worker in filter(None, self.workers):
                worker.kill()
        return self

    def _publish(self, number: int, copy: int) -> None:
        task = self.app.tasks[self.operations[number].promise.name]
        while True:
            try:
                task.apply_async((number,), task_id=f"{number}.{copy}")
                return
            except OperationalError:  # perhaps it was sent
                wait(1)

    def _start(self, slot: int, machine: Machine) -> None:
        self.workers[slot] = Worker(self, slot, machine)

    def end(self, worker: Worker) -> None:
        """End a worker, if it has not ended, and start another one, perhaps on another machine."""
        if self.workers[worker.slot] is worker:
            worker.kill()
            self.workers[worker.slot] = None
            other = Machine(self.world, counts_suspend=self.draw.random() < 0.7)
            machine = self.draw.choice((worker.machine, other))
            self.world.after(self.draw.uniform(1, 60), partial(self._start, worker.slot, machine))

    def _strike_later(self, slot: int) -> None:
        self.world.after(self.draw.expovariate(1 / 200), partial(self._strike, slot))

    def _strike(self, slot: int) -> None:
        worker, seconds, what = self.workers[slot], self.draw.uniform(1, 150), self.draw.choice(STRIKES)
        if self.world.now > self.length:
            return
        self._strike_later(slot)
        if worker is None or worker.machine.resumes_at > self.world.now:
            return
        self._note(f"worker {slot} is struck: {what}")
        self.counts[what] += 1
        match what:
            case "worker killed":
                self.end(worker)
            case "process killed":
                worker.lose()
            case "warm" | "cold":
                worker.stops = what
                self.world.after(self.draw.uniform(10, 900), partial(self.end, worker))
            case "date":
                worker.machine.date_error += self.draw.uniform(-3600, 3600)
            case _:
                worker.machine.hinder(what, seconds)

    def _note(self, what: str) -> None:
        self.history.append(f"{self.world.now:.3f} {what}")

    def _problem(self, what: str, about: object) -> None:
        self._note(f"BROKEN {what}: {about}")
        self.problems.append(what)

    def swap(self, by: Host, new: Record, expected: str | None) -> Record | None:
        """What the store does; each write that wins is looked at."""
        before, stored = self.store.get(new.key), self.store.swap(new, expected)
        if stored is new:
            self._note(f"{by.name} writes {new.key[-6:]} {new.status} attempt {new.attempts}")
            self._owners.setdefault(new.owner, by)
            if before is not None and before.status is Status.IN_PROGRESS:
                self._note_next(by, before, new)
        return stored

    def _note_next(self, by: Host, before: Record, new: Record) -> None:
        """Look at what follows on a claim: where another than its holder wrote that, its body must have ended."""
        holder, is_takeover = self._owners[before.owner], new.owner != before.owner
        self.counts["takeovers"] += is_takeover
        self._unfinished[new.key] += is_takeover or new.status is Status.RELEASED
        until = before.lease_until / 1000 - EPOCH
        is_living = by is not holder and holder.runs == new.key and not holder.is_dead
        if is_living and holder.machine.hindered("store", until - LEASE, until) < LEASE / 3:
            self._problem("a living body was taken over", new.key)

    def note_redelivery(self, tag: str, sent: Sent) -> None:
        self.counts["redeliveries"] += sent.received > 0
        holder, until, task_id = self.queue.holders.get(tag), sent.visible_at, sent.raw["headers"]["id"]
        self._redelivered.update([task_id.partition(".")[0]] if sent.received else [])
        is_living = holder is not None and not holder.main.is_dead and holder.stops != "cold"
        if holder and is_living and holder.machine.hindered("broker", until - VISIBILITY, until) < VISIBILITY / 3:
            self._problem("a message was not held", task_id)

    def note_sent(self, headers: Mapping[str, Any]) -> None:
        conflicts, now = headers.get(CONFLICTS_HEADER, 0), self.world.now
        age = now - self._first_sent.setdefault(headers["id"], now)
        self.counts["conflicts"] += conflicts > 0
        if conflicts > 8 + 2 * log2(1 + age) + age / 15:
            self._problem("asked too often", f"{headers['id']} {conflicts} times in {age:.0f} s")

    def note_delivery(self, child: Host, began: float, returned: Any) -> None:
        self.counts["deliveries"] += 1
        now = self.world.now
        hindered = sum(child.machine.hindered(each, began, now) for each in ("store", "broker"))
        if not (child.runs or hindered) and now - began > 20:
            self._problem("a process was kept from others", f"{now - began:.0f} s")
        error = returned[1].exception if returned and returned[0] else None
        error = error.exc if isinstance(error, ExceptionWithTraceback) else error
        if error is not None and not isinstance(error, Retry | Reject | OutcomeUnknown):
            self._problem("a delivery failed", repr(error))

    def note_shutdown(self, worker: Worker, returned: list[str]) -> None:
        """Look at what a worker leaves behind that ended when it was told to."""
        now = self.world.now
        for sent in filter(None, map(self.queue.messages.get, returned)):
            if sent.visible_at > now + _RETURNED_IN and worker.main.lost_at < now - 30:
                self._problem("a message was given back and hidden", sent.raw["headers"]["id"])
        for record in self.store.scan(status=Status.IN_PROGRESS):
            holder = self._owners[record.owner]
            if holder.worker == worker.main.worker and not holder.is_dead and holder.lost_at < now - 30:
                self._problem("a claim was kept at shutdown", record.key)

    def _audit(self) -> None:
        for number, each in enumerate(self.operations):
            key = self.app.tasks[each.promise.name].idempotency_key_for(number)
            record = self.store.get(key)
            status, promise = record.status if record else None, each.promise
            effects = len(set(each.effects)) if promise.keyed else len(each.effects)
            is_faulted = str(number) in self._redelivered or self._unfinished[key] > 0
            self.counts.update(tasks=1, faulted=is_faulted, unknown=status is Status.UNKNOWN)
            self.counts[f"effects_{min(effects, 2)}"] += 1
            is_poison = record is not None and record.takeovers == promise.policy.max_takeovers
            if status not in FINAL or (status is Status.UNKNOWN and not (promise.doubtful or is_poison)):
                self._problem("stuck", f"{number} {status}")
            elif effects < (status is not Status.UNKNOWN) or effects > (promise.most or effects):
                self._problem("too many effects, or too few", f"{number} {effects} {status}")
            elif len(each.effects) > 1 + self._unfinished[key]:
                self._problem("an effect was repeated without a cause", number)


@contextmanager
def _by_process() -> Iterator[None]:
    """Within the block, what the library has once in a process belongs to the process of whoever asks."""
    beats = {name: (lambda attempt, name=name: getattr(here().heartbeat, name)(attempt)) for name in ("start", "stop")}
    doubles: list[tuple[Any, str, Any]] = [
        (Runtime, "opened", property(lambda runtime: here().opened)),
        (guard, "heartbeat", SimpleNamespace(**beats)),
        (task_module, "this_process", lambda: here().name),
        (delivery, "is_gone", _is_gone),
        (recovery, "is_gone", _is_gone),
        (
            recovery,
            "_place",
            lambda task_id: zlib.crc32(f"{here().worker} {task_id}".encode()) % len(recovery._stopped),
        ),
    ]
    with ExitStack() as stack:
        for whole, name, double in doubles:
            stack.enter_context(patch.object(whole, name, double))
        stack.enter_context(patch.dict(holding.HeldMessages.__init__.__kwdefaults__, clock=monotonic))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        yield


def _is_gone(name: str) -> bool:
    """As far as a process can tell: of others on its machine."""
    other = here().fleet.hosts.get(name)
    return other is not None and other.machine is here().machine and other.is_dead


def _waiting(*_: Any, **__: Any) -> int:
    wait(30)
    return 1000


def _deciding(
    see: Callable[[Any], Any] = lambda record: record, ask: Callable[[Any], Any] = lambda asked: asked
) -> Any:
    """The protocol's decision on another record, or about another operation, than it is asked for."""
    return lambda record, asked, *args, **nonces: decide(record and see(record), ask(asked), *args, **nonces)


def _rerunning(record: Record) -> Record:
    is_first = record.status is Status.COMPLETED and record.attempts == 1
    return record.but(status=Status.RELEASED) if is_first else record


FLAWS: Mapping[str, tuple[str, Any, str, Any]] = {
    "heartbeat renews nothing": ("a living body was taken over", claim.Claim, "renew", lambda self: None),
    "leases are ignored": (
        "a living body was taken over",
        claim,
        "decide",
        _deciding(lambda each: each.but(lease_until=0)),
    ),
    "keeper holds nothing": ("a message was not held", holding.HeldMessages, "look", lambda self: 1.0),
    "keeper goes on": ("a message was given back and hidden", holding.Keeper, "shutdown", lambda *_: None),
    "claims outlast their worker": ("a claim was kept at shutdown", claim.Claim, "release", lambda self: Written()),
    "delays do not grow": ("asked too often", Policy, "conflict_delay_ms", lambda *_, **__: 5000),
    "conflicts wait in the worker": ("a process was kept from others", Policy, "conflict_delay_ms", _waiting),
    "conflicts are dropped": ("stuck", postpone, "_postpone", lambda *_: None),
    "outcomes do not count": ("an effect was repeated without a cause", claim, "decide", _deciding(_rerunning)),
    "refuse is forgotten": (
        "too many effects, or too few",
        claim,
        "decide",
        _deciding(ask=lambda asked: asked._replace(policy=PROMISES["at least once"].policy)),
    ),
}
"""By name, a mistake: what it is seen by, and where it is put."""


def hour(seed: object, **size: Any) -> tuple[Mapping[str, int], list[str]]:
    """What happened in one hour, counted, and what must not."""
    fleet = Fleet(seed, **size).run()
    return fleet.counts, fleet.problems


def flawed(name: str) -> tuple[Mapping[str, int], list[str]]:
    """As :func:`hour`, with one of the flaws: of the first of nine small fleets in which its check sees it."""
    seen, whole, attribute, double = FLAWS[name]
    with patch.object(whole, attribute, double):
        tried = (hour(f"{name} {number}", workers=10, minutes=20, operations=200) for number in range(9))
        return next((each for each in tried if seen in each[1]), ({}, []))


def row(found: list[tuple[Mapping[str, int], list[str]]], **named: Any) -> Row:
    """What was found in many hours, for the table."""
    counts, problems = Counter[str](), [each for _, problems in found for each in problems]
    for each, _ in found:
        counts.update(each)
    counted = {name: counts[name] for name in _COUNTED}
    faults = {name: counts[name] for name in (*STRIKES, "redeliveries", "conflicts")}
    common = {"store": "virtual", "promise": "all three", "campaign": "a fleet in virtual time", "healed": None}
    return Row(**{**common, **counted, **named}, faults=faults, stuck=problems.count("stuck"), violations=len(problems))


_COUNTED = ("tasks", "faulted", "deliveries", "takeovers", "effects_0", "effects_1", "effects_2", "unknown")
