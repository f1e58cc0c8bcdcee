"""The admin page, asked over Django's test client: what it shows, whom it obeys, and what a verdict does."""

import re
from dataclasses import replace
from html import unescape
from importlib import reload
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from celery import Celery
from cryptography.fernet import Fernet
from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.core.checks import run_checks
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import clear_url_caches

from celery_idempotent import StoreUnavailable
from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.codec import Codec, Encoded
from celery_idempotent.protocol.contents import Slot, pack
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, Finished, to_plain
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.protocol.verdicts import counts_until
from celery_idempotent.stores.keyring import KeyRing
from celery_idempotent.stores.sql.schema import TABLE
from celery_idempotent.stores.wrappers import Sealed, innermost
from celery_idempotent.testing.contract import a_record
from tests.django.project import urls
from tests.django.project.shop.tasks import refund
from tests.support.deliveries import deliver

LIST = "/admin/celery_idempotent/idempotencyrecord/"
KINDS = ("resolve", "release", "forget")
JSON = "application/json"
Response = Any  # what the client returns has no public type


@pytest.fixture
def store(database: str, shop: Celery, monkeypatch: pytest.MonkeyPatch) -> DjangoStore:
    """The shop's store, on a database of each kind; people and sessions stay in the default one."""
    store = DjangoStore(database)
    monkeypatch.setitem(shop.conf, "idempotency_store", store)
    with connections[database].cursor() as cursor:
        cursor.execute(f"DELETE FROM {TABLE}")
    return store


def _client(*permissions: str) -> Client:
    """A browser of somebody who works here and has these permissions on records, or all."""
    user = User.objects.create_user(uuid4().hex, is_staff=True, is_superuser="all" in permissions)
    for each in {*permissions} - {"all"}:
        user.user_permissions.add(Permission.objects.get(codename=f"{each}_idempotencyrecord"))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def operator() -> Client:
    return _client("view", "change")


def _written(store: DjangoStore, status: Status = Status.IN_PROGRESS, **changes: Any) -> Record:
    now = store.now()
    times = {"created_at": now - 90_000, "fencing_token": now - 90_000, "updated_at": now - 60_000}
    outcome = {"expires_at": now // 1000 + 600} if status in {Status.COMPLETED, Status.FAILED} else {}
    record = a_record().but(
        status=status, **{"task": "shop.refund", **times, "lease_until": now + 60_000, **outcome, **changes}
    )
    assert store.swap(record, None) == record
    return record


def _fitting(store: DjangoStore, kind: str, **changes: Any) -> Record:
    """A record that can take a verdict of this kind; the grace of what is released, 5 s, is over."""
    if kind == "release":
        return _written(store, lease_until=store.now() - 5_001, **changes)
    return _written(store, Status.UNKNOWN if kind == "resolve" else Status.COMPLETED, **changes)


def _url(record: Record) -> str:
    return f"{LIST}{quote(record.key)}/change/"


def _text(response: Response) -> str:
    assert response.status_code == 200, response
    return unescape(response.content.decode())


def _messages(response: Response) -> str:
    found = re.search(r'<ul class="messagelist">(.*?)</ul>', _text(response), re.DOTALL)
    return found[1] if found else ""


def _selected(client: Client, kind: str, *records: Record, at: str = LIST, **form: Any) -> Response:
    """What the list's action asks of these records."""
    chosen = {"action": f"{kind}_selected", "_selected_action": [each.key for each in records]}
    return client.post(at, {**chosen, **form}, follow=True)


def _judge(client: Client, kind: str, *records: Record, at: str = LIST, **fields: Any) -> Response:
    """Send the form of a verdict, and follow where it leads."""
    shown = {"seen": [f"{each.revision} {each.key}" for each in records], "reason": "ticket 7", "checked": "on"}
    return _selected(client, kind, *records, at=at, **{**shown, "verdict": "rerun", **fields})


def test_list_shows_what_an_operator_looks_for(store: DjangoStore, operator: Client) -> None:
    """In two requests of the table, one of them a bounded count; what is large is not read."""
    values = {"label": "acme/7", "updated_at": 1_800_000_000_007, "result": "x" * 5_000, "content_type": JSON}
    record = _written(store, Status.COMPLETED, attempts=3, expires_at=1_900_000_000, **values)
    _written(store, Status.COMPLETED, expires_at=1)
    _fitting(store, "release")
    _written(store, lease_until=store.now() - 1)  # the grace is 5 s

    with CaptureQueriesContext(connections[store.alias]) as queries:
        text = _text(operator.get(LIST))

    shown = ("shop.refund", record.key, "acme/7", '<td class="field-attempts">3</td>', "2027-01-15", "2030-03-17")
    assert [each for each in shown if each not in text] == []
    states = ["COMPLETED", "FORGOTTEN", "IN_PROGRESS", "IN_PROGRESS, lease over"]
    assert sorted(re.findall(r'"field-state">(.*?)<', text)) == states
    asked = [each["sql"] for each in queries.captured_queries if TABLE in each["sql"]]
    assert ["LIMIT 1000" in each for each in asked if "COUNT" in each] == [True]
    assert (len(asked), [each for each in asked if "result_text" in each or "steps" in each]) == (2, [])


def test_list_is_ordered_filtered_and_searched(store: DjangoStore, operator: Client) -> None:
    """First what waits for a person, then the latest; filters offer all statuses and tasks, also one asked for."""
    now = store.now()
    _written(store, Status.COMPLETED, key="early", updated_at=now - 3)
    _written(store, Status.COMPLETED, key="late", updated_at=now - 1)
    _written(store, Status.FAILED, key="failed", updated_at=now - 2, task_id="the-id")
    _written(store, key="running:1:abcdef", updated_at=now, label="globex/1")
    _written(store, Status.RELEASED, key="released:1:fedcba", updated_at=now - 5, label="globex/10")
    _written(store, Status.UNKNOWN, key="unknown", updated_at=now - 4, task="shop.gone")
    wanted = {
        "": "unknown released running failed late early",
        "o=6": "released unknown early failed late running",
        "status=COMPLETED": "late early",
        "task=shop.gone": "unknown",
        "q=%20early%20": "early",
        "q=earlyx": "",
        "q=the-id": "failed",
        "q=running:1:ab": "running",
        "q=globex/1": "running",
        "q=globex/*": "released running",
    }
    key = r'<th class="field-short_key"><a [^>]*><span title="(\w*).*?">'
    found = {query: re.findall(key, _text(operator.get(f"{LIST}?{query}"))) for query in wanted}
    assert {query: " ".join(keys) for query, keys in found.items()} == wanted

    def offered(query: str, field: str) -> set[str]:
        return set(re.findall(rf"\?{field}=([\w.]+)", _text(operator.get(LIST + query))))

    tasks = {"shop.refund", "shop.charge", "shop.receipt", "shop.book", "reports.send"}
    assert (offered("", "status"), offered("", "task")) == (set(Status), tasks)
    assert offered("?task=shop.gone", "task") == {*tasks, "shop.gone"}


def test_page_of_a_record_shows_all_of_it(store: DjangoStore, operator: Client) -> None:
    """Every field, JSON laid out, times readable, the size of the result; what looks like markup is text."""
    values = {"result": '{"id": "Öre"}', "content_type": JSON, "steps": {"reserve": {"result": 7}}}
    times = {"lease_until": 1_800_000_000_000, "created_at": 1_800_000_001_000, "updated_at": 1_800_000_002_000}
    record = _written(store, Status.COMPLETED, error="<b>said</b>", expires_at=1_900_000_000, **values, **times)
    page = operator.get(_url(record))
    fields = (record.key, record.task, record.task_id, record.worker, record.revision, record.owner, "f" * 64)
    told = *(f"2027-01-15 08:00:0{second}.000 UTC" for second in range(3)), "2030-03-17 17:46:40.000 UTC"
    laid_out = '{\n  "id": "Öre"\n}', '"reserve": {\n    "result": 7\n  }'
    shown = *fields, *told, *laid_out, "14 bytes", "<b>said</b>", str(record.fencing_token)
    assert [each for each in shown if each not in _text(page)] == []
    assert "<b>said" not in page.content.decode()


def test_pages_show_and_judge_what_is_encrypted(
    store: DjangoStore, operator: Client, shop: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In clear, as the app has the key; the database does not, also of what a person states, nor an app without it."""
    runtime, codec = runtime_of(shop), Codec("json", frozenset({JSON}))
    sealed: Any = Sealed(runtime.store, KeyRing(Fernet.generate_key()))
    monkeypatch.setattr(runtime, "_last_opened", replace(runtime.opened, store=sealed))

    def secret(status: Status = Status.UNKNOWN) -> Record:
        key = a_record().key
        step = pack(sealed, codec.encode("card 4711"), Slot(key, "result", "pay")).encoded
        outcome = pack(sealed, codec.encode({"receipt": "card 4712"}), Slot(key, "result")).encoded
        result = {"result": outcome.data, "content_type": outcome.content_type} if status is Status.COMPLETED else {}
        told = {"label": "acme/4713", "error": "no answer", "steps": {"pay": to_plain(Finished(step))}}
        return _written(sealed, status, key=key, **told, **result)

    record, other = secret(), secret()
    one, several = _selected(operator, "resolve", record), _selected(operator, "resolve", record, other)
    for page in (operator.get(_url(record)), one, several):
        assert set(re.findall("acme/4713|no answer", _text(page))) == {"acme/4713", "no answer"}
    assert "card 4711" in _text(operator.get(_url(record)))
    assert "acme/4713" in _text(operator.get(LIST))
    asked = [_messages(operator.get(LIST, {"q": each})) for each in ("acme/4713", record.key)]
    assert ["Labels are encrypted" in each for each in asked] == [True, False]

    _judge(operator, "resolve", record, verdict="completed", result='{"receipt": "card 4715"}')

    page = _text(operator.get(_url(record)))
    assert ("card 4715" in page, "it had said: no answer" in page) == (True, True)
    assert "card 471" not in repr(store.get(record.key))
    done = secret(Status.COMPLETED)
    assert '"receipt": "card 4712"' in _text(operator.get(_url(done)))
    monkeypatch.setattr(runtime, "_last_opened", replace(runtime.opened, store=innermost(sealed)))
    assert "this app has no key that opens it" in _text(operator.get(_url(done)))


def _spoil(store: DjangoStore, record: Record, column: str, damage: str) -> None:
    with connections[store.alias].cursor() as cursor:
        cursor.execute(f"UPDATE {TABLE} SET {column} = {damage} WHERE revision = %s", [record.revision])


@pytest.mark.parametrize(
    ("column", "damage", "reason"),
    [
        ("status", "'DONE'", "'DONE' is not a valid Status"),
        ("updated_at", str(2**63 - 1), "updated_at is 9223372036854775807"),
        ("schema_version", "2", "has schema 2"),
    ],
)
def test_record_that_cannot_be_read_is_named_and_hides_no_other(
    store: DjangoStore, operator: Client, column: str, damage: str, reason: str
) -> None:
    """The list and the record's own page say why, and no verdict is offered, nor taken."""
    damaged, good = _written(store, Status.UNKNOWN), _written(store)
    _spoil(store, damaged, column, damage)

    listed, shown = _text(operator.get(LIST)), _text(operator.get(_url(damaged)))

    assert re.search(rf"unreadable: .*{re.escape(reason)}", listed)
    assert good.key in listed
    assert reason in shown
    assert "_selected" not in shown
    for kind in KINDS:
        assert "unreadable: " in _text(_selected(operator, kind, damaged))
        assert "Nothing was changed" in _messages(_judge(operator, kind, damaged))


def test_pages_cannot_be_forged(store: DjangoStore, operator: Client) -> None:
    """What somebody else has chosen is on one line, and runs from left to right."""
    forged, shown = "a\n\u202eb\x85", r"a\n\u202eb\x85"
    named = dict.fromkeys(("task", "task_id", "worker", "label", "error"), forged)
    texts = {**named, "steps": {forged: {"lost": "x"}}, "verdict": {"by": forged, "reason": forged, "at": "?"}}
    unknown, over = _written(store, Status.UNKNOWN, **texts), _fitting(store, "release", **texts)
    looked_at = operator.get(LIST), operator.get(_url(unknown))
    pages = *looked_at, _selected(operator, "resolve", unknown), _selected(operator, "release", over)
    for page, times in zip(pages, (4, 8, 6, 4), strict=True):
        text = _text(page)
        assert (text.count(shown), {"\u202e", "\x85"} & set(text)) == (times, set())


@pytest.mark.parametrize(
    ("permissions", "status", "requests"),
    [
        (["all"], 403, "get:add post:K/change post:K/delete"),
        (["view"], 403, "post:K/change"),
        (["view"], 200, "post:"),
        ([], 403, "get: get:K/change post:"),
        (None, 302, "get: get:K/change post:"),
    ],
    ids=["superuser", "viewer who edits", "viewer who judges", "staff", "stranger"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_does_more_than_is_permitted(
    store: DjangoStore, permissions: list[str] | None, status: int, requests: str, kind: str
) -> None:
    """Nobody edits or deletes, those who may change give verdicts, those who may view look; nor is more offered."""
    client = Client() if permissions is None else _client(*permissions)
    record = _fitting(store, kind)
    said = {"seen": f"{record.revision} {record.key}", "reason": "r", "verdict": "rerun", "checked": "on"}
    said |= {"action": f"{kind}_selected", "_selected_action": record.key, "post": "yes"}
    for request in requests.split(" "):
        method, _, page = request.partition(":")
        address = f"{LIST}{page.replace('K', quote(record.key))}{'/' if page else ''}"
        answer = client.get(address) if method == "get" else client.post(address, said)
        assert (request, answer.status_code) == (request, status)
    assert store.get(record.key) == record
    if permissions:
        listed, offered = _text(client.get(LIST)), [*KINDS] if "all" in permissions else []
        assert [each for each in (*KINDS, "delete") if f"{each}_selected" in listed] == offered
        shown = _text(client.get(_url(record)))
        assert (f"{kind}_selected" in shown, 'name="_save"' in shown) == (bool(offered), False)


def test_only_what_a_record_can_take_is_offered(store: DjangoStore, operator: Client) -> None:
    """Resolve for UNKNOWN, release for a claim whose grace is over, forget for an outcome or what was given back."""
    records = {str(status): _written(store, status) for status in Status}
    records["abandoned"] = _fitting(store, "release")
    records["in its grace"] = _written(store, lease_until=store.now() - 1)  # looked at first, as it lasts 5 s
    pages = {name: _text(operator.get(_url(record))) for name, record in reversed(records.items())}
    offered = {name: "".join(each for each in KINDS if f"{each}_selected" in pages[name]) for name in records}
    forgettable = dict.fromkeys(("COMPLETED", "FAILED", "RELEASED"), "forget")
    none = dict.fromkeys(("IN_PROGRESS", "in its grace"), "")
    assert offered == {"UNKNOWN": "resolve", "abandoned": "release", **forgettable, **none}


@pytest.mark.parametrize(
    ("kind", "fields", "said", "value"),
    [
        ("resolve", {"verdict": "completed", "result": '{"id": "re_1"}'}, "Given: It happened", {"id": "re_1"}),
        ("resolve", {"verdict": "rerun", "result": "no JSON"}, "Given: It did not happen", None),
        ("release", {}, "Given: Give the claim back", None),
        ("forget", {}, "Given: Forget the outcome", None),
    ],
    ids=["completed", "rerun", "release", "forget"],
)
def test_verdict_is_logged_and_the_next_delivery_follows_it(
    store: DjangoStore, operator: Client, kind: str, fields: dict[str, str], said: str, value: Any
) -> None:
    """It carries the person's name and reason; an outcome counts for as long as the policy of the task says."""
    order = uuid4().hex
    record = _fitting(store, kind, key=refund.idempotency_key_for(order), fingerprint=None)

    response = _judge(operator, kind, record, **fields)

    judged = store.get(record.key)
    assert judged is not None
    user = User.objects.get(pk=operator.session["_auth_user_id"])
    assert (judged.verdict["by"], judged.verdict["reason"]) == (user.username, "ticket 7")
    if value:
        assert counts_until(judged) == judged.verdict["at"] + 3 * 86_400_000
    assert re.search(f"{said}.* Key: {record.key}", _messages(response))
    assert f"by {user.username}, on {record.status} " in _text(operator.get(_url(record)))
    entry = LogEntry.objects.get(object_id=record.key)
    assert re.search(f"{said}.* Reason: ticket 7", entry.change_message)
    assert entry.user_id == user.pk
    assert deliver(refund, order).value == (value or f"refunded {order}")


@pytest.mark.parametrize(
    ("kind", "fields", "complaint"),
    [
        *((kind, {"reason": " "}, "This field is required.") for kind in KINDS),
        ("release", {"checked": ""}, "This field is required."),
        ("resolve", {"verdict": "maybe"}, "Select a valid choice"),
        ("resolve", {"verdict": "completed", "result": "NaN"}, "Write JSON"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_incomplete_verdict_is_asked_again(
    store: DjangoStore, operator: Client, kind: str, fields: dict[str, str], complaint: str
) -> None:
    """Without a verdict, a reason, a result in JSON or the word that the receiver was asked, nothing is written."""
    record = _fitting(store, kind)
    assert complaint in _text(_judge(operator, kind, record, **fields))
    assert store.get(record.key) == record


def test_page_of_a_verdict_tells_of_steps(store: DjangoStore, operator: Client) -> None:
    """Of one record and of several: which ended, and that one in doubt may fit neither verdict."""
    steps = {"reserve": to_plain(Finished(Encoded("7", JSON))), "sms": to_plain(Begun(1_800_000_000_000, 2))}
    record, without = _written(store, Status.UNKNOWN, steps=steps, error="killed"), _written(store, Status.UNKNOWN)
    one, several = _text(_selected(operator, "resolve", record)), _text(_selected(operator, "resolve", record, without))
    began = "began at 2027-01-15 08:00:00.000 UTC in attempt 2, and did not end"
    shown = record.task_id, "killed", "It is replayed for 3 d.", "reserve</th><td>finished", f"sms</th><td>{began}"
    assert [each for each in shown if each not in one] == []
    assert re.search(rf"{record.key}:\s+step reserve [^;]*; step sms began at [^;]*\.", several)
    assert [several.count(each) for each in ("neither verdict fits", "errornote")] == [1, 0]
    assert one.count("neither verdict fits") == 1
    assert "neither verdict fits" not in _text(_selected(operator, "resolve", without))


@pytest.mark.parametrize("kind", KINDS)
def test_selected_records_get_one_verdict(store: DjangoStore, operator: Client, kind: str) -> None:
    """Those that can take it are shown to be confirmed, the others are named and left as they are."""
    fitting = [_fitting(store, kind, label=f"acme/{number}", task="shop.charge") for number in range(2)]
    other = _written(store, Status.RELEASED if kind == "resolve" else Status.UNKNOWN, key=f"\u202e{uuid4().hex}")

    with CaptureQueriesContext(connections[store.alias]) as asking:
        asked = _text(_selected(operator, kind, *fitting, other))
    assert sum("steps" in each["sql"] for each in asking) == 1, "records are read together, and no results"
    assert not any("result_" in each["sql"] for each in asking)
    response = _judge(operator, kind, *fitting, other)

    assert {*re.findall(r'name="seen" value="(.*?)"', asked)} == {f"{each.revision} {each.key}" for each in fitting}
    assert all(f"{shown}</td>" in asked for shown in ("acme/0", "acme/1", "rerun"))
    assert re.findall(r"<li>(\S+): ([A-Z]+)", asked) == [(rf"\u202e{other.key[1:]}", other.status)]
    assert 'name="seen"' not in _text(_selected(operator, kind, other))
    assert [_messages(response).count(each) for each in ("</li>", "Nothing was changed", "\u202e")] == [3, 1, 0]
    judged = [store.get(each.key) for each in (*fitting, other)]
    assert [bool(each and each.verdict) for each in judged] == [True, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_verdict_on_what_has_changed_or_gone_is_refused(store: DjangoStore, operator: Client, kind: str) -> None:
    """It is on the record that the person saw, and on no other; the log does not claim it."""
    record, unseen, gone = _fitting(store, kind), _fitting(store, kind), a_record().but(key="gone")
    anew = record.but(revision="anew", attempts=2)
    store.swap(anew, record.revision)

    assert "somebody else changed the record meanwhile" in _messages(_judge(operator, kind, record))
    for shown in ("forged", f"{anew.revision} {anew.key}"):
        assert "somebody else changed" in _messages(_judge(operator, kind, unseen, seen=shown))
    assert (store.get(record.key), store.get(unseen.key)) == (anew, unseen)
    assert not LogEntry.objects.filter(object_id=record.key).exists()
    assert f"nothing to {kind}" in _messages(_selected(operator, kind, gone))
    assert f"nothing to {kind}" in _messages(_judge(operator, kind, gone))


def test_failure_of_the_store_is_told(store: DjangoStore, operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The person learns what is certain, and the log does not claim a verdict."""
    record = _written(store, Status.UNKNOWN)
    for error, told in (
        (StoreUnavailable("s", "swap", "gone"), "It is not certain what was written; look again"),
        (RecordTooLarge("2 MB"), "Nothing was changed: the store has no room for so large a record: 2 MB"),
    ):
        monkeypatch.setattr(DjangoStore, "swap", Mock(side_effect=error))
        assert told in _messages(_judge(operator, "resolve", record))
    assert not LogEntry.objects.filter(object_id=record.key).exists()


def test_verdicts_work_under_atomic_requests(
    store: DjangoStore, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The views step out of the transactions of their requests, on every database."""
    for alias in connections:
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)
    reload(urls)  # as in a process that starts with these databases
    clear_url_caches()
    record = _written(store, Status.UNKNOWN)
    assert _text(_selected(operator, "resolve", record))
    assert "did not happen" in _messages(_judge(operator, "resolve", record))


def test_admin_site_of_the_users_is_not_left(store: DjangoStore, operator: Client) -> None:
    """Pages, forms and redirects stay on the site on which the model is registered."""
    record = _written(store, Status.UNKNOWN)
    staff, page = (each.replace("/admin/", "/staff/") for each in (LIST, _url(record)))

    assert f'formaction="{staff}"' in _text(operator.get(page))
    assert '"/admin/' not in _text(_selected(operator, "resolve", record, at=staff))
    assert _judge(operator, "resolve", record, at=staff).redirect_chain[0][0] == page


def test_not_more_is_judged_than_a_person_can_check(
    store: DjangoStore, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selecting everything releases nothing, nor does a form with more."""
    monkeypatch.setattr("celery_idempotent.contrib.django.admin._MOST_JUDGED", 2)
    records = [_fitting(store, "release") for _ in range(3)]
    assert "Release at most 2 at a time" in _messages(_selected(operator, "release", *records))
    assert 'name="seen"' in _text(_selected(operator, "release", *records[1:]))
    assert "Release at most 2 at a time" in _messages(_judge(operator, "release", *records))
    assert _messages(_judge(operator, "release", *records[1:])).count("Given: ") == 2


@pytest.mark.parametrize(
    ("setting", "reason"),
    [("memory://", "they write to memory://"), (None, "set it to a store"), ("nosuch://", "no store has this scheme")],
)
def test_records_elsewhere_are_told(
    shop: Celery, operator: Client, monkeypatch: pytest.MonkeyPatch, setting: str | None, reason: str
) -> None:
    """An empty list is not mistaken for peace: the page says so, and a system check, unless there is no page."""

    def warnings() -> list[Any]:
        return [each for each in run_checks() if each.id == "celery_idempotent.W001"]

    assert "not what workers write" not in _text(operator.get(LIST))
    assert warnings() == []
    monkeypatch.setitem(shop.conf, "idempotency_store", setting)
    page, (warning,) = _text(operator.get(LIST)), warnings()

    assert "This is not what workers write" in page
    assert (reason in page, reason in warning.msg, "django://default" in str(warning.hint)) == (True, True, True)
    monkeypatch.delitem(apps.app_configs, "admin")
    assert warnings() == []
