"""Verdicts on the page: asked for whole, given on what the person saw, and kept with who and why."""

from typing import Any

import pytest
from celery import Celery
from starlette.testclient import TestClient

from celery_idempotent import StoreMisconfigured, StoreUnavailable
from celery_idempotent.contrib.web.records import PAGE
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge
from tests.support.web import (
    Watched,
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
)  # fmt: skip


@pytest.fixture
def store() -> Watched:
    return Watched()


@pytest.fixture
def app(store: Watched) -> Celery:
    return a_shop(idempotency_store=store)


@pytest.fixture
def person(app: Celery) -> TestClient:
    """Somebody who may give verdicts."""
    return a_program(a_page(app))


def _seen(*records: Record) -> dict[str, Any]:
    return {"seen": a_verdict(*records)["seen"]}


@pytest.mark.parametrize(
    ("status", "action", "becomes"),
    [
        (Status.UNKNOWN, "completed", Status.COMPLETED),
        (Status.UNKNOWN, "rerun", Status.RELEASED),
        (Status.IN_PROGRESS, "release", Status.RELEASED),
        (Status.FAILED, "forget", Status.COMPLETED),
    ],
)
def test_verdict_is_given_and_kept(
    app: Celery, person: TestClient, status: Status, action: str, becomes: Status
) -> None:
    """With its result, and with who and why in one line each."""
    record, result = a_written(app, status), '{"id": "ch_1"}'
    said = a_verdict(record, by=" Ann  Lee ", reason="they\nsaid so\x1b", action=action, result=result)

    assert "1 of 1 judged" in text_of(person.post("/judge", data=said).text)

    judged = now_of(app, record)
    assert (judged.status, judged.result) == (becomes, result if action == "completed" else None)
    assert [judged.verdict[name] for name in ("action", "by", "reason")] == [action, "Ann Lee", "they said so\\x1b"]
    assert "Ann Lee" in person.get("/record", params={"key": record.key}).text


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        *(({"action": each}, "Choose a verdict") for each in ("", "delete")),
        ({"by": " "}, "Say who you are"),
        ({"reason": "\n"}, "Say why"),
        ({"checked": ""}, "Check the receiver first"),
        *(({"result": each}, "Write JSON") for each in ("", "ch_1", "NaN", "[" * 100_000, "{'a': 1}")),
    ],
    ids=lambda value: str(value)[:24],
)
def test_incomplete_verdict_is_asked_for_again(
    app: Celery, person: TestClient, said: dict[str, str], asked: str
) -> None:
    """With what was written, and nothing is changed."""
    record = a_written(app)
    answer = person.post("/judge", data=a_verdict(record, **{"by": "<Ann>", **said}))
    assert (answer.status_code, asked in text_of(answer.text)) == (422, True)
    assert 'aria-invalid="true"' in answer.text
    assert ('value="&lt;Ann&gt;"' in answer.text) is ("by" not in said)
    assert now_of(app, record) == record


def test_first_step_asks_for_what_fits(app: Celery, person: TestClient) -> None:
    """Of several records, how many a verdict fits; of steps, that a verdict is on the whole operation."""
    alive = a_written(app, Status.IN_PROGRESS, lease_until=app.conf.idempotency_store.now() + 60_000)
    fitting = [
        (a_written(app, steps={"sms": {"begun_at": 1, "attempt": 1}}), ["completed", "rerun"]),
        (a_written(app, Status.IN_PROGRESS), ["release"]),
        (a_written(app, Status.COMPLETED), ["forget"]),
        (alive, []),
    ]
    for record, choices in fitting:
        html = person.post("/judge", data=_seen(record)).text
        assert [each for each in ("completed", "rerun", "release", "forget") if f'value="{each}"' in html] == choices
        assert ("Result to replay" in html) is ("completed" in choices)
        assert ("No verdict fits" in html) is (choices == [])
        assert ("Your verdict is on the whole operation" in html) is bool(record.steps)
        assert (">fits" in html, "Changed or gone" in html) == (False, False)
    assert text_of(person.post("/judge", data=_seen(*(each for each, _ in fitting))).text).count("fits 1 of 4") == 4


def test_many_are_judged_at_once(app: Celery, person: TestClient) -> None:
    """What does not fit, has changed or is gone, is named with its reason at both steps; the others are judged."""
    unknown = [a_written(app) for _ in range(3)]
    done, gone, changed = a_written(app, Status.COMPLETED), a_written(app), a_written(app)
    store = app.conf.idempotency_store
    store.delete(gone.key, gone.revision)
    store.swap(changed.but(revision="new"), changed.revision)

    asked = person.post("/judge", data=_seen(*unknown, done, gone, changed)).text
    shown = text_of(person.post("/judge", data=a_verdict(*unknown, done, gone, changed, action="rerun")).text)

    assert asked.count('name="seen"') == 4
    assert f"left out. Look again: {gone.key} {changed.key}" in text_of(asked)
    assert "3 of 6 judged" in shown
    assert "only an UNKNOWN outcome takes a verdict; it is COMPLETED" in shown
    assert f"left out. Look again: {gone.key} {changed.key}" in shown
    assert [now_of(app, each).status for each in unknown] == [Status.RELEASED] * 3


def test_record_that_changes_at_the_last_moment_keeps_its_change(
    app: Celery, person: TestClient, store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was looked up, too: the verdict is on the revision that the person saw."""
    record, look = a_written(app), store.get

    def looked_too_early(key: str) -> Record | None:
        seen = look(key)
        store.swap(record.but(revision="new"), record.revision)
        return seen

    monkeypatch.setattr(store, "get", looked_too_early)
    shown = text_of(person.post("/judge", data=a_verdict(record)).text)
    assert "somebody else changed the record meanwhile" in shown
    assert now_of(app, record).revision == "new"


@pytest.mark.parametrize("seen", [[], [f"r k{number}" for number in range(PAGE + 1)], ["%ff %ff"]], ids=len)
def test_nothing_or_too_much_is_not_judged(person: TestClient, seen: list[str]) -> None:
    """A person has looked at a page, at most."""
    assert person.post("/judge", data={**a_verdict(), "seen": seen}).status_code == 400


def test_outage_in_the_midst_is_told(app: Celery, person: TestClient, store: Watched) -> None:
    """What is judged, what nobody knows, and that the others were not tried."""
    first, second, third = (a_written(app, label=label) for label in ("first one", "second", "third"))
    store.failing[second.key] = StoreUnavailable("memory://", "swap", "gone")

    shown = text_of(person.post("/judge", data=a_verdict(first, second, third)).text)

    assert "1 of 3 judged" in shown
    first_of_these = shown.index("Nobody knows whether the first of these is judged")
    assert first_of_these < shown.index("second") < shown.index("third") < shown.index("first one")
    assert [now_of(app, each).status for each in (first, third)] == [Status.COMPLETED, Status.UNKNOWN]


@pytest.mark.parametrize("error", [RecordTooLarge("too much"), StoreMisconfigured("s", "swap", "too much")])
def test_refusal_of_the_store_is_told_of_each(
    app: Celery, person: TestClient, store: Watched, error: Exception
) -> None:
    """Another record may have room."""
    first, second = a_written(app), a_written(app)
    store.failing[first.key] = error
    shown = text_of(person.post("/judge", data=a_verdict(first, second)).text)
    assert "1 of 2 judged" in shown
    assert "too much" in shown


def test_judged_waits_for_nobody(app: Celery, person: TestClient) -> None:
    """The overview does not name it until the next count."""
    judged, left = a_written(app, label="judged"), a_written(app, label="left")
    assert judged.label in overview_of(person)
    person.post("/judge", data=a_verdict(judged))
    html = overview_of(person)
    assert (judged.label in html, left.label in html) == (False, True)


def test_who_judges_is_asked_once(app: Celery) -> None:
    """The next form has the name, whatever letters it has."""
    browser = a_browser(a_page(app))
    first, second = a_written(app), a_written(app)
    token = {"form_token": form_token_in(browser.get("/records").text)}
    browser.post("/judge", data={**a_verdict(first, by='Zoë "Z"; a=b'), **token})
    assert 'value="Zoë &#34;Z&#34;; a=b"' in browser.post("/judge", data={**_seen(second), **token}).text
