"""What a terminal is shown, and a pipe is not: rows that fit, a pager, what goes on, and live counts."""
# mypy: allow-untyped-decorators

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import Record, Status, StoreUnavailable
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.operating.display import duration
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import FaultyStore
from celery_idempotent.testing.contract import a_record
from tests.support.commands import run
from tests.support.deliveries import an_app

KEY = f"shop.charge:1:{'0123456789abcdef' * 4}"
HOSTILE = "\x1b[31m[bold]:smile:[/]\u202e"


@pytest.fixture
def app() -> Celery:
    app = an_app()
    app.conf.idempotency_store = FaultyStore(MemoryStore())
    return app


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(screen, "is_terminal", lambda *, err=False: True)
    for name, value in (("COLUMNS", "80"), ("LINES", "50"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    return monkeypatch


def keep(app: Celery, **values: Any) -> Record:
    record: Record = replace(a_record(), **values)
    app.conf.idempotency_store.swap(record, None)
    return record


def _bare(shown: str) -> str:
    """Without the colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", shown)


def _wide(app: Celery, **values: Any) -> Record:
    return keep(app, **{"key": KEY, "task": "shop.charge", "label": f"acme/{'o' * 60}", "worker": "celery@w", **values})


def test_row_is_one_line_of_a_narrow_terminal(app: Celery, terminal: pytest.MonkeyPatch) -> None:
    """What is least asked for is left out, labels are cut, and of the key there is what show takes."""
    record = _wide(app, status=Status.UNKNOWN)

    heads, row = _bare(run(app, "list").stdout).splitlines()

    assert heads.split() == ["STATUS", "AGE", "LABEL", "KEY"]
    assert len(row.rstrip()) <= 80
    assert "…" in row
    shown = row.split()[-1]
    assert shown == "shop.charge:1:0123456789ab"
    assert json.loads(run(app, "show", shown, "--json").stdout)["key"] == record.key


def test_what_a_list_prints_every_command_takes(app: Celery, terminal: pytest.MonkeyPatch) -> None:
    """Also where two tasks have one hash, as for one value; and however long the name of the task is."""
    name = f"shop.{'billing.' * 8}charge"
    records = [
        _wide(app, key=KEY.replace("shop.charge", task), task=task, status=Status.UNKNOWN, fencing_token=1)
        for task in ("shop.charge", "shop.refund", name)
    ]

    rows = _bare(run(app, "list").stdout).splitlines()[1:]
    shown = [row.split()[-1] for row in rows]

    assert shown == [record.key[:-52] for record in records]
    for text, record in zip(shown, records, strict=True):
        assert json.loads(run(app, "show", text, "--json").stdout)["key"] == record.key
        assert run(app, "effect-key", text, "charge").exit_code == 0
        assert run(app, "resolve", text, "--rerun", "--yes").stdout == f"{record.key} is RELEASED\n"
        assert run(app, "forget", text, "--yes").exit_code == 0


def test_task_of_no_part_of_the_key_is_shown_beside_it(app: Celery, terminal: pytest.MonkeyPatch) -> None:
    """As where a policy has a scope."""
    _wide(app, task="shop.refund")
    assert "TASK" in _bare(run(app, "list").stdout)


def test_wide_terminal_has_whole_keys(app: Celery, terminal: pytest.MonkeyPatch) -> None:
    """Where every cell has its room."""
    terminal.setenv("COLUMNS", "220")
    _wide(app)

    heads, row = _bare(run(app, "list").stdout).splitlines()

    assert heads.split() == ["STATUS", "UPDATED", "ATTEMPTS", "TASK", "LABEL", "KEY", "WORKER"]
    assert KEY in row
    assert len(row.rstrip()) <= 220


def test_key_that_is_no_hash_is_not_shortened(app: Celery, terminal: pytest.MonkeyPatch) -> None:
    """Its beginning may be that of many."""
    _wide(app, key="order-2026-11-22-0001")
    assert "order-2026-11-22-0001" in run(app, "list").stdout


def test_pager_is_for_what_does_not_fit_on_one_screen(app: Celery, terminal: pytest.MonkeyPatch) -> None:
    """And for nothing less."""
    paged: list[str] = []
    terminal.setattr("click.echo_via_pager", lambda text, color: paged.append(text))
    for _ in range(48):
        keep(app)

    assert len(run(app, "list").stdout.splitlines()) == 49
    assert paged == []
    keep(app)
    assert run(app, "list").stdout == ""
    assert len(paged[0].splitlines()) == 50


def test_terminal_obeys_nothing_that_was_stored(app: Celery, terminal: pytest.MonkeyPatch) -> None:
    """Neither its own codes, nor rich's markup and emoji."""
    record = keep(app, key="k", task=HOSTILE, label=HOSTILE, error=HOSTILE, status=Status.FAILED)

    for arguments in (("list",), ("show", record.key), ("stats",)):
        shown = run(app, *arguments).stdout
        assert r"\x1b[31m[bold]:smile:[/]\u202e" in shown
        assert "\u202e" not in shown


def test_long_values_go_on_beside_their_name(app: Celery, terminal: pytest.MonkeyPatch) -> None:
    """Nothing of a record is cut."""
    _wide(app, error="x" * 200)

    shown = _bare(run(app, "show", KEY).stdout)

    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())
    assert shown.count("x") >= 200
    assert "\n         label  acme/" in shown


def test_terminal_is_told_what_goes_on_and_a_pipe_is_not(app: Celery, terminal: pytest.MonkeyPatch) -> None:
    """How many were read, how many of how many were judged; on stderr, and gone at the end."""
    for each in range(3):
        keep(app, key=f"u{each}", status=Status.UNKNOWN)
    drawn = run(app, "resolve", "--status", "unknown", "--rerun", "--yes", "--reason", "r")
    assert "judged 3, refused 0" in drawn.stdout
    assert "reading 3" in drawn.stderr
    assert "judging" in drawn.stderr
    assert "3/3" in drawn.stderr

    terminal.setattr(screen, "is_terminal", lambda *, err=False: False)
    assert run(app, "list").stderr == ""


def test_stats_count_by_status_and_task(app: Celery) -> None:
    """With the oldest of each, and what is forgotten apart from what counts."""
    now = app.conf.idempotency_store.now()
    keep(app, task="a", status=Status.IN_PROGRESS, updated_at=now - 3_600_000)
    keep(app, task="a", status=Status.IN_PROGRESS, updated_at=now)
    keep(app, task="b", status=Status.COMPLETED, updated_at=now, expires_at=1)

    made = json.loads(run(app, "stats", "--json").stdout)
    shown = run(app, "stats").stdout

    assert made["by_status"] == {"IN_PROGRESS": 2, "FORGOTTEN": 1}
    assert made["by_task"] == {"a": {"IN_PROGRESS": 2}, "b": {"FORGOTTEN": 1}}
    assert made["oldest_in_progress"] == made["oldest"]["IN_PROGRESS"] < made["oldest"]["FORGOTTEN"]
    assert made["outbox"] is None
    assert "IN_PROGRESS  2        1 h\n" in shown


@pytest.mark.parametrize(("ahead", "side"), [(3_600_000, "ahead"), (-3_600_000, "behind")])
def test_stats_tell_how_far_the_stores_clock_is_off(app: Celery, ahead: int, side: str) -> None:
    """Ages and leases are by the store's."""
    app.conf.idempotency_store = MemoryStore(lambda: time.time_ns() // 1_000_000 + ahead)

    offset = json.loads(run(app, "stats", "--json").stdout)["clock_offset_ms"]

    assert offset == pytest.approx(ahead, abs=60_000)
    assert re.search(rf"the store's clock is 3[56]\d{{5}} ms {side}", run(app, "stats").stdout)


def test_stats_tell_what_waits_in_the_outbox(app: Celery, tmp_path: Path) -> None:
    """How many, and for how long the oldest one."""
    app.conf.idempotency_store = store = SQLStore(f"sqlite:///{tmp_path}/records.sqlite")
    store.provision()
    assert json.loads(run(app, "stats", "--json").stdout)["outbox"] == {"depth": 0, "oldest_age": None}
    assert "outbox: 0 wait; " in run(app, "stats").stdout

    transaction = store.begin()
    transaction.enqueue(OutboxMessage("t", "{}", "application/json"))
    transaction.commit()

    made = json.loads(run(app, "stats", "--json").stdout)
    assert (made["outbox"]["depth"], made["outbox"]["oldest_age"] >= 0, made["oldest_in_progress"]) == (1, True, None)
    assert "outbox: 1 wait, the oldest for 0 s; " in run(app, "stats").stdout
    store.close()


@pytest.mark.parametrize("arguments", [("--json",), ()])
def test_watch_counts_again_until_it_is_interrupted(
    app: Celery, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """In a pipe each look is printed: with --json, by a line."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        keep(app, task="shop.charge")
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("celery_idempotent.integration.cli.store.time.sleep", pause)
    result = run(app, "watch", "--every", "7", *arguments)

    assert pauses == [7, 7, 7]
    if arguments:
        assert [json.loads(line)["by_status"] for line in result.stdout.splitlines()] == [
            {},
            {"IN_PROGRESS": 1},
            {"IN_PROGRESS": 2},
        ]
    else:
        assert result.stdout.count("the store's clock") == 3


def test_watch_draws_on_a_terminal_and_outlasts_an_outage(app: Celery, terminal: pytest.MonkeyPatch) -> None:
    """The last counts stay, with what went wrong; the next look may fare better."""
    keep(app, task="shop.charge", status=Status.UNKNOWN)
    store = app.conf.idempotency_store
    looks = iter(range(9))

    def fail() -> Any:
        raise StoreUnavailable("s", "scan", "timed out")

    def pause(seconds: float) -> None:
        match next(looks):
            case 0:
                terminal.setattr(store, "scan", lambda **_: fail())
            case 1:
                terminal.setattr(store, "scan", store.store.scan)
            case _:
                raise KeyboardInterrupt

    terminal.setattr("celery_idempotent.integration.cli.store.time.sleep", pause)
    told = run(app, "watch")

    assert len(re.findall(r"^UNKNOWN +1 ", _bare(told.stdout), re.MULTILINE)) == 2
    assert told.stderr.count("timed out") == 1


@pytest.mark.parametrize(
    ("milliseconds", "told"),
    [(-5, "0 s"), (999, "0 s"), (61_000, "1 min 1 s"), (3_600_000, "1 h"), (90_061_000, "1 d 1 h")],
)
def test_age_has_two_units(milliseconds: int, told: str) -> None:
    """As exact as anybody needs."""
    assert duration(milliseconds) == told
