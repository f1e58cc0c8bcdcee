"""What makes and completes a table: on demand, with its indexes, TTL and point-in-time recovery."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.stores.dynamodb.errors import OTHER_KEY, refusal_of
from celery_idempotent.stores.dynamodb.indexes import ATTENTION, Ask, Index, Indexes

_NOT_OFFERED = frozenset({"UnknownOperationException", "UnknownOperation", "InvalidAction", "NotImplemented"})
"""How servers that imitate DynamoDB say that they lack an operation."""

_NOT_READY = "ContinuousBackupsUnavailableException"

_READY_FOR_BACKUPS_WITHIN = 600.0
"""Seconds. AWS makes a table ready for backups some time, even minutes, after it has become ACTIVE."""


@dataclass(frozen=True, slots=True)
class Provisioning:
    """What a table shall be.

    Args:
        store: What errors call the store.
        table: Name or ARN of the table.
        keys: By attribute of its key, ``HASH`` or ``RANGE``.
        wanted_key: The same, for people.
        ttl_attr: The attribute by which items expire.
        indexes: Those that it shall have.
        ask: Asks DynamoDB, as the store does.
        mark_doubtful: Writes the records in doubt once more, each with the attribute that their index looks for.
    """

    store: str
    table: str
    keys: Mapping[str, str]
    wanted_key: str
    ttl_attr: str
    indexes: Indexes
    ask: Ask
    mark_doubtful: Callable[[], None]

    def run(self) -> None:
        """Create the table, its indexes, TTL and recovery, as far as they are missing."""
        types = [each.type() for each in self.indexes.all]
        definitions = [each.definition() for each in self.indexes.all]
        indexed = {"GlobalSecondaryIndexes": definitions} if definitions else {}
        self.ask(
            "CreateTable",
            "ResourceInUseException",
            TableName=self.table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in self.keys] + types,
            KeySchema=[{"AttributeName": name, "KeyType": kind} for name, kind in self.keys.items()],
            **indexed,
        )
        table = self._wait_until_active()
        if {each["AttributeName"]: each["KeyType"] for each in table["KeySchema"]} != self.keys:
            raise StoreMisconfigured(self.store, "CreateTable", OTHER_KEY.format(key=self.wanted_key))
        for index in self.indexes.all:
            self._add(index)
        ttl = self.ask("DescribeTimeToLive", TableName=self.table)["TimeToLiveDescription"]
        if ttl["TimeToLiveStatus"] in {"DISABLED", "DISABLING"}:
            self.ask(
                "UpdateTimeToLive",
                TableName=self.table,
                TimeToLiveSpecification={"Enabled": True, "AttributeName": self.ttl_attr},
            )
        self._enable_recovery()

    def _wait_until_active(self) -> Mapping[str, Any]:
        while True:
            table: Mapping[str, Any] = self.ask("DescribeTable", TableName=self.table)["Table"]
            if table["TableStatus"] in {"ACTIVE", "UPDATING"}:
                return table
            time.sleep(0.5)

    def _add(self, index: Index) -> None:
        while True:
            table: Mapping[str, Any] = self.ask("DescribeTable", TableName=self.table)["Table"]
            found = next((x for x in table.get("GlobalSecondaryIndexes", ()) if x["IndexName"] == index.name), None)
            if found is not None and found["KeySchema"] != index.definition()["KeySchema"]:
                raise StoreMisconfigured(
                    self.store,
                    "UpdateTable",
                    f"the index {index.name!r} is not one of {index.attribute!r} alone; choose another name",
                )
            if found is not None and found["IndexStatus"] == "ACTIVE":
                return
            if found is None:
                self._create(index, table)
            time.sleep(0.5)

    def _create(self, index: Index, table: Mapping[str, Any]) -> None:
        """Begin to add an index to a table, unless somebody else is doing so."""
        if index.attribute == ATTENTION:
            self.mark_doubtful()  # first, so that an index that is there has them all
        units = {name: table["ProvisionedThroughput"][name] for name in ("ReadCapacityUnits", "WriteCapacityUnits")}
        definition = {**index.definition(), **({"ProvisionedThroughput": units} if all(units.values()) else {})}
        self.ask(
            "UpdateTable",
            "ResourceInUseException",
            TableName=self.table,
            AttributeDefinitions=[each for each in table["AttributeDefinitions"] if each != index.type()]
            + [index.type()],
            GlobalSecondaryIndexUpdates=[{"Create": definition}],
        )

    def _enable_recovery(self) -> None:
        give_up_at = time.monotonic() + _READY_FOR_BACKUPS_WITHIN
        while True:
            reply = self.ask(
                "UpdateContinuousBackups",
                _NOT_READY,
                *_NOT_OFFERED,
                TableName=self.table,
                PointInTimeRecoverySpecification={"PointInTimeRecoveryEnabled": True},
            )
            if refusal_of(reply) != _NOT_READY:
                return
            if time.monotonic() >= give_up_at:
                raise StoreUnavailable(
                    self.store, "UpdateContinuousBackups", "the table is not ready for backups; provision it again"
                )
            time.sleep(2)
