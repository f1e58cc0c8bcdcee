"""The command line looks records up, and shows them: whole to a program, fitting to a terminal, and never obeyed."""
# mypy: allow-untyped-decorators

import re
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import AtMostOnce, IdempotentTask, Keyed, Policy, Record, Status, current_attempt
from celery_idempotent.engine.claim import effect_key
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.operating.display import duration, iso, outcome, state
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.contents import OBJECT
from celery_idempotent.protocol.steps import Begun, Finished, to_plain
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.contract import a_record
from tests.support.commands import keep, run, told
from tests.support.deliveries import an_app, deliver
from tests.support.objects import pointed
from tests.support.stores import Indexed

HOUR = 3_600_000
NOW = 1_800_000_000_000
JSON = "application/json"
HOSTILE = "\x1b]0;owned\x07\n[bold red]x[/] :smile: \u202e\u2028\x7f"
SHOWN = r"\x1b]0;owned\x07\n[bold red]x[/] :smile: \u202e\u2028\x7f"
DIGEST = "0123456789abcdef" * 4
TIMES = ("created_at", "updated_at")


@pytest.fixture
def app() -> Celery:
    app = an_app()
    of_order = Policy(key="order", label="order", effects={"charge": Keyed(), "text *": AtMostOnce()})

    @app.task(base=IdempotentTask, shared=False, name="shop.charge", idempotent=of_order)
    def charge(order: str) -> Any:
        return current_attempt().step("charge", lambda step: step.key)

    @app.task(shared=False, name="plain")
    def plain() -> None: ...

    app.finalize()
    return app


def _state(**values: Any) -> str:
    """As it is told at NOW, with a grace of 5 ms."""
    return state(a_record().but(**values), grace=5, now=NOW)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(screen, "is_terminal", lambda *, err=False: True)
    for name, value in (("COLUMNS", "80"), ("LINES", "50"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    return monkeypatch


def _rows(app: Celery, *arguments: str) -> list[str]:
    """The lines that a command draws, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", run(app, *arguments).stdout).splitlines()


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        *(("", "abcd"), ("--status Completed", "c"), ("--status forgotten", "d"), ("--worker w2", "b")),
        *((f"--older-than {each}", keys) for each, keys in (("30m", "ab"), ("1.5h", "a"), ("1D", ""))),
        ("--status unknown --label acme/* --older-than 5400s --task shop.charge", "a"),
    ],
)
def test_list_has_what_is_asked_for(app: Celery, arguments: str, keys: str) -> None:
    """All that is asked for counts, statuses as they are shown; oldest write first."""
    now = app.conf.idempotency_store.now()
    for key, status, age, values in (
        ("d", Status.COMPLETED, 0, {"expires_at": now // 1000 - 1}),
        ("c", Status.COMPLETED, 1, {"expires_at": now // 1000 + 60}),
        ("b", Status.UNKNOWN, HOUR, {"worker": "w2"}),
        ("a", Status.UNKNOWN, 3 * HOUR, {"label": "acme/1"}),
    ):
        keep(app, key=key, status=status, **{"task": "shop.charge", "label": "", "updated_at": now - age, **values})
    assert "".join(each["key"] for each in told(app, "list", *arguments.split())) == keys


def test_list_as_json_has_all_that_programs_ask_for(app: Celery) -> None:
    """Names are those of the record, times ISO 8601 in UTC, and what is not there is null or empty."""
    deliver(app.tasks["shop.charge"], "acme/7", task_id="the-id")
    verdict = {"action": "rerun", "by": "ann", "reason": "", "status": "UNKNOWN", "attempt": 1, "error": None}
    keep(app, status=Status.RELEASED, verdict={**verdict, "at": 0}, updated_at=1)

    first, second = told(app, "list")

    assert first["verdict"] == {**verdict, "at": "1970-01-01T00:00:00.000Z"}
    assert first["updated_at"] == "1970-01-01T00:00:00.001Z"
    named = {"label": "acme/7", "status": "COMPLETED", "task": "shop.charge", "task_id": "the-id", "attempts": 1}
    known = {**named, "key": app.tasks["shop.charge"].idempotency_key_for("acme/7"), "worker": "celery@here"}
    assert second == {**first, **known, "error": None, "verdict": None} | {each: second[each] for each in TIMES}


@pytest.mark.parametrize("kind", [MemoryStore, Indexed])
def test_list_says_that_there_is_more(app: Celery, kind: type[MemoryStore]) -> None:
    """By a warning, so that a program's input stays JSON; what is listed is the oldest, wherever a store begins."""
    app.conf.idempotency_store = kind()
    for age in (1, 3, 2):
        keep(app, key=f"of {age} h", updated_at=app.conf.idempotency_store.now() - age * HOUR)

    assert [each["key"] for each in told(app, "list", "--limit", "2")] == ["of 3 h", "of 2 h"]
    assert ["raise --limit" in run(app, "list", "--json", "--limit", each).stderr for each in "23"] == [True, False]


def test_reading_all_records_is_announced(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store says that no index tells which are meant; a whole key needs none."""
    said = list[str]()

    def counted(doing: str, records: Iterator[Record]) -> Iterator[Record]:
        said.append(doing)
        return records

    monkeypatch.setattr(screen, "counted", counted)
    app.conf.idempotency_store = Indexed(lambda: NOW)
    record = keep(app, status=Status.UNKNOWN, label="acme/7")
    for arguments in (
        "list --label acme/7",
        "show acme/7",
        "effect-key acme/7 charge",
        "forget --label acme/7 --dry-run",
    ):
        run(app, *arguments.split())
        assert said.pop() == "reading all records, as no index tells which are meant; found"
    for arguments in ("list --status UNKNOWN", f"show {record.key}"):
        run(app, *arguments.split())
    assert said == ["reading; found"]
    run(app, "stats")
    assert said[1:] == ["reading all records; read"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("list", "--limit", "0"), "range"),
        *((("list", "--older-than", each), "must be an age such as 30m") for each in ("2", "-2d", "1.2345d")),
        (("list", "--status", "DONE"), "--status"),
        (("purge", "--batch", "10001"), "--batch"),
        (("purge", "--released-before", "nan"), "--released-before"),
        (("key", "shop.charge", "--args", "[7"), "ord-1"),
        (("key", "shop.charge", "--kwargs", "[7]"), "not a JSON dict"),
        (("key", "shop.charge", "--args", "[7, 8]"), "does not take these arguments"),
        (("key", "plain"), "not idempotent"),
        (("key", "shop.chrge"), "idempotent tasks: shop.charge"),
        (("resolve", "k", "--rerun", "--completed", "1"), "either --completed RESULT or --rerun"),
        (("resolve", "k", "--completed", "[" * 100_000), "not JSON"),
        (("resolve", "--rerun"), "give a KEY"),
        (("forget", "k", "--label", "acme/*"), "not both"),
        (("forget", "--label", "acme/*"), "--reason"),
        (("forget", "k", "--json"), "--yes or --dry-run"),
        (("ddl",), "--dialect: postgresql, mysql, mariadb, sqlite"),
        (("copy", "memory://", "memory://"), "one store"),
        (("copy", "memory://", "nowhere://"), "Invalid value for TARGET: no store has this scheme"),
    ],
    ids=lambda value: " ".join(value)[:32] if isinstance(value, tuple) else "",
)
def test_mistake_is_answered_by_a_sentence(app: Celery, arguments: tuple[str, ...], reason: str) -> None:
    """With what is wrong: before the store is opened, anything is read, or anybody confirms what cannot be done."""
    app.conf.idempotency_store = None
    refused = run(app, *arguments, answer="y\n")
    assert (refused.exit_code, refused.stdout, reason in refused.stderr) == (2, "", True)


def test_record_is_found_by_what_is_known_of_it(app: Celery) -> None:
    """A log line has the task id, a customer the label, and a terminal has room for a part of the key."""
    charge = app.tasks["shop.charge"]
    made = deliver(charge, "acme/7", task_id="the-id").value
    deliver(charge, "acme/8")
    odd = keep(app, key="k\u200b-1", label="acme\u200b/7", task_id="the\x1bid")
    key = charge.idempotency_key_for("acme/7")
    for text in (key, key[:-50], key.rpartition(":")[2][:12], "the-id", "acme/7"):
        assert told(app, "show", text)["key"] == key
        assert run(app, "effect-key", text, "charge").stdout == f"{made}\n"
    assert told(app, "key", "shop.charge", "--args", '["acme/7"]') == {"task": "shop.charge", "key": key}
    for text in (r"acme\u200b/7", r"the\x1bid", r"k\u200b-1", odd.label):  # as they are printed, or stored
        assert told(app, "show", text)["key"] == odd.key


@pytest.mark.parametrize("text", ["0123456789ab --task shop.refund", "shop.refund:0123456789ab", "KEY"])
def test_task_says_which_record_is_meant(app: Celery, text: str) -> None:
    """Two tasks have one hash for one value, and one label; what fits both is refused, and names both."""
    shared = {"label": "acme/7", "status": Status.UNKNOWN, "fencing_token": 1}
    one, other = (keep(app, key=f"{each}:v1:{DIGEST}", task=each, **shared) for each in ("shop.charge", "shop.refund"))
    arguments = text.replace("KEY", other.key).split()
    for command in (("show", "0123456789ab"), ("forget", "acme/7", "--yes")):
        refused = run(app, *command)
        assert (refused.exit_code, one.key in refused.stderr, other.key in refused.stderr) == (1, True, True)
    assert run(app, "show", one.key, "--task", "shop.refund").exit_code == 1
    assert told(app, "effect-key", arguments[0], "c", *arguments[1:])["effect_key"] == effect_key(other.key, "c")
    assert run(app, "forget", *arguments, "--yes").exit_code == 1
    assert run(app, "resolve", "--rerun", *arguments, "--yes").stdout.startswith(other.key)
    assert app.conf.idempotency_store.get(one.key) == one


def test_effect_key_needs_no_record(app: Celery) -> None:
    """If the key is a whole one; a slip in the name is told."""
    key = app.tasks["shop.charge"].idempotency_key_for("acme/7")
    made = effect_key(key, "charge")
    assert told(app, "effect-key", key, "charge") == {"key": key, "name": "charge", "effect_key": made}
    assert run(app, "effect-key", "acme/7", "charge").exit_code == 1
    deliver(app.tasks["shop.charge"], "acme/7")
    advice = "Advice: nothing is known of an effect called chrge; known are: charge\n"
    assert [run(app, "effect-key", "acme/7", each).stderr for each in ("charge", "chrge")] == ["", advice]


STEPS = {
    "paid": to_plain(Finished(Encoded('{"id": "ch_1"}', JSON))),
    "packed": to_plain(Finished(Encoded(b"7", "application/x-python-serialize"))),
    "odd": to_plain(Finished(Encoded("{", JSON))),
    "lost": to_plain(Finished(None, "too large")),
    "text bob": to_plain(Begun(1_800_000_000_000, 2)),
    "broken": {"text": 7},
}
VERDICT = {"action": "rerun", "by": "ann", "reason": "PAY", "at": 0, "status": "UNKNOWN", "attempt": 1, "error": "slow"}


def test_show_has_steps_with_their_effect_keys(app: Celery) -> None:
    """What is JSON is decoded, the rest could run code and is measured; people read what is in doubt, and its key."""
    record = keep(app, key="k", status=Status.UNKNOWN, task="shop.charge", steps=STEPS, verdict=VERDICT)
    shown = told(app, "show", "k")
    unread, made = {"bytes": 1}, {name: effect_key("k", name) for name in [*STEPS, "charge"]}
    states: dict[str, dict[str, Any]] = {
        "paid": {"state": "finished", "content_type": JSON, "result": {"id": "ch_1"}},
        "packed": {"state": "finished", "content_type": "application/x-python-serialize", "result": unread},
        "odd": {"state": "finished", "content_type": JSON, "result": unread},
        "lost": {"state": "finished", "lost": "too large"},
        "text bob": {"state": "begun", "begun_at": "2027-01-15T08:00:00.000Z", "attempt": 2},
        "broken": {"state": "damaged"},
    }
    assert shown["steps"] == {name: {**step, "effect_key": made[name]} for name, step in states.items()}
    assert shown["effect_keys"] == made
    facts = (shown["result"], shown["fencing_token"], shown["lease_until"])
    assert facts == (None, record.fencing_token, iso(record.lease_until))
    lines = [line.strip().split("  ", 1)[1] for line in run(app, "show", "k").stdout.splitlines()]
    for known in ("text bob: began at 2027-01-15T08:00:00.000Z in attempt 2, and did not end", "lost: finished; "):
        (line,) = (number for number, each in enumerate(lines) if each.startswith(known))
        assert lines[line + 1] == made[known.partition(":")[0]]
    assert any("rerun by ann, on UNKNOWN after attempt 1, because: PAY (it had said: slow)" in each for each in lines)


def test_show_tells_until_when_an_outcome_counts(app: Celery) -> None:
    """A record outlasts its outcome for its verdict; steps are dropped with it, so of its effects nothing is known."""
    verdict = {"action": "completed", "at": 0, "counts_until": 1_700_000_000_000, "kept_until": 1_800_000_000_000}
    keep(app, key="k", status=Status.COMPLETED, task="shop.charge", expires_at=1_800_000_000, verdict=verdict)
    facts, shown = told(app, "show", "k"), run(app, "show", "k").stdout
    assert "expires_at  2023-11-14T22:13:20.000Z" in shown
    assert "charge: not known, as an outcome keeps no steps" in shown
    assert facts["expires_at"] == "2023-11-14T22:13:20.000Z"
    assert facts["verdict"]["kept_until"] == "2027-01-15T08:00:00.000Z"


def test_result_is_for_programs_and_only_measured_for_people(app: Celery) -> None:
    """A screen is seen by more people; one that is an object is named and not read, and a damaged pointer is told."""
    written = POINTER.to_encoded()
    facts = {"object": POINTER.name, "bytes": 200, "sha256": POINTER.sha256, "of": JSON}
    keep(app, key="begun", status=Status.RELEASED, steps={"charge": to_plain(Finished(written))})
    for key, data, kind in (("json", '"ch_1"', JSON), ("whole", written.data, OBJECT), ("damaged", "{}", OBJECT)):
        keep(app, key=key, status=Status.COMPLETED, result=data, content_type=kind, expires_at=2**40)

    results = [told(app, "show", key)["result"] for key in ("json", "whole", "damaged")]
    assert results == ["ch_1", facts, {"bytes": 2}]
    assert told(app, "show", "begun")["steps"]["charge"]["result"] == facts
    shown = {"json": "6 bytes", "whole": NAMED, "damaged": "2 bytes", "begun": f"its result is {NAMED[:-11]}"}
    assert [key for key, text in shown.items() if text not in " ".join(run(app, "show", key).stdout.split())] == []
    assert "ch_1" not in run(app, "show", "json").stdout


@pytest.mark.parametrize("is_terminal", [False, True])
def test_nothing_that_was_stored_is_obeyed_by_a_terminal(
    app: Celery, request: pytest.FixtureRequest, is_terminal: bool
) -> None:
    """Neither control characters, nor markup, nor changes of direction; and in JSON they come back as they were."""
    if is_terminal:
        request.getfixturevalue("terminal")
    named = dict.fromkeys(("error", "label", "task", "worker"), HOSTILE)
    record = keep(app, key=f"k{HOSTILE}", status=Status.FAILED, expires_at=2**40, **named)
    for arguments in (("list",), ("show", record.key), ("stats",), ("forget", record.key, "--dry-run")):
        plain, made = "\n".join(_rows(app, *arguments)), run(app, *arguments, "--json").stdout
        assert all(map(str.isprintable, [*plain.splitlines(), *made.splitlines()]))
        assert (made.isascii(), SHOWN[:20] in plain) == (True, True)
    (facts,) = told(app, "list")
    assert (facts["error"], facts["label"], facts["key"]) == (HOSTILE, HOSTILE, record.key)


POINTER = pointed(Encoded("x" * 200, JSON))
NAMED = f"kept as the object {POINTER.name}: 200 bytes"
QUEUED = {"status": Status.RELEASED, "owner": "", "attempts": 0}


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        *((duration(each), told) for each, told in ((-5, "0 s"), (61_000, "1 min 1 s"), (90_061_000, "1 d 1 h"))),
        (iso(2**62), str(2**62)),
        (outcome('{"id": "Ö"}', JSON), '{\n  "id": "Ö"\n}'),
        (outcome("x" * 100_001, JSON), "too long to show: 100001 bytes"),
        (outcome("not json", JSON), "'not json'"),
        (outcome("[" * 90_000, JSON), f"'{'[' * 90_000}'"),
        (outcome(b"x", None), "not shown: of unknown type is never decoded here"),
        (outcome(b"cos\nsystem\n.", "a/pickle"), "not shown: a/pickle is never decoded here"),
        (outcome(POINTER.to_encoded().data, OBJECT), f"{NAMED} of {JSON}, SHA-256 {POINTER.sha256}"),
        (_state(status=Status.UNKNOWN, owner=""), "UNKNOWN"),
        (_state(status=Status.COMPLETED, expires_at=1), "FORGOTTEN"),
        (_state(lease_until=NOW - 4), "IN_PROGRESS"),
        (_state(lease_until=NOW - 5), "IN_PROGRESS, lease over"),
        (_state(**QUEUED, lease_until=NOW + 1), "RELEASED, queued"),
        (_state(**QUEUED, lease_until=NOW), "RELEASED, message in doubt"),
        (_state(status=Status.RELEASED, lease_until=NOW + 1), "RELEASED"),
    ],
    ids=lambda value: value[:24],
)
def test_people_are_told_alike_everywhere(shown: str, text: str) -> None:
    """Nothing but JSON is decoded, as that could run code; ages have two units; a status says what can be done."""
    assert shown == text
