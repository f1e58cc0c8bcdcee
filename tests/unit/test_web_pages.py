"""What people see of the store: whole, escaped, in order, and at the cost of what is shown."""

import itertools
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from starlette.testclient import TestClient

from celery_idempotent import Policy, StoreMisconfigured, StoreUnavailable
from celery_idempotent.contrib.web import pages
from celery_idempotent.contrib.web.overview import MOST_NAMED, Overview, counted
from celery_idempotent.contrib.web.records import PAGE, ago, timeline
from celery_idempotent.engine.claim import effect_key
from celery_idempotent.integration.operating import display
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, Finished, to_plain
from celery_idempotent.protocol.verdicts import Action, given
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.contract import a_completion, a_record
from tests.support.objects import pointed
from tests.support.waiting import wait_until
from tests.support.web import (
    BEARER,
    HOUR,
    a_page,
    a_program,
    a_shop,
    a_verdict,
    a_written,
    overview_of,
    store_of,
    text_of,
)

MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
CONTROL = "\x00\x1b[31m\r\nforged\u202etxt.exe\u2028\x7f\ud800"
HOSTILE = MARKUP + CONTROL


class _Store(MemoryStore):
    """Counts what is asked of it, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0
        self.scans = 0
        self.error: Exception | None = None

    def get(self, key: str) -> Record | None:
        if self.error:
            raise self.error
        return super().get(key)

    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        self.scans += 1
        for record in super().scan(status=status, task=task, label=label):
            if self.error:
                raise self.error
            self.read += 1
            yield record


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


def _listed(html: str) -> list[str]:
    """The names of the records in the list, in its order."""
    return re.findall(r'class="what"><a [^>]*>([^<]*)<', html)


# -- whatever a record holds


@pytest.mark.parametrize("status", list(Status))
def test_nothing_of_a_record_is_obeyed(app: Celery, person: TestClient, status: Status) -> None:
    """Neither as markup by a browser, nor as a control character by whoever copies it."""
    texts: dict[str, Any] = dict.fromkeys(
        ("label", "task", "task_id", "worker", "app", "process", "error", "owner", "trace"), HOSTILE
    )
    verdict = {"action": HOSTILE, "by": HOSTILE, "reason": HOSTILE, "at": 1, "status": HOSTILE, "error": HOSTILE}
    record = a_written(
        app,
        status,
        key=f"{MARKUP}:1:{HOSTILE[:-1]}",
        revision=HOSTILE[:-1],
        fingerprint=HOSTILE,
        steps={HOSTILE: HOSTILE},
        verdict=verdict,
        result=f'{{"a": "{MARKUP}"}}'.encode(),
        content_type=HOSTILE,
        **texts,
    )
    shown = [
        person.get("/"),
        person.get("/records"),
        person.get("/records", params={"all": "1", "label": MARKUP}),
        person.get("/record", params={"key": record.key}),
        person.post("/judge", data={"seen": " ".join(map(quote, (record.revision, record.key)))}),
        person.post("/judge", data={"seen": [quote(MARKUP), record.key]}),
    ]
    for answer in shown:
        assert answer.status_code == 200
        assert "<script" not in answer.text
        assert "<img src=x" not in answer.text
        assert not set("\x00\x1b\r\u202e\u2028\x7f") & set(answer.text)
    assert "&lt;script&gt;" in shown[1].text


@pytest.mark.parametrize("path", ["/records", "/record", "/nowhere", "/judge"])
def test_nothing_of_an_address_is_obeyed(person: TestClient, path: str) -> None:
    """What somebody is made to click on is as foreign."""
    for name in ("label", "key", "task", "status", "older", "page", "all", MARKUP):
        answer = person.get(path, params={name: MARKUP + CONTROL[:-1]})
        assert answer.status_code < 500
        assert "<script" not in answer.text
        assert "<img src=x" not in answer.text
        assert not set("\x00\x1b\r\u202e\u2028\x7f") & set(answer.text)


def test_outcome_is_decoded_only_as_json(app: Celery, person: TestClient) -> None:
    """Decoding anything else could run code."""
    json = a_written(app, Status.COMPLETED, result='{"id": "<b>"}', content_type="application/json")
    pickled = a_written(app, Status.COMPLETED, result=b"cos\nsystem\n", content_type="application/x-python-serialize")
    assert '{ "id": "<b>" }' in text_of(person.get("/record", params={"key": json.key}).text)
    assert "is never decoded here" in text_of(person.get("/record", params={"key": pickled.key}).text)


def test_outcome_that_is_an_object_is_named_and_not_read(app: Celery, person: TestClient) -> None:
    """Whose, where, and how large; the page asks nobody else than the store."""
    app.conf.idempotency_large_results = "s3://nowhere/prefix?endpoint=http://127.0.0.1:1"
    pointer = pointed(Encoded("x" * 200, "application/json"))
    written = pointer.to_encoded()
    record = a_written(app, Status.COMPLETED, result=written.data, content_type=written.content_type)
    shown = text_of(person.get("/record", params={"key": record.key}).text)
    assert f"kept as the object {pointer.name}: 200 bytes of application/json, SHA-256 {pointer.sha256}" in shown


# -- searching


def test_search_asks_for_whatever_is_known(app: Celery, person: TestClient) -> None:
    """By each field alone, and by several at once."""
    old = a_written(app, label="acme/1", age=3 * HOUR)
    young = a_written(app, Status.COMPLETED, label="acme/2", task="shop.refund", age=1000)
    other = a_written(app, Status.FAILED, label="other")
    searches: dict[tuple[str, ...], set[str]] = {
        (): {old.label, young.label, other.label},
        ("label", "acme/1"): {old.label},
        ("label", "acme/*"): {old.label, young.label},
        ("label", "acme"): set(),
        ("status", "completed"): {young.label},
        ("task", "shop.refund"): {young.label},
        ("older", "7200"): {old.label},
        ("older", "60"): {old.label, other.label},
        ("key", old.key): {old.label},
        ("key", old.key[:25]): {old.label},
        ("key", old.key.rpartition(":")[2][:8]): {old.label},
        ("key", old.task_id): {old.label},
        ("key", old.key, "status", "FAILED"): set(),
        ("label", "acme/*", "status", "UNKNOWN"): {old.label},
    }
    for asked, found in searches.items():
        query = dict(zip(asked[::2], asked[1::2], strict=True))
        assert set(_listed(person.get("/records", params=query).text)) == found, asked


@pytest.mark.parametrize(
    "query",
    [
        {"status": "DONE"},
        *({"older": each} for each in ("x", "-1", "1e9", "9" * 5000, "10000000001", "\u0661", "1.5")),
        *({"page": each} for each in ("x", "-1", "2001", "9" * 5000)),
    ],
    ids=str,
)
def test_search_that_cannot_be_understood_is_told(person: TestClient, query: dict[str, str]) -> None:
    """By a sentence, and nothing is read."""
    answer = person.get("/records", params=query)
    assert answer.status_code == 400
    assert "cannot be understood" in answer.text


def test_form_keeps_what_was_asked(person: TestClient) -> None:
    """Also an age that it does not offer."""
    html = person.get("/records", params={"older": "7260", "status": "FAILED", "label": "a&b"}).text
    assert '<option value="7260" selected>2 h 1 min</option>' in html
    assert "<option selected>FAILED</option>" in html
    assert 'value="a&amp;b"' in html


def test_page_reads_what_it_shows(app: Celery, person: TestClient, store: _Store) -> None:
    """The first of many pages reads one record more than it shows, to tell whether there are more."""
    for number in range(3 * PAGE):
        a_written(app, label=f"n{number}")

    first = person.get("/records").text
    assert store.read == PAGE + 1
    second = person.get("/records", params={"page": "2"}).text
    third = person.get("/records", params={"page": "3"}).text

    pages = [_listed(each) for each in (first, second, third)]
    assert [len(each) for each in pages] == [PAGE] * 3
    assert len({name for each in pages for name in each}) == 3 * PAGE
    assert 'rel="next" href="/records?page=2"' in first
    assert 'rel="prev" href="/records?page=1"' in second
    assert 'rel="next"' not in third
    assert "nothing on this page" in person.get("/records", params={"page": "4"}).text


def test_whole_key_is_one_request(app: Celery, person: TestClient, store: _Store) -> None:
    """However large the store is."""
    record = a_written(app)
    assert _listed(person.get("/records", params={"key": record.key}).text) == [record.label]
    assert store.scans == 0


def test_list_shows_the_longest_untouched_first(app: Celery, person: TestClient) -> None:
    """By the last write."""
    for hours in (2, 3, 1):
        a_written(app, label=f"{hours} hours", age=hours * HOUR)
    assert _listed(person.get("/records").text) == ["3 hours", "2 hours", "1 hours"]


def test_all_of_a_page_are_chosen_without_a_script(app: Celery, person: TestClient) -> None:
    """By a link to the same page, and back."""
    a_written(app)
    assert " checked" not in person.get("/records", params={"label": "acme/*"}).text
    chosen = person.get("/records", params={"label": "acme/*", "all": "1"}).text
    assert " checked" in chosen
    assert 'href="/records?label=acme%2F%2A&amp;page=1">Choose none' in chosen


def test_states_are_told_as_people_read_them(app: Celery, person: TestClient) -> None:
    """Not only by the status: whether an attempt may be alive, a message is queued, an outcome counts."""
    now = store_of(app).now()
    a_written(app, Status.IN_PROGRESS)
    a_written(app, Status.IN_PROGRESS, lease_until=now + HOUR)
    a_written(app, Status.RELEASED, owner="", lease_until=now + HOUR)
    a_written(app, Status.COMPLETED, expires_at=1)
    shown = re.findall(r'class="badge [^>]*>([^<]*)<', person.get("/records").text)
    for each in ("IN_PROGRESS, lease over", "RELEASED, queued", "FORGOTTEN"):
        assert shown.count(each) == 1


# -- one record


def test_record_shows_all_that_is_known(app: Celery, person: TestClient) -> None:
    """What was promised, what happened, and what was recorded."""
    record = a_written(app, error="lost", steps={"charge": to_plain(Begun(1_700_000_000_000, 1))})
    shown = text_of(person.get("/record", params={"key": record.key}).text)
    policy: Policy = app.tasks["shop.charge"].idempotency_policy
    for line in policy.guarantee("shop.charge").split("\n"):
        assert line.strip() in shown
    for each in (record.key, record.task_id, record.worker, record.trace, "lost", "2023-11-14 22:13:20.000 UTC"):
        assert each in shown
    assert display.utc(record.updated_at) in shown
    for name in ("charge", "receipt"):
        assert f"{name} {effect_key(record.key, name)}" in shown
    assert "no such task" not in shown


def test_promise_of_a_task_of_others_is_told_as_a_guess(app: Celery, person: TestClient) -> None:
    """Its worker has a policy that this app does not know."""
    record = a_written(app, task="elsewhere.pay")
    assert "This app has no such task" in person.get("/record", params={"key": record.key}).text


def test_missing_record_is_told(person: TestClient) -> None:
    """It may have been forgotten since the list was read."""
    assert person.get("/record", params={"key": "k"}).status_code == 404
    assert person.get("/record").status_code == 404


@pytest.mark.parametrize(
    "error",
    [StoreUnavailable("memory://", "get", "<b>down</b>"), StoreMisconfigured("memory://", "read", "<b>damaged</b>")],
    ids=["unavailable", "damaged"],
)
@pytest.mark.parametrize("path", ["/", "/records", "/record?key=k"])
def test_store_that_gives_no_record_is_told(
    app: Celery, person: TestClient, store: _Store, error: Exception, path: str
) -> None:
    """In the store's words, and the next look asks again."""
    a_written(app)
    store.error = error
    answer = wait_until(lambda: _refused(person.get(path)), "the store has failed")
    assert "&lt;b&gt;" in answer.text
    store.error = None
    assert person.get(path).status_code in (200, 404)


@pytest.mark.parametrize(("headers", "status"), [({}, 401), (BEARER, 503)], ids=["a stranger", "a person"])
def test_store_that_was_never_there_is_told(
    app: Celery, store: _Store, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], status: int
) -> None:
    """It has not told its time either; and a stranger's request does not ask for it."""

    def fail() -> int:
        raise StoreUnavailable("memory://", "now", "down")

    monkeypatch.setattr(store, "now", fail)
    assert TestClient(a_page(app), headers=headers).get("/records").status_code == status


def _refused(answer: Any) -> Any:
    """The answer, unless it says that it still counts."""
    return answer if answer.status_code == 503 else None


# -- the timeline

NOW = 1_800_000_000_000
DONE = to_plain(Finished(Encoded("1", "application/json")))
LOST = to_plain(Finished(None, "too large"))


def _told(record: Record, now: int = NOW + HOUR) -> list[str]:
    return [each.title for each in timeline(record, now)]


def test_timeline_of_one_attempt() -> None:
    """It claimed, it lives, and its lease will end, or has."""
    record = a_record()
    told = ["Attempt 1 claimed it", "Last sign of life"]
    assert _told(record, NOW) == [*told, "The lease ends, unless renewed"]
    assert _told(record) == [*told, "The lease was over"]


def test_timeline_of_a_takeover_and_its_steps() -> None:
    """What has no time stands behind the last claim; a step in doubt stands where it began."""
    steps: dict[str, Any] = {"sms": to_plain(Begun(NOW + 9_000, 3)), "charge": DONE, "mail": LOST, "odd": 7}
    record = replace(
        a_record(), status=Status.UNKNOWN, attempts=3, takeovers=2, fencing_token=NOW + 5_000, updated_at=NOW + 99_000,
        steps=steps, error="why",
    )  # fmt: skip
    events = timeline(record, NOW + HOUR)
    assert [each.title for each in events] == [
        "First recorded",
        "Attempt 3 took over: the 2 attempts before it never ended",
        "Step charge ended",
        "Step mail ended",
        "Step odd",
        "Step sms began",
        "Nobody can tell whether the effect happened",
    ]
    assert events[0].details == ("2 earlier attempts are counted, but not kept",)
    assert [each.details[0].partition(";")[0] for each in events[2:4]] == [
        "its result is recorded",
        "its result is lost: too large",
    ]
    assert events[-1].details == ("why",)


def test_timeline_of_a_verdict() -> None:
    """With who, why, and what was judged; the outcome follows."""
    unknown = replace(a_record(), status=Status.UNKNOWN, error="lost", attempts=2, takeovers=1, fencing_token=NOW)
    verdict = given(Action.COMPLETED, unknown, NOW + 3_000, by="bob", reason="PSP-2")
    events = timeline(replace(a_completion(unknown), verdict=verdict, updated_at=NOW + 3_000), NOW + HOUR)
    assert [each.title for each in events] == [
        "First recorded",
        "Attempt 2 took over: the attempt before it never ended",
        "Verdict: it happened",
        "Completed",
        "The outcome will be forgotten",
    ]
    assert events[2].details == ("by: bob", "why: PSP-2", "judged: it was UNKNOWN, attempt 2", "its error: lost")
    assert events[0].details == ("1 earlier attempt is counted, but not kept",)


def test_timeline_ends_with_the_outcome_though_a_verdict_keeps_the_record() -> None:
    """That is until when a duplicate is answered."""
    record = replace(a_completion(a_record()), expires_at=NOW, verdict={"counts_until": NOW + 1_000})

    assert timeline(record, NOW)[-1].at == NOW + 1_000


def test_timeline_of_what_was_forgotten_on_purpose() -> None:
    """The mark that is left is no completion."""
    done = a_completion(a_record())
    verdict = given(Action.FORGET, done, NOW + 1_000, by="ann", reason="PSP-1")
    record = replace(done, verdict=verdict, updated_at=NOW + 1_000, expires_at=NOW // 1000)
    assert _told(record) == ["Attempt 1 claimed it", "Verdict: forgotten on purpose", "Forgotten"]
    assert _told(record, NOW // 1000 * 1000)[-1] == "Forgotten", "as deliveries see it from this moment on"


def test_timeline_of_what_a_publisher_recorded() -> None:
    """Nobody has claimed it yet; once an attempt has given it back, that is told."""
    announced = replace(a_record(), status=Status.RELEASED, owner="", attempts=0)
    assert _told(announced) == ["Recorded by a publisher"]
    assert _told(replace(announced, attempts=2, worker="", process="")) == [
        "First recorded",
        "Attempt 2 claimed it",
        "Given back, to be run by the next delivery",
    ]


@pytest.mark.parametrize("verdict", [{"action": ["x"], "at": "x"}, {"at": None}])
def test_timeline_bears_a_verdict_that_nobody_can_have_written(verdict: dict[str, Any]) -> None:
    """Somebody may have put it there by hand."""
    assert _told(replace(a_record(), verdict=verdict))


def test_times_are_told_from_both_sides() -> None:
    """What was, and what will be."""
    assert (ago(NOW - HOUR, NOW), ago(NOW + HOUR, NOW), ago(NOW, NOW)) == ("1 h ago", "in 1 h", "0 s ago")


# -- the overview


def test_overview_counts_by_status_and_task(app: Celery, person: TestClient) -> None:
    """Outcomes that no longer count by themselves."""
    for status, number in ((Status.COMPLETED, 3), (Status.FAILED, 2)):
        for _ in range(number):
            a_written(app, status, task="shop.refund")
    a_written(app, Status.COMPLETED, expires_at=1)
    html = overview_of(person)
    cards = re.findall(r'number">([\d,]+)</span>\s*<span class="badge (\w+)', html)
    assert {status: len(_listed(person.get(f"/records?status={status}").text)) for _, status in cards} == {
        status: int(count) for count, status in cards
    }
    assert {status: count for count, status in cards} == {
        "UNKNOWN": "0", "IN_PROGRESS": "0", "FAILED": "2", "RELEASED": "0", "COMPLETED": "3", "FORGOTTEN": "1",
    }  # fmt: skip
    assert "shop.charge 0 0 0 0 0 1 shop.refund 0 0 2 0 3 0" in text_of(html)
    assert "Nothing does." in html


def test_overview_names_who_waits_for_a_person(app: Celery, person: TestClient) -> None:
    """UNKNOWN first, then claims that nobody took over; each the oldest first, and not all of many."""
    for number in range(MOST_NAMED + 5):
        a_written(app, label=f"unknown {number}", age=(number + 1) * HOUR)
    a_written(app, Status.IN_PROGRESS, label="abandoned", age=99 * HOUR)
    a_written(app, Status.IN_PROGRESS, label="alive", lease_until=store_of(app).now() + HOUR)
    html = overview_of(person)
    oldest_first = [f"unknown {number}" for number in range(MOST_NAMED + 4, 4, -1)]
    assert _listed(html) == [*oldest_first, "abandoned"]
    assert f'<a href="/records?status=UNKNOWN">Search all {MOST_NAMED + 5}</a>' in html


def _scraped(person: TestClient) -> dict[str, float]:
    answer = person.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = (line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("celery_idempotent_"): float(value) for name, value in samples}


def test_prometheus_is_told_what_waits_until_somebody_has_judged(
    app: Celery, person: TestClient, store: _Store
) -> None:
    """How many, and since when; by a look at what is open alone, once a minute and after a verdict."""
    records = [a_written(app, age=each * HOUR) for each in (1, 3)]
    a_written(app, Status.IN_PROGRESS, age=2 * HOUR)
    a_written(app, Status.IN_PROGRESS, lease_until=store_of(app).now() + HOUR)
    a_written(app, Status.COMPLETED)

    told = _scraped(person)
    assert told == _scraped(person) | {name: pytest.approx(age, abs=60) for name, age in told.items() if "age" in name}
    assert (told['operations{state="unknown"}'], told['operations{state="abandoned"}']) == (2, 1)
    assert told['operations_age_seconds{state="unknown"}'] == pytest.approx(3 * 3600, abs=60)
    assert told['operations_age_seconds{state="abandoned"}'] == pytest.approx(2 * 3600, abs=60)
    assert (store.scans, store.read) == (2, 4)

    writing = a_program(a_page(app))
    assert _scraped(writing)['operations{state="unknown"}'] == 2
    writing.post("/judge", data=a_verdict(*records))
    told = _scraped(writing)
    assert (told['operations{state="unknown"}'], told['operations_age_seconds{state="unknown"}']) == (0, 0)


def test_prometheus_gets_no_zero_for_what_is_not_counted_yet(
    app: Celery, person: TestClient, store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where the store does not answer: a target that is down is an alert, and a zero is none."""
    monkeypatch.setattr(pages, "_PATIENCE_OF_A_SCRAPE", 0.01)
    a_written(app)
    go_on, scan = threading.Event(), store.scan

    def held(**asked: Any) -> Iterator[Record]:
        assert go_on.wait(60)
        yield from scan(**asked)

    store.scan = held  # type: ignore[method-assign]
    assert person.get("/metrics").status_code == 503
    store.error = StoreUnavailable("s", "scan", "away")
    go_on.set()
    assert wait_until(lambda: "away" in person.get("/metrics").text, "it fails")
    store.error = None
    wait_until(lambda: person.get("/metrics").status_code == 200, "it is counted")


def _with(html: str, words: str) -> str:
    """The page if it has ``words``, else empty."""
    return html if words in html else ""


class _Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_views_share_a_count(app: Celery, store: _Store) -> None:
    """A count reads everything, so another is not made for each of them."""
    overview = Overview(runtime_of(app), _Clock())
    assert [overview.look(10).counted is None for _ in range(3)] == [False] * 3
    assert store.scans == 1


def test_old_count_is_made_again(app: Celery, store: _Store) -> None:
    """After some seconds."""
    clock = _Clock()
    overview = Overview(runtime_of(app), clock)
    assert overview.look(10).counted
    clock.seconds = 4.9
    assert overview.look(10).age == 4.9
    assert store.scans == 1
    clock.seconds = 5.1
    assert overview.look(10).age == 0
    assert store.scans == 2


def test_slow_count_is_made_seldom(app: Celery, store: _Store) -> None:
    """Counting takes a tenth of the time, at most."""
    clock = _Clock()
    overview = Overview(runtime_of(app), clock)
    a_written(app)
    scan = store.scan

    def slow(**asked: Any) -> Iterator[Record]:
        clock.seconds += 60
        return scan(**asked)

    store.scan = slow  # type: ignore[method-assign]
    assert overview.look(10).counted
    clock.seconds += 599
    overview.look(10)
    assert store.scans == 1
    clock.seconds += 2
    overview.look(10)
    assert store.scans == 2


def test_view_does_not_wait_for_a_slow_count(app: Celery, person: TestClient, store: _Store) -> None:
    """The first view says how far it is, and comes back by itself; others meanwhile do not count, too."""
    go_on, scan = threading.Event(), store.scan

    def held(**asked: Any) -> Iterator[Record]:
        yield from itertools.repeat(a_record(), 2_500)
        assert go_on.wait(60)
        yield from scan(**asked)

    store.scan = held  # type: ignore[method-assign]
    for _ in range(2):
        html = wait_until(lambda: _with(person.get("/").text, "2,500 so far"), "it says how far it is")
        assert 'http-equiv="refresh"' in html
    store.scan = scan  # type: ignore[method-assign]
    a_written(app)
    go_on.set()
    assert "2,500" in overview_of(person)
    assert store.scans == 1


def test_count_that_takes_long_to_fail_is_told_by_the_next_view(app: Celery, store: _Store) -> None:
    """Or each would begin another and say that it counts; after it, the store is asked again."""
    fail, scan = threading.Event(), store.scan
    overview = Overview(runtime_of(app), _Clock())

    def failing(**asked: Any) -> Iterator[Record]:
        assert fail.wait(60)
        raise StoreUnavailable("memory://", "scan", "timed out")

    store.scan = failing  # type: ignore[method-assign]
    assert overview.look(0).so_far == 0
    fail.set()
    with pytest.raises(StoreUnavailable, match="timed out"):
        overview.look(60)
    store.scan = scan  # type: ignore[method-assign]
    assert overview.look(60).counted


def test_failure_that_nobody_waited_for_is_raised_once(app: Celery, store: _Store) -> None:
    """Whoever looks first after it."""
    overview = Overview(runtime_of(app), _Clock())
    store.error = StoreUnavailable("memory://", "scan", "down")
    a_written(app)

    def is_raised() -> bool:
        try:
            overview.look(0)
        except StoreUnavailable:
            return True
        return False

    wait_until(is_raised, "the failure is raised")
    store.error = None
    assert overview.look(60).counted


def test_what_is_named_is_not_all_that_waits(app: Celery) -> None:
    """Of many, one that is judged leaves all others to be counted."""
    first, *_ = [a_written(app, age=(MOST_NAMED + 5 - number) * HOUR) for number in range(MOST_NAMED + 5)]
    unknown = counted(runtime_of(app), store_of(app).scan()).unknown.without([first.key])
    assert (unknown.count, len(unknown.records)) == (MOST_NAMED + 4, MOST_NAMED - 1)


def test_judged_is_left_out_before_the_next_count_is_over(app: Celery, store: _Store) -> None:
    """Of what is named and of its number; and the next look begins to count."""
    judged, left = a_written(app), a_written(app)
    abandoned = a_written(app, Status.IN_PROGRESS)
    overview = Overview(runtime_of(app), _Clock())
    overview.judged([judged.key])
    assert overview.look(10).counted
    overview.judged([judged.key, abandoned.key])

    go_on, scan = threading.Event(), store.scan

    def held(**asked: Any) -> Iterator[Record]:
        assert go_on.wait(60)
        return scan(**asked)

    store.scan = held  # type: ignore[method-assign]
    view = overview.look(0)
    go_on.set()
    assert view.counted is not None
    assert (view.counted.unknown.count, view.counted.unknown.records) == (1, [left])
    assert (view.counted.abandoned.count, view.counted.abandoned.records) == (0, [])
    assert view.so_far == 0
    assert overview.look(60).so_far is None


def test_judged_is_left_out_of_a_count_that_is_over_and_nobody_has_seen(app: Celery, store: _Store) -> None:
    """It was counted before the verdict."""
    judged, left = a_written(app), a_written(app)
    overview, go_on, scan = Overview(runtime_of(app), _Clock()), threading.Event(), store.scan

    def held(**asked: Any) -> Iterator[Record]:
        assert go_on.wait(60)
        return scan(**asked)

    store.scan = held  # type: ignore[method-assign]
    assert overview.look(0).counted is None
    assert overview._next is not None
    go_on.set()
    overview._next.result(60)
    overview.judged([judged.key])
    assert overview._last is not None
    assert (overview._last.unknown.count, overview._last.unknown.records) == (1, [left])


def test_next_count_is_told_while_the_last_is_shown(app: Celery, store: _Store) -> None:
    """Whoever looks sees the last one, how old it is, and that the next is under way."""
    go_on, scan, clock = threading.Event(), store.scan, _Clock()
    overview = Overview(runtime_of(app), clock)
    assert overview.look(10).counted
    clock.seconds = 60

    def held(**asked: Any) -> Iterator[Record]:
        assert go_on.wait(60)
        return scan(**asked)

    store.scan = held  # type: ignore[method-assign]
    look = overview.look(0)
    assert (look.counted is not None, look.age, look.so_far) == (True, 60, 0)
    go_on.set()
    assert overview.look(60).so_far is None
