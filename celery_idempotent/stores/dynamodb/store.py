"""DynamoDB: one conditional PutItem per swap, and no GetItem on any path that a task takes.

``ReturnValuesOnConditionCheckFailure=ALL_OLD`` makes a failed condition answer with the stored item (AWS,
June 2023), so a duplicate costs one request. The driver resends after a lost reply; the resend then fails
on its own write, and the item it returns carries our own revision, which is how it is recognised.

DynamoDB has no clock to ask. Its replies have a ``Date`` header of one second's resolution: as long as the
local clock agrees with it to the second, the local clock counts; beyond that, it is corrected.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Self, Unpack
from urllib.parse import parse_qsl, unquote, urlsplit

import botocore
from botocore import xform_name
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.loaders import Loader
from botocore.session import Session, get_session

from celery_idempotent._version import __version__
from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.printable import scheme_of
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge, Wanted, WriteFailed
from celery_idempotent.stores import readable
from celery_idempotent.stores.dynamodb.direct import DirectPath, Unfit
from celery_idempotent.stores.dynamodb.items import (
    ATTRIBUTES,
    DRIVER_ERRORS,
    LOST,
    attribute_of,
    explained,
    named,
    refusal_of,
    text_of,
    typed,
    value_of,
)
from celery_idempotent.stores.dynamodb.provisioning import ATTENTION, Indexes, Provisioning
from celery_idempotent.stores.failures import warn
from celery_idempotent.stores.forks import PerProcess

if TYPE_CHECKING:
    import boto3
    from mypy_boto3_dynamodb import DynamoDBClient

_ITEM_LIMIT = 400 * 1024
"""Bytes an item may have (DynamoDB Developer Guide, "Quotas")."""

_URL_OPTIONS = frozenset(
    {"key_attr", "sort_key_attr", "sort_key_value", "ttl_attr", "unknown_index", "label_index"}
    | {"transport", "region", "secure"}
)
"""What the query of a URL may say."""

_CALLED = frozenset({"dynamodb", "oidc", "portal.sso", "signin", "sts"})
"""Services that a client calls, those of its credentials too. botocore reads the endpoints of all: 7 MB."""

_VERIFY = "celery-idempotent:verify"

_CANCELLED = "TransactionCanceledException"
_CONDITION_FAILED = "ConditionalCheckFailed"
_CONTENTION = frozenset({"TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"})
"""Reasons for a cancelled transaction that pass by themselves (API Reference, "TransactWriteItems")."""

_CONFIG = Config(
    connect_timeout=2,
    read_timeout=3,
    retries={"mode": "standard", "total_max_attempts": 3},
    # At least the concurrency of any sane threaded worker; boto3's default of 10 would queue the rest.
    max_pool_connections=64,
    tcp_keepalive=True,
    # The parameters below are built here and covered by tests; validating them again costs 8 % of a call.
    parameter_validation=False,
    # What CloudTrail shows. Without one botocore composes its own, twice for every request: 9 % of a call.
    user_agent=f"celery-idempotent/{__version__} Botocore/{botocore.__version__}",
)
"""Seconds. botocore's defaults (60 s, 60 s) outlast a lease; three tries of these do not."""


class DynamoDBStore:
    """Records as items of one DynamoDB table, one item per idempotency key.

    The table needs a string partition key, and nothing else on it; :meth:`provision` creates such a table.
    A table that has a sort key too is used with a constant in it, so that the partitions stay even.

    Args:
        table: Name or ARN of the table.
        region: AWS Region; default: whatever boto3 finds.
        endpoint_url: Another endpoint, such as ``http://localhost:8000``.
        session: Your own boto3 session, for credentials and profile.
        client: Your own DynamoDB client, or better a function that makes one. A client made before a fork
            must not be used after it, so with a prefork worker only a function will do.
        config: botocore settings on top of ours (2 s to connect, 3 s to read, 3 tries).
        key_attr: Name of the partition key attribute.
        sort_key_attr: Name of the sort key attribute, if the table has one.
        sort_key_value: Its constant value.
        ttl_attr: Name of the table's TTL attribute, in seconds; DynamoDB deletes outcomes past it.
        unknown_index: Name of an index of the records in doubt, by which they are listed at once; None: lists read
            the whole table. No other record is in it, so it costs nothing until an operation ends in doubt.
        label_index: The same, of labels. The first write of a record that has one costs another.
        transport: ``direct``: the first try of a write goes over botocore's connections without the rest of boto3, at a
            fraction of its CPU time. ``boto3``: all goes through a boto3 client, whose events you may
            hook. Default: direct, unless you give ``session`` or ``client``.
        local_clock: The local clock in milliseconds since the epoch, for tests.

    Raises:
        PolicyError: The options contradict each other.
    """

    def __init__(
        self,
        table: str,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        session: "boto3.session.Session | None" = None,
        client: "DynamoDBClient | Callable[[], DynamoDBClient] | None" = None,
        config: Config | None = None,
        key_attr: str = "idempotencyKey",
        sort_key_attr: str | None = None,
        sort_key_value: str = "idempotency",
        ttl_attr: str = "expiryTimestamp",
        unknown_index: str | None = None,
        label_index: str | None = None,
        transport: str | None = None,
        local_clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        if client is not None and (session or endpoint_url or region or config):
            raise PolicyError(
                "client", repr(client), "has its own session, region, endpoint and config; leave those out"
            )
        if transport not in {None, "boto3", "direct"} or (client is not None and transport == "direct"):
            raise PolicyError("transport", repr(transport), "write boto3 or direct; a client of yours is boto3's")
        self.table = table
        self._region = region
        self._endpoint_url = endpoint_url
        # For people: an endpoint may be written with a login.
        self._place = (endpoint_url or region or "").removeprefix("http://").rpartition("@")[2]
        self._given_client = client
        self._config = _CONFIG.merge(config) if config else _CONFIG
        self._key_attr = key_attr
        self._keys = {key_attr: "HASH"} | ({sort_key_attr: "RANGE"} if sort_key_attr else {})
        self._constant = {sort_key_attr: {"S": sort_key_value}} if sort_key_attr else {}
        self._attributes = {**ATTRIBUTES, "key": key_attr, "expires_at": ttl_attr}
        if len({*self._attributes.values(), sort_key_attr, ATTENTION}) != len(self._attributes) + 2:
            raise PolicyError("key_attr, sort_key_attr, ttl_attr", repr(sorted(self._attributes.values())), "overlap")
        if unknown_index is not None and unknown_index == label_index:
            raise PolicyError("unknown_index, label_index", repr(label_index), "are two indexes; name them differently")
        self._indexes = Indexes(table, unknown_index, label_index, self._ask)
        self._ttl_attr = ttl_attr
        self._local_clock = local_clock
        self._offset = 0
        self._date = ""
        self._connected = PerProcess(self._new_client)
        self._session = PerProcess(lambda: session or self._new_session())
        self._log_in: Callable[[Session], None] = lambda session: None  # a function, as its repr shows no secret
        self._models: Loader | None = None
        self._direct = PerProcess(self._new_direct_path)
        self._indirect_for = ""
        if transport == "boto3" or (transport is None and (session or client) is not None):
            self._indirect_for = "so configured"
        self._made_in = os.getpid()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The store that ``dynamodb://[key:secret]@region/table`` or ``...@host:port/table`` names.

        Options in the query: ``key_attr``, ``sort_key_attr``, ``sort_key_value``, ``ttl_attr``, ``unknown_index``,
        ``label_index``, ``transport``, ``region`` and ``secure=1`` (the last two for an endpoint).

        Raises:
            PolicyError: No table, no host that can be read, or an unknown option.
        """
        # The secrets that AWS makes have slashes in them, and nothing else that a URL would need to escape.
        before, _, query = url.partition("?")
        login, _, place = before.partition("://")[2].rpartition("@")
        key, _, secret = map(unquote, login.partition(":"))
        try:
            parts = urlsplit(f"dynamodb://{place}")
            port = parts.port
        except ValueError:  # whose text would quote a secret that looks like a port
            raise _unusable(url, "host or port cannot be read; write dynamodb://@eu-west-1/table-name") from None
        table = unquote(parts.path.strip("/"))
        options: dict[str, Any] = dict(parse_qsl(query))
        unknown = options.keys() - _URL_OPTIONS
        if not table or not parts.hostname:
            raise _unusable(url, "write dynamodb://@eu-west-1/table-name")
        if unknown:
            raise _unusable(url, f"unknown option {', '.join(sorted(unknown))}")
        secure = options.pop("secure", "0") in {"1", "true"}
        if port or parts.hostname == "localhost":
            host = parts.hostname if port is None else f"{parts.hostname}:{port}"
            endpoint = f"http{'s' if secure else ''}://{host}"
            region = options.pop("region", None) or os.environ.get("AWS_REGION") or "us-east-1"
        else:
            endpoint, region = None, options.pop("region", parts.hostname)
        store = cls(table, region=region, endpoint_url=endpoint, **options)
        if key:
            store._log_in = lambda session: session.set_credentials(key, secret)
        return store

    def __repr__(self) -> str:
        return f"dynamodb://@{self._place}/{self.table}"

    @property
    def way(self) -> str:
        """For people: the path that writes take; sure once the first has been made, as by :meth:`verify`."""
        return f"through boto3 ({self._indirect_for})" if self._indirect_for else "on the direct path"

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._put(self._item(new), self._condition(expected), new)

    def swap_with(self, new: Record, expected: str | None, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        """See :meth:`celery_idempotent.stores.CommittingStore.swap_with`; one TransactWriteItems.

        ``writes`` are up to 99, as boto3's ``transact_write_items`` takes them, to tables of the same account and
        Region. A resend whose first request was applied fails on our own record, which shows that it was.
        """
        record = {
            "Put": {
                "TableName": self.table,
                "Item": self._item(new),
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
                **self._condition(expected),
            }
        }
        answers = _CANCELLED, "ValidationException", "ResourceNotFoundException"
        reply = self._ask("TransactWriteItems", *answers, TransactItems=[record, *typed(writes)])
        refusal = refusal_of(reply)
        if not refusal:
            return new
        if refusal == _CANCELLED:
            return self._winner_of(*(reply.get("CancellationReasons") or [{}]))
        if "size" in text_of(reply) and new.result is not None:
            # Of the record or of one of the writes; without the result it turns out which.
            raise RecordTooLarge(text_of(reply))
        raise WriteFailed(None, text_of(reply))

    def get(self, key: str) -> Record | None:
        return self._record_in(self._ask("GetItem", TableName=self.table, Key=self._key(key), ConsistentRead=True))

    def scan(self, **wanted: Unpack[Wanted]) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`; by an index where one is configured that tells."""
        status, label = wanted.get("status"), wanted.get("label")
        meant = self._attributes_of(status=status, task=wanted.get("task"), label=label)
        keys = self._indexes.keys(status, label)
        if keys is None:
            items = self._scanned(meant)
        else:
            own = self._constant
            ours = [{self._key_attr: each[self._key_attr], **own} for each in keys if own.items() <= each.items()]
            found = self._indexes.items(ours)
            # An index is a moment behind: what counts is what the table has.
            items = (each for each in found if meant.items() <= each.items())
        yield from readable(items, self._record, self._key_of)

    def reads_all(self, **wanted: Unpack[Wanted]) -> bool:
        """See :meth:`celery_idempotent.stores.IndexedStore.reads_all`; an index that is missing counts as there."""
        return self._indexes.of(wanted.get("status"), wanted.get("label")) is None

    def delete(self, key: str, expected: str) -> bool:
        condition = self._condition(expected)
        reply = self._ask("DeleteItem", LOST, TableName=self.table, Key=self._key(key), **condition)
        return not refusal_of(reply)

    def now(self) -> int:
        """See :meth:`celery_idempotent.stores.Store.now`; the local clock until a reply has shown it wrong."""
        return self._local_clock() + self._offset

    def verify(self) -> None:
        """See :meth:`celery_idempotent.stores.VerifiableStore.verify`; a PutItem whose condition cannot hold.

        Warns of a configured index that is missing, if it may ask.
        """
        self._put(self._key(_VERIFY), self._impossible(), None)
        missing = [repr(name) for name in self._indexes.missing()]
        if missing:
            reason = f"the table has no index {' and '.join(missing)} yet, so lists read all of it"
            warn(repr(self), f"{reason}; provision it: celery -A <your app> idempotency provision")

    def provision(self) -> None:
        """Create the table on demand, with TTL, and with point-in-time recovery where the server has it.

        Configured indexes that it lacks are added, and waited for until they are filled. Workers can go on meanwhile.

        Raises:
            StoreMisconfigured: A table of that name has another key, or a permission is missing.
            StoreUnavailable: The server did not answer, or the table was not ready for backups in ten minutes.
        """
        Provisioning(repr(self), self._keys, self._ttl_attr, self._indexes, self._mark_doubtful).run()
        self.verify()

    def close(self) -> None:
        """See :meth:`celery_idempotent.stores.Store.close`; a client given by you stays open."""
        self._direct.forget()
        self._session.forget()
        client = self._connected.forget()
        if client is not None and client is not self._given_client:
            client.close()

    def _mark_doubtful(self) -> None:
        in_doubt = self._scanned(self._attributes_of(status=Status.UNKNOWN))
        for record in readable(in_doubt, self._record, self._key_of):
            self._put(self._item(record), self._condition(record.revision), record)

    def _attributes_of(self, **wanted: str | None) -> dict[str, Any]:
        """What an item has that is meant; in a table shared with others, it is one of ours."""
        return self._constant | {name: {"S": str(each)} for name, each in wanted.items() if each is not None}

    def _scanned(self, meant: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        parameters: dict[str, Any] = {"TableName": self.table, "ConsistentRead": True}
        if meant:
            parameters |= {
                "FilterExpression": " AND ".join(f"#f{index} = :f{index}" for index in range(len(meant))),
                "ExpressionAttributeNames": {f"#f{index}": name for index, name in enumerate(meant)},
                "ExpressionAttributeValues": {f":f{index}": each for index, each in enumerate(meant.values())},
            }
        return self._indexes.pages("Scan", parameters, self._ask("Scan", **parameters))

    def _winner_of(self, own: Mapping[str, Any], *others: Mapping[str, Any]) -> Record | None:
        """The record because of which a transaction was cancelled, by the reasons for the record and for the writes."""
        if own.get("Code") == _CONDITION_FAILED:
            return self._record_in(own)
        for position, reason in enumerate(others):
            if (code := reason.get("Code")) not in {"None", *_CONTENTION}:
                told = code if code == _CONDITION_FAILED else f"{code}: {reason.get('Message', '')}"
                raise WriteFailed(position, told)
        raise StoreUnavailable(repr(self), "TransactWriteItems", "it conflicts with another transaction")

    def _impossible(self) -> dict[str, Any]:
        return self._of_key("attribute_exists(#key) AND attribute_not_exists(#key)")

    def _of_key(self, condition: str) -> dict[str, Any]:
        return {"ConditionExpression": condition, "ExpressionAttributeNames": {"#key": self._key_attr}}

    def _condition(self, expected: str | None) -> dict[str, Any]:
        if expected is None:
            return self._of_key("attribute_not_exists(#key)")
        return {
            "ConditionExpression": "#revision = :expected",
            "ExpressionAttributeNames": {"#revision": "revision"},
            "ExpressionAttributeValues": {":expected": {"S": expected}},
        }

    def _key(self, key: str) -> dict[str, Any]:
        return {self._key_attr: {"S": key}, **self._constant}

    def _item(self, record: Record) -> dict[str, Any]:
        if len(record.result or "") > _ITEM_LIMIT:
            raise RecordTooLarge(f"{len(record.result or '')} bytes of result; DynamoDB's limit is 400 KB an item")
        values = record.to_fields()
        item = self._key(values.pop("key"))
        for name, value in values.items():
            item[self._attributes[name]] = attribute_of(value)
        if self._indexes.mark and record.status == Status.UNKNOWN:
            item |= self._indexes.mark
        return item

    def _record_in(self, reply: Mapping[str, Any]) -> Record | None:
        return self._record(reply["Item"]) if reply.get("Item") else None

    def _record(self, item: Mapping[str, Any]) -> Record:
        values = {name: item[each] for name, each in self._attributes.items() if each in item}
        values["key"] = self._key_of(item)
        return Record.from_fields(values, store=repr(self), decode=value_of)

    def _key_of(self, item: Mapping[str, Any]) -> Any:
        return item[self._key_attr]["S"]

    def _put(self, item: Mapping[str, Any], condition: Mapping[str, Any], new: Record | None) -> Record | None:
        reply = self._ask(
            "PutItem",
            LOST,
            TableName=self.table,
            Item=item,
            ReturnValuesOnConditionCheckFailure="ALL_OLD",
            **condition,
        )
        return self._record_in(reply) if refusal_of(reply) else new

    def _ask(self, operation: str, *answers: str, **parameters: Any) -> Any:
        """What the server replies; of errors, those whose code is one of ``answers``."""
        asked_at = self._local_clock()
        try:
            reply = self._reply(operation, parameters)
        except DRIVER_ERRORS as error:
            reply = error.response if isinstance(error, ClientError) else {}
            self._learn_time(reply, asked_at)
            if refusal_of(reply) in answers:
                return reply
            raise explained(error, repr(self), operation, key=named(self._keys)) from error
        self._learn_time(reply, asked_at)
        return reply

    def _reply(self, operation: str, parameters: Mapping[str, Any]) -> Any:
        if operation == "PutItem" and not self._indirect_for:
            try:
                reply = self._direct().put(parameters)
            except Unfit as reason:
                self._indirect_for = str(reason)
            else:
                if reply is not None:
                    return reply
        return getattr(self._connected(), xform_name(operation))(**parameters)

    def _new_direct_path(self) -> DirectPath:
        harmless = {"TableName": self.table, "Item": self._key(_VERIFY), **self._impossible()}
        return DirectPath(self._connected(), self._session().get_credentials(), harmless)

    def _new_session(self) -> Session:
        """One that finds what boto3's would; forked processes share with it what it has read of the services."""
        session = get_session()
        if self._models is None:
            self._models = session.get_component("data_loader")
            for partition in self._models.load_data("endpoints")["partitions"]:
                partition["services"] = {name: each for name, each in partition["services"].items() if name in _CALLED}
        session.register_component("data_loader", self._models)
        self._log_in(session)
        return session

    def _new_client(self) -> "DynamoDBClient":
        given = self._given_client
        if given is None:
            session = self._session()
            create: Any = session.create_client if isinstance(session, Session) else session.client
            options = {"region_name": self._region, "endpoint_url": self._endpoint_url, "config": self._config}
            client: DynamoDBClient = create("dynamodb", **options)
            return client
        if not isinstance(given, BaseClient):
            return given()
        if os.getpid() != self._made_in:
            why = "the DynamoDB client was made before this process was forked, and its connections are shared"
            raise StoreMisconfigured(repr(self), "connect", f"{why}; pass client=a function that makes a client")
        return given

    def _learn_time(self, reply: Mapping[str, Any], asked_at: int) -> None:
        date = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
        if date == self._date:
            return
        self._date = date
        try:
            server = round(parsedate_to_datetime(date).timestamp() * 1000)
        except ValueError:
            return  # a proxy or load balancer that answers in DynamoDB's place need not date its answer
        # The server read its clock between asking and now, and truncated it to the second.
        earliest, latest = server - self._local_clock(), server + 999 - asked_at
        self._offset = min(max(0, earliest), latest)


def _unusable(url: str, remedy: str) -> PolicyError:
    return PolicyError("idempotency_store", scheme_of(url), remedy)
