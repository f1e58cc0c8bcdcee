"""An hour of a fleet in seconds: the library in Celery's own requests and tracer, in virtual time, on a virtual SQS.

Store, broker and network are virtual, and so is the worker: it has a pool and stops as Celery's does. All else is
what production runs: how a message is accepted, claims, heartbeats, the keeper, postponement, recovery.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from heapq import heappop, heappush
from math import inf, log2
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.exceptions import Reject, Retry
from kombu.exceptions import OperationalError
from kombu.transport import virtual

from celery_idempotent import IdempotentTask, Policy, current_attempt
from celery_idempotent.engine import claim, delivery
from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.errors import OutcomeUnknown, StoreUnavailable
from celery_idempotent.integration.broker import holding, recovery
from celery_idempotent.integration.headers import CONFLICTS_HEADER
from celery_idempotent.integration.messages import postpone
from celery_idempotent.integration.settings import Runtime, StoreHandle
from celery_idempotent.integration.task import guard, requests
from celery_idempotent.integration.task import task as task_module
from celery_idempotent.protocol.operation import Written
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreWrapper
from lab.proof import virtual_time
from lab.proof.table import Row
from lab.proof.verdicts import FINAL, PROMISES, Promise, Seen, breaches
from lab.proof.virtual_time import EPOCH, Machine, Process, Thread, World, here, monotonic, wait

LEASE = VISIBILITY = 60.0
_RETURNED_IN = 10.0  # seconds for which kombu hides what it gives back
_POOL = 2
_LOSS = 0.005  # of so many requests, and of so many replies, nobody hears again
_SETTINGS = {
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "task_publish_retry": False,
    "broker_pool_limit": 500,
    "broker_transport": f"{__name__}:Transport",
    "broker_transport_options": {"visibility_timeout": VISIBILITY},
}
STRIKES = ("worker killed", "process killed", "warm", "cold", "suspended", "date", "store", "broker")
"""What happens to a worker: deaths, shutdowns, a machine that stands, and what it cannot reach."""


class NoAnswer(OSError):
    """Of the broker: the request is lost, or late, or the reply is."""


_LOST: Mapping[str, Any] = {"broker": NoAnswer, "store": partial(StoreUnavailable, "virtual", "request", "no answer")}


class Host(Process):
    """A process of a worker, and what the library has once in each. ``runs`` is the key of its body."""

    def __init__(self, fleet: "Fleet", machine: Machine, worker: str = "") -> None:
        super().__init__(machine)
        self.fleet, self.name, self.runs, self.lost_at = fleet, str(len(fleet.hosts)), "", 0.0
        self.worker = worker or self.name
        self.opened, self.heartbeat = StoreHandle(None, Store(fleet.store), Breaker("virtual")), Heartbeat()
        fleet.hosts[self.name] = self

    def could_reach(self, server: str, until: float) -> bool:
        """Whether it could have prolonged in time what it has until then."""
        return self.machine.hindered(server, until - LEASE, until) < LEASE / 3

    def ask(self, server: str, act: Callable[[], Any]) -> Any:
        """What ``act`` gives, there, unless the network keeps it."""
        fleet, draw = self.fleet, self.fleet.draw
        wait(draw.uniform(0.001, 0.02))
        fate = draw.random()
        if fate < _LOSS / 2:
            fleet.after(draw.uniform(0, 20), act)
        elif fate > _LOSS and not self.machine.hindered(server, fleet.now, fleet.now + 1e-6):
            answer = act()
            wait(draw.uniform(0.001, 0.02))
            if fate < 1 - _LOSS:
                return answer
        self.lost_at = fleet.now
        wait(2)
        raise _LOST[server]()


class Store(StoreWrapper):
    """The store, as whoever asks reaches it."""

    def get(self, key: str) -> Any:
        return here().ask("store", partial(self.store.get, key))

    def swap(self, new: Record, expected: str | None) -> Any:
        return here().ask("store", partial(here().fleet.swap, here(), new, expected))


@dataclass(eq=False)
class Sent:
    """A message, which was received so many times; it is its receipt, too. At 0 it is gone."""

    raw: Any
    received: int = 0
    holder: "Worker | None" = None
    visible_at: float = inf


class Sqs(virtual.Channel):
    """A channel of kombu's to SQS, and boto's client in one with it."""

    visibility_timeout = VISIBILITY
    predefined_queues: Mapping[str, Any] = {}

    def sqs(self, queue: Any) -> "Sqs":
        return self

    def _put(self, queue: str, message: Any, **_: Any) -> None:
        here().ask("broker", partial(here().fleet.send, message))

    def get_queue_attributes(self, **_: Any) -> Any:
        return here().ask("broker", lambda: {"Attributes": {"VisibilityTimeout": VISIBILITY}})

    def change_message_visibility_batch(self, *, Entries: Any, **_: Any) -> Any:  # noqa: N803
        return here().ask("broker", partial(here().fleet.show_each, Entries))

    def basic_ack(self, delivery_tag: Sent, multiple: bool = False) -> None:
        self._let_go(delivery_tag, partial(setattr, delivery_tag, "visible_at", 0.0))

    def basic_reject(self, delivery_tag: Sent, requeue: bool = False) -> None:
        give_back = partial(here().fleet.show, delivery_tag, _RETURNED_IN)
        self._let_go(delivery_tag, give_back) if requeue else self.basic_ack(delivery_tag)

    def _let_go(self, sent: Sent, act: Callable[[], Any]) -> None:
        sent.holder = None
        here().ask("broker", act)


class Transport(virtual.Transport):
    """What kombu connects by."""

    Channel = Sqs
    driver_type = "sqs"
    connection_errors = recoverable_connection_errors = (NoAnswer,)


class Worker(Host):
    """The main process, which receives and holds messages, and its pool processes, which execute them."""

    connection_errors, disable_rate_limits, event_dispatcher = (NoAnswer,), True, None
    qos = timer = task_buckets = controller = apply_eta_task = _limit_task = _limit_post_eta = MagicMock()

    def __init__(self, fleet: "Fleet", slot: int, machine: Machine) -> None:
        super().__init__(fleet, machine)
        self.slot, self.stops, self.pool, self.hostname = slot, "", self, self.name
        self.child = partial(Host, fleet, machine, self.name)
        self.free, self.running = [self.child() for _ in range(_POOL)], dict[Host, Any]()
        self.received, self.waiting = list[Sent](), deque[Any]()
        # What Celery and the keeper look for.
        self.app, self.connection = fleet.app, fleet.app.connection_for_read()
        self.task_consumer = SimpleNamespace(channel=self.connection.channel())
        self.keeper = holding.Keeper(self)
        fleet.workers[slot] = self
        Thread(self._work, process=self).start()

    def _work(self) -> None:
        self.keeper.start(self)
        while not self.stops:
            if len(self.running) + len(self.waiting) >= 2 * _POOL or not self._receive():
                wait(self.fleet.draw.uniform(0.5, 1.5))
        for request in list(self.running.values()) if self.stops == "cold" else ():
            request.cancel(self)
        while self.running:
            wait(0.5)
        self.keeper.shutdown(self)
        returned = [each for each in self.received if each.holder is self]
        for each in returned:
            with suppress(NoAnswer):
                self.task_consumer.channel.basic_reject(each, requeue=True)
        wait(self.fleet.draw.uniform(5, 20))
        self.fleet.note_shutdown(self, returned)
        self.fleet.after(0, partial(self.fleet.end, self))

    def _receive(self) -> bool:
        sent: Sent | None = None
        with suppress(NoAnswer):
            sent = self.ask("broker", self.fleet.receive)
        if sent is not None:
            sent.holder = self
            self.received.append(sent)
            info = {**sent.raw["properties"]["delivery_info"], "sqs_queue": "celery"}
            properties = {**sent.raw["properties"], "delivery_info": info, "delivery_tag": sent}
            message = virtual.Message({**sent.raw, "properties": properties}, self.task_consumer.channel)
            handle = self.app.tasks[message.headers["task"]].start_strategy(self.app, self)
            handle(message, None, message.ack_log_error, message.reject_log_error, ())
        return sent is not None

    def on_task_request(self, request: Any) -> None:
        """What Celery calls with each message that it has accepted."""
        self.waiting.append(request)
        self._begin()

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
        began, returned = self.fleet.now, None
        with suppress(SystemExit):  # it was told to end
            returned = act()
        self.fleet.note_delivery(child, began, returned)
        child.runs = ""
        del self.running[child]
        self.free.append(child)
        if returned:
            Thread(callback, (returned,), process=self).start()
        Thread(self._begin, process=self).start()

    def terminate_job(self, thread: Thread, signal: int) -> None:
        self.fleet.after(0, lambda: thread.dead or thread.throw(SystemExit()))

    def lose(self) -> None:
        """Have a pool process killed, with what it runs."""
        for child, request in list(self.running.items())[:1]:
            child.kill()
            del self.running[child]
            self.free.append(self.child())
            try:
                raise WorkerLostError("killed")
            except WorkerLostError:
                Thread(request.on_failure, (ExceptionInfo(),), process=self).start()

    def kill(self) -> None:
        super().kill()
        for each in (*self.free, *self.running):
            each.kill()
        self.keeper._let_go(self)


def _body(number: int) -> int:
    """What each task does: what takes some time, the effect, and what takes some time."""
    fleet, attempt = here().fleet, current_attempt()
    effects, half = fleet.effects[number], fleet.draw.choices((1, 15, 300), (5, 3, 2))[0]
    here().runs = attempt.key
    wait(fleet.draw.uniform(0, half))
    if fleet.tasks[number % 3][0].keyed:
        attempt.step("charge", lambda step: effects.append(step.key))
    else:
        effects.append(str(len(effects)))
    fleet.note(f"{here().name} has the effect of {number}")
    wait(fleet.draw.uniform(0, half))
    return number


class Fleet(World):
    """Everything there is, what happens to it, and what is seen."""

    def __init__(self, seed: object, *, workers: int = 50, minutes: float = 60, operations: int = 1000) -> None:
        super().__init__(seed)
        self.length, self.slots = minutes * 60, workers
        self.store = MemoryStore(lambda: round((EPOCH + self.now) * 1000))
        self.workers, self.hosts = dict[int, Worker](), dict[str, Host]()
        self.app = Celery("fleet", set_as_current=False, config_source=_SETTINGS)
        task = partial(self.app.task, base=IdempotentTask, shared=False, lazy=False)
        self.tasks = [(each, task(name=each.name, idempotent=each.policy)(_body)) for each in PROMISES.values()]
        self.effects: list[list[str]] = [[] for _ in range(operations)]
        self.history, self.counts = list[str](), Counter[str]()
        self._owners, self._unfinished, self._redelivered = dict[str, Host](), Counter[str](), Counter[str]()
        self._first_sent, self._messages = dict[str, float](), list[tuple[float, int, Sent]]()

    def live(self) -> "Fleet":
        """All of it, and then what it takes until every message is settled, or two hours."""
        with self.replacing({**_ONCE_IN_EACH, requests: {"_turns": {}}}):
            client = Host(self, Machine(self))
            for slot in range(self.slots):
                self._strike(slot)
                Worker(self, slot, Machine(self))
            for number in range(len(self.effects)):
                first = self.draw.uniform(0, self.length)
                for copy in range(self.draw.choices((1, 2, 3), (4, 4, 2))[0]):
                    at = first + copy * self.draw.uniform(0, 60)
                    Thread(self._publish, (number, copy, at), process=client).start()
            self.run(self.length)
            while any(each.visible_at for _, _, each in self._messages) and self.now < self.length + 7200:
                self.run(self.now + 60)
            self._audit()
            for worker in self.workers.values():
                worker.kill()
        return self

    def _publish(self, number: int, copy: int, at: float) -> None:
        wait(at)
        try:
            self.tasks[number % 3][1].apply_async((number,), task_id=f"{number}.{copy}")
        except OperationalError:  # perhaps it was sent
            self._publish(number, copy, 1)

    def end(self, worker: Worker) -> None:
        """End a worker, if it has not ended, and start another one, perhaps on another machine."""
        if self.workers.get(worker.slot) is worker:
            worker.kill()
            del self.workers[worker.slot]
            machine = self.draw.choice((worker.machine, Machine(self, counts_suspend=self.draw.random() < 0.7)))
            self.after(self.draw.uniform(1, 60), partial(Worker, self, worker.slot, machine))

    def _strike(self, slot: int) -> None:
        if self.now > self.length:
            return
        self.after(self.draw.expovariate(1 / 200), partial(self._strike, slot))
        worker, what = self.workers.get(slot), self.draw.choice(STRIKES)
        if worker is None or worker.machine.resumes_at > self.now:
            return
        self.note(f"worker {slot} is struck: {what}")
        self.counts[what] += 1
        match what:
            case "worker killed":
                self.end(worker)
            case "process killed":
                worker.lose()
            case "warm" | "cold":
                worker.stops = what
                self.after(self.draw.uniform(10, 900), partial(self.end, worker))
            case _:
                worker.machine.hinder(what, self.draw.uniform(1, 150))

    def note(self, what: str) -> None:
        self.history.append(f"{self.now:.3f} {what}")

    def _never(self, is_so: bool, what: str, about: object) -> None:
        if is_so:
            self.note(f"BROKEN {what}: {about}")
            self.counts.update({f"BROKEN {what}": 1, "violations": 1})

    def swap(self, by: Host, new: Record, expected: str | None) -> Record | None:
        """What the store does; where another than its holder ends a claim, the holder's body must have ended."""
        before, stored = self.store.get(new.key), self.store.swap(new, expected)
        if stored is new:
            self.note(f"{by.name} writes {new.key[-6:]} {new.status} attempt {new.attempts}")
            self._owners.setdefault(new.owner, by)
        if stored is new and before is not None and before.status is Status.IN_PROGRESS:
            holder, is_takeover = self._owners[before.owner], new.owner != before.owner
            self.counts["takeovers"] += is_takeover
            self._unfinished[new.key] += is_takeover or new.status is Status.RELEASED
            is_living = by is not holder and holder.runs == new.key and not holder.is_dead
            could_renew = holder.could_reach("store", before.lease_until / 1000 - EPOCH)
            self._never(is_living and could_renew, "a living body was taken over", new.key)
        return stored

    def send(self, raw: Any) -> None:
        """Take a message, perhaps twice, and perhaps show it late; nobody may ask in vain too often."""
        draw, task_id, conflicts = self.draw, raw["headers"]["id"], raw["headers"].get(CONFLICTS_HEADER, 0)
        for _ in range(1 + (draw.random() < 0.01)):
            late = draw.uniform(0, 30) if draw.random() < 0.02 else 0
            self.show(Sent(raw), raw["properties"].get("DelaySeconds", 0) + late)
        age = self.now - self._first_sent.setdefault(task_id, self.now)
        self.counts["conflicts"] += conflicts > 0
        self._never(conflicts > 8 + 2 * log2(1 + age) + age / 15, "asked too often", f"{task_id} {conflicts} times")

    def receive(self) -> Sent | None:
        """A message that is visible, if there is one; a living worker that has it must have held it."""
        while self._messages and self._messages[0][0] <= self.now:
            visible_at, _, sent = heappop(self._messages)
            if sent.visible_at == visible_at:
                task_id, holder = sent.raw["headers"]["id"], sent.holder
                self._redelivered[task_id.partition(".")[0]] += sent.received > 0
                if holder is not None and not holder.is_dead and holder.stops != "cold":
                    self._never(holder.could_reach("broker", visible_at), "a message was not held", task_id)
                sent.visible_at, received = 0.0, Sent(sent.raw, sent.received + 1)
                self.show(received, VISIBILITY)
                return received
        return None

    def show(self, sent: Sent, seconds: float) -> bool:
        """Show it in so many seconds, unless it is visible by now."""
        is_hidden = sent.visible_at > self.now
        if is_hidden:
            sent.visible_at = self.now + seconds
            heappush(self._messages, (sent.visible_at, next(self._order), sent))
        return is_hidden

    def show_each(self, entries: Any) -> Any:
        gone = [each["Id"] for each in entries if not self.show(each["ReceiptHandle"], each["VisibilityTimeout"])]
        return {"Failed": [{"Id": each, "Code": "MessageNotInflight"} for each in gone]}

    def note_delivery(self, child: Host, began: float, returned: Any) -> None:
        self.counts["deliveries"] += 1
        hindered = sum(child.machine.hindered(each, began, self.now) for each in ("store", "broker"))
        is_idle = not (child.runs or hindered) and self.now - began > 20
        self._never(is_idle, "a process was kept from others", f"{self.now - began:.0f} s")
        error = returned[1].exception if returned and returned[0] else None
        error = getattr(error, "exc", error)
        self._never(not isinstance(error, Retry | Reject | OutcomeUnknown | None), "a delivery failed", repr(error))

    def note_shutdown(self, worker: Worker, returned: list[Sent]) -> None:
        """Look at what a worker leaves behind that ended when it was told to."""
        recently = self.now - 30
        for sent in returned:
            is_hidden = sent.visible_at > self.now + _RETURNED_IN and worker.lost_at < recently
            self._never(is_hidden, "a message was given back and hidden", sent.raw["headers"]["id"])
        for record in self.store.scan(status=Status.IN_PROGRESS):
            holder = self._owners[record.owner]
            is_kept = holder.worker == worker.name and not holder.is_dead and holder.lost_at < recently
            self._never(is_kept, "a claim was kept at shutdown", record.key)

    def _audit(self) -> None:
        for number, raw in enumerate(self.effects):
            promise, task = self.tasks[number % 3]
            key = task.idempotency_key_for(number)
            record, excused, redelivered = self.store.get(key), self._unfinished[key], self._redelivered[str(number)]
            status = record.status if record else None
            is_poison = record is not None and record.takeovers == task.idempotency_policy.max_takeovers
            effects = len(set(raw)) if promise.keyed else len(raw)
            promise = replace(promise, doubtful=promise.doubtful or is_poison)
            seen = Seen(promise=promise, effects=effects, status=status)
            self.counts.update(tasks=1, redeliveries=redelivered, faulted=redelivered + excused > 0)
            self.counts.update({f"effects_{min(effects, 2)}": 1, "unknown": seen.unknown, "stuck": status not in FINAL})
            for problem in breaches(seen):
                self._never(True, problem, number)
            self._never(len(raw) > 1 + excused, "an effect was repeated", number)


def _is_gone(name: str) -> bool:
    """As far as a process can tell: of others on its machine."""
    other = here().fleet.hosts.get(name)
    return other is not None and other.machine is here().machine and other.is_dead


_BEATS = {name: (lambda attempt, name=name: getattr(here().heartbeat, name)(attempt)) for name in ("start", "stop")}
_ONCE_IN_EACH: Mapping[Any, Mapping[str, Any]] = {
    Runtime: {"opened": property(lambda runtime: here().opened)},
    guard: {"heartbeat": SimpleNamespace(**_BEATS)},
    task_module: {"this_process": lambda: here().name},
    delivery: {"is_gone": _is_gone},
    recovery: {"is_gone": _is_gone, "_stopped": defaultdict(bool), "_place": lambda task: (here().worker, task)},
    holding.HeldMessages.__init__: {"__kwdefaults__": {"clock": monotonic}},
}
"""What the library has once in a process, in place of which it finds that of the process of whoever asks."""

FLAWS: Mapping[str, tuple[str, Any, str, Any]] = {
    "heartbeat renews nothing": ("a living body was taken over", claim.Claim, "renew", lambda self: None),
    "clocks follow the date": ("a living body was taken over", virtual_time, "monotonic", virtual_time.date),
    "keeper holds nothing": ("a message was not held", holding.HeldMessages, "look", lambda self: 1.0),
    "keeper goes on": ("a message was given back and hidden", holding.Keeper, "shutdown", lambda *_: None),
    "claims outlast their worker": ("a claim was kept at shutdown", claim.Claim, "release", lambda self: Written()),
    "delays do not grow": ("asked too often", Policy, "conflict_delay_ms", lambda *_, **__: 5000),
    "delays cannot be told": ("a delivery failed", Policy, "conflict_delay_ms", lambda *_, **__: 1 / 0),
    "conflicts wait in the worker": ("a process was kept from others", postpone, "_postpone", lambda *_: wait(30)),
    "conflicts are dropped": ("the operation has no end", postpone, "_postpone", lambda *_: None),
    "outcomes are forgotten": ("an effect was repeated", Promise, "policy", property(lambda self: Policy(retain=61))),
    "refuse is forgotten": ("2 effects", Promise, "policy", property(lambda self: Policy())),
}
"""By name, a mistake: what it is seen by, and where it is put."""


def simulate(seed: object, **size: Any) -> Counter[str]:
    """What happened in one hour, counted; what must not is ``BROKEN``."""
    return Fleet(seed, **size).live().counts


def simulate_flaw(name: str) -> Counter[str]:
    """As :func:`simulate`, with one of the flaws: of the first of nine small fleets in which its check sees it."""
    seen, whole, attribute, double = FLAWS[name]
    with patch.object(whole, attribute, double):
        tried = (simulate(f"{name} {number}", workers=10, minutes=20, operations=200) for number in range(9))
        return next((each for each in tried if each[f"BROKEN {seen}"]), Counter())


def sum_up(found: Iterable[Counter[str]], **named: Any) -> Row:
    """What was found in many hours, for the table."""
    counts = sum(found, Counter[str]())
    common: dict[str, Any] = {each.name: counts[each.name] for each in fields(Row) if each.type is int}
    faults = {each: counts[each] for each in (*STRIKES, "redeliveries", "conflicts")}
    told = {"store": "virtual", "promise": "all three", "campaign": "a fleet in virtual time"}
    return Row(**{**common, **told, **named}, faults=faults)
