"""Verdicts on the page: asked for whole, given on what the person saw, and kept with who and why."""

from typing import Any

import pytest
from celery import Celery
from starlette.testclient import TestClient

from celery_idempotent import StoreMisconfigured, StoreUnavailable
from celery_idempotent.contrib.web.records import PAGE
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.signals import verdict_given
from celery_idempotent.stores.memory import MemoryStore
from tests.support.web import (
    a_browser,
    a_page,
    a_program,
    a_shop,
    a_verdict,
    a_written,
    form_token_in,
    now_of,
    overview_of,
    text_of,
)


class _Store(MemoryStore):
    """Fails the swap of the key that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: tuple[str, Exception] | None = None

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if self.failing and new.key == self.failing[0]:
            raise self.failing[1]
        return super().swap(new, expected)


@pytest.fixture
def store() -> _Store:
    return _Store()


@pytest.fixture
def app(store: _Store) -> Celery:
    return a_shop(idempotency_store=store)


@pytest.fixture
def person(app: Celery) -> TestClient:
    """Somebody who may give verdicts."""
    return a_program(a_page(app))


def _seen(*records: Record) -> dict[str, Any]:
    return {"seen": a_verdict(*records)["seen"]}


@pytest.mark.parametrize(
    ("status", "said", "becomes"),
    [
        (Status.UNKNOWN, {"action": "completed", "result": '{"id": "ch_1"}'}, Status.COMPLETED),
        (Status.UNKNOWN, {"action": "rerun"}, Status.RELEASED),
        (Status.IN_PROGRESS, {"action": "release"}, Status.RELEASED),
        (Status.FAILED, {"action": "forget"}, Status.COMPLETED),
        (Status.RELEASED, {"action": "forget"}, Status.COMPLETED),
    ],
)
def test_verdict_is_given_and_kept(
    app: Celery, person: TestClient, status: Status, said: dict[str, str], becomes: Status
) -> None:
    """With who and why, on the record and in the signal."""
    told: list[Any] = []
    verdict_given.connect(lambda **event: told.append(event), weak=False, dispatch_uid="page")
    record = a_written(app, status)

    answer = person.post("/judge", data=a_verdict(record, by=" Ann  Lee ", reason="they\nsaid so\x1b", **said))

    verdict_given.disconnect(dispatch_uid="page")
    judged = now_of(app, record)
    verdict = judged.verdict
    assert "1 of 1 judged" in text_of(answer.text)
    assert judged.status is becomes
    assert [verdict[name] for name in ("action", "by", "reason", "status")] == [
        *(said["action"], "Ann Lee", "they said so\\x1b", status),
    ]
    assert [each["by"] for each in told if each["key"] == record.key] == ["Ann Lee"]
    assert judged.result == ('{"id": "ch_1"}' if said["action"] == "completed" else None)
    assert "Ann Lee" in person.get("/record", params={"key": record.key}).text


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ({"action": ""}, "Choose a verdict"),
        ({"action": "delete"}, "Choose a verdict"),
        ({"by": " "}, "Say who you are"),
        ({"reason": "\n"}, "Say why"),
        ({"checked": ""}, "Check the receiver first"),
        *(({"result": each}, "Write JSON") for each in ("", "ch_1", "NaN", "[" * 100_000, "{'a': 1}")),
    ],
    ids=str,
)
def test_incomplete_verdict_is_asked_for_again(
    app: Celery, person: TestClient, said: dict[str, str], asked: str
) -> None:
    """With what was written, and nothing is changed."""
    record = a_written(app)
    answer = person.post("/judge", data=a_verdict(record, **{"by": "<Ann>", **said}))
    assert answer.status_code == 422
    assert asked in text_of(answer.text)
    assert 'aria-invalid="true"' in answer.text
    assert "by" in said or 'value="&lt;Ann&gt;"' in answer.text
    assert now_of(app, record) == record


def test_first_step_asks_for_what_fits(app: Celery, person: TestClient) -> None:
    """Of several records, how many a verdict fits."""
    unknown, abandoned, done = (a_written(app, each) for each in (Status.UNKNOWN, Status.IN_PROGRESS, Status.COMPLETED))
    for record, choices in (
        (unknown, ["completed", "rerun"]),
        (abandoned, ["release"]),
        (done, ["forget"]),
    ):
        html = person.post("/judge", data=_seen(record)).text
        assert [each for each in ("completed", "rerun", "release", "forget") if f'value="{each}"' in html] == choices
        assert ("Result to replay" in html) is ("completed" in choices)
        assert "fits" not in html
        assert "Changed or gone" not in html
    assert text_of(person.post("/judge", data=_seen(unknown, abandoned, done)).text).count("fits 1 of 3") == 4


def test_steps_are_spoken_of(app: Celery, person: TestClient) -> None:
    """A verdict is on the whole operation."""
    plain, stepped = a_written(app), a_written(app, steps={"sms": {"begun_at": 1, "attempt": 1}})
    sentence = "Your verdict is on the whole operation"
    assert sentence not in person.post("/judge", data=_seen(plain)).text
    assert sentence in person.post("/judge", data=_seen(stepped)).text


def test_living_attempt_takes_no_verdict(app: Celery, person: TestClient) -> None:
    """Neither is one asked for, nor given to whoever sends it all the same."""
    alive = a_written(app, Status.IN_PROGRESS, lease_until=app.conf.idempotency_store.now() + 60_000)
    assert "No verdict fits" in person.post("/judge", data=_seen(alive)).text
    for action in ("completed", "rerun", "release", "forget"):
        assert "0 of 1 judged" in text_of(person.post("/judge", data=a_verdict(alive, action=action)).text)
    assert now_of(app, alive) == alive


def test_many_are_judged_at_once(app: Celery, person: TestClient) -> None:
    """What does not fit, has changed or is gone, is named with its reason; the others are judged."""
    unknown = [a_written(app) for _ in range(3)]
    done, gone, changed = a_written(app, Status.COMPLETED), a_written(app), a_written(app)
    store = app.conf.idempotency_store
    store.delete(gone.key, gone.revision)
    store.swap(changed.but(revision="new"), changed.revision)

    answer = person.post("/judge", data=a_verdict(*unknown, done, gone, changed, action="rerun"))

    shown = text_of(answer.text)
    assert "3 of 6 judged" in shown
    assert "only an UNKNOWN outcome takes a verdict; it is COMPLETED" in shown
    assert f"left out. Look again: {gone.key} {changed.key}" in shown
    assert [now_of(app, each).status for each in unknown] == [Status.RELEASED] * 3


def test_record_that_changes_at_the_last_moment_keeps_its_change(
    app: Celery, person: TestClient, store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was looked up, too: the verdict is on the revision that the person saw."""
    record = a_written(app)
    look = store.get

    def looked_too_early(key: str) -> Record | None:
        seen = look(key)
        store.swap(record.but(revision="new"), record.revision)
        return seen

    monkeypatch.setattr(store, "get", looked_too_early)
    shown = text_of(person.post("/judge", data=a_verdict(record)).text)
    assert "somebody else changed the record meanwhile" in shown
    assert now_of(app, record).revision == "new"


def test_record_that_changed_is_judged_by_nobody_who_has_not_seen_it(app: Celery, person: TestClient) -> None:
    """The first step leaves it out, and says so."""
    record = a_written(app)
    app.conf.idempotency_store.swap(record.but(revision="new"), record.revision)
    html = person.post("/judge", data=_seen(record)).text
    assert "Changed or gone since you looked" in html
    assert 'name="seen"' not in html


@pytest.mark.parametrize("seen", [[], [f"r k{number}" for number in range(PAGE + 1)], ["%ff %ff"]], ids=len)
def test_nothing_or_too_much_is_not_judged(person: TestClient, seen: list[str]) -> None:
    """A person has looked at a page, at most."""
    assert person.post("/judge", data={**a_verdict(), "seen": seen}).status_code == 400


def test_outage_in_the_midst_is_told(app: Celery, person: TestClient, store: _Store) -> None:
    """What is judged, what nobody knows, and that the others were not tried."""
    first, second, third = (a_written(app, label=label) for label in ("first one", "second", "third"))
    store.failing = (second.key, StoreUnavailable("memory://", "swap", "gone"))

    shown = text_of(person.post("/judge", data=a_verdict(first, second, third)).text)

    assert "1 of 3 judged" in shown
    first_of_these = shown.index("Nobody knows whether the first of these is judged")
    assert first_of_these < shown.index("second") < shown.index("third") < shown.index("first one")
    assert [now_of(app, each).status for each in (first, third)] == [Status.COMPLETED, Status.UNKNOWN]


@pytest.mark.parametrize(
    ("error", "told"),
    [(RecordTooLarge("x"), "no room for so large a record"), (StoreMisconfigured("s", "swap", "denied"), "denied")],
    ids=["too large", "misconfigured"],
)
def test_refusal_of_the_store_is_told_of_each(
    app: Celery, person: TestClient, store: _Store, error: Exception, told: str
) -> None:
    """Another record may have room."""
    first, second = a_written(app), a_written(app)
    store.failing = (first.key, error)
    shown = text_of(person.post("/judge", data=a_verdict(first, second)).text)
    assert "1 of 2 judged" in shown
    assert told in shown


def test_judged_waits_for_nobody(app: Celery, person: TestClient) -> None:
    """The overview does not name it until the next count."""
    judged, left = a_written(app, label="judged"), a_written(app, label="left")
    assert judged.label in overview_of(person)
    person.post("/judge", data=a_verdict(judged))
    html = overview_of(person)
    assert judged.label not in html
    assert left.label in html


def test_who_judges_is_asked_once(app: Celery) -> None:
    """The next form has the name, whatever letters it has."""
    browser = a_browser(a_page(app))
    first, second = a_written(app), a_written(app)
    token = {"form_token": form_token_in(browser.get("/records").text)}
    browser.post("/judge", data={**a_verdict(first, by='Zoë "Z"; a=b'), **token})
    assert 'value="Zoë &#34;Z&#34;; a=b"' in browser.post("/judge", data={**_seen(second), **token}).text
