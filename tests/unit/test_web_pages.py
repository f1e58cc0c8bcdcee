"""What people see of the store: whole, escaped, and at the cost of what is shown; and the verdicts that they give."""

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import pytest
from celery import Celery
from starlette.testclient import TestClient

from celery_idempotent import Policy, StoreMisconfigured, StoreUnavailable
from celery_idempotent.contrib.web import pages
from celery_idempotent.contrib.web.overview import MOST_NAMED, Overview, count
from celery_idempotent.contrib.web.records import PAGE, timeline
from celery_idempotent.engine.claim import effect_key
from celery_idempotent.integration.operating import display
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, Finished, to_plain
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.protocol.verdicts import Action, given
from celery_idempotent.testing.contract import a_completion, a_record
from tests.support import web
from tests.support.web import HOUR, Watched, a_page, a_verdict, a_written, now_of, overview_of, seen, store_of, text_of

MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
CONTROL = "\x00\x1b[31m\r\nforged\u202etxt.exe\u2028\x7f\ud800"
HOSTILE = MARKUP + CONTROL


@pytest.fixture
def store() -> Watched:
    return Watched()


@pytest.fixture
def app(store: Watched) -> Celery:
    return web.a_shop(idempotency_store=store)


@pytest.fixture
def person(app: Celery) -> TestClient:
    """Somebody who may give verdicts."""
    return web.a_program(a_page(app))


def _listed(html: str) -> list[str]:
    """The names of the records in the list, in its order."""
    return re.findall(r'class="what"><a [^>]*>([^<]*)<', html)


def _shown(person: TestClient, record: Record) -> str:
    return text_of(person.get("/record", params={"key": record.key}).text)


def _obeyed(html: str) -> list[str]:
    """What a browser, or whoever copies it, would obey."""
    return [each for each in ("<script", "<img src=x", *"\x00\x1b\r\u202e\u2028\x7f") if each in html]


@pytest.mark.parametrize("status", list(Status))
def test_nothing_of_a_record_is_obeyed(app: Celery, person: TestClient, status: Status) -> None:
    """Neither as markup by a browser, nor as a control character by whoever copies it."""
    names = ("label", "task", "task_id", "worker", "app", "process", "error", "owner", "trace", "fingerprint")
    verdict = {"action": HOSTILE, "by": HOSTILE, "reason": HOSTILE, "at": 1, "status": HOSTILE, "error": HOSTILE}
    values = {"steps": {HOSTILE: HOSTILE}, "verdict": verdict, "revision": HOSTILE[:-1], "content_type": HOSTILE}
    outcome = f'{{"a": "{MARKUP}"}}'.encode()
    named: dict[str, Any] = {**dict.fromkeys(names, HOSTILE), **values, "key": f"{MARKUP}:1:{HOSTILE[:-1]}"}
    record = a_written(app, status, result=outcome, **named)
    shown = [
        person.get("/"),
        person.get("/records"),
        person.get("/records", params={"all": "1", "label": MARKUP}),
        person.get("/record", params={"key": record.key}),
        person.post("/judge", data={"seen": " ".join(map(quote, (record.revision, record.key)))}),
        person.post("/judge", data={"seen": [quote(MARKUP), record.key]}),
    ]
    assert [(each.status_code, _obeyed(each.text)) for each in shown] == [(200, [])] * 6
    assert "&lt;script&gt;" in shown[1].text


@pytest.mark.parametrize("path", ["/records", "/record", "/nowhere", "/judge"])
def test_nothing_of_an_address_is_obeyed(person: TestClient, path: str) -> None:
    """What somebody is made to click on is as foreign."""
    for name in ("label", "key", "task", "status", "older", "page", "all", MARKUP):
        answer = person.get(path, params={name: MARKUP + CONTROL[:-1]})
        assert (answer.status_code < 500, _obeyed(answer.text)) == (True, [])


def test_search_asks_for_whatever_is_known(app: Celery, person: TestClient, store: Watched) -> None:
    """By each field alone, and by several at once; a whole key is one request, however large the store is."""
    old = a_written(app, label="acme/1", age=3 * HOUR)
    a_written(app, Status.COMPLETED, label="acme/2", task="shop.refund", age=1000)
    a_written(app, Status.FAILED, label="other")
    for asked, found in {
        (): ["acme/1", "other", "acme/2"],
        ("label", "acme/*"): ["acme/1", "acme/2"],
        ("status", " completed "): ["acme/2"],
        ("task", "shop.refund"): ["acme/2"],
        ("older", "7200"): ["acme/1"],
        ("key", old.key[:25]): ["acme/1"],
        ("key", old.key, "status", "FAILED"): [],
        ("label", "acme/*", "status", "UNKNOWN"): ["acme/1"],
    }.items():
        query = dict(zip(asked[::2], asked[1::2], strict=True))
        assert _listed(person.get("/records", params=query).text) == found, asked
    store.scans = 0
    assert _listed(person.get("/records", params={"key": old.key}).text) == ["acme/1"]
    assert store.scans == 0
    vars(store)["reads_all"] = lambda **wanted: wanted["status"] is None
    for query, is_said in (({}, True), ({"status": "UNKNOWN"}, False), ({"key": old.key}, False)):
        assert ("No index tells" in person.get("/records", params=query).text) is is_said


@pytest.mark.parametrize("query", ["status=DONE", "older=x", "older=-1", "older=%D9%A1", "page=x", "page=2001"])
def test_search_that_cannot_be_understood_is_told(person: TestClient, query: str) -> None:
    """By a sentence, and nothing is read."""
    answer = person.get(f"/records?{query}")
    assert (answer.status_code, "cannot be understood" in answer.text) == (400, True)


def test_page_reads_what_it_shows(app: Celery, person: TestClient, store: Watched) -> None:
    """The first of many reads one record more than it shows; all are shown once, each page the oldest first."""
    for number in range(3 * PAGE):
        a_written(app, label=f"n{number}", age=(number + 1) * 1000)

    first = person.get("/records").text
    assert store.read == PAGE + 1
    shown = [first, *(person.get("/records", params={"page": each}).text for each in ("2", "3"))]

    listed = [_listed(each) for each in shown]
    assert listed == [[f"n{last - each}" for each in range(PAGE)] for last in (PAGE - 1, 2 * PAGE - 1, 3 * PAGE - 1)]
    linked = [re.findall(r'rel="(?:next|prev)" href="/records\?page=(\d)"', each) for each in shown]
    assert linked == [["2"], ["1", "3"], ["2"]]
    assert "nothing on this page" in person.get("/records", params={"page": "4"}).text


def test_record_shows_all_that_is_known(app: Celery, person: TestClient) -> None:
    """What was promised, what happened, and what was recorded; the promise of a task of others is a guess."""
    steps = {"charge": to_plain(Begun(1_700_000_000_000, 1))}
    record = a_written(app, error="lost", steps=steps)
    shown = _shown(person, record)
    policy: Policy = app.tasks["shop.charge"].idempotency_policy
    facts = record.key, record.task_id, record.worker, record.trace, display.utc(record.updated_at)
    effects = [f"{name} {effect_key(record.key, name)}" for name in ("charge", "receipt")]
    promised = [each.strip() for each in policy.guarantee("shop.charge").split("\n")]
    wanted = *facts, *effects, *promised, "lost", "2023-11-14 22:13:20.000 UTC"
    assert [each for each in wanted if each not in shown] == []
    assert "This app has no such task" not in shown
    assert "This app has no such task" in _shown(person, a_written(app, task="elsewhere.pay"))


@pytest.mark.parametrize(
    "error", [StoreUnavailable("s", "get", "<b>no</b>"), StoreMisconfigured("s", "get", "<b>no</b>")]
)
@pytest.mark.parametrize("path", ["/", "/records", "/record?key=k"])
def test_store_that_gives_no_record_is_told(person: TestClient, store: Watched, error: Exception, path: str) -> None:
    """In the store's words, and the next look asks again."""
    store.error = error
    assert "&lt;b&gt;" in seen(person, path, lambda page: page.status_code == 503).text
    store.error = None
    assert person.get(path).status_code == (404 if "key" in path else 200)


@pytest.mark.parametrize(("headers", "status"), [({}, 401), (web.BEARER, 503)], ids=["a stranger", "a person"])
def test_store_that_was_never_there_is_told(
    app: Celery, store: Watched, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], status: int
) -> None:
    """It has not told its time either; and a stranger's request does not ask for it."""
    monkeypatch.setattr(store, "now", Mock(side_effect=StoreUnavailable("memory://", "now", "down")))
    assert TestClient(a_page(app), headers=headers).get("/records").status_code == status


NOW = 1_800_000_000_000
STEPS = {
    "sms": to_plain(Begun(NOW + 9_000, 3)),
    "charge": to_plain(Finished(Encoded("1", "application/json"))),
    "mail": to_plain(Finished(None, "too large")),
    "odd": 7,
}
UNKNOWN = replace(a_record(), status=Status.UNKNOWN, error="lost", attempts=2, takeovers=1, fencing_token=NOW)
TAKEN = replace(UNKNOWN, attempts=3, takeovers=2, fencing_token=NOW + 5_000, updated_at=NOW + 99_000, steps=STEPS)
BOB = given(Action.COMPLETED, UNKNOWN, NOW + 3_000, by="bob", reason="PSP-2")
ANN = given(Action.FORGET, a_completion(a_record()), NOW + 1_000, by="ann", reason="PSP-1")
JUDGED = replace(a_completion(UNKNOWN), verdict=BOB, updated_at=NOW + 3_000)
ERASED = replace(a_completion(a_record()), verdict=ANN, updated_at=NOW + 1_000, expires_at=NOW // 1000)
ANNOUNCED = replace(a_record(), status=Status.RELEASED, owner="", attempts=0)
GIVEN_BACK = replace(ANNOUNCED, attempts=2, worker="", process="")
BY_HAND = replace(a_record(), verdict={"action": ["x"], "at": "x"})
ONE = "Attempt 1 claimed it"
ALIVE = f"{ONE}; Last sign of life"
TAKEOVER = "Attempt 3 took over: the 2 attempts before it never ended"
TOOK_STEPS = f"{TAKEOVER}; Step charge; Step mail; Step odd; Step sms"
JUDGEMENT = "Attempt 2 took over: the attempt before it never ended; Verdict: completed; Completed"


@pytest.mark.parametrize(
    ("record", "now", "titles"),
    [
        (a_record(), NOW, f"{ALIVE}; The lease ends, unless renewed"),
        (a_record().but(lease_until=NOW), NOW, f"{ALIVE}; The lease was over"),
        (TAKEN, NOW, f"First recorded; {TOOK_STEPS}; Nobody can tell whether the effect happened"),
        (JUDGED, NOW, f"First recorded; {JUDGEMENT}; The outcome will be forgotten"),
        (ERASED, NOW, f"{ONE}; Verdict: forget; Forgotten"),
        (ANNOUNCED, NOW, "Recorded by a publisher"),
        (GIVEN_BACK, NOW, "First recorded; Attempt 2 claimed it; Given back, to be run by the next delivery"),
        (BY_HAND, NOW, f"{ONE}; Verdict: ['x']; {ALIVE[-17:]}; The lease ends, unless renewed"),
    ],
    ids=["alive", "over", "taken over", "judged", "erased", "queued", "given back", "by hand"],
)
def test_timeline_tells_what_happened_in_its_order(record: Record, now: int, titles: str) -> None:
    """What has no time stands behind the last claim, a step in doubt where it began, a verdict before its outcome."""
    assert "; ".join(each.title for each in timeline(record, now)) == titles


def test_timeline_tells_who_and_why_and_until_when_the_outcome_counts() -> None:
    """That is until when a duplicate is answered, though a verdict keeps the record."""
    assert timeline(TAKEN, NOW)[-1].details == ("lost",)
    assert timeline(TAKEN, NOW)[-2].details == ("began at 2027-01-15 08:00:09.000 UTC in attempt 3, and did not end",)
    said = "completed by bob, on UNKNOWN after attempt 2, because: PSP-2 (it had said: lost)"
    assert timeline(JUDGED, NOW)[2].details == (f"2027-01-15 08:00:03.000 UTC {said}",)
    kept = replace(a_completion(a_record()), expires_at=NOW, verdict={"counts_until": NOW + 1_000})
    assert timeline(kept, NOW)[-1].at == NOW + 1_000


def test_overview_counts_by_status_and_task(app: Celery, person: TestClient) -> None:
    """Outcomes that no longer count by themselves; each number leads to its records."""
    for status in (*[Status.COMPLETED] * 3, *[Status.FAILED] * 2):
        a_written(app, status, task="shop.refund")
    a_written(app, Status.COMPLETED, expires_at=1)
    html = overview_of(person)
    numbers = re.findall(r'number">([\d,]+)</span>\s*<span class="badge (\w+)', html)
    cards = {name: int(count) for count, name in numbers}
    none = dict.fromkeys(("UNKNOWN", "IN_PROGRESS", "RELEASED"), 0)
    assert cards == {**none, "FAILED": 2, "COMPLETED": 3, "FORGOTTEN": 1}
    assert {name: len(_listed(person.get(f"/records?status={name}").text)) for name in cards} == cards
    assert "shop.charge 0 0 0 0 0 1 shop.refund 0 0 2 0 3 0" in text_of(html)


def test_overview_names_who_waits_for_a_person(app: Celery, person: TestClient) -> None:
    """UNKNOWN first, then claims that nobody took over; each the oldest first, and not all of many."""
    records = [a_written(app, label=f"unknown {each}", age=(each + 1) * HOUR) for each in range(MOST_NAMED + 5)]
    a_written(app, Status.IN_PROGRESS, label="abandoned", age=99 * HOUR)
    a_written(app, Status.IN_PROGRESS, label="alive", lease_until=store_of(app).now() + HOUR)
    html = overview_of(person)
    oldest_first = [f"unknown {number}" for number in range(MOST_NAMED + 4, 4, -1)]
    assert _listed(html) == [*oldest_first, "abandoned"]
    assert f'<a href="/records?status=UNKNOWN">Search all {MOST_NAMED + 5}</a>' in html
    left = count(runtime_of(app), store_of(app).scan()).unknown.without([records[-1].key])
    assert (left.count, len(left.records)) == (MOST_NAMED + 4, MOST_NAMED - 1)


def _scraped(person: TestClient) -> dict[str, float]:
    answer = person.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = (line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("celery_idempotent_operations"): float(value) for name, value in samples}


def test_prometheus_is_told_of_the_open_until_they_are_judged(app: Celery, person: TestClient, store: Watched) -> None:
    """How many, and since when; by a look at what is open alone, once a minute and after a verdict."""
    records = [a_written(app, age=each * HOUR) for each in (1, 3)]
    a_written(app, Status.IN_PROGRESS, age=2 * HOUR)
    a_written(app, Status.IN_PROGRESS, lease_until=store_of(app).now() + HOUR)
    a_written(app, Status.COMPLETED)

    for _ in range(2):
        assert _scraped(person) == {
            '{state="unknown"}': 2,
            '{state="abandoned"}': 1,
            '_age_seconds{state="unknown"}': pytest.approx(3 * 3600, abs=60),
            '_age_seconds{state="abandoned"}': pytest.approx(2 * 3600, abs=60),
        }
    assert (store.scans, store.read) == (2, 4)
    person.post("/judge", data=a_verdict(*records))
    told = _scraped(person)
    assert (told['{state="unknown"}'], told['_age_seconds{state="unknown"}']) == (0, 0)


def _held(store: Watched, first: Callable[[], object] = lambda: None) -> threading.Event:
    """What the next scan of the store waits for."""
    go_on = threading.Event()

    def wait() -> None:
        first()
        assert go_on.wait(60)

    store.before_scan = wait
    return go_on


def test_prometheus_gets_no_zero_for_what_is_not_counted_yet(
    person: TestClient, store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where the store does not answer: a target that is down is an alert, and a zero is none."""
    monkeypatch.setattr(pages, "_PATIENCE_OF_A_SCRAPE", 0.01)
    go_on = _held(store)
    assert person.get("/metrics").status_code == 503
    store.error = StoreUnavailable("s", "scan", "away")
    go_on.set()
    seen(person, "/metrics", lambda page: "away" in page.text)
    store.error = None
    seen(person, "/metrics", lambda page: page.status_code == 200)


@pytest.fixture
def clock() -> Any:
    return SimpleNamespace(seconds=0.0)


@pytest.fixture
def overview(app: Celery, clock: Any) -> Overview:
    return Overview(runtime_of(app), lambda: clock.seconds)


@pytest.mark.parametrize(("took", "fresh"), [(0, 5), (60, 600)])
def test_views_share_a_fresh_count(overview: Overview, store: Watched, clock: Any, took: float, fresh: float) -> None:
    """A count reads everything: another is made after some seconds, and counting takes a tenth of the time at most."""

    def work() -> None:
        clock.seconds += took

    store.before_scan = work
    for age in (0.0, 0.0, fresh - 0.1):
        clock.seconds = age + (took if store.scans else 0)
        look = overview.look(10)
        assert (look.counted is not None, store.scans) == (True, 1)
        assert look.age == pytest.approx(age)
    clock.seconds = took + fresh
    assert (overview.look(10).age, store.scans) == (0, 2)


def test_view_does_not_wait_for_a_slow_count(
    app: Celery, person: TestClient, store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first view says how far it is, and comes back by itself; others meanwhile do not count again."""
    go_on, scan = threading.Event(), store.scan

    def held(**asked: Any) -> Any:
        yield from itertools.repeat(a_record(), 2_500)
        assert go_on.wait(60)
        yield from scan(**asked)

    monkeypatch.setattr(store, "scan", held)
    monkeypatch.setattr(pages, "_PATIENCE", 0.1)
    for _ in range(2):
        page = seen(person, "/", lambda page: "2,500 so far" in page.text)
        assert 'http-equiv="refresh"' in page.text
    go_on.set()
    assert "2,500" in overview_of(person)
    assert store.scans == 1


def test_count_that_fails_is_told_once_by_the_next_view(overview: Overview, store: Watched) -> None:
    """Or each would begin another and say that it counts; after it, the store is asked again."""
    go_on = _held(store)
    assert overview.look(0).so_far == 0
    store.error = StoreUnavailable("memory://", "scan", "timed out")
    go_on.set()
    with pytest.raises(StoreUnavailable, match="timed out"):
        overview.look(60)
    store.error = None
    assert overview.look(60).counted


def test_judged_is_left_out_before_the_next_count_is_over(app: Celery, overview: Overview, store: Watched) -> None:
    """Of what is named and of its number; and the next look begins to count, and says so."""
    judged, left, abandoned = a_written(app), a_written(app), a_written(app, Status.IN_PROGRESS)
    overview.leave_out([judged.key])
    assert overview.look(10).counted
    overview.leave_out([judged.key, abandoned.key])

    go_on = _held(store)
    view = overview.look(0)
    go_on.set()

    assert view.counted is not None
    assert (view.counted.unknown.count, view.counted.unknown.records) == (1, [left])
    assert (view.counted.abandoned.count, view.counted.abandoned.records) == (0, [])
    assert (view.age, view.so_far, overview.look(60).so_far) == (0, 0, None)


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
def test_verdict_given_is_kept(app: Celery, person: TestClient, status: Status, action: str, becomes: Status) -> None:
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
        ({"action": "delete"}, "Choose a verdict"),
        ({"by": " "}, "Say who you are"),
        ({"reason": "\n"}, "Say why"),
        ({"checked": ""}, "Check the receiver first"),
        *(({"result": each}, "Write JSON") for each in ("", "NaN", "[" * 100_000)),
    ],
    ids=lambda value: str(value)[:24],
)
def test_incomplete_verdict_is_asked_again(app: Celery, person: TestClient, said: dict[str, str], asked: str) -> None:
    """With what was written, and nothing is changed."""
    record = a_written(app)
    answer = person.post("/judge", data=a_verdict(record, **{"by": "<Ann>", **said}))
    assert (answer.status_code, asked in text_of(answer.text)) == (422, True)
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
        assert ("Your verdict is on the whole operation" in html) is bool(record.steps)
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


@pytest.mark.parametrize("seen", [[], [f"r k{number}" for number in range(PAGE + 1)], ["%ff %ff"]], ids=len)
def test_nothing_or_too_much_is_not_judged(person: TestClient, seen: list[str]) -> None:
    """A person has looked at a page, at most."""
    assert person.post("/judge", data={**a_verdict(), "seen": seen}).status_code == 400


def test_outage_in_the_midst_is_told(app: Celery, person: TestClient, store: Watched) -> None:
    """What is judged, what nobody knows, and that the others were not tried; after a refusal they are."""
    first, second, third = (a_written(app, label=label) for label in ("first one", "second", "third"))
    store.failing[second.key] = StoreUnavailable("memory://", "swap", "gone")
    shown = text_of(person.post("/judge", data=a_verdict(first, second, third)).text)
    assert "1 of 3 judged" in shown
    first_of_these = shown.index("Nobody knows whether the first of these is judged")
    assert first_of_these < shown.index("second") < shown.index("third") < shown.index("first one")
    assert [now_of(app, each).status for each in (first, third)] == [Status.COMPLETED, Status.UNKNOWN]
    store.failing[second.key] = RecordTooLarge("too much")
    shown = text_of(person.post("/judge", data=a_verdict(second, third)).text)
    assert ("1 of 2 judged" in shown, "too much" in shown) == (True, True)
