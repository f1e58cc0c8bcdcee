"""how-to/telemetry.md and how-to/telemetry.md against what is exported; the recipe in a real worker."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from lab.embedded import EmbeddedRedis
from tests.support.deliveries import an_app
from tests.support.documents import DOCS, code, table
from tests.support.local_docker import free_port
from tests.support.waiting import wait_until
from tests.support.web import a_page, a_program, a_shop

PAGE = DOCS / "how-to/telemetry.md"
METRICS = DOCS / "how-to/telemetry.md"
SHIPPED = DOCS / "operations"
RULES = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((SHIPPED / "dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
EXPRESSIONS = [*QUERIES, *(rule["expr"] for rule in RULES)]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """What Prometheus would scrape, by name and labels, without those of the scope."""
    return {
        (
            sample.name,
            frozenset(each for each in sample.labels.items() if not each[0].startswith("otel_")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class _Sender:
    """As much of a task as a counter looks at."""

    name = "shop.charge"
    app = an_app()
    request = SimpleNamespace(delivery_info={"exchange": "", "routing_key": "celery"})


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Samples]:
    """What the exporter of Prometheus makes of every instrument, once each has something to tell; and the page's."""
    registry = CollectorRegistry()
    monkeypatch.setattr(holding, "_holdings", [SimpleNamespace(messages=range(2))])
    otel.instrument(MeterProvider([PrometheusMetricReader(registry=registry)]))
    backlog.look(lambda limit: [], lambda: 0)
    assert otel._current is not None
    for error in (None, "StoreUnavailable"):
        for what in Timed:
            otel._current.time(what, "shop.charge", 0.1, error)
    signals.claimed.send(sender=_Sender(), waited=1.0)
    page = a_program(a_page(a_shop(), write=False)).get("/metrics").text
    yield samples(generate_latest(registry).decode()) | samples(page)
    otel.uninstrument()
    backlog.forget()


def test_metrics_of_the_page_are_those_that_are_exported(exported: Samples) -> None:
    """By the names of Prometheus: dots become underscores, the unit is added, and `_total` to a counter."""
    ends = {"counter": "_total", "histogram": "_seconds_bucket"}
    documented = set()
    for row in table(METRICS, "metric"):
        name = row["metric"].strip("`").replace(".", "_")
        of_seconds = "_seconds" if row["type"] == "gauge" and row["unit"] == "`s`" else ""
        documented.add(name + ends.get(row["type"], of_seconds))

    ours = {name for name, _ in exported if name.startswith("celery_idempotent_")}
    assert documented == {name for name in ours if not re.search("_(sum|count|created)$", name)}


def test_attributes_of_the_page_are_those_that_are_exported(exported: Samples) -> None:
    """And no others: whoever pays for series counts them."""
    for row in table(METRICS, "metric"):
        documented = {each.replace(".", "_") for each in re.findall(r"`([\w.]+)`", row["attributes"])}
        prefix = row["metric"].strip("`").replace(".", "_")
        found = {label for name, labels in exported if name.startswith(prefix) for label, _ in labels}
        assert found - {"le"} == documented, row["metric"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_dashboard_and_alerts_ask_for_what_is_exported(expression: str, exported: Samples) -> None:
    """Each metric by its name, each with labels that it has, and events that exist."""
    names = {name for name, _ in exported}
    asked = re.findall(r"(celery_idempotent_\w+)(?:\{([^}]*)\})?", expression)
    assert asked
    for name, selector in asked:
        assert name in names
        known = {label for each, labels in exported if each == name for label, _ in labels}
        assert set(re.findall(r"(\w+)[=!]~?=?\"", selector)) <= known
        for events in re.findall(r'event=~?"([^"]+)"', selector):
            assert set(events.split("|")) <= {str(event) for event in SIGNALS}


def _promtool(*arguments: str, folder: Path = SHIPPED) -> None:
    program = shutil.which("promtool")
    if program is None:
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict("promtool is not installed: apt install prometheus")
    ended = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_alerts_are_rules_of_prometheus() -> None:
    """They load, and warn of nothing."""
    _promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yml")


def test_alerts_fire_when_they_should_and_end() -> None:
    """Also for a counter that begins at 1."""
    _promtool("test", "rules", "alerts_test.yml")


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    """A rule that never fires, or always, would pass its check."""
    cases = yaml.safe_load((SHIPPED / "alerts_test.yml").read_text())["tests"]
    tried = {(each["alertname"], bool(each["exp_alerts"])) for case in cases for each in case["alert_rule_test"]}
    assert tried == {(rule["alert"], fires) for rule in RULES for fires in (True, False)}


def test_alerts_are_those_of_the_page() -> None:
    """Every one, no other."""
    assert [row["alert"].strip("`") for row in table(PAGE, "alert")] == [rule["alert"] for rule in RULES]


def test_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    """Once Grafana has put in its variables; read by Prometheus's own parser."""
    variables = {"$task": ".*", "$__rate_interval": "5m", "$__range": "6h"}
    rules = []
    for number, query in enumerate(QUERIES):
        for name, value in variables.items():
            query = query.replace(name, value)
        rules.append({"record": f"panel:query:{number}", "expr": query})
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    _promtool("check", "rules", "rules.yml", folder=tmp_path)


def test_panels_of_the_dashboard_do_not_overlap_and_know_their_variables() -> None:
    """Grafana draws one over the other, and asks for a variable that it does not know as it stands."""
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    known = {each["name"] for each in DASHBOARD["templating"]["list"]} | {"__rate_interval", "__range"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) <= known


def test_nothing_of_opentelemetry_is_imported_by_itself() -> None:
    """Not by the package, a worker's steps, or a delivery."""
    program = """
import sys
from tests.support.deliveries import an_app, deliver
from celery_idempotent import IdempotentTask
app = an_app()
def charge(): ...
charge = app.task(base=IdempotentTask, shared=False, name="charge")(charge)
print(deliver(charge).state, *(name for name in sys.modules if name.startswith("opentelemetry")))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=DOCS.parent)
    assert ended.stdout.split() == ["SUCCESS"], ended.stderr


JSON_LOG = next(text for _, text in code(PAGE, "python") if "pythonjsonlogger" in text)
RECIPE = next(text for _, text in code(PAGE, "python") if "worker_process_init" in text)
APP = """
from pathlib import Path
import time

from celery import Celery
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.outbox import send

HERE = Path(__file__).parent
handler.setStream((HERE / "log.json").open("a", buffering=1))
logger.propagate = False
BROKER = os.environ["BROKER"]
app = Celery("shop", broker=BROKER, backend=BROKER)
app.conf.update(
    idempotency_store=f"sqlite:///{HERE}/records.sqlite",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)
app.conf.task_default_queue = os.environ["QUEUE"]


@worker_process_init.connect(weak=False)
def write_spans(**_):
    out = open(HERE / f"spans-{os.getpid()}", "w", buffering=1)
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(
        out=out, formatter=lambda span: span.to_json(indent=None) + "\\n"
    )))


@app.task(base=IdempotentTask, name="shop.charge", idempotent=Policy("order_id", lease=1, backoff=0.2))
def charge(order_id):
    while order_id == "slow" and not (HERE / "let-go").exists():
        time.sleep(0.02)
    return os.getpid()
"""


@dataclass(frozen=True)
class Shop:
    """A worker with the recipe, and two processes in its pool."""

    app: Celery
    folder: Path
    port: int

    def charge(self, order_id: str) -> Any:
        """Send the task, whose result is the pid of the process that ran the body."""
        return self.app.send_task("shop.charge", (order_id,))

    def scrape(self, number: int) -> Samples:
        """What Prometheus gets: of the main process by 0, of the pool from 1."""
        with urlopen(f"http://localhost:{self.port + number}/metrics", timeout=30) as answer:
            return samples(answer.read().decode())

    def told(self, name: str, *processes: int, **labels: str) -> float:
        """The sum of a metric over processes; NaN is told by none."""
        wanted = labels.items()
        found = [
            value
            for number in processes
            for (each, about), value in self.scrape(number).items()
            if each == f"celery_idempotent_{name}" and wanted <= dict(about).items()
        ]
        return sum(found)

    def spans(self) -> list[dict[str, Any]]:
        """All spans that have ended, of all processes."""
        lines = [line for path in self.folder.glob("spans-*") for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines if line.endswith("}")]


def _answers(shop: Shop, number: int) -> Callable[[], bool]:
    def answers() -> bool:
        try:
            return bool(shop.scrape(number))
        except (URLError, ConnectionError):
            return False

    return answers


def _free_ports() -> int:
    """The first of four."""
    while True:
        port = free_port()
        try:
            for each in range(port, port + 4):
                with socket.create_server(("127.0.0.1", each)):
                    pass
        except OSError:
            continue
        return port


@pytest.fixture
def shop(redis_server: EmbeddedRedis, tmp_path: Path) -> Iterator[Shop]:
    """The recipe of the page, word for word, in a worker."""
    (tmp_path / "shop.py").write_text(JSON_LOG + RECIPE + APP)
    port, queue = _free_ports(), tmp_path.name
    app = Celery("shop", broker=redis_server.url, backend=redis_server.url, set_as_current=False)
    app.conf.task_default_queue = queue
    environment = {**os.environ, "BROKER": redis_server.url, "QUEUE": queue, "METRICS_PORT": str(port)}
    environment["PYTHONPATH"] = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")])
    run = [sys.executable, "-m", "celery", "-A", "shop"]
    subprocess.run([*run, "idempotency", "provision"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    options = ["--pool=prefork", "--concurrency=2", "--without-mingle", "--without-gossip", "--prefetch-multiplier=1"]
    with (tmp_path / "log").open("w") as log:
        worker = subprocess.Popen([*run, "worker", *options], cwd=tmp_path, env=environment, stdout=log, stderr=log)
    shop = Shop(app, tmp_path, port)
    try:
        for number in range(3):
            wait_until(_answers(shop, number), f"process {number} exports: {(tmp_path / 'log').read_text()}")
        yield shop
    finally:
        worker.terminate()
        worker.wait(30)
        app.close()


@pytest.mark.timeout(300)
def test_recipe_exports_every_process_of_a_prefork_worker(shop: Shop) -> None:
    """Counts and latencies of the pool, gauges of the main process; and a new pool process begins anew."""
    first = shop.charge("o-1")
    winner = first.get(timeout=60)
    assert {shop.charge("o-1").get(timeout=60) for _ in range(3)} == {winner}
    pool = (1, 2)
    for event, count in (("claimed", 1), ("completed", 1), ("replayed", 3)):
        assert shop.told("events_total", *pool, event=event, task="shop.charge") == count
        assert shop.told("events_total", 0, event=event) == 0
    assert shop.told("claim_duration_seconds_count", *pool, task="shop.charge") == 4

    slow = [shop.charge("slow") for _ in range(2)]  # one of them meets the other
    wait_until(lambda: shop.told("events_total", *pool, event="conflicted") >= 1, "they meet")
    wait_until(lambda: shop.told("renewal_duration_seconds_count", *pool, task="shop.charge") >= 1, "a renewal")
    assert shop.told("in_flight", *pool) == 1
    assert shop.told("messages_held", 0) >= 1
    (shop.folder / "let-go").touch()
    assert len({each.get(timeout=60) for each in slow}) == 1
    wait_until(lambda: shop.told("wait_duration_seconds_count", *pool, task="shop.charge") == 1, "a wait")
    wait_until(lambda: shop.told("in_flight", *pool) == 0, "nothing is under way")
    assert not any(name.startswith("celery_idempotent_outbox") for number in pool for name, _ in shop.scrape(number))
    wait_until(lambda: ("celery_idempotent_outbox_age_seconds", frozenset()) in shop.scrape(0), "the relay looks")
    assert shop.told("outbox_messages", 0) == 0

    before = {number: shop.told("events_total", number) for number in pool}
    os.kill(winner, signal.SIGKILL)
    (died,) = wait_until(
        lambda: [each for each in pool if before[each] and not _scraped(shop, each)], "another process takes its port"
    )
    assert shop.told("events_total", *(set(pool) - {died})) == sum(before.values()) - before[died]
    assert shop.charge("o-2").get(timeout=60) != winner


def _scraped(shop: Shop, number: int) -> float:
    """The events of a process; 1 while nobody answers."""
    try:
        return shop.told("events_total", number)
    except (URLError, ConnectionError):
        return 1


@pytest.mark.timeout(300)
def test_worker_writes_json_by_the_formatter_of_the_page(shop: Shop) -> None:
    """Celery sets up its own logging before and after, and each line is written once."""
    results = [shop.charge("o-1") for _ in range(2)]
    for each in results:
        each.get(timeout=60)
    lines = [json.loads(line) for line in (shop.folder / "log.json").read_text().splitlines()]

    (replayed,) = (each for each in lines if each.get("idempotency_event") == "idempotency.replayed")
    assert {replayed["idempotency_task_id"], replayed["idempotency_done_by"]} == {each.id for each in results}
    assert "idempotency.replayed" not in (shop.folder / "log").read_text()


@pytest.mark.timeout(300)
def test_span_of_a_replay_names_the_span_that_did_the_work(shop: Shop) -> None:
    """Beside the instrumentation of Celery, in a real worker: by the task id, which both of them have."""
    first = shop.charge("o-1")
    first.get(timeout=60)
    second = shop.charge("o-1")
    second.get(timeout=60)

    def run_of(task_id: str) -> dict[str, Any] | None:
        spans = (each for each in shop.spans() if each["name"] == "run/shop.charge")
        return next((each for each in spans if each["attributes"].get("messaging.message.id") == task_id), None)

    replay = wait_until(lambda: run_of(second.id), "the span of the replay ends")
    assert replay is not None
    work = run_of(first.id)
    assert work is not None
    (link,) = replay["links"]
    assert link["attributes"] == {"celery_idempotent.event": "replayed"}
    assert link["context"]["trace_id"] == work["context"]["trace_id"]
    assert replay["events"] == work["events"] == []
