"""The admin page, asked over Django's test client: what it shows, whom it obeys, and what a verdict does."""

import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from importlib import reload
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from cryptography.fernet import Fernet
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.core.checks import run_checks
from django.db import connections, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import clear_url_caches

from celery_idempotent import StoreMisconfigured, StoreUnavailable
from celery_idempotent.contrib.django import project
from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.codec import Codec, Encoded
from celery_idempotent.protocol.contents import OBJECT, Slot, pack
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, Finished, to_plain
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.protocol.verdicts import counts_until, kept_until
from celery_idempotent.signals import verdict_given
from celery_idempotent.stores.keyring import KeyRing
from celery_idempotent.stores.sql.schema import TABLE
from celery_idempotent.stores.wrappers import Offloading, Sealed, innermost
from celery_idempotent.testing.contract import a_record
from tests.django.project import urls
from tests.django.project.shop.tasks import refund
from tests.support.deliveries import deliver
from tests.support.objects import MemoryObjects, large_results, pointed

LIST = "/admin/celery_idempotent/idempotencyrecord/"
RETAIN = 3 * 86_400

POINTER = pointed(Encoded("x" * 200, "application/json"))

Response = Any  # what the client returns has no public type


@pytest.fixture
def store(database: str, shop: Celery) -> Iterator[DjangoStore]:
    """The shop's store, on a database of each kind; people and sessions stay in the default one."""
    before = shop.conf.idempotency_store
    shop.conf.idempotency_store = store = DjangoStore(database)
    with connections[database].cursor() as cursor:
        cursor.execute(f"DELETE FROM {TABLE}")
    yield store
    shop.conf.idempotency_store = before


def _client(*permissions: str) -> Client:
    """A browser of somebody who works here and has these permissions on records."""
    user = User.objects.create_user(uuid4().hex, is_staff=True)
    for each in permissions:
        user.user_permissions.add(Permission.objects.get(codename=f"{each}_idempotencyrecord"))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def operator() -> Client:
    """Somebody who may give verdicts."""
    return _client("view", "change")


@pytest.fixture
def viewer() -> Client:
    """Somebody who may look."""
    return _client("view")


def _written(store: DjangoStore, status: Status = Status.IN_PROGRESS, **changes: Any) -> Record:
    now = store.now()
    began = {"created_at": now - 90_000, "fencing_token": now - 90_000}
    times = {**began, "updated_at": now - 60_000, "lease_until": now + 60_000}
    outcome = {"expires_at": now // 1000 + 600} if status in {Status.COMPLETED, Status.FAILED} else {}
    record = replace(a_record(), **{"status": status, "task": "shop.refund", **times, **outcome, **changes})
    assert store.swap(record, None) == record
    return record


def _abandoned(store: DjangoStore, **changes: Any) -> Record:
    """What a worker leaves that died; the grace, 5 s, is over."""
    return _written(store, lease_until=store.now() - 5_001, **changes)


def _url(record: Record, page: str = "change") -> str:
    return f"{LIST}{quote(record.key)}/{page}/"


def _text(response: Response) -> str:
    assert response.status_code == 200, response
    return unescape(response.content.decode())


def _keys(response: Response) -> list[str]:
    return re.findall(r'<th class="field-short_key"><a [^>]*><span title="(.*?)">', _text(response))


def _messages(response: Response) -> str:
    found = re.search(r'<ul class="messagelist">(.*?)</ul>', _text(response), re.DOTALL)
    return found[1] if found else ""


def _resolve(client: Client, record: Record, **fields: str) -> Response:
    """Open the page of a verdict, fill in the form, and follow where it leads."""
    _text(client.get(_url(record, "resolve")))
    return _judge(client, "resolve", record, **fields)


def _release(client: Client, *records: Record, **fields: str) -> Response:
    return _judge(client, "release", *records, **fields)


def _judge(client: Client, kind: str, *records: Record, **fields: str) -> Response:
    seen = [f"{each.revision} {each.key}" for each in records]
    return client.post(f"{LIST}{kind}/", {"seen": seen, "reason": "ticket 7", **fields}, follow=True)


# -- what is shown


def test_list_shows_what_an_operator_looks_for(store: DjangoStore, viewer: Client) -> None:
    """Status, task, label, key, attempts and times in UTC of each record."""
    record = _written(
        store, Status.COMPLETED, attempts=3, label="acme/7", updated_at=1_800_000_000_007, expires_at=1_900_000_000
    )

    text = _text(viewer.get(LIST))

    for shown in (
        *("COMPLETED", "shop.refund", record.key, "acme/7"),
        *("2027-01-15</span>", "08:00:00</span>", "2030-03-17</span>", "17:46:40</span>"),
    ):
        assert shown in text
    assert '<td class="field-attempts">3</td>' in text


def test_list_says_what_counts_no_longer_and_what_may_be_given_back(store: DjangoStore, viewer: Client) -> None:
    """As the other page and the commands do, in the same requests: nothing is fetched for it."""
    _written(store, Status.COMPLETED, expires_at=1)
    _written(store, lease_until=store.now() - 2_000)  # the grace is 5 s
    with CaptureQueriesContext(connections[store.alias]) as before:
        text = _text(viewer.get(LIST))
    _abandoned(store)
    with CaptureQueriesContext(connections[store.alias]) as after:
        later = _text(viewer.get(LIST))

    assert '<td class="field-state">FORGOTTEN</td>' in text
    assert "lease over" not in text
    assert '<td class="field-state">IN_PROGRESS, lease over</td>' in later
    assert len(before) == len(after)


def test_list_begins_with_what_waits_for_a_person(store: DjangoStore, viewer: Client) -> None:
    """UNKNOWN first, outcomes last, the latest of them first: in the order of the table's index."""
    early = _written(store, Status.COMPLETED, expires_at=1_900_000_000)
    late = _written(store, Status.COMPLETED, expires_at=1_900_000_001)
    others = [_written(store, each) for each in (Status.UNKNOWN, Status.RELEASED, Status.IN_PROGRESS)]

    assert _keys(viewer.get(LIST)) == [each.key for each in (*others, late, early)]


def test_list_can_be_ordered_by_its_columns(store: DjangoStore, viewer: Client) -> None:
    """Updated, oldest first."""
    now = store.now()
    records = [_written(store, updated_at=now - age) for age in (1, 3, 2)]

    assert _keys(viewer.get(f"{LIST}?o=5")) == [records[index].key for index in (1, 2, 0)]


def test_list_is_filtered_by_status(store: DjangoStore, viewer: Client) -> None:
    """Every status is offered, and shows its own."""
    records = {status: _written(store, status) for status in Status}

    for status, record in records.items():
        assert f"?status={status}" in _text(viewer.get(LIST))
        assert _keys(viewer.get(f"{LIST}?status={status}")) == [record.key]


def test_list_is_filtered_by_task(store: DjangoStore, viewer: Client) -> None:
    """The app's idempotent tasks are offered, and one that is gone from it can still be asked for."""
    record, old = _written(store), _written(store, task="shop.gone")

    text = _text(viewer.get(LIST))
    assert "?task=shop.refund" in text
    assert "?task=shop.charge" in text
    assert "?task=reports.send" in text
    assert "?task=shop.gone" not in text
    assert "celery.backend_cleanup" not in text
    assert _keys(viewer.get(f"{LIST}?task=shop.refund")) == [record.key]
    assert _keys(viewer.get(f"{LIST}?task=shop.gone")) == [old.key]
    assert "?task=shop.gone" in _text(viewer.get(f"{LIST}?task=shop.gone"))


def test_record_is_found_by_its_key_or_its_task_id(store: DjangoStore, viewer: Client) -> None:
    """Both as they stand in a log line, with the space that was copied along; a key as a list prints it, too."""
    record, _ = _written(store), _written(store)

    for term in (record.key, f" {record.key} ", record.task_id, record.key[:-20]):
        assert _keys(viewer.get(LIST, {"q": term})) == [record.key]
    assert _keys(viewer.get(LIST, {"q": f"{record.key}x"})) == []
    assert len(_keys(viewer.get(LIST, {"q": " "}))) == 2


def test_list_of_a_large_table_is_cheap(store: DjangoStore, viewer: Client) -> None:
    """Nothing is counted or sorted beyond what is listed, and what is large is not read."""
    _written(store, Status.COMPLETED, result='"' + "x" * 5_000 + '"', content_type="application/json")

    with CaptureQueriesContext(connections[store.alias]) as queries:
        viewer.get(LIST)

    asked = [each["sql"] for each in queries.captured_queries if TABLE in each["sql"]]
    assert len(asked) == 2
    assert "LIMIT 1000" in next(each for each in asked if "COUNT" in each)
    assert not any("result_text" in each or "steps" in each for each in asked)


def test_list_ends_at_a_thousand_and_says_so(store: DjangoStore, viewer: Client) -> None:
    """Further ones are found by filter and search."""
    record = _written(store, Status.RELEASED)
    with transaction.atomic(using=store.alias), connections[store.alias].cursor() as cursor:
        cursor.execute(f"SELECT * FROM {TABLE}")
        (row,) = cursor.fetchall()
        places = ", ".join(["%s"] * len(row))
        more = [(f"k{number}", *row[1:]) for number in range(1_000)]
        cursor.executemany(f"INSERT INTO {TABLE} VALUES ({places})", more)
    last = f"{LIST}?p=10"

    assert len(_keys(viewer.get(last))) == 100
    assert "a list ends at 1000 records" in _text(viewer.get(last))
    assert _keys(viewer.get(LIST, {"q": record.key})) == [record.key]
    assert "a list ends" not in _text(viewer.get(LIST, {"q": record.key}))


def test_page_of_a_record_shows_all_of_it(store: DjangoStore, viewer: Client) -> None:
    """Every field, JSON laid out, times readable, the size of the result."""
    record = _written(
        store,
        Status.COMPLETED,
        result='{"id": "ch_1", "name": "Öre"}',
        content_type="application/json",
        steps={"reserve": {"result": 7}},
        error="<b>said</b> the worker",
        lease_until=1_800_000_000_000,
        created_at=1_800_000_001_000,
        updated_at=1_800_000_002_000,
        expires_at=1_900_000_000,
    )

    text = _text(viewer.get(_url(record)))

    for shown in (
        *(record.key, record.task, record.task_id, record.worker, record.revision, record.owner, "f" * 64),
        *(
            "The effect happened; later deliveries get the result.",
            '{\n  "id": "ch_1",\n  "name": "Öre"\n}',
            "30 bytes",
        ),
        *('"reserve": {\n    "result": 7\n  }', "<b>said</b> the worker", str(record.fencing_token)),
        *(f"2027-01-15 08:00:0{second}.000 UTC" for second in range(3)),
        "2030-03-17 17:46:40.000 UTC",
    ):
        assert shown in text, shown
    assert "<b>said" not in viewer.get(_url(record)).content.decode()


def test_what_is_not_json_is_never_decoded(store: DjangoStore, viewer: Client, tmp_path: Path) -> None:
    """A pickle runs code when it is decoded, so that only its size is told."""

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "decoded",)

    data = pickle.dumps(Bomb())
    record = _written(store, Status.COMPLETED, result=data, content_type="application/x-python-serialize")

    text = _text(viewer.get(_url(record)))

    assert "application/x-python-serialize is never decoded here" in text
    assert f"{len(data)} bytes" in text
    assert not (tmp_path / "decoded").exists()


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"result": "x" * 100_001, "content_type": "application/json"}, "too long to show: 100001 bytes"),
        ({"result": "not json", "content_type": "application/json"}, "'not json'"),
        ({"result": b"x"}, "of unknown type is never decoded here"),
        ({"error": "result lost"}, "0 bytes"),
        (
            {"result": POINTER.to_encoded().data, "content_type": OBJECT},
            f"kept as the object {POINTER.name}: 200 bytes of application/json, SHA-256 {POINTER.sha256}",
        ),
    ],
)
def test_odd_outcomes_are_described(store: DjangoStore, viewer: Client, changes: dict[str, Any], shown: str) -> None:
    """Whatever stands there, the page can be opened."""
    assert shown in _text(viewer.get(_url(_written(store, Status.COMPLETED, **changes))))


@pytest.fixture
def sealed(shop: Celery, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The shop's app encrypts."""
    runtime = runtime_of(shop)
    sealed: Any = Sealed(runtime.store, KeyRing(Fernet.generate_key()))
    monkeypatch.setattr(runtime, "_last_opened", replace(runtime.opened, store=sealed))
    return sealed


def _secret(sealed: Any, status: Status = Status.UNKNOWN) -> Record:
    """A record of which all that can be is encrypted."""
    key, codec = a_record().key, Codec("json", frozenset({"application/json"}))
    step = pack(sealed, codec.encode("card 4711"), Slot(key, "result", "pay")).encoded
    outcome = pack(sealed, codec.encode({"receipt": "card 4712"}), Slot(key, "result")).encoded
    result = outcome if status is Status.COMPLETED else None
    return _written(
        sealed,
        status,
        key=key,
        label="acme/4713",
        error="no answer about card 4714",
        steps={"pay": to_plain(Finished(step))},
        result=result and result.data,
        content_type=result and result.content_type,
    )


def test_pages_show_what_is_encrypted(store: DjangoStore, operator: Client, sealed: Any) -> None:
    """In clear, as the app has the key; the database does not."""
    record = _secret(sealed)

    assert "acme/4713" in _text(operator.get(LIST))
    page = _text(operator.get(_url(record)))
    for each in ("acme/4713", "card 4711", "no answer about card 4714"):
        assert each in page
    one = _text(operator.get(_url(record, "resolve")))
    other = _secret(sealed)
    several = _text(
        operator.post(LIST, {"action": "resolve_selected", "_selected_action": [record.key, other.key]}, follow=True)
    )
    for page in (one, several):
        assert "acme/4713" in page
        assert "no answer about card 4714" in page
    assert "card 471" not in repr(store.get(record.key))


def test_page_shows_an_encrypted_result(
    store: DjangoStore, viewer: Client, sealed: Any, shop: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the app has the key, and else that it is encrypted."""
    record = _secret(sealed, Status.COMPLETED)

    assert '"receipt": "card 4712"' in _text(viewer.get(_url(record)))
    runtime = runtime_of(shop)
    monkeypatch.setattr(runtime, "_last_opened", replace(runtime.opened, store=innermost(sealed)))
    page = _text(viewer.get(_url(record)))
    assert "it is encrypted, and this app has no key that opens it" in page
    assert "encrypted:" in page


def test_search_by_label_says_that_labels_are_encrypted(store: DjangoStore, viewer: Client, sealed: Any) -> None:
    """The database cannot find one; a key it finds as ever."""
    record = _secret(sealed)

    assert "Labels are encrypted" in _messages(viewer.get(LIST, {"q": "acme/4713"}))
    assert _keys(viewer.get(LIST, {"q": record.key})) == [record.key]


def test_verdict_on_an_encrypted_record(store: DjangoStore, operator: Client, sealed: Any) -> None:
    """What a person states is encrypted, as is the copy of the error that was judged, and both are shown."""
    record = _secret(sealed)
    _resolve(operator, record, verdict="completed", result='{"receipt": "card 4715"}', checked="on")

    page = _text(operator.get(_url(record)))
    assert "card 4715" in page
    assert "it had said: no answer about card 4714" in page
    kept = repr(store.get(record.key))
    assert "card 471" not in kept


def test_lease_that_is_over_is_told(store: DjangoStore, viewer: Client) -> None:
    """Whoever looks for dead workers finds them in the list."""
    running, abandoned = _written(store), _abandoned(store)

    assert "IN_PROGRESS, lease over" in _text(viewer.get(_url(abandoned)))
    assert "lease over" not in _text(viewer.get(_url(running)))


def test_what_a_publisher_recorded_is_told(store: DjangoStore, viewer: Client) -> None:
    """It looks like a claim that was given back, and is a message on its way, or one that may never come."""
    released = _written(store, Status.RELEASED)
    queued = _written(store, Status.RELEASED, owner="", attempts=0)
    lost = _written(store, Status.RELEASED, owner="", attempts=0, lease_until=store.now())

    assert "RELEASED, queued" in _text(viewer.get(_url(queued)))
    assert "RELEASED, message in doubt" in _text(viewer.get(_url(lost)))
    assert "RELEASED," not in _text(viewer.get(_url(released)))


# -- what is shown of what cannot be read


def _spoil(store: DjangoStore, record: Record, column: str, damage: str) -> None:
    with connections[store.alias].cursor() as cursor:
        cursor.execute(f"UPDATE {TABLE} SET {column} = {damage} WHERE revision = %s", [record.revision])


@pytest.mark.parametrize(
    ("column", "damage", "reason"),
    [
        ("status", "'DONE'", "'DONE' is not a valid Status"),
        ("lease_until", "-1", "lease_until is -1"),
        ("updated_at", str(2**63 - 1), "updated_at is 9223372036854775807"),
        (
            "schema_version",
            "2",
            "has schema 2 and this version of celery-idempotent knows up to 1; upgrade this worker",
        ),
        ("expires_at", "1", "expires_at is set on UNKNOWN, which never expires"),
    ],
)
def test_record_that_cannot_be_read_is_named_and_hides_no_other(
    store: DjangoStore, operator: Client, column: str, damage: str, reason: str
) -> None:
    """The list and the record's own page say why, and no verdict is offered, nor taken."""
    damaged, good = _written(store, Status.UNKNOWN), _written(store)
    _spoil(store, damaged, column, damage)

    listed = _text(operator.get(LIST))
    assert re.search(rf"unreadable: .*{re.escape(reason)}", listed)
    assert good.key in listed
    shown = _text(operator.get(_url(damaged)))
    assert reason in shown
    assert "deliveries are postponed until somebody repairs it" in shown
    assert "resolvelink" not in shown
    assert "releaselink" not in shown
    assert "forgetlink" not in shown
    assert "not shown" in shown
    for kind in ("resolve", "release", "forget"):
        assert "unreadable: " in _text(operator.get(_url(damaged, kind)))
        assert "Nothing was changed" in _messages(_judge(operator, kind, damaged, verdict="rerun", checked="on"))
    with pytest.raises(StoreMisconfigured):
        store.get(damaged.key)


@pytest.mark.parametrize(
    "column", ["lease_until", "updated_at", "attempts", "expires_at", "steps", "result_bytes", "task"]
)
@pytest.mark.parametrize("damage", ["'many'", "x'ff'", "1.5"])
def test_any_value_that_sqlite_keeps_is_shown(operator: Client, shop: Celery, column: str, damage: str) -> None:
    """SQLite keeps whatever it is given in whatever column."""
    shop.conf.idempotency_store = store = DjangoStore()
    record = _written(store)
    _spoil(store, record, column, damage)

    assert _text(operator.get(f"{LIST}?q={record.key}"))
    assert _text(operator.get(_url(record)))


def test_key_on_mysql_that_is_no_text_is_shown(store: DjangoStore, operator: Client) -> None:
    """Keys are bytes there, so they can be any."""
    record = _written(store)
    if connections[store.alias].vendor == "mysql":
        _spoil(store, record, "idempotency_key", "x'ff0a'")
        shown = r"\xff\n"
    else:
        shown = record.key

    assert _keys(operator.get(LIST)) == [shown]


def test_pages_cannot_be_forged(store: DjangoStore, operator: Client) -> None:
    """What somebody else has chosen is on one line, and runs from left to right."""
    forged, shown = "a\n\u202eb\x85", r"a\n\u202eb\x85"
    named = dict.fromkeys(("task", "task_id", "worker", "label", "error"), forged)
    texts = {**named, "steps": {forged: {"lost": "x"}}, "verdict": {"by": forged, "reason": forged, "at": "?"}}
    unknown, over = _written(store, Status.UNKNOWN, **texts), _abandoned(store, **texts)

    for page, times in ((LIST, 4), (_url(unknown), 8), (_url(unknown, "resolve"), 6), (_url(over, "release"), 4)):
        text = _text(operator.get(page))
        assert text.count(shown) == times
        assert not {"\u202e", "\x85"} & set(text)


def test_deep_json_is_shown_as_it_stands(store: DjangoStore, viewer: Client) -> None:
    """So deep that Python gives up."""
    record = _written(store, Status.COMPLETED, result="[" * 90_000, content_type="application/json")

    assert "[" * 90_000 in _text(viewer.get(_url(record)))


# -- who may do what


def test_nothing_is_edited_by_anybody(store: DjangoStore) -> None:
    """Not even by a superuser: no adding, no changing, no deleting."""
    record = _written(store)
    client = Client()
    client.force_login(User.objects.create_superuser(uuid4().hex))

    assert client.get(f"{LIST}add/").status_code == 403
    assert client.post(_url(record), {"status": "COMPLETED"}).status_code == 403
    assert client.post(_url(record, "delete"), {"post": "yes"}).status_code == 403
    assert "delete_selected" not in _text(client.get(LIST))
    assert 'name="_save"' not in _text(client.get(_url(record)))
    assert store.get(record.key) == record


def test_without_permission_to_change_nobody_gives_verdicts(store: DjangoStore, viewer: Client) -> None:
    """No action, no button, and no way in by the address."""
    unknown, abandoned = _written(store, Status.UNKNOWN), _abandoned(store)

    assert "release_selected" not in _text(viewer.get(LIST))
    assert "resolve_selected" not in _text(viewer.get(LIST))
    assert _url(unknown, "resolve") not in _text(viewer.get(_url(unknown)))
    assert _url(abandoned, "release") not in _text(viewer.get(_url(abandoned)))
    assert viewer.get(_url(unknown, "resolve")).status_code == 403
    assert _judge(viewer, "resolve", unknown, verdict="rerun", checked="on").status_code == 403
    assert _judge(viewer, "forget", unknown, checked="on").status_code == 403
    assert viewer.get(_url(abandoned, "release")).status_code == 403
    assert _release(viewer, abandoned, checked="on").status_code == 403
    assert [store.get(each.key) for each in (unknown, abandoned)] == [unknown, abandoned]


def test_without_permission_to_view_nobody_sees_records(store: DjangoStore) -> None:
    """Results may be personal data."""
    record = _written(store)

    assert _client().get(LIST).status_code == 403
    assert _client().get(_url(record)).status_code == 403
    assert "/login/" in Client().get(_url(record, "resolve"))["Location"]


def test_only_what_a_record_can_take_is_offered(store: DjangoStore, operator: Client) -> None:
    """Resolve for UNKNOWN, release for a claim whose grace is over, forget for an outcome or what was given back."""
    records = {str(status): _written(store, status) for status in Status}
    records["abandoned"] = _abandoned(store)
    records["in its grace"] = _written(store, lease_until=store.now() - 1)
    records["ahead of the clock"] = _written(store, Status.FAILED, fencing_token=store.now() + 600_000)

    offered = {
        (name, page)
        for name, record in records.items()
        for page in ("resolve", "release", "forget")
        if _url(record, page) in _text(operator.get(_url(record)))
    }

    forgettable = {(name, "forget") for name in ("COMPLETED", "FAILED", "RELEASED")}
    assert offered == {("UNKNOWN", "resolve"), ("abandoned", "release"), *forgettable}


# -- resolving


def test_it_happened_is_replayed(store: DjangoStore, operator: Client) -> None:
    """The verdict becomes the outcome for as long as the task's policy says, and is written into the admin's log."""
    key = refund.idempotency_key_for(f"o-1 {store.alias}")
    record = _written(store, Status.UNKNOWN, key=key, fingerprint=None)

    response = _resolve(operator, record, verdict="completed", result='{"id": "re_1"}', checked="on")

    resolved = store.get(key)
    assert resolved is not None
    assert (resolved.status, json.loads(str(resolved.result))) == (Status.COMPLETED, {"id": "re_1"})
    assert counts_until(resolved) == pytest.approx(store.now() + RETAIN * 1000, abs=10_000)
    assert deliver(refund, f"o-1 {store.alias}").value == {"id": "re_1"}
    assert f"Resolved: it happened. Later deliveries get the result. Key: {key}" in _messages(response)
    entry = LogEntry.objects.get(object_id=key)
    assert "Resolved: it happened" in entry.change_message
    assert str(entry.user_id) == operator.session["_auth_user_id"]


def test_it_did_not_happen_runs_again(store: DjangoStore, operator: Client) -> None:
    """The next delivery runs; a result that was written beside it does not count."""
    key = refund.idempotency_key_for(f"o-2 {store.alias}")
    record = _written(store, Status.UNKNOWN, key=key, fingerprint=None)

    response = _resolve(operator, record, verdict="rerun", result="no JSON", checked="on")

    released = store.get(key)
    assert released is not None
    assert released.status is Status.RELEASED
    assert "it did not happen" in _messages(response)
    assert deliver(refund, f"o-2 {store.alias}").value == f"refunded o-2 {store.alias}"
    assert "did not happen" in LogEntry.objects.get(object_id=key).change_message


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"verdict": "rerun"}, "This field is required."),
        ({"checked": "on"}, "This field is required."),
        ({"verdict": "completed", "checked": "on"}, "Write JSON"),
        ({"verdict": "completed", "checked": "on", "result": "ch_1"}, "Write JSON"),
        ({"verdict": "completed", "checked": "on", "result": "NaN"}, "Write JSON"),
        ({"verdict": "completed", "checked": "on", "result": "[" * 100_000}, "Write JSON"),
        ({"verdict": "maybe", "checked": "on"}, "Select a valid choice"),
    ],
)
def test_incomplete_verdict_is_asked_again(
    store: DjangoStore, operator: Client, fields: dict[str, str], complaint: str
) -> None:
    """Without a verdict, a result in JSON or the word that the receiver was asked, nothing is written."""
    record = _written(store, Status.UNKNOWN)

    assert complaint in _text(_resolve(operator, record, **fields))
    assert store.get(record.key) == record


def test_page_of_a_verdict_says_what_it_is_about(store: DjangoStore, operator: Client) -> None:
    """Task, id, worker, times and reason, and for how long a result would be replayed."""
    record = _written(store, Status.UNKNOWN, error="killed", worker="w@there", task="shop.charge")

    text = _text(operator.get(_url(record, "resolve")))

    for shown in (record.key, "shop.charge", record.task_id, "w@there", "killed", " UTC", "It is replayed for 1 d."):
        assert shown in text


def test_steps_in_doubt_are_named(store: DjangoStore, operator: Client) -> None:
    """Which ended and which only began, and what a verdict on the whole operation means for each."""
    steps = {
        "reserve": to_plain(Finished(Encoded("7", "application/json"))),
        "sms": to_plain(Begun(1_800_000_000_000, 2)),
        "odd": {"of": "another version"},
    }
    record, without = _written(store, Status.UNKNOWN, steps=steps), _written(store, Status.UNKNOWN)

    text = _text(operator.get(_url(record, "resolve")))

    assert re.search(r"Step reserve</th><td>finished", text)
    assert re.search(r"Step sms</th><td>began at 2027-01-15 08:00:00.000 UTC in attempt 2, and did not end", text)
    assert re.search(r"Step odd</th><td>not readable by this version", text)
    assert "neither verdict fits" in text
    assert "neither verdict fits" not in _text(operator.get(_url(without, "resolve")))


@pytest.mark.parametrize("verdict", ["completed", "rerun"])
def test_verdict_on_what_has_changed_is_refused(store: DjangoStore, operator: Client, verdict: str) -> None:
    """Somebody else resolved it, it ran, and it is UNKNOWN again: the old look at the receiver does not count."""
    record = _written(store, Status.UNKNOWN)
    operator.get(_url(record, "resolve"))
    anew = replace(record, revision="anew", attempts=2)
    store.swap(anew, record.revision)

    response = _resolve(operator, record, verdict=verdict, result="1", checked="on")

    assert "somebody else changed the record meanwhile" in _messages(response)
    assert store.get(record.key) == anew
    assert not LogEntry.objects.filter(object_id=record.key).exists()


def test_only_unknown_is_resolved(store: DjangoStore, operator: Client) -> None:
    """By the address or from a page that is out of date."""
    record = _written(store, Status.RELEASED)

    text = _text(operator.get(_url(record, "resolve")))

    assert f"Only an UNKNOWN outcome can be resolved; these are not:</p>\n<ul><li>{record.key}: RELEASED" in text
    assert 'name="seen"' not in text
    assert "only an UNKNOWN outcome takes a verdict" in _messages(
        _judge(operator, "resolve", record, verdict="rerun", checked="on")
    )


@pytest.mark.parametrize("page", ["resolve", "release", "forget"])
def test_verdict_on_nothing_is_refused(store: DjangoStore, operator: Client, page: str) -> None:
    """A record that was deleted meanwhile is told as such."""
    response = operator.get(_url(replace(a_record(), key="gone"), page), follow=True)

    assert "Nothing is recorded under gone" in _messages(response)


def test_selected_records_get_one_verdict(store: DjangoStore, operator: Client) -> None:
    """The action of the list shows them with their labels, and one reason stands in all of them, with a name."""
    records = [_written(store, Status.UNKNOWN, label=f"acme/{number}", error="killed") for number in range(2)]
    chosen = {"action": "resolve_selected", "index": 0, "_selected_action": [each.key for each in records]}

    asked = _text(operator.post(LIST, chosen))
    _judge(operator, "resolve", *records, verdict="completed", result="null", checked="on")

    judged = [store.get(each.key) for each in records]
    name = User.objects.get(pk=operator.session["_auth_user_id"]).username
    assert all(f"acme/{number}</td>" in asked for number in range(2))
    for each in judged:
        assert each is not None
        assert (each.status, each.verdict["by"], each.verdict["reason"]) == (Status.COMPLETED, name, "ticket 7")
        assert kept_until(each) == each.verdict["at"] + 365 * 86_400_000
        assert f"completed by {name}, on UNKNOWN after attempt 1, because: ticket 7 (it had said: killed)" in _text(
            operator.get(_url(each))
        )
    (entry,) = LogEntry.objects.filter(object_id=records[0].key)
    assert "Reason: ticket 7" in entry.change_message


def test_steps_of_several_records_are_named(store: DjangoStore, operator: Client) -> None:
    """One verdict on several operations, and what it means for the steps of each."""
    steps = {"sms": to_plain(Begun(1_800_000_000_000, 2)), "odd": {}}
    records = [_written(store, Status.UNKNOWN, steps=steps), _written(store, Status.UNKNOWN)]
    chosen = {"action": "resolve_selected", "index": 0, "_selected_action": [each.key for each in records]}

    text = _text(operator.post(LIST, chosen))

    assert re.search(rf"{records[0].key}:\s+step sms began at [^;]*; step odd not readable by this version\.", text)
    assert text.count("neither verdict fits") == 1


def test_what_is_forgotten_runs_again(store: DjangoStore, operator: Client) -> None:
    """Its contents are gone, the reason is not, and whoever listens hears of it."""
    key = refund.idempotency_key_for(f"o-3 {store.alias}")
    record = _written(store, Status.COMPLETED, key=key, result='"secret"', fencing_token=1, label="acme/3")
    told = []

    def tell(**kwargs: Any) -> None:
        told.append((kwargs["action"], kwargs["reason"], kwargs["key"]))

    verdict_given.connect(tell)
    try:
        response = _judge(operator, "forget", record, checked="on")
    finally:
        verdict_given.disconnect(tell)

    assert "Forgotten. The next delivery is a new operation." in _messages(response)
    assert told == [("forget", "ticket 7", key)]
    left = store.get(key)
    assert left is not None
    assert (left.result, left.label, left.verdict["reason"]) == (None, "", "ticket 7")
    assert deliver(refund, f"o-3 {store.alias}").value == f"refunded o-3 {store.alias}"


def test_object_of_a_large_result_is_forgotten_with_it(
    store: DjangoStore, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a page cannot show it can delete."""
    large, key, runtime = large_results(), a_record().key, project.runtime()
    offloading: Any = Offloading(runtime.store, large)
    monkeypatch.setattr(runtime, "_last_opened", replace(runtime.opened, store=offloading))
    written, write = pack(offloading, Encoded("x" * 200, "application/json"), Slot(key, "result"))
    assert write is not None
    write()
    record = _written(store, Status.COMPLETED, key=key, result=written.data, content_type=written.content_type)

    _judge(operator, "forget", record, checked="on")

    assert isinstance(large.objects, MemoryObjects)
    assert large.objects.objects == {}


def test_selected_outcomes_are_forgotten_after_a_confirmation(store: DjangoStore, operator: Client) -> None:
    """The list's action shows those that can be, and names those that cannot."""
    records = [_written(store, Status.FAILED), _written(store, Status.UNKNOWN)]
    chosen = {"action": "forget_selected", "index": 0, "_selected_action": [each.key for each in records]}

    text = _text(operator.post(LIST, chosen))

    assert f"{records[0].revision} {records[0].key}" in text
    assert f"{records[1].key}: UNKNOWN" in text


def test_a_verdict_needs_a_reason(store: DjangoStore, operator: Client) -> None:
    """Nothing is written without one."""
    record = _written(store, Status.FAILED)

    text = _text(_judge(operator, "forget", record, checked="on", reason=" "))

    assert "This field is required." in text
    assert store.get(record.key) == record


def test_records_are_found_by_label_and_by_the_start_of_a_key(store: DjangoStore, operator: Client) -> None:
    """A star stands for any rest."""
    mine = _written(store, label="acme/1", key="shop.refund:1:abcdef")
    other = _written(store, label="acme/10", key="mail.send:1:fedcba")

    assert _keys(operator.get(f"{LIST}?q=acme/1")) == [mine.key]
    assert sorted(_keys(operator.get(f"{LIST}?q=acme/*"))) == sorted([mine.key, other.key])
    assert _keys(operator.get(f"{LIST}?q=mail.send*")) == [other.key]
    assert _keys(operator.get(f"{LIST}?q={mine.task_id}")) == [mine.key]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StoreUnavailable("s", "swap", "gone"), "It is not certain what was written; look again"),
        (
            RecordTooLarge("2 MB"),
            "Nothing was changed: the store has no room for so large a record: 2 MB; see https://",
        ),
    ],
)
def test_failure_of_the_store_is_told(
    store: DjangoStore, operator: Client, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    """The person learns what is certain, and the log does not claim a verdict."""
    record = _written(store, Status.UNKNOWN)

    def fail(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(DjangoStore, "swap", fail)
        response = _resolve(operator, record, verdict="completed", result="1", checked="on")

    assert told in _messages(response)
    assert not LogEntry.objects.filter(object_id=record.key).exists()


def test_verdicts_work_under_atomic_requests(
    store: DjangoStore, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The views step out of the transactions of their requests, on every database."""
    for alias in connections:
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)
    reload(urls)  # as in a process that starts with these databases
    clear_url_caches()
    unknown, abandoned = _written(store, Status.UNKNOWN), _abandoned(store)

    assert "did not happen" in _messages(_resolve(operator, unknown, verdict="rerun", checked="on"))
    assert "Released" in _messages(_release(operator, abandoned, checked="on"))


# -- releasing


def test_release_gives_back_what_was_shown(store: DjangoStore, operator: Client) -> None:
    """From the list: a confirmation that names each claim and its policy, then the release, then the log."""
    records = [_abandoned(store), _abandoned(store, task="shop.charge")]
    chosen = {"action": "release_selected", "index": 0, "_selected_action": [each.key for each in records]}

    page = _text(operator.post(LIST, chosen))
    response = _release(operator, *records, checked="on")

    for shown in (*(f"{each.revision} {each.key}" for each in records), "refuse", "rerun", "did <strong>not</strong>"):
        assert shown in page
    assert [_status(store, each) for each in records] == [Status.RELEASED] * 2
    assert all(f"publish it again. Key: {each.key}" in _messages(response) for each in records)
    assert LogEntry.objects.filter(object_id__in=[each.key for each in records]).count() == 2


def test_release_from_the_page_of_a_record(store: DjangoStore, operator: Client) -> None:
    """The same confirmation for one."""
    record = _abandoned(store)

    assert f"{record.revision} {record.key}" in _text(operator.get(_url(record, "release")))


def test_release_waits_for_a_confirmation(store: DjangoStore, operator: Client) -> None:
    """Nothing is given back by whoever did not look."""
    record = _abandoned(store)

    response = _release(operator, record)

    assert "This field is required." in _text(response)
    assert store.get(record.key) == record


def test_what_may_be_alive_is_not_released(store: DjangoStore, operator: Client) -> None:
    """A running lease is not offered; a lease that is over waits for the grace."""
    running, in_grace = _written(store), _written(store, lease_until=store.now() - 2_000)
    chosen = {"action": "release_selected", "index": 0, "_selected_action": [running.key]}

    page = _text(operator.post(LIST, chosen))
    response = _release(operator, in_grace, checked="on")

    assert f"{running.revision} {running.key}" not in page
    assert f"{running.key}: IN_PROGRESS" in page
    assert "its lease and grace run for another" in _messages(response)
    assert [_status(store, each) for each in (running, in_grace)] == [Status.IN_PROGRESS] * 2


def test_claim_that_was_taken_over_meanwhile_stays(store: DjangoStore, operator: Client) -> None:
    """The release is of the claim that was shown, and of no other."""
    record = _abandoned(store)
    taken_over = replace(record, revision="taken over", attempts=2)
    store.swap(taken_over, record.revision)

    response = _release(operator, record, checked="on")

    assert "somebody else changed the record meanwhile" in _messages(response)
    assert store.get(record.key) == taken_over


def test_release_of_nothing_leads_back_to_the_list(store: DjangoStore, operator: Client) -> None:
    """By the address alone, or of what has been deleted meanwhile."""
    for response in (
        operator.get(f"{LIST}release/", follow=True),
        _release(operator, replace(a_record(), key="gone"), checked="on"),
    ):
        assert "nothing to release" in _messages(response)


def test_admin_site_of_the_users_is_not_left(store: DjangoStore, operator: Client) -> None:
    """Pages, forms and redirects stay on the site on which the model is registered."""
    unknown, abandoned = _written(store, Status.UNKNOWN), _abandoned(store)
    page, other = (_url(each).replace("/admin/", "/staff/") for each in (unknown, abandoned))
    resolve = page.replace("/change/", "/resolve/")

    assert f'href="{resolve}"' in _text(operator.get(page))
    assert '"/admin/' not in _text(operator.get(resolve))
    assert '"/admin/' not in _text(operator.get(other.replace("/change/", "/release/")))
    given = {"seen": f"{unknown.revision} {unknown.key}", "reason": "r", "verdict": "rerun", "checked": "on"}
    assert operator.post(f"{LIST.replace('/admin/', '/staff/')}resolve/", given)["Location"] == page


def test_not_more_is_released_than_a_person_can_check(
    store: DjangoStore, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selecting everything releases nothing."""
    monkeypatch.setattr("celery_idempotent.contrib.django.admin._MOST_JUDGED", 2)
    records = [_abandoned(store) for _ in range(3)]
    chosen = {"action": "release_selected", "index": 0, "_selected_action": [each.key for each in records]}

    assert "Release at most 2 at a time" in _messages(operator.post(LIST, chosen, follow=True))


def _status(store: DjangoStore, record: Record) -> Status | None:
    found = store.get(record.key)
    return found.status if found else None


# -- where records are elsewhere


@pytest.mark.parametrize(
    ("setting", "reason"),
    [("memory://", "they write to memory://"), (None, "set it to a store"), ("nosuch://", "no store has this scheme")],
)
def test_records_elsewhere_are_told(shop: Celery, viewer: Client, setting: str | None, reason: str) -> None:
    """An empty list is not mistaken for peace: the page says so, and a system check."""
    before = shop.conf.idempotency_store
    shop.conf.idempotency_store = setting
    try:
        page = _text(viewer.get(LIST))
        (warning,) = [each for each in run_checks() if each.id == "celery_idempotent.W001"]
    finally:
        shop.conf.idempotency_store = before

    assert "This is not what workers write" in page
    assert reason in page
    assert reason in warning.msg
    assert "django://default" in str(warning.hint)


def test_records_in_django_are_no_matter(shop: Celery, viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning where the page shows what workers write, and none where there is no page."""
    assert "not what workers write" not in _text(viewer.get(LIST))
    assert not [each for each in run_checks() if each.id == "celery_idempotent.W001"]

    from django.apps import apps

    before = shop.conf.idempotency_store
    shop.conf.idempotency_store = "memory://"
    try:
        monkeypatch.delitem(apps.app_configs, "admin")
        assert not [each for each in run_checks(tags=None) if each.id == "celery_idempotent.W001"]
    finally:
        shop.conf.idempotency_store = before
