"""how-to/telemetry.md and docs/operations against what is exported; the recipe in a real worker."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from celery import Celery
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from celery_idempotent import signals
from celery_idempotent.contrib import otel
from celery_idempotent.engine.events import Timed
from celery_idempotent.integration.broker import holding
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.messages.outbox import backlog
from celery_idempotent.stores.sql.store import SQLStore
from lab.embedded import EmbeddedRedis
from tests.support.deliveries import an_app
from tests.support.documents import DOCS, code, table
from tests.support.local_docker import free_port
from tests.support.packages import program
from tests.support.waiting import wait_until
from tests.support.web import a_page, a_program, a_shop

PAGE = DOCS / "how-to/telemetry.md"
SHIPPED = DOCS / "operations"
RULES = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((SHIPPED / "dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """What Prometheus would scrape, by name and labels, without those of the scope."""
    return {
        (each.name, frozenset(label for label in each.labels.items() if not label[0].startswith("otel_"))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Samples]:
    """What the exporter of Prometheus makes of every instrument, once each has something to tell; and the page's."""
    registry, request = CollectorRegistry(), SimpleNamespace(delivery_info={"exchange": "", "routing_key": "celery"})
    monkeypatch.setattr(holding, "_holdings", [SimpleNamespace(messages=range(2))])
    otel.instrument(MeterProvider([PrometheusMetricReader(registry=registry)]))
    backlog.look(lambda limit: [], lambda: 0)
    assert otel._current is not None
    for error in (None, "StoreUnavailable"):
        for what in Timed:
            otel._current.time(what, "shop.charge", 0.1, error)
    sender = type("Charge", (), {"name": "shop.charge", "app": an_app(), "request": request})
    signals.claimed.send(sender=sender, waited=1.0)
    page = a_program(a_page(a_shop(), write=False)).get("/metrics").text
    yield samples(generate_latest(registry).decode()) | samples(page)
    otel.uninstrument()
    backlog.forget()


def test_metrics_and_attributes_of_the_page_are_those_that_are_exported(exported: Samples) -> None:
    """With the names of Prometheus, and no others: whoever pays for series counts them."""
    ends, documented = {"counter": "_total", "histogram": "_seconds_bucket"}, set()
    for row in table(PAGE, "metric"):
        name = row["metric"].strip("`").replace(".", "_")
        of_seconds = "_seconds" if row["type"] == "gauge" and row["unit"] == "`s`" else ""
        documented.add(name + ends.get(row["type"], of_seconds))
        attributes = {each.replace(".", "_") for each in re.findall(r"`([\w.]+)`", row["attributes"])}
        found = {label for each, labels in exported if each.startswith(name) for label, _ in labels}
        assert found - {"le"} == attributes, row["metric"]
    ours = {name for name, _ in exported if name.startswith("celery_idempotent_")}
    assert documented == {name for name in ours if not re.search("_(sum|count|created)$", name)}


def test_dashboard_and_alerts_ask_for_metrics_that_are_exported(exported: Samples) -> None:
    """Each with labels that it has, and events that exist."""
    for expression in (*QUERIES, *(rule["expr"] for rule in RULES)):
        asked = re.findall(r"(celery_idempotent_\w+)(?:\{([^}]*)\})?", expression)
        assert asked
        for name, selector in asked:
            known = [{label for label, _ in labels} for each, labels in exported if each == name]
            assert known, expression
            assert set(re.findall(r"(\w+)[=!]~?=?\"", selector)) <= set().union(*known), expression
            for events in re.findall(r'event=~?"([^"]+)"', selector):
                assert set(events.split("|")) <= {str(event) for event in SIGNALS}, expression


def promtool(*arguments: str, folder: Path = SHIPPED) -> None:
    ended = subprocess.run([program("promtool", "prometheus"), *arguments], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_alerts_are_rules_that_fire_and_end(tmp_path: Path) -> None:
    """Each has a case in which it fires and one in which it does not; the dashboard's queries are PromQL."""
    promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")
    cases = yaml.safe_load((SHIPPED / "alerts_test.yml").read_text())["tests"]
    tried = {(each["alertname"], bool(each["exp_alerts"])) for case in cases for each in case["alert_rule_test"]}
    assert tried == {(rule["alert"], fires) for rule in RULES for fires in (True, False)}
    assert [row["alert"].strip("`") for row in table(PAGE, "alert")] == [rule["alert"] for rule in RULES]

    variables = {"$task": ".*", "$__rate_interval": "5m", "$__range": "6h"}
    filled = [re.sub(r"\$\w+", lambda found: variables[found[0]], query) for query in QUERIES]
    rules = [{"record": f"panel:query:{number}", "expr": query} for number, query in enumerate(filled)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "rules.yml", folder=tmp_path)


_, RECIPE = (text for _, text in code(PAGE, "python"))
APP = """
import time

from celery import Celery
from celery_idempotent import IdempotentTask, Policy

app = Celery("shop", broker=os.environ["BROKER"], backend=os.environ["BROKER"])
app.conf.update(
    idempotency_store="sqlite:///records.sqlite",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_default_queue=os.environ["QUEUE"],
)

@app.task(base=IdempotentTask, name="shop.charge", idempotent=Policy("order_id", lease=1, backoff=0.2))
def charge(order_id):
    while order_id == "slow" and not os.path.exists("let-go"):
        time.sleep(0.02)
    return os.getpid()
"""


@pytest.fixture
def port(redis_server: EmbeddedRedis, tmp_path: Path) -> Iterator[int]:
    """The recipe of the page, word for word, in a worker with two processes; the first of its ports."""
    (tmp_path / "shop.py").write_text(RECIPE + APP)
    SQLStore(f"sqlite:///{tmp_path}/records.sqlite").provision()
    with ExitStack() as held:  # the first of four ports that are free
        port = free_port()
        for each in range(port, port + 4):
            held.enter_context(socket.create_server(("127.0.0.1", each)))
    environment = {**os.environ, "BROKER": redis_server.url, "QUEUE": tmp_path.name, "METRICS_PORT": str(port)}
    environment["PYTHONPATH"] = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--pool=prefork", "--concurrency=2"]
    command += ["--without-mingle", "--without-gossip", "--prefetch-multiplier=1"]
    with (tmp_path / "log").open("w") as log:
        worker = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        for number in range(3):
            wait_until(partial(scrape, port + number), f"{number}: {(tmp_path / 'log').read_text()}")
        yield port
    finally:
        worker.terminate()
        worker.wait(30)


def scrape(port: int) -> Samples:
    """What Prometheus gets of a process; nothing while nobody answers."""
    with suppress(URLError, ConnectionError), urlopen(f"http://localhost:{port}/metrics") as answer:
        return samples(answer.read().decode())
    return {}


@pytest.mark.timeout(300)
def test_recipe_exports_each_process_of_prefork_workers(port: int, redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    """Counts and latencies of the pool, gauges of the main process; and a new pool process begins anew."""
    app = Celery("shop", broker=redis_server.url, backend=redis_server.url, set_as_current=False)
    app.conf.task_default_queue = tmp_path.name

    def charge(order_id: str) -> Any:
        """Whose result is the pid of the process that ran the body."""
        return app.send_task("shop.charge", (order_id,))

    def told(name: str, *ports: int, **labels: str) -> float:
        """The sum of a metric over processes."""
        return sum(
            value
            for each in ports
            for (metric, about), value in scrape(each).items()
            if metric == f"celery_idempotent_{name}" and labels.items() <= dict(about).items()
        )

    pool, winner = (port + 1, port + 2), charge("o-1").get(timeout=60)
    assert {charge("o-1").get(timeout=60) for _ in range(3)} == {winner}
    counts = {event: told("events_total", *pool, event=event) for event in ("claimed", "completed", "replayed")}
    assert counts == {"claimed": 1, "completed": 1, "replayed": 3}
    assert told("events_total", port) == 0
    assert told("claim_duration_seconds_count", *pool, task="shop.charge") == 4

    slow = [charge("slow") for _ in range(2)]  # one of them meets the other
    wait_until(lambda: told("events_total", *pool, event="conflicted") >= 1, "they meet")
    wait_until(lambda: told("renewal_duration_seconds_count", *pool, task="shop.charge") >= 1, "a renewal")
    assert (told("in_flight", *pool), told("messages_held", port) >= 1) == (1, True)
    (tmp_path / "let-go").touch()
    assert len({each.get(timeout=60) for each in slow}) == 1
    wait_until(lambda: told("wait_duration_seconds_count", *pool, task="shop.charge") == 1, "a wait")

    before = {each: told("events_total", each) for each in pool}
    os.kill(winner, signal.SIGKILL)
    (died,) = wait_until(
        lambda: [each for each in pool if before[each] and scrape(each) and not told("events_total", each)],
        "another process takes its port",
    )
    assert told("events_total", *(set(pool) - {died})) == sum(before.values()) - before[died]
    assert charge("o-2").get(timeout=60) != winner
    app.close()
