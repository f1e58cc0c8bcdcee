"""Three ways to charge an order once: this library, bare boto3, and AWS Powertools.

All take the same order and return the same result. `delivery(number)` is a delivery of that order, ready to
be called: the first one does the work, and every further one is a duplicate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import boto3
from aws_lambda_powertools.utilities.idempotency import (
    DynamoDBPersistenceLayer,
    IdempotencyConfig,
    idempotent_function,
)
from botocore.config import Config
from botocore.exceptions import ClientError
from celery import Celery
from celery.app.task import Context
from celery.app.trace import setup_worker_optimizations

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.engine.delivery import Conflict, Delivery
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.integration.settings import CONTROL_FLOW, runtime_of
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.dynamodb.store import _CONFIG, DynamoDBStore
from lab.benchmarks.environment import Servers
from lab.benchmarks.payloads import order, result_of

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

__all__ = [
    "LIBRARY_CONFIG",
    "BareBoto3",
    "Body",
    "Contender",
    "GuardedCall",
    "GuardedTask",
    "Powertools",
    "Requests",
    "dynamodb_store",
    "make_app",
    "recorded_requests",
]

LIBRARY_CONFIG: Config = _CONFIG
"""The client settings that the library uses unless told otherwise."""

Body = Callable[[dict[str, Any]], dict[str, Any]]

TABLE = "benchmark"
POWERTOOLS_TABLE = "benchmark-powertools"
_WORKER, _TASK_ID = "celery@benchmark", "0b8d1a5e-7c2f-4a52-9d0c-6f6f3b1f4a11"


class Contender(Protocol):
    """One way to charge an order once."""

    name: str

    def delivery(self, number: int) -> Callable[[], object]:
        """A delivery of order ``number``; everything that precedes it in any case is done."""


def make_app(store: Store) -> Celery:
    """A Celery app whose broker is never used: the benchmarks deliver by hand."""
    app = Celery("benchmark", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_store=store, task_acks_late=True, task_reject_on_worker_lost=True)
    return app


def _charge_task(app: Celery, body: Body, policy: Policy) -> Any:
    def charge(order: dict[str, Any]) -> dict[str, Any]:
        return body(order)

    app.task(name="charge", base=IdempotentTask, idempotent=policy, shared=False)(charge)
    return app.tasks["charge"]


def dynamodb_store(
    servers: Servers, session: boto3.session.Session | None = None, transport: str = "direct"
) -> DynamoDBStore:
    """The library's store on the table of the benchmarks, which is there afterwards."""
    store = DynamoDBStore(
        TABLE, endpoint_url=servers.dynamodb, session=session or servers.session(), transport=transport
    )
    store.provision()
    return store


class GuardedCall:
    """The library without Celery: key derivation, delivery, codec, store.

    Args:
        store: Where the records are.
        policy: The task's policy.
        body: What is to happen once.
        name: How it is called in the tables.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy | None = None,
        body: Body = result_of,
        name: str = "celery-idempotent, Delivery.run",
    ) -> None:
        self.name = name
        self.policy = policy or Policy()
        self.store = store
        app = make_app(store)
        self._app = app  # its runtime holds it weakly
        self._task = _charge_task(app, body, self.policy)
        self._body = body
        self._codec = runtime_of(app).codec

    def operation(self, sent: dict[str, Any]) -> Operation:
        """A delivery of the order ``sent``, its key derived."""
        identity = self._task.idempotency_identity((), {"order": sent}, headers={}, task_id=_TASK_ID)
        names = {"task": self._task.name, "task_id": _TASK_ID, "worker": _WORKER}
        return Operation(identity=identity, policy=self.policy, **names, grace=0)

    def delivery(self, number: int) -> Callable[[], object]:
        """A delivery of order ``number``."""
        sent = order(number)
        return lambda: self._deliver(sent)

    def _deliver(self, sent: dict[str, Any]) -> object:
        delivery = Delivery(self.operation(sent), self.store, self._codec, heartbeat, CONTROL_FLOW, lambda event: None)
        outcome = delivery.run(lambda claim: self._body(sent))
        return outcome if isinstance(outcome, Conflict) else outcome.value


class GuardedTask:
    """The library as a worker calls it: the task's ``__call__``, with its logging and signals.

    Args:
        store: Where the records are.
        name: How it is called in the tables.
    """

    def __init__(self, store: Store, name: str = "celery-idempotent, task") -> None:
        self.name = name
        self._app = make_app(store)
        self._task = _charge_task(self._app, result_of, Policy(scope="charge-as-task"))
        # As a worker does: without it the task's own __call__ would push a second request.
        setup_worker_optimizations(self._app)

    def delivery(self, number: int) -> Callable[[], object]:
        """A delivery of order ``number``: what celery.app.trace does around a task, and the request it made before."""
        kwargs = {"order": order(number)}
        request = Context({"id": _TASK_ID, "headers": {}, "hostname": _WORKER}, args=(), kwargs=kwargs)
        request.called_directly = False
        return lambda: self._deliver(request, kwargs)

    def _deliver(self, request: Context, kwargs: dict[str, Any]) -> object:
        task = self._task
        task.request_stack.push(request)
        try:
            return task(**kwargs)
        finally:
            task.request_stack.pop()


@dataclass(frozen=True, slots=True)
class Requests:
    """The parameters of one new key as the library passes them to boto3."""

    claim: Mapping[str, Any]
    complete: Mapping[str, Any]


def recorded_requests(servers: Servers) -> Requests:
    """What the library passes to boto3 for one new key."""
    session = servers.session()
    seen: list[Mapping[str, Any]] = []

    def record(params: Mapping[str, Any], **_: Any) -> None:
        seen.append(params)

    session.events.register("provide-client-params.dynamodb.PutItem", record)
    call = GuardedCall(dynamodb_store(servers, session, "boto3"))
    deliver = call.delivery(time.time_ns())  # no earlier run on a lasting server can have used that number
    seen.clear()
    deliver()
    claim, complete = seen
    return Requests(claim, complete)


class BareBoto3:
    """The library's own requests, replayed by nothing but boto3: the least that any code must pay.

    The items are ready made: only the key and the result are put into them, so the attributes, expressions
    and lengths are those of the library, and no time is spent on anything but boto3 and JSON.

    Args:
        name: How it is called in the tables.
        client: The client to send them with.
        requests: What to send.
    """

    def __init__(self, name: str, client: DynamoDBClient, requests: Requests) -> None:
        self.name = name
        self._client = client
        self._requests = requests
        self._prefix = f"{name}:"

    def delivery(self, number: int) -> Callable[[], object]:
        """A delivery of order ``number``."""
        sent, key = order(number), {"S": self._key(number)}
        return lambda: self._deliver(sent, key)

    def _deliver(self, sent: dict[str, Any], key: dict[str, str]) -> object:
        claim, complete = self._requests.claim, self._requests.complete
        try:
            self._client.put_item(**{**claim, "Item": {**claim["Item"], "idempotencyKey": key}})
        except ClientError as error:
            if error.response["Error"]["Code"] != "ConditionalCheckFailedException":
                raise
            item: Mapping[str, Any] = error.response["Item"]  # type: ignore[typeddict-item]  # unknown to the stubs
            return json.loads(item["resultData"]["S"])
        result = result_of(sent)
        done = {**complete["Item"], "idempotencyKey": key, "resultData": {"S": json.dumps(result)}}
        self._client.put_item(**{**complete, "Item": done})
        return result

    def _key(self, number: int) -> str:
        length = len(self._requests.claim["Item"]["idempotencyKey"]["S"])
        return self._prefix + str(number).rjust(length - len(self._prefix), "0")


class Powertools:
    """AWS Powertools Idempotency: its cache off, a Lambda context registered so that it has a lease.

    Args:
        servers: Where DynamoDB is.
        session: The session to make the client of.
        body: What is to happen once.
        lease_ms: What the Lambda context gives as remaining time, which is the lease.
    """

    name = "Powertools"

    def __init__(
        self, servers: Servers, session: boto3.session.Session, body: Body = result_of, lease_ms: int = 60_000
    ) -> None:
        client = session.client("dynamodb", endpoint_url=servers.dynamodb)
        _create_table(client, POWERTOOLS_TABLE)
        config = IdempotencyConfig(use_local_cache=False)
        context: Any = _LambdaContext(lease_ms)
        config.register_lambda_context(context)
        layer = DynamoDBPersistenceLayer(POWERTOOLS_TABLE, boto3_client=client)

        decorator: Any = idempotent_function(data_keyword_argument="order", persistence_store=layer, config=config)

        @decorator
        def charge(order: dict[str, Any]) -> dict[str, Any]:
            return body(order)

        self._charge = charge

    def delivery(self, number: int) -> Callable[[], object]:
        """A delivery of order ``number``."""
        sent = order(number)
        return lambda: self._charge(order=sent)


@dataclass(frozen=True, slots=True)
class _LambdaContext:
    remaining_ms: int

    def get_remaining_time_in_millis(self) -> int:
        """What Powertools takes for its lease."""
        return self.remaining_ms


def _create_table(client: DynamoDBClient, name: str) -> None:
    try:
        client.create_table(
            TableName=name,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        )
    except client.exceptions.ResourceInUseException:
        return
    client.get_waiter("table_exists").wait(TableName=name)
