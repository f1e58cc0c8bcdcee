"""The pure parts of the demo: its ledger, its payment provider, its audit and its verdict."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import io
import multiprocessing
import re
import sys
from pathlib import Path

import click
import pytest
from rich.console import Console

from lab.demo import audit, faults, orders, report
from lab.demo.gateway import Gateway
from lab.demo.ledger import Ledger, Row
from lab.demo.settings import LEASE, SLOW_BODY, VISIBILITY_TIMEOUT, Settings
from lab.servers import STORES, Servers
from tests.support.documents import ROOT

ORDER = "order-0000"
EFFECTS = ("charge_card", "reserve_stock", "send_receipt")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


class TestLedger:
    """The witness loses no row and invents none."""

    def test_is_empty_before_the_first_row(self, ledger: Ledger) -> None:
        assert ledger.rows() == []

    def test_keeps_duplicates(self, ledger: Ledger) -> None:
        row = Row(what="effect", task="charge_card", order=ORDER, attempt=2, token=17)
        ledger.append(row)
        ledger.append(row)
        assert ledger.rows() == [row, row]

    @pytest.mark.parametrize("kept", [1, 10, 40])
    def test_a_torn_line_costs_only_itself(self, ledger: Ledger, tmp_path: Path, kept: int) -> None:
        first, torn, last = (Row(what="effect", order=f"order-{number}") for number in range(3))
        ledger.append(first)
        before = (tmp_path / "ledger.jsonl").stat().st_size
        ledger.append(torn)
        with (tmp_path / "ledger.jsonl").open("r+b") as file:
            file.truncate(before + kept)
        ledger.append(last)
        assert ledger.rows() == [first, last]

    def test_many_writers_lose_nothing(self, ledger: Ledger) -> None:
        context = multiprocessing.get_context("spawn")
        writers = [context.Process(target=_write, args=(ledger, name)) for name in range(3)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert len({(row.task, row.attempt) for row in ledger.rows()}) == 3 * 200 == len(ledger.rows())


def _write(ledger: Ledger, name: int) -> None:
    for number in range(200):
        ledger.append(Row(what="effect", task=str(name), attempt=number))


class TestGateway:
    """The provider keeps its word about keys."""

    def test_one_key_is_one_charge(self, ledger: Ledger) -> None:
        first = Gateway(ledger).charge(ORDER, idempotency_key="k")
        again = Gateway(ledger).charge(ORDER, idempotency_key="k")
        assert first == again
        assert [row.what for row in ledger.rows()] == ["effect", "recognised"]

    def test_another_key_is_another_charge(self, ledger: Ledger) -> None:
        gateway = Gateway(ledger)
        assert gateway.charge(ORDER, idempotency_key="k") != gateway.charge(ORDER, idempotency_key="l")

    def test_no_key_is_a_charge_every_time(self, ledger: Ledger) -> None:
        gateway = Gateway(ledger)
        assert gateway.charge(ORDER) != gateway.charge(ORDER)
        assert len(ledger.rows()) == 2

    def test_racing_callers_with_one_key_get_one_charge(self, ledger: Ledger) -> None:
        with multiprocessing.get_context("spawn").Pool(3) as pool:
            charges = pool.starmap(_charge, [(ledger, f"key-{n % 10}") for n in range(60)])
        assert len(set(charges)) == 10
        assert sum(row.what == "effect" for row in ledger.rows()) == 10


def _charge(ledger: Ledger, key: str) -> str:
    return Gateway(ledger).charge(ORDER, idempotency_key=key)


class TestOrders:
    """The load is the same for both columns, and meets every fault."""

    def test_are_the_same_each_time(self) -> None:
        assert orders.make(5) == orders.make(5)
        assert orders.with_duplicates(orders.make(50)) == orders.with_duplicates(orders.make(50))

    def test_a_third_is_published_twice(self) -> None:
        load = orders.make(30)
        published = orders.with_duplicates(load)
        assert len(published) == 40
        assert set(published) == set(load)

    def test_even_the_smallest_load_meets_every_fault(self) -> None:
        numbers = range(20)
        for modulus, rest in (*faults.KILLS.values(), faults.SLOW):
            assert any(number % modulus == rest for number in numbers)

    def test_no_order_meets_two_faults(self) -> None:
        shares = (*faults.KILLS.values(), faults.SLOW)
        assert all(sum(number % modulus == rest for modulus, rest in shares) <= 1 for number in range(400))


class TestSettings:
    """The same settings reach every process."""

    SETTINGS = Settings(broker_url="sqs://a:b@h:1//", store_url="memory://", folder=Path("/folder"), faults=True)

    def test_survive_the_way_to_a_child_process(self) -> None:
        assert Settings.from_environ(self.SETTINGS.environ()) == self.SETTINGS

    @pytest.mark.parametrize("broker", ["sqs://a:b@h:1//", "redis://h:1/0"])
    def test_every_broker_redelivers_in_time(self, broker: str) -> None:
        options = dataclasses.replace(self.SETTINGS, broker_url=broker).celery()["broker_transport_options"]
        assert options["visibility_timeout"] == VISIBILITY_TIMEOUT

    def test_rabbitmq_confirms_what_is_published(self) -> None:
        settings = dataclasses.replace(self.SETTINGS, broker_url="amqp://a:b@h:1/%2F").celery()
        assert settings["broker_transport_options"] == {"confirm_publish": True}

    def test_a_slow_body_outlives_lease_and_visibility(self) -> None:
        assert LEASE < VISIBILITY_TIMEOUT < SLOW_BODY

    @pytest.mark.parametrize(("name", "shown"), [("mariadb", "MariaDB"), ("rabbitmq", "RabbitMQ")])
    def test_a_server_that_is_not_installed_is_named_with_its_remedy(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, shown: str
    ) -> None:
        monkeypatch.setattr(f"lab.embedded.{name}.PATH", str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))
        store, broker = (name, "") if name in STORES else ("", name)
        with pytest.raises(click.ClickException, match=f"{shown}: run: apt-get install {name}-server"):
            Servers(store, broker, tmp_path).__enter__()


def _effects(times: dict[str, int]) -> list[Row]:
    return [
        Row(what=what, task=task, order=ORDER, task_id=f"id-{task}")
        for task in EFFECTS
        for _ in range(times.get(task, 1))
        for what in ("run", "effect")
    ]


def _tally(*more: Row, **times: int) -> audit.Tally:
    return audit.tally([*_effects(times), *more], orders=[ORDER], published=1, seconds=1.0)


class TestTally:
    """Rows become numbers."""

    def test_counts_what_happened(self) -> None:
        rows = [
            *_effects({}),
            *_effects({}),
            *(Row(what="delivery", pid=pid, task_id="same") for pid in range(5)),
            Row(what="kill", task="charge_card", point="before", order=ORDER),
            Row(what="kill", task="reserve_stock", point="after", order=ORDER),
            *(Row(what=what) for what in ("recognised", "replayed", "taken_over", "lease_lost", "store_killed")),
            *(Row(what=what) for what in ("conflicted", "store_unavailable") for _ in range(2)),
        ]
        assert audit.tally(rows, orders=[ORDER, "order-0001"], published=3, seconds=2.5) == audit.Tally(
            orders=2,
            published=3,
            deliveries=5,
            redelivered=1,
            runs=6,
            killed_before=1,
            killed_after=1,
            charged_once=0,
            charged_more=1,
            charged_never=1,
            recognised=1,
            others_once=0,
            others_more_excused=1,
            others_more=1,
            others_never=2,
            replayed=1,
            conflicted=2,
            taken_over=1,
            leases_lost=1,
            store_kills=1,
            store_missed=2,
            seconds=2.5,
        )


class TestFollowing:
    """From deliveries, ends and kills it is known who is at what."""

    @staticmethod
    def row(what: str, pid: int, task_id: str = "") -> Row:
        return Row(what=what, pid=pid, task_id=task_id)

    def test_a_delivery_that_neither_ended_nor_was_killed_is_unended(self) -> None:
        deliveries = [self.row("delivery", pid, str(pid)) for pid in (1, 2, 3)]
        assert audit.unended([*deliveries, self.row("ended", 1, "1"), self.row("kill", 3)]) == 1

    def test_nothing_is_unended_when_all_is_done(self) -> None:
        rows = [self.row("delivery", 1, "a"), self.row("run", 1, "a"), self.row("ended", 1, "a")]
        assert audit.unended(rows * 2) == 0

    def test_a_second_delivery_while_the_first_runs_counts(self) -> None:
        rows = [self.row("delivery", 1, "a"), self.row("delivery", 2, "a"), self.row("delivery", 3, "a")]
        assert audit.tally(rows, orders=[], published=0, seconds=0).redelivered == 1

    @pytest.mark.parametrize("end", ["ended", "kill"])
    def test_a_second_delivery_after_the_first_does_not(self, end: str) -> None:
        rows = [self.row("delivery", 1, "a"), self.row(end, 1), self.row("delivery", 2, "a")]
        assert audit.tally(rows, orders=[], published=0, seconds=0).redelivered == 0

    def test_another_task_meanwhile_does_not(self) -> None:
        rows = [self.row("delivery", 1, "a"), self.row("delivery", 2, "b")]
        assert audit.tally(rows, orders=[], published=0, seconds=0).redelivered == 0


class TestBrokenPromises:
    """The verdict demands exactly what is promised."""

    def test_once_each_is_what_was_promised(self) -> None:
        assert audit.broken_promises(_tally()) == []

    @pytest.mark.parametrize("times", [0, 2, 3])
    def test_a_charge_is_never_excused(self, times: int) -> None:
        excuse = Row(what="kill", task="charge_card", point="after", order=ORDER)
        lost = Row(what="lease_lost", task_id="id-charge_card")
        assert len(audit.broken_promises(_tally(excuse, lost, charge_card=times))) == 1

    @pytest.mark.parametrize("task", ["reserve_stock", "send_receipt"])
    def test_a_repeated_effect_needs_an_excuse(self, task: str) -> None:
        assert len(audit.broken_promises(_tally(**{task: 2}))) == 1

    @pytest.mark.parametrize("task", ["reserve_stock", "send_receipt"])
    @pytest.mark.parametrize("what", ["kill", "lease_lost"])
    def test_a_crash_or_lost_lease_after_the_effect_excuses_it(self, task: str, what: str) -> None:
        excuse = Row(what=what, task=task, point="after", order=ORDER, task_id=f"id-{task}")
        assert audit.broken_promises(_tally(excuse, **{task: 2})) == []

    @pytest.mark.parametrize(
        "other",
        [
            Row(what="kill", task="reserve_stock", point="before", order=ORDER),
            Row(what="kill", task="send_receipt", point="after", order=ORDER),
            Row(what="kill", task="reserve_stock", point="after", order="order-0001"),
            Row(what="lease_lost", task_id="id-send_receipt"),
            Row(what="lease_lost", task_id="unheard of"),
        ],
    )
    def test_an_excuse_for_something_else_does_not(self, other: Row) -> None:
        assert len(audit.broken_promises(_tally(other, reserve_stock=2))) == 1

    def test_a_missing_effect_is_never_excused(self) -> None:
        excuse = Row(what="kill", task="reserve_stock", point="after", order=ORDER)
        assert len(audit.broken_promises(_tally(excuse, reserve_stock=0))) == 1


class TestMissingEvidence:
    """A demonstration that could not fail proves nothing."""

    PLAIN = dataclasses.replace(_tally(charge_card=2), killed_before=2, killed_after=1, redelivered=1)
    IDEMPOTENT = dataclasses.replace(_tally(), killed_before=2, killed_after=1, redelivered=1, replayed=1, taken_over=1)

    def test_a_real_fire_is_evidence(self) -> None:
        assert audit.missing_evidence(self.PLAIN, self.IDEMPOTENT, kills=3, store_kills=0) == []

    def test_without_a_duplicate_in_the_plain_column_nothing_is_proved(self) -> None:
        plain = dataclasses.replace(self.PLAIN, charged_more=0)
        assert len(audit.missing_evidence(plain, self.IDEMPOTENT, kills=3, store_kills=0)) == 1

    @pytest.mark.parametrize("field", ["killed_before", "redelivered", "replayed", "taken_over"])
    def test_without_fire_in_the_idempotent_column_nothing_is_proved(self, field: str) -> None:
        calm = dataclasses.replace(self.IDEMPOTENT, **{field: 0})
        assert len(audit.missing_evidence(self.PLAIN, calm, kills=3, store_kills=0)) == 1

    def test_both_columns_must_meet_every_planned_kill(self) -> None:
        assert len(audit.missing_evidence(self.PLAIN, self.IDEMPOTENT, kills=4, store_kills=0)) == 2

    def test_a_store_that_can_come_back_must_have_been_killed_in_both_columns(self) -> None:
        assert len(audit.missing_evidence(self.PLAIN, self.IDEMPOTENT, kills=3, store_kills=1)) == 2


class TestReport:
    """What is printed at the end."""

    COLUMN = dataclasses.replace(
        _tally(), **{field.name: 100 for field in dataclasses.fields(audit.Tally) if field.name != "seconds"}
    )

    def test_its_table_fits_a_terminal(self) -> None:
        shown = Console(width=80, record=True, file=io.StringIO())
        shown.print(report.table(self.COLUMN, self.COLUMN, "redis-cluster", "redis"))
        table = shown.export_text()
        assert "…" not in table
        assert len(re.findall(r"\S +100 +100$", table, re.MULTILINE)) == len(dataclasses.fields(audit.Tally)) - 3

    def test_its_summary_has_four_lines_that_fit(self) -> None:
        lines = report.summary(self.COLUMN, self.COLUMN)
        assert len(lines) == 4
        assert max(map(len, lines)) <= 78


BROUGHT_BY = {
    "boto3": "dynamodb",
    "celery": "install_requires",
    "click": "install_requires",  # of celery
    "kombu": "install_requires",
    "rich": "install_requires",
    "sqlalchemy": "sql",
}


class TestEnvironment:
    """`make demo` installs little, and all that it needs."""

    def test_everything_that_is_imported_at_once_is_in_it(self) -> None:
        """What belongs to another store's server is imported where that is started."""
        names = ("demo", "embedded", "fleet.py", "servers.py", "tether.py", "tether_program.py")
        paths = [path for name in names for path in (ROOT / "lab").glob(f"{name}/*.py" if "." not in name else name)]
        found = {each for path in (*paths, *(ROOT / "example_project").glob("*.py")) for each in _heads(path)}
        config = configparser.ConfigParser()
        config.read(ROOT / "setup.cfg")
        demo = config["options.extras_require"]["demo"]
        for module in found - set(sys.stdlib_module_names) - {"lab", "celery_idempotent", "example_project"}:
            extra = BROUGHT_BY[module]
            assert extra in ("install_requires", "demo") or re.search(rf"celery-idempotent\[.*\b{extra}\b.*\]", demo)


def _heads(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found
