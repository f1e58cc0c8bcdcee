"""``check`` reads the source of tasks: what it warns of, what is right and silent, and what it cannot read."""

import functools
import importlib
import random
import re
import sys
from collections.abc import Callable
from datetime import date
from datetime import datetime as dt
from pathlib import Path
from textwrap import dedent
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.integration.cli.bodies import ModuleSource, findings
from tests.support.commands import run, told
from tests.support.deliveries import an_app

pytestmark = pytest.mark.filterwarnings("default")
fresh = uuid4

HEAD = """
import random, secrets, time, uuid as ids; from os import urandom; from uuid import uuid4, uuid5
from datetime import date, datetime as dt, timedelta; from django.utils import timezone; from shop.clock import now
from celery_idempotent import current_attempt, outbox; from .money import refund; from .tasks import charge, report
"""
TASKS = {"shop.tasks.charge": "shop.charge", "shop.money.refund": "refund", "shop.tasks.report": "report"}


def _read(source: str) -> dict[int, str]:
    """By line, what is found in this module of a shop, where the key of ``report`` is not all its arguments."""
    found = ModuleSource(HEAD + dedent(source), "shop.tasks", "shop", TASKS, {"shop.charge", "refund"}, {}, {})
    return {line - HEAD.count("\n"): text for line, text in found.findings}


def _check(source: str) -> None:
    """Where a line ends with ``#!``, there is a finding that begins with what follows, and nowhere else."""
    lines = enumerate(dedent(source).splitlines(), 1)
    expected = {number: line.partition("#! ")[2] for number, line in lines if "#! " in line}
    assert {line: text[: len(expected.get(line, text))] for line, text in _read(source).items()} == expected


CALLS = """uuid4(); ids.uuid1().hex; str(uuid4()); dt.now(); dt.utcnow().isoformat(); time.time(); time.time_ns();
    dt.now() - timedelta(days=1); int(time.monotonic()); random.random(); random.choice([1, 2]); secrets.token_hex(8);
    urandom(8); f"{timezone.now()}"; [{"at": dt.now()}]; hash("o-1")"""
PUBLISH = """charge.delay({}); charge.delay(1, at={}); charge.apply_async(({},)); refund.si({}); group([charge.s({})]);
    refund.apply_async(kwargs={{"at": {}}}, countdown=1); outbox.send(None, refund, {}); tx.send(charge, {});
    current_attempt().send("charge", charge, {})"""


@pytest.mark.parametrize("publish", PUBLISH.split(";"))
def test_argument_that_is_another_each_time_is_told_where_all_arguments_are_the_key(publish: str) -> None:
    """Whatever this module calls the function, and however deep it stands."""
    for call in CALLS.split(";"):
        (text,) = _read(f"def f(tx):\n    {publish.strip().format(call.strip())}").values()
        assert re.match(r"(shop\.charge|refund): [\w.]+\(\) in the arguments, which are the key, makes each", text), (
            call
        )


def test_what_is_the_same_or_means_a_period_or_is_no_argument_is_silent() -> None:
    """So are tasks with a key of their own, and what a comment excuses. A name means what it is where it stands."""
    _check("""
    class Order:
        def uuid4(self): ...
    def imported():
        from random import randint as now
        x = str(uuid4())
        charge.delay(  # idempotency: ok is for its own line only
            dt.now(),  # idempotency: ok, each is a new one
            now(1, 2),  #! shop.charge: random.randint()
            x,  #! shop.charge: uuid.uuid4()
        )
        x = 7
        charge.delay(x)
    def f(due, other, time):
        def hash(x): ...
        charge.delay(now(), uuid5(ids.NAMESPACE_URL, "o-1"), random.Random(7).random(), uuid4, hash(1), time.time())
        charge.delay(date.today(), dt.now().date(), f"{timezone.now().strftime('%Y')}", dt.now() > due)
        charge.apply_async((dt.now(),), idempotency_key="o-1")
        report.delay(uuid4(), other.delay(uuid4()), other.send(uuid4()))
    """)


def test_what_a_body_does_with_its_attempt_is_told_with_its_task() -> None:
    """What is defined in a block need not run in it, and other transactions are not ours. The item names a step."""
    _check("""
    def charge(order):
        attempt = current_attempt()
        for count, line in enumerate(order.lines):
            attempt.step(f"line-{line.id}", lambda step: pay(uuid4(), step.key))
            attempt.fenced_step(f"line {count}", fence=a, probe=b, act=c)
        attempt.step(f"mail-{uuid4()}", mail)  #! shop.charge: uuid.uuid4() in the name for step() makes the next att
        attempt.step(name=f"try {attempt.number}", call=mail)  #! shop.charge: attempt.number in the name for step()
        current_attempt().send(f"{date.today()}", report)  #! shop.charge: datetime.date.today() in the name for send()
        with attempt.transaction() as tx:
            tx.send(report, order)
            report.delay(order)  #! shop.charge: delay() publishes even if the transaction rolls back; write tx.send(
            report.delay(order)  # idempotency: ok
            hook(lambda: report.delay(order))
            return tx.done(order)
    def helper(attempt, app, robot):
        with lock, attempt.transaction():
            app.send_task("report")  #! helper: send_task() publishes
        with outbox.transaction():
            report.delay()
        robot.step(uuid4(), attempt.effect_key(str(id(robot))))  #! helper: id() in the name for effect_key() makes
    """)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args: function(*args))


@wrapped
def stamped(order: str) -> str:
    return f"{order} {dt.now()}"


FUNCTIONS: dict[Any, str] = {
    stamped: "datetime.datetime.now()",
    (lambda order: (order, date.today())): "datetime.date.today()",
    (lambda order: (order, random.random())): "random.random()",
    (lambda order: order.lower()): "",
    functools.partial(str.lower): "",
}


@pytest.mark.parametrize(("function", "call"), FUNCTIONS.items())
@pytest.mark.parametrize(("option", "effect"), [("key", "run again"), ("fingerprint", "raise KeyReused")])
def test_function_of_a_policy_is_read_where_it_is_written(function: Any, call: str, option: str, effect: str) -> None:
    """Through decorators; a day counts, too, as a message can be delivered again after midnight."""
    app, policy = an_app(), Policy(**{"key": "order", option: function})
    app.task(base=IdempotentTask, shared=False, name="shop.pay", idempotent=policy)(stamped)
    app.finalize()
    found = [each.partition("shop.pay: ")[2] for each in findings(app) if "shop.pay: " in each]
    text = f"{call} in {option}= makes a duplicate {effect}; compute it from the arguments alone"
    assert found == [text] * bool(call)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An app whose task and publisher are in a module ``publisher``, which gets its uuid4 by way of another module."""
    head = f"from {__name__} import IdempotentTask, an_app, fresh\napp = an_app(worker_pool='solo')\n"
    task = "class Pay(IdempotentTask):\n    name = 'shop.pay'\n    def run(self, order): ...\n"
    publish = "pay = app.register_task(Pay())\ndef publish():\n    pay.delay(fresh())\n"
    Path(tmp_path, "publisher.py").write_text(head + task + publish)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "publisher", raising=False)
    return importlib.import_module("publisher").app


def test_check_warns_with_place_task_and_remedy(app: Celery) -> None:
    """By what names are in the imported module; a strict check fails, and programs are told as of any warning."""
    said = run(app, "check")
    start = "publisher.py:8: shop.pay: uuid.uuid4() in the arguments, which are the key, makes each call another"
    assert f"Warning: {start}" in said.stderr
    assert (said.exit_code, run(app, "check", "--strict").exit_code) == (0, 1)
    assert [each["text"].startswith(start) for each in told(app, "check")["problems"]] == [True]


@pytest.mark.parametrize("text", ["def (:", "\0", "", None])
def test_module_without_source_is_passed_over(app: Celery, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """As in an interactive session, or where its file is another by now."""
    Path("publisher.py").write_text(text or "")
    monkeypatch.delattr("publisher.__file__") if text is None else None
    assert findings(app) == []
    monkeypatch.delitem(sys.modules, "publisher")
    assert findings(app) == []
