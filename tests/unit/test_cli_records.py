"""The command line looks records up: by what is asked for, by whatever is known of one, for people and programs."""
# mypy: allow-untyped-decorators

import json
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import AtMostOnce, IdempotentTask, Keyed, Policy, Record, Status, current_attempt
from celery_idempotent.engine.claim import effect_key
from celery_idempotent.integration.operating.display import iso
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.contents import OBJECT
from celery_idempotent.protocol.steps import Begun, Finished, to_plain
from celery_idempotent.testing.contract import a_record
from tests.support.commands import run
from tests.support.deliveries import an_app, deliver
from tests.support.objects import pointed

HOUR = 3_600_000
HOSTILE = "\x1b]0;owned\x07\n[bold red]x[/] :smile: \u202e\u2028\x7f"
SHOWN = r"\x1b]0;owned\x07\n[bold red]x[/] :smile: \u202e\u2028\x7f"


@pytest.fixture
def app() -> Celery:
    app = an_app()

    @app.task(
        base=IdempotentTask,
        bind=True,
        shared=False,
        name="shop.charge",
        idempotent=Policy(key="order", label="order", effects={"charge": Keyed(), "text *": AtMostOnce()}),
    )
    def charge(self: Any, order: str) -> str:
        current_attempt().step("charge", lambda step: charged.append(step.key))
        return f"charged {order}"

    charged: list[str] = []
    app.conf.charged = charged
    app.finalize()
    return app


def keep(app: Celery, **values: Any) -> Record:
    record: Record = replace(a_record(), **values)
    app.conf.idempotency_store.swap(record, None)
    return record


def listed(app: Celery, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(app, "list", "--json", *arguments).stdout)
    return found


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ((), "abcde"),
        (("--status", "unknown"), "ab"),
        (("--status", "Completed"), "d"),
        (("--status", "forgotten"), "e"),
        (("--task", "shop.mail"), "c"),
        (("--label", "acme/1"), "a"),
        (("--label", "acme/*"), "ab"),
        (("--worker", "w2"), "b"),
        (("--older-than", "2h"), "a"),
        (("--older-than", "30m"), "ab"),
        (("--older-than", "1d"), ""),
        (("--status", "UNKNOWN", "--label", "acme/*", "--older-than", "90m", "--task", "shop.charge"), "a"),
    ],
)
def test_list_has_what_is_asked_for(app: Celery, arguments: tuple[str, ...], keys: str) -> None:
    """All that is asked for counts, statuses as they are shown; oldest write first."""
    now = app.conf.idempotency_store.now()
    common = {"task": "shop.charge", "worker": "w1", "updated_at": now, "label": ""}
    for key, values in {
        "e": {"status": Status.COMPLETED, "expires_at": now // 1000 - 1, "updated_at": now},
        "d": {"status": Status.COMPLETED, "expires_at": now // 1000 + 60, "updated_at": now - 1},
        "c": {"status": Status.RELEASED, "task": "shop.mail", "updated_at": now - 2},
        "b": {"status": Status.UNKNOWN, "label": "acme/2", "worker": "w2", "updated_at": now - HOUR},
        "a": {"status": Status.UNKNOWN, "label": "acme/1", "updated_at": now - 3 * HOUR},
    }.items():
        keep(app, key=key, **{**common, **values})

    assert "".join(each["key"] for each in listed(app, *arguments)) == keys


def test_list_as_json_has_all_that_programs_ask_for(app: Celery) -> None:
    """Names are those of the record, times ISO 8601 in UTC, and what is not there is null or empty."""
    deliver(app.tasks["shop.charge"], "acme/7", task_id="the-id")
    verdict = {
        "action": "rerun",
        "by": "ann",
        "reason": "none",
        "at": 0,
        "status": "UNKNOWN",
        "attempt": 1,
        "error": None,
    }
    keep(app, status=Status.RELEASED, verdict=verdict, updated_at=1)

    first, second = listed(app)

    assert first["verdict"] == {**verdict, "at": "1970-01-01T00:00:00.000Z"}
    assert first["updated_at"] == "1970-01-01T00:00:00.001Z"
    assert second == {
        "key": app.tasks["shop.charge"].idempotency_key_for("acme/7"),
        "label": "acme/7",
        "status": "COMPLETED",
        "task": "shop.charge",
        "task_id": "the-id",
        "worker": "celery@here",
        "attempts": 1,
        "created_at": second["created_at"],
        "updated_at": second["updated_at"],
        "error": None,
        "verdict": None,
    }


def test_list_says_that_there_is_more(app: Celery) -> None:
    """By a warning, so that a program's input stays JSON; what is listed is the oldest, wherever a store begins."""
    for age in (1, 3, 2):
        keep(app, key=f"of {age} h", updated_at=app.conf.idempotency_store.now() - age * HOUR)

    short, whole = (run(app, "list", "--json", "--limit", each) for each in ("2", "3"))

    assert [each["key"] for each in json.loads(short.stdout)] == ["of 3 h", "of 2 h"]
    assert short.stderr == "Warning: there are more than these 2; ask for fewer, or give --limit\n"
    assert (len(json.loads(whole.stdout)), whole.stderr) == (3, "")


def test_labels_have_a_column_where_there_is_one(app: Celery) -> None:
    """Most apps set none."""
    keep(app, label="")
    assert "LABEL" not in run(app, "list").stdout
    keep(app, label="acme/7")
    assert "acme/7" in run(app, "list").stdout


def test_unknown_task_is_answered_with_those_there_are(app: Celery) -> None:
    """As advice: records of a task that was removed can still be there, and then nothing is said."""
    asked = run(app, "list", "--task", "shop.chrge")
    assert (asked.exit_code, asked.stdout) == (0, "STATUS  UPDATED  ATTEMPTS  TASK  KEY  WORKER\n")
    assert asked.stderr == ("Advice: this app has no task shop.chrge; its idempotent tasks: shop.charge\n")
    assert run(app, "list", "--task", "shop.charge").stderr == ""
    keep(app, task="shop.removed")
    assert run(app, "list", "--task", "shop.removed").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("list", "--limit", "0"), "0 is not in the range x>=1"),
        (("list", "--limit", "-1"), "-1 is not in the range x>=1"),
        (("list", "--limit", "many"), "'many' is not a valid integer range"),
        (("list", "--older-than", "2"), "must be an age such as 30m, 1h or 2d (s, m, h, d, w), and is '2'"),
        (("list", "--older-than", "-2d"), "must be an age such as"),
        (("purge", "--batch", "10001"), "10001 is not in the range 1<=x<=10000"),
        (("purge", "--released-before", "nan"), "'nan' is no number"),
        (("relay", "--every", "0"), "0.0 is not in the range 0<x<="),
        (("watch", "--every", "soon"), "'soon' is not a valid float range"),
    ],
)
def test_bad_number_is_refused_in_words(app: Celery, arguments: tuple[str, ...], told: str) -> None:
    """Before the store is opened."""
    app.conf.idempotency_store = None
    refused = run(app, *arguments)
    assert refused.exit_code == 2
    assert told in refused.stderr


@pytest.mark.parametrize("known", ["key", "beginning", "hash", "task id", "label"])
def test_record_is_found_by_what_is_known_of_it(app: Celery, known: str) -> None:
    """A log line has the task id, a customer the label, and a terminal has room for a part of the key."""
    deliver(app.tasks["shop.charge"], "acme/7", task_id="the-id")
    deliver(app.tasks["shop.charge"], "acme/8", task_id="another")
    key = app.tasks["shop.charge"].idempotency_key_for("acme/7")
    text = {
        "key": key,
        "beginning": key[:-50],
        "hash": key.rpartition(":")[2][:12],
        "task id": "the-id",
        "label": "acme/7",
    }[known]

    assert json.loads(run(app, "show", text, "--json").stdout)["key"] == key
    assert run(app, "effect-key", text, "charge").stdout == f"{app.conf.charged[0]}\n"


@pytest.mark.parametrize(
    "text", ["0123456789ab --task shop.refund", "shop.refund:0123456789ab", "acme/7 --task shop.refund", "KEY"]
)
def test_task_says_which_record_is_meant(app: Celery, text: str) -> None:
    """Two tasks have one hash for one value, and one label."""
    digest = "0123456789abcdef" * 4
    one, other = (
        keep(app, key=f"{task}:v1:{digest}", task=task, label="acme/7", status=Status.UNKNOWN, fencing_token=1)
        for task in ("shop.charge", "shop.refund")
    )
    arguments = text.replace("KEY", other.key).split()

    assert run(app, "show", "0123456789ab").exit_code == 1
    assert run(app, "show", one.key, "--task", "shop.refund").exit_code == 1
    assert json.loads(run(app, "show", *arguments, "--json").stdout)["key"] == other.key
    effect_key_of = run(app, "effect-key", arguments[0], "charge", *arguments[1:]).stdout.strip()
    assert effect_key_of == effect_key(other.key, "charge")
    for command in (("resolve", "--rerun"), ("forget",)):
        assert run(app, *command, *arguments, "--yes").stdout.startswith(other.key)
    assert app.conf.idempotency_store.get(one.key) == one


def test_texts_are_taken_as_they_are_printed(app: Celery) -> None:
    """A label with a character that nobody sees is printed with its escape, and so is a task id, or a key."""
    odd = keep(app, key="k\u200b-1", label="acme\u200b/7", task_id="the\x1bid")
    listed_as = run(app, "list").stdout

    for text in (r"acme\u200b/7", r"the\x1bid", r"k\u200b-1", odd.label, odd.task_id):
        assert json.loads(run(app, "show", text, "--json").stdout)["key"] == odd.key
    assert r"acme\u200b/7" in listed_as


def test_text_that_fits_several_records_names_them(app: Celery) -> None:
    """Nothing is shown of one that was not meant."""
    keys = [keep(app, key=f"shop.charge:1:{each}", label="acme/7").key for each in "ab"]
    for command in (("show", "acme/7"), ("effect-key", "shop.charge:1", "charge"), ("forget", "acme/7", "--yes")):
        refused = run(app, *command)
        assert refused.exit_code == 1
        assert "it fits several records: " in refused.stderr
        assert all(each in refused.stderr for each in keys)


def test_effect_key_is_what_the_receiver_was_called_with(app: Celery) -> None:
    """Also where the record is gone, if the key is a whole one; a slip in the name is told."""
    key = app.tasks["shop.charge"].idempotency_key_for("acme/7")
    assert run(app, "effect-key", key, "charge").stdout.strip() == effect_key(key, "charge")

    deliver(app.tasks["shop.charge"], "acme/7")
    told = run(app, "effect-key", "acme/7", "chrge")
    assert told.stderr == "Advice: nothing is known of an effect called chrge; known are: charge\n"
    assert json.loads(run(app, "effect-key", "acme/7", "charge", "--json").stdout) == {
        "key": key,
        "name": "charge",
        "effect_key": app.conf.charged[0],
    }
    assert run(app, "effect-key", "acme/9", "charge").exit_code == 1


def _with_steps(app: Celery) -> Record:
    return keep(
        app,
        key="k",
        status=Status.UNKNOWN,
        task="shop.charge",
        steps={
            "paid": to_plain(Finished(Encoded('{"id": "ch_1"}', "application/json"))),
            "packed": to_plain(Finished(Encoded(b"7", "application/x-python-serialize"))),
            "odd": to_plain(Finished(Encoded("{", "application/json"))),
            "lost": to_plain(Finished(None, "too large")),
            "text bob": to_plain(Begun(1_800_000_000_000, 2)),
            "broken": {"text": 7},
        },
    )


def test_show_as_json_has_steps_with_their_effect_keys(app: Celery) -> None:
    """What is JSON is decoded; of the rest, which could run code when it is read, the size is told."""
    record = _with_steps(app)

    shown = json.loads(run(app, "show", "k", "--json").stdout)

    states = {
        name: {key: value for key, value in step.items() if key != "effect_key"}
        for name, step in shown["steps"].items()
    }
    assert states == {
        "paid": {"state": "finished", "content_type": "application/json", "result": {"id": "ch_1"}},
        "packed": {"state": "finished", "content_type": "application/x-python-serialize", "result": {"bytes": 1}},
        "odd": {"state": "finished", "content_type": "application/json", "result": {"bytes": 1}},
        "lost": {"state": "finished", "lost": "too large"},
        "text bob": {"state": "begun", "begun_at": "2027-01-15T08:00:00.000Z", "attempt": 2},
        "broken": {"state": "damaged"},
    }
    assert shown["effect_keys"] == {name: effect_key("k", name) for name in [*record.steps, "charge"]}
    assert all(step["effect_key"] == shown["effect_keys"][name] for name, step in shown["steps"].items())
    assert (shown["result"], shown["fencing_token"]) == (None, record.fencing_token)
    assert shown["lease_until"] == iso(record.lease_until)


def test_show_says_of_no_effect_of_an_outcome_that_nothing_was_recorded(app: Celery) -> None:
    """Steps are dropped when the outcome is recorded: the effect of a completed operation did most likely happen."""
    keep(app, key="k", status=Status.COMPLETED, task="shop.charge", expires_at=2_000_000_000, steps={})

    told = run(app, "show", "k").stdout

    assert "charge: not known, as an outcome keeps no steps" in told


def test_show_tells_a_person_of_steps_and_verdicts(app: Celery) -> None:
    """Which may have happened, what the receiver knows each by, and who has judged before."""
    record = _with_steps(app)
    verdict = {
        "action": "rerun",
        "by": "ann",
        "reason": "PAY-1",
        "at": 0,
        "status": "UNKNOWN",
        "attempt": 1,
        "error": "it stalled",
    }
    newer = replace(record, revision="r2", verdict=verdict)
    app.conf.idempotency_store.swap(newer, record.revision)

    lines = run(app, "show", "k").stdout.splitlines()

    told = [line.split("  ", 1)[1].strip() for line in map(str.strip, lines)]
    assert "paid: finished" in told
    assert "lost: finished; its result is lost: too large" in told
    assert "text bob: began at 2027-01-15T08:00:00.000Z in attempt 2, and did not end" in told
    assert "broken: not readable by this version" in told
    assert "charge: nothing recorded" in told
    assert told[
        told.index("text bob: began at 2027-01-15T08:00:00.000Z in attempt 2, and did not end") + 1
    ] == effect_key("k", "text bob")
    assert (
        "1970-01-01T00:00:00.000Z rerun by ann, on UNKNOWN after attempt 1, because: PAY-1 (it had said: it stalled)"
    ) in told


def test_show_tells_a_person_when_an_outcome_is_forgotten(app: Celery) -> None:
    """As a time, whatever unit the record has."""
    keep(app, key="k", status=Status.FAILED, expires_at=1_800_000_000)

    assert "expires_at  2027-01-15T08:00:00.000Z" in run(app, "show", "k").stdout


def test_show_tells_until_when_an_outcome_counts_and_until_when_its_verdict_stays(app: Celery) -> None:
    """The record outlasts its outcome."""
    verdict = {"action": "completed", "at": 0, "counts_until": 1_700_000_000_000, "kept_until": 1_800_000_000_000}
    keep(app, key="k", status=Status.COMPLETED, expires_at=1_800_000_000, verdict=verdict)

    told = json.loads(run(app, "show", "k", "--json").stdout)

    assert "expires_at  2023-11-14T22:13:20.000Z" in run(app, "show", "k").stdout
    assert (told["expires_at"], told["verdict"]["counts_until"]) == ("2023-11-14T22:13:20.000Z",) * 2
    assert told["verdict"]["kept_until"] == "2027-01-15T08:00:00.000Z"


def test_result_is_decoded_for_programs_and_only_measured_for_people(app: Celery) -> None:
    """A screen is seen by more people than a program's input."""
    deliver(app.tasks["shop.charge"], "acme/7")

    assert json.loads(run(app, "show", "acme/7", "--json").stdout)["result"] == "charged acme/7"
    shown = run(app, "show", "acme/7").stdout
    assert "charged acme/7" not in shown
    assert "result  16 bytes" in shown


def test_nothing_that_was_stored_is_obeyed_by_a_terminal(app: Celery) -> None:
    """Neither control characters, nor markup, nor changes of direction; and in JSON they come back as they were."""
    record = keep(
        app, key=f"k{HOSTILE}", status=Status.FAILED, error=HOSTILE, label=HOSTILE, task=HOSTILE, worker=HOSTILE
    )

    for arguments in (("list",), ("show", record.key), ("stats",), ("forget", record.key, "--dry-run")):
        plain, made = run(app, *arguments).stdout, run(app, *arguments, "--json").stdout
        assert all(map(str.isprintable, plain.splitlines())), arguments
        assert all(map(str.isprintable, made.splitlines())), arguments
        assert made.isascii()
        assert SHOWN in plain
    (told,) = listed(app)
    assert (told["error"], told["label"], told["key"]) == (HOSTILE, HOSTILE, record.key)


def test_time_that_no_calendar_has_is_a_number() -> None:
    """Of a damaged record, which a person looks at all the same."""
    assert iso(2**62) == str(2**62)


def test_key_is_printed_as_json(app: Celery) -> None:
    """As every command does."""
    made = json.loads(run(app, "key", "shop.charge", "--args", '["acme/7"]', "--json").stdout)
    assert made == {"task": "shop.charge", "key": app.tasks["shop.charge"].idempotency_key_for("acme/7")}


def test_result_that_is_an_object_is_named_and_not_read(app: Celery) -> None:
    """To people and programs, of the operation as of its steps; a damaged pointer is what it is."""
    pointer = pointed(Encoded("x" * 200, "application/json"))
    written = pointer.to_encoded()
    named = {"object": pointer.name, "bytes": 200, "sha256": pointer.sha256, "of": "application/json"}
    steps = {"charge": to_plain(Finished(written))}
    whole = keep(app, key="whole", status=Status.COMPLETED, result=written.data, content_type=OBJECT, expires_at=2**40)
    keep(app, key="begun", status=Status.RELEASED, steps=steps)
    keep(app, key="damaged", status=Status.COMPLETED, result="{}", content_type=OBJECT, expires_at=2**40)

    assert json.loads(run(app, "show", "--json", whole.key).stdout)["result"] == named
    assert json.loads(run(app, "show", "--json", "begun").stdout)["steps"]["charge"]["result"] == named
    assert json.loads(run(app, "show", "--json", "damaged").stdout)["result"] == {"bytes": 2}
    assert f"kept as the object {pointer.name}: 200 bytes" in " ".join(run(app, "show", whole.key).stdout.split())
    assert f"its result is kept as the object {pointer.name}" in " ".join(run(app, "show", "begun").stdout.split())
    assert "2 bytes" in run(app, "show", "damaged").stdout
