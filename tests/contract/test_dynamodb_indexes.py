"""The optional indexes of a DynamoDB table: what is found by them, what they cost, and how a table gets them."""
# mypy: allow-untyped-decorators

import warnings
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from botocore.exceptions import ClientError

from celery_idempotent.errors import IdempotencyWarning, PolicyError, StoreMisconfigured
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.provisioning import ATTENTION
from celery_idempotent.testing import StoreContract
from celery_idempotent.testing.contract import a_record
from tests.support.dynamodb import count_requests

INDEXES = "&unknown_index=in-doubt&label_index=labels"


@pytest.fixture
def url(dynamodb_endpoint: str) -> str:
    """A table that does not exist yet, without indexes."""
    return f"dynamodb://test:test@{dynamodb_endpoint.removeprefix('http://')}/t-{uuid4().hex}?region=us-east-1"


def _opened(url: str) -> DynamoDBStore:
    store = open_store(url)
    assert isinstance(store, DynamoDBStore)
    return store


@pytest.fixture
def store(url: str) -> Iterator[DynamoDBStore]:
    """A new table with both indexes."""
    store = _opened(url + INDEXES)
    store.provision()
    yield store
    store.close()


class TestDynamoDBStoreWithIndexes(StoreContract):
    """The whole contract, where lists are read off indexes."""

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        self.url = url + INDEXES
        store = _opened(self.url)
        store.provision()
        yield store
        store.close()

    def reopen(self, store: Store) -> Store:
        return open_store(self.url)


class TestDynamoDBStoreWithIndexesAndOwnNames(StoreContract):
    """The same on a table with a sort key."""

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        store = _opened(f"{url}{INDEXES}&key_attr=pk&sort_key_attr=sk")
        store.provision()
        yield store
        store.close()


def _kept(store: Store, **values: Any) -> Record:
    record = a_record().but(**values)
    assert store.swap(record, None) == record
    return record


def _item(store: DynamoDBStore, record: Record) -> dict[str, Any]:
    item: Any = store._connected().get_item(TableName=store.table, Key=store._key(record.key))["Item"]
    return dict(item)


def test_list_of_those_in_doubt_asks_for_no_others(store: DynamoDBStore) -> None:
    """One question to the index and one to the table, however many others there are."""
    for _ in range(30):
        _kept(store)
    doubtful = [_kept(store, status=Status.UNKNOWN) for _ in range(3)]

    with count_requests(store) as requests:
        assert {each.key for each in store.scan(status=Status.UNKNOWN)} == {each.key for each in doubtful}
    assert requests == ["Query", "BatchGetItem"]


def test_list_of_a_label_asks_for_no_others(store: DynamoDBStore) -> None:
    """The same, and what else is asked about is looked at in what was found."""
    for _ in range(30):
        _kept(store)
    found = _kept(store, label="acme/7", task="mail")
    _kept(store, label="acme/7")

    with count_requests(store) as requests:
        assert list(store.scan(label="acme/7", task="mail")) == [found]
    assert requests == ["Query", "BatchGetItem"]


def test_list_of_more_than_a_batch_is_whole(store: DynamoDBStore) -> None:
    """DynamoDB reads a hundred items at once."""
    doubtful = {_kept(store, status=Status.UNKNOWN).key for _ in range(101)}

    with count_requests(store) as requests:
        assert {each.key for each in store.scan(status=Status.UNKNOWN)} == doubtful
    assert requests == ["Query", "BatchGetItem", "BatchGetItem"]


def test_other_questions_read_the_table(store: DynamoDBStore) -> None:
    """No index knows of them."""
    record = _kept(store)

    with count_requests(store) as requests:
        for wanted in ({}, {"status": Status.IN_PROGRESS}, {"task": record.task}):
            assert list(store.scan(**wanted)) == [record]
    assert requests == ["Scan"] * 3


def test_nothing_but_doubt_is_marked(url: str, store: DynamoDBStore) -> None:
    """A record that no person is needed for is the same item with and without the index."""
    plain = _opened(url)
    for status in Status:
        record = a_record().but(status=status, label="")
        marked, unmarked = store._item(record), plain._item(record)
        assert (marked == unmarked) is (status is not Status.UNKNOWN)
        assert {**marked, ATTENTION: 0} == {**unmarked, ATTENTION: 0}


def test_verdict_takes_a_record_out_of_the_index(store: DynamoDBStore) -> None:
    """The item is written whole, so it loses the mark."""
    record = _kept(store, status=Status.UNKNOWN)
    store.swap(record.but(status=Status.RELEASED, revision="2"), record.revision)

    assert ATTENTION not in _item(store, record)
    with count_requests(store) as requests:
        assert list(store.scan(status=Status.UNKNOWN)) == []
    assert requests == ["Query"]


def test_index_that_is_behind_lists_nothing_that_has_changed(
    store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it names is read from the table, and looked at again."""
    judged, gone, still = (_kept(store, status=Status.UNKNOWN) for _ in range(3))
    items = store._indexes.items

    def later(keys: Any) -> Any:
        store.swap(judged.but(status=Status.COMPLETED, revision="2"), judged.revision)
        store.delete(gone.key, gone.revision)
        return items(keys)

    monkeypatch.setattr(store._indexes, "items", later)

    assert list(store.scan(status=Status.UNKNOWN)) == [still]


def test_items_of_others_are_left_alone(url: str) -> None:
    """In a table shared with others, an index of labels may have theirs."""
    store = _opened(f"{url}{INDEXES}&sort_key_attr=sk")
    store.provision()
    ours = _kept(store, label="acme/7")
    theirs = {"idempotencyKey": {"S": ours.key}, "sk": {"S": "profile"}, "label": {"S": "acme/7"}}
    store._connected().put_item(TableName=store.table, Item=theirs)

    assert list(store.scan(label="acme/7")) == [ours]
    store.close()


def test_pages_and_what_a_busy_table_leaves_out_are_asked_for_again(
    store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index answers in pages of 1 MB, and a batch may come back in part."""
    one, two = (_kept(store, status=Status.UNKNOWN) for _ in range(2))
    keys = [store._key(each.key) for each in (one, two)]
    asked: list[Any] = []

    def answer(operation: str, *answers: str, **parameters: Any) -> Any:
        asked.append((operation, parameters))
        if operation == "Query":
            return {"Items": keys[1:]} if "ExclusiveStartKey" in parameters else _page(keys[0])
        (wanted,) = parameters["RequestItems"].values()
        rest = {store.table: {"Keys": wanted["Keys"][1:], "ConsistentRead": True}} if wanted["Keys"][1:] else {}
        first = next(each for each in (one, two) if store._key(each.key) == wanted["Keys"][0])
        return {"Responses": {store.table: [store._item(first)]}, "UnprocessedKeys": rest}

    pauses: list[float] = []
    monkeypatch.setattr("celery_idempotent.stores.dynamodb.provisioning.time.sleep", pauses.append)
    monkeypatch.setattr(store._indexes, "_ask", answer)

    assert list(store.scan(status=Status.UNKNOWN)) == [one, two]
    assert [each for each, _ in asked] == ["Query", "Query", "BatchGetItem", "BatchGetItem"]
    assert all(each["RequestItems"][store.table]["ConsistentRead"] for _, each in asked[2:])
    assert len(pauses) == 1


def _page(key: Any) -> Any:
    return {"Items": [key], "LastEvaluatedKey": key}


# -- a table without them


def test_missing_index_is_told_and_done_without(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Lists read the table as they would without the option; a check says which command creates it."""
    _opened(url).provision()
    store = _opened(url + INDEXES)
    record = _kept(store, status=Status.UNKNOWN)

    with pytest.warns(IdempotencyWarning, match="'in-doubt' and 'labels' yet.*idempotency provision"):
        store.verify()
    assert list(store.scan(status=Status.UNKNOWN)) == [record]
    assert "idempotency.index_missing table=" in caplog.text
    store.close()


def test_whoever_may_not_ask_is_told_nothing(store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker needs no permission on indexes, so it starts without one."""

    def refuse(**_: Any) -> None:
        raise ClientError({"Error": {"Code": "AccessDeniedException", "Message": "no"}}, "Query")

    monkeypatch.setattr(store._connected(), "query", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.verify()
    with pytest.raises(StoreMisconfigured, match="dynamodb:Query is not granted"):
        list(store.scan(status=Status.UNKNOWN))


def test_table_in_use_gets_its_indexes(url: str) -> None:
    """With what is in doubt already: the index of an attribute that older writes lack would miss it."""
    before = _opened(url)
    before.provision()
    old = _kept(before, status=Status.UNKNOWN, label="acme/1")
    ended = _kept(before, status=Status.COMPLETED, label="acme/2")
    store = _opened(url + INDEXES)

    store.provision()
    store.provision()

    new = _kept(store, status=Status.UNKNOWN, label="acme/1")
    with count_requests(store) as requests:
        assert {each.key for each in store.scan(status=Status.UNKNOWN)} == {old.key, new.key}
        assert {each.key for each in store.scan(label="acme/1")} == {old.key, new.key}
        assert list(store.scan(label="acme/2")) == [ended]
    assert "Scan" not in requests
    assert ATTENTION not in _item(store, ended)
    store.close()


def test_doubt_that_is_settled_while_an_index_is_made_is_left_as_it_is(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marking it is a compare-and-swap: a verdict that comes in between is not undone."""
    before = _opened(url)
    before.provision()
    old = _kept(before, status=Status.UNKNOWN)
    store = _opened(url + INDEXES)
    scanned = store._scanned

    def then_judged(meant: Any) -> Iterator[Any]:
        for each in scanned(meant):
            before.swap(old.but(status=Status.COMPLETED, revision="2"), old.revision)
            yield each

    monkeypatch.setattr(store, "_scanned", then_judged)
    store.provision()

    assert before.get(old.key) == old.but(status=Status.COMPLETED, revision="2")
    store.close()


def test_index_that_is_being_filled_is_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where somebody else is making it: the table then takes no other change."""
    _opened(url).provision()
    store = _opened(url + "&label_index=labels")
    client: Any = store._connected()
    describe, update = client.describe_table, client.update_table
    pauses: list[float] = []

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
    monkeypatch.setattr("celery_idempotent.stores.dynamodb.provisioning.time.sleep", pauses.append)
    store.provision()

    assert len(pauses) == 3
    store.close()


def test_index_of_a_table_with_fixed_capacity_has_the_tables(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DynamoDB takes no index there without."""
    store = _opened(url + "&label_index=labels")
    store._connected().create_table(
        TableName=store.table,
        AttributeDefinitions=[{"AttributeName": "idempotencyKey", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "idempotencyKey", "KeyType": "HASH"}],
        ProvisionedThroughput={"ReadCapacityUnits": 3, "WriteCapacityUnits": 4},
    )
    client: Any = store._connected()
    update = client.update_table
    asked: list[Any] = []

    def noted(**given: Any) -> Any:
        asked.extend(given["GlobalSecondaryIndexUpdates"])
        return update(**given)

    monkeypatch.setattr(client, "update_table", noted)
    store.provision()

    assert asked[0]["Create"]["ProvisionedThroughput"] == {"ReadCapacityUnits": 3, "WriteCapacityUnits": 4}
    store.close()


def test_index_of_something_else_is_refused(store: DynamoDBStore, url: str) -> None:
    """Its name is taken."""
    other = _opened(f"{url}&unknown_index=labels")

    with pytest.raises(StoreMisconfigured, match="'labels' is not one of 'attention'"):
        other.provision()


def test_indexes_need_names_of_their_own() -> None:
    """Two indexes cannot share one, nor an attribute be the mark and something else."""
    with pytest.raises(PolicyError, match="name them differently"):
        DynamoDBStore("t", unknown_index="i", label_index="i")
    with pytest.raises(PolicyError, match="overlap"):
        DynamoDBStore("t", ttl_attr=ATTENTION)
