"""The optional indexes of a DynamoDB table: what is found by them, what they cost, and how a table gets them."""
# mypy: allow-untyped-decorators

import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from botocore.exceptions import ClientError

from celery_idempotent.errors import IdempotencyWarning, StoreMisconfigured
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.provisioning import ATTENTION
from celery_idempotent.testing.contract import a_record
from tests.support.dynamodb import count_requests, new_url, provisioned
from tests.support.stores import kept

INDEXES = "&unknown_index=in-doubt&label_index=labels"
UNKNOWN, COMPLETED, RELEASED = Status.UNKNOWN, Status.COMPLETED, Status.RELEASED


@pytest.fixture
def url(dynamodb_endpoint: str) -> str:
    """A table that does not exist yet, without indexes."""
    return new_url(dynamodb_endpoint)


@pytest.fixture
def store(url: str) -> Iterator[DynamoDBStore]:
    """A new table with both indexes."""
    with provisioned(url + INDEXES) as store:
        yield store


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that nobody waits for."""
    taken: list[float] = []
    monkeypatch.setattr("celery_idempotent.stores.dynamodb.provisioning.time.sleep", taken.append)
    return taken


def _keys(store: Store, **wanted: Any) -> set[str]:
    return {each.key for each in store.scan(**wanted)}


def _item(store: DynamoDBStore, record: Record) -> dict[str, Any]:
    item: Any = store._connected().get_item(TableName=store.table, Key=store._key(record.key))["Item"]
    return dict(item)


def test_lists_ask_for_no_others(store: DynamoDBStore) -> None:
    """One question to the index and one per hundred to the table; of what no index knows, the table is read."""
    doubtful = [kept(store, status=UNKNOWN, label="") for _ in range(101)]
    plain, found, other = kept(store), kept(store, label="acme/7", task="mail"), kept(store, label="acme/7")

    with count_requests(store) as requests:
        assert _keys(store, status=UNKNOWN) == {each.key for each in doubtful}
        assert list(store.scan(label="acme/7", task="mail")) == [found]
    assert requests == ["Query", "BatchGetItem", "BatchGetItem", "Query", "BatchGetItem"]
    with count_requests(store) as requests:
        assert len(_keys(store)) == 104
        assert _keys(store, status=Status.IN_PROGRESS) == {plain.key, found.key, other.key}
        assert _keys(store, task="mail") == {found.key}
    assert set(requests) == {"Scan"}
    asked: Any = ({"status": UNKNOWN}, {"label": "acme/7"}, {}, {"status": Status.IN_PROGRESS}, {"task": "mail"})
    assert [store.reads_all(**each) for each in asked] == [False, False, True, True, True]


def test_nothing_but_doubt_is_marked_until_its_verdict(url: str, store: DynamoDBStore) -> None:
    """A record that no person is needed for is the same item with and without the index."""
    plain = DynamoDBStore.from_url(url)
    for status in Status:
        record = a_record().but(status=status, label="")
        marked, unmarked = store._item(record), plain._item(record)
        assert (marked == unmarked) is (status is not UNKNOWN)
        assert {**marked, ATTENTION: 0} == {**unmarked, ATTENTION: 0}

    record = kept(store, status=UNKNOWN)
    store.swap(record.but(status=RELEASED, revision="2"), record.revision)
    assert ATTENTION not in _item(store, record)
    with count_requests(store) as requests:
        assert list(store.scan(status=UNKNOWN)) == []
    assert requests == ["Query"]


def test_index_behind_lists_nothing_that_has_changed(store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it names is read from the table, and looked at again."""
    judged, gone, still = (kept(store, status=UNKNOWN) for _ in range(3))
    items = store._indexes.items

    def later(keys: Any) -> Any:
        store.swap(judged.but(status=COMPLETED, revision="2"), judged.revision)
        store.delete(gone.key, gone.revision)
        return items(keys)

    monkeypatch.setattr(store._indexes, "items", later)

    assert list(store.scan(status=UNKNOWN)) == [still]


def test_pages_and_what_a_busy_table_leaves_out_are_asked_for_again(
    store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """An index answers in pages of 1 MB, and a batch may come back in part."""
    records = [kept(store, status=UNKNOWN) for _ in range(2)]
    keys = [store._key(each.key) for each in records]
    asked: list[Any] = []

    def answer(operation: str, *answers: str, **parameters: Any) -> Any:
        asked.append((operation, parameters))
        if operation == "Query":
            is_second = "ExclusiveStartKey" in parameters
            return {"Items": keys[1:]} if is_second else {"Items": keys[:1], "LastEvaluatedKey": keys[0]}
        (wanted,) = parameters["RequestItems"].values()
        first, rest = wanted["Keys"][0], wanted["Keys"][1:]
        left = {store.table: {"Keys": rest, "ConsistentRead": True}} if rest else {}
        return {"Responses": {store.table: [store._item(records[keys.index(first)])]}, "UnprocessedKeys": left}

    monkeypatch.setattr(store._indexes, "ask", answer)

    assert list(store.scan(status=UNKNOWN)) == records
    assert [each for each, _ in asked] == ["Query", "Query", "BatchGetItem", "BatchGetItem"]
    assert all(each["RequestItems"][store.table]["ConsistentRead"] for _, each in asked[2:])
    assert len(pauses) == 1


def test_missing_index_is_told_and_done_without(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Lists read the table as they would without the option; a check says which command creates it."""
    with provisioned(url):
        pass
    store = DynamoDBStore.from_url(url + INDEXES)
    record = kept(store, status=UNKNOWN)

    with pytest.warns(IdempotencyWarning, match="'in-doubt' and 'labels' yet.*idempotency provision"):
        store.verify()
    assert list(store.scan(status=UNKNOWN)) == [record]
    assert "idempotency.index_missing table=" in caplog.text


def test_whoever_may_not_ask_is_told_nothing(store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker needs no permission on indexes, so it starts without one."""

    def refuse(**_: Any) -> None:
        raise ClientError({"Error": {"Code": "AccessDeniedException", "Message": "no"}}, "Query")

    monkeypatch.setattr(store._connected(), "query", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.verify()
    with pytest.raises(StoreMisconfigured, match="dynamodb:Query is not granted"):
        list(store.scan(status=UNKNOWN))


def test_table_in_use_gets_its_indexes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is in doubt already, marked by compare-and-swap: a verdict that comes in between is not undone."""
    with provisioned(url) as before:
        old, judged = (kept(before, status=UNKNOWN, label="acme/1") for _ in range(2))
        ended = kept(before, status=COMPLETED, label="acme/2")
    verdict = judged.but(status=COMPLETED, revision="2", label="acme/3")
    store = DynamoDBStore.from_url(url + INDEXES)
    scanned = store._scanned

    def then_judged(meant: Any) -> Iterator[Any]:
        for each in scanned(meant):
            before.swap(verdict, judged.revision)
            yield each

    with monkeypatch.context() as patched:
        patched.setattr(store, "_scanned", then_judged)
        store.provision()
    store.provision()

    assert before.get(judged.key) == verdict
    new = kept(store, status=UNKNOWN, label="acme/1")
    with count_requests(store) as requests:
        assert _keys(store, status=UNKNOWN) == _keys(store, label="acme/1") == {old.key, new.key}
        assert list(store.scan(label="acme/2")) == [ended]
    assert "Scan" not in requests
    assert ATTENTION not in _item(store, ended)


def test_index_being_filled_is_waited_for(url: str, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    """Also where somebody else is making it: the table then takes no other change."""
    with provisioned(url):
        pass
    store = DynamoDBStore.from_url(url + "&label_index=labels")
    client: Any = store._connected()
    describe, update = client.describe_table, client.update_table
    pauses.clear()

    def busy(**parameters: Any) -> Any:
        monkeypatch.setattr(client, "update_table", update)
        raise ClientError({"Error": {"Code": "ResourceInUseException", "Message": "busy"}}, "UpdateTable")

    def slow(**parameters: Any) -> Any:
        reply = describe(**parameters)
        for each in reply["Table"].get("GlobalSecondaryIndexes", ()):
            each["IndexStatus"] = "CREATING" if len(pauses) < 3 else "ACTIVE"
        return reply

    monkeypatch.setattr(client, "update_table", busy)
    monkeypatch.setattr(client, "describe_table", slow)
    store.provision()

    assert len(pauses) == 3


def test_index_of_a_table_with_fixed_capacity_has_the_tables(url: str) -> None:
    """DynamoDB takes no index there without."""
    store = DynamoDBStore.from_url(url + "&label_index=labels")
    client: Any = store._connected()
    units = {"ReadCapacityUnits": 3, "WriteCapacityUnits": 4}
    client.create_table(
        TableName=store.table,
        AttributeDefinitions=[{"AttributeName": "idempotencyKey", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "idempotencyKey", "KeyType": "HASH"}],
        ProvisionedThroughput=units,
    )
    with patch.object(client, "update_table", wraps=client.update_table) as update:
        store.provision()

    (asked,) = update.call_args_list[0].kwargs["GlobalSecondaryIndexUpdates"]
    assert asked["Create"]["ProvisionedThroughput"] == units


def test_index_of_something_else_is_refused(store: DynamoDBStore, url: str) -> None:
    """Its name is taken."""
    with pytest.raises(StoreMisconfigured, match="'labels' is not one of 'attention'"):
        DynamoDBStore.from_url(f"{url}&unknown_index=labels").provision()
