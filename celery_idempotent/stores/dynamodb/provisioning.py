"""What makes and completes a table: on demand, with its indexes, TTL and point-in-time recovery.

Two optional indexes find few records among many without reading the table. Both are sparse: an item is in one only if
it has the attribute that is the index's key. Of those in doubt, that is an attribute of its own, which no write on the
way of an operation that ends has; of labels, it is the label. An index follows its table a moment later. So it gives
keys alone, and what they stand for is read from the table.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.printable import say
from celery_idempotent.protocol.record import Status
from celery_idempotent.stores.dynamodb.items import OTHER_KEY, named, refusal_of, text_of

logger = logging.getLogger(__name__)

ATTENTION = "attention"
"""Attribute of the items that need a person."""

_LABEL = "label"
_MISSING = "ValidationException"
"""How DynamoDB answers where there is no such index, or it is still being filled."""

_NOT_GRANTED = ("AccessDeniedException", "AccessDenied")
_BATCH = 100
"""Items that BatchGetItem reads (DynamoDB Developer Guide, "Quotas")."""

_PAUSE = 0.5
Ask = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Index:
    """An index of one attribute, a string."""

    name: str
    attribute: str

    def definition(self) -> Mapping[str, Any]:
        return {
            "IndexName": self.name,
            "KeySchema": [{"AttributeName": self.attribute, "KeyType": "HASH"}],
            "Projection": {"ProjectionType": "KEYS_ONLY"},
        }

    def type(self) -> Mapping[str, str]:
        """What tells the type of its attribute."""
        return {"AttributeName": self.attribute, "AttributeType": "S"}


class Indexes:
    """The indexes that a table has, as far as they are configured; ``ask`` asks DynamoDB, as the store does."""

    def __init__(self, table: str, unknown: str | None, label: str | None, ask: Ask) -> None:
        self.table = table
        self.ask = ask
        attributes = ((unknown, ATTENTION), (label, _LABEL))
        self.all: Sequence[Index] = [Index(name, attribute) for name, attribute in attributes if name]
        #: What marks an item that needs a person; nothing, if nobody looks for it.
        self.mark: Mapping[str, Any] = {ATTENTION: {"S": str(Status.UNKNOWN)}} if unknown else {}

    def of(self, status: Status | None, label: str | None) -> tuple[Index, str] | None:
        """The index that is configured for a question, and what to look for in it."""
        values = {ATTENTION: str(Status.UNKNOWN) if status == Status.UNKNOWN else "", _LABEL: label or ""}
        return next(((each, values[each.attribute]) for each in self.all if values[each.attribute]), None)

    def keys(self, status: Status | None, label: str | None) -> Iterator[Mapping[str, Any]] | None:
        """The keys of the items that may be meant; None if no index tells, which is logged where one should."""
        if (found := self.of(status, label)) is None:
            return None
        index, value = found
        question = self._question(index, value)
        first = self.ask("Query", _MISSING, **question)
        if refusal_of(first):
            say(logger.warning, "index_missing", table=self.table, index=index.name, reason=text_of(first))
            return None
        return self.pages("Query", question, first)

    def items(self, keys: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The items of these keys, as the table has them now; those that are gone are left out."""
        for first in range(0, len(keys), _BATCH):
            rest: Any = {self.table: {"Keys": keys[first : first + _BATCH], "ConsistentRead": True}}
            while rest:
                reply = self.ask("BatchGetItem", RequestItems=rest)
                for items in reply["Responses"].values():
                    yield from items
                rest = reply.get("UnprocessedKeys")
                if rest:
                    time.sleep(_PAUSE)

    def missing(self) -> Iterator[str]:
        """Of the configured indexes, those that cannot be asked; whoever may not ask is told nothing."""
        for index in self.all:
            reply = self.ask("Query", _MISSING, *_NOT_GRANTED, **self._question(index, "-"), Limit=1)
            if refusal_of(reply) == _MISSING:
                yield index.name

    def pages(self, operation: str, question: Mapping[str, Any], page: Any) -> Iterator[Mapping[str, Any]]:
        """The items of this page of answers and of those behind it."""
        yield from page["Items"]
        while "LastEvaluatedKey" in page:
            page = self.ask(operation, **question, ExclusiveStartKey=page["LastEvaluatedKey"])
            yield from page["Items"]

    def _question(self, index: Index, value: str) -> dict[str, Any]:
        return {
            "TableName": self.table,
            "IndexName": index.name,
            "KeyConditionExpression": "#i = :i",
            "ExpressionAttributeNames": {"#i": index.attribute},
            "ExpressionAttributeValues": {":i": {"S": value}},
        }


_NOT_OFFERED = frozenset({"UnknownOperationException", "UnknownOperation", "InvalidAction", "NotImplemented"})
"""How servers that imitate DynamoDB say that they lack an operation."""

_NOT_READY = "ContinuousBackupsUnavailableException"

_READY_FOR_BACKUPS_WITHIN = 600.0
"""Seconds. AWS makes a table ready for backups some time, even minutes, after it has become ACTIVE."""


@dataclass(frozen=True, slots=True)
class Provisioning:
    """What a table shall be: ``keys`` are ``HASH`` or ``RANGE`` by attribute.

    ``mark_doubtful`` writes the records in doubt once more, each with the attribute that their index looks for.
    """

    store: str
    keys: Mapping[str, str]
    ttl_attr: str
    indexes: Indexes
    mark_doubtful: Callable[[], None]

    def run(self) -> None:
        """Create the table, its indexes, TTL and recovery, as far as they are missing."""
        types = [each.type() for each in self.indexes.all]
        definitions = [each.definition() for each in self.indexes.all]
        self._ask(
            "CreateTable",
            "ResourceInUseException",
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in self.keys] + types,
            KeySchema=[{"AttributeName": name, "KeyType": kind} for name, kind in self.keys.items()],
            **({"GlobalSecondaryIndexes": definitions} if definitions else {}),
        )
        if {each["AttributeName"]: each["KeyType"] for each in self._table()["KeySchema"]} != self.keys:
            raise StoreMisconfigured(self.store, "CreateTable", OTHER_KEY.format(key=named(self.keys)))
        for index in self.indexes.all:
            while not self._is_filled(index):
                time.sleep(_PAUSE)
        ttl = self._ask("DescribeTimeToLive")["TimeToLiveDescription"]
        if ttl["TimeToLiveStatus"] in {"DISABLED", "DISABLING"}:
            enabled = {"Enabled": True, "AttributeName": self.ttl_attr}
            self._ask("UpdateTimeToLive", TimeToLiveSpecification=enabled)
        self._enable_recovery()

    def _ask(self, operation: str, *answers: str, **parameters: Any) -> Any:
        return self.indexes.ask(operation, *answers, TableName=self.indexes.table, **parameters)

    def _table(self) -> Mapping[str, Any]:
        """What the table is, as soon as it is there."""
        while True:
            table: Mapping[str, Any] = self._ask("DescribeTable")["Table"]
            if table["TableStatus"] in {"ACTIVE", "UPDATING"}:
                return table
            time.sleep(_PAUSE)

    def _is_filled(self, index: Index) -> bool:
        """Whether the table has the index; if not, and nobody is making it, that begins."""
        table = self._table()
        found = next((x for x in table.get("GlobalSecondaryIndexes", ()) if x["IndexName"] == index.name), None)
        if found is None:
            self._create(index, table)
            return False
        if found["KeySchema"] != index.definition()["KeySchema"]:
            why = f"the index {index.name!r} is not one of {index.attribute!r} alone; choose another name"
            raise StoreMisconfigured(self.store, "UpdateTable", why)
        return bool(found["IndexStatus"] == "ACTIVE")

    def _create(self, index: Index, table: Mapping[str, Any]) -> None:
        """Begin to add an index to a table, unless somebody else is doing so."""
        if index.attribute == ATTENTION:
            self.mark_doubtful()  # first, so that an index that is there has them all
        units = {name: table["ProvisionedThroughput"][name] for name in ("ReadCapacityUnits", "WriteCapacityUnits")}
        definition = {**index.definition(), **({"ProvisionedThroughput": units} if all(units.values()) else {})}
        others = [each for each in table["AttributeDefinitions"] if each != index.type()]
        self._ask(
            "UpdateTable",
            "ResourceInUseException",
            AttributeDefinitions=[*others, index.type()],
            GlobalSecondaryIndexUpdates=[{"Create": definition}],
        )

    def _enable_recovery(self) -> None:
        give_up_at = time.monotonic() + _READY_FOR_BACKUPS_WITHIN
        enabled = {"PointInTimeRecoveryEnabled": True}
        answers = _NOT_READY, *_NOT_OFFERED
        while True:
            reply = self._ask("UpdateContinuousBackups", *answers, PointInTimeRecoverySpecification=enabled)
            if refusal_of(reply) != _NOT_READY:
                return
            if time.monotonic() >= give_up_at:
                why = "the table is not ready for backups; provision it again"
                raise StoreUnavailable(self.store, "UpdateContinuousBackups", why)
            time.sleep(2)
