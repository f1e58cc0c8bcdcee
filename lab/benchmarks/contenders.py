"""Ways to charge an order once: this library, bare boto3, and AWS Powertools.

All take the same order. `delivery(number)` is a delivery of that order, ready to be called: the first one does the
work, and every further one is a duplicate.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import boto3
from aws_lambda_powertools.utilities.idempotency import DynamoDBPersistenceLayer, IdempotencyConfig, idempotent_function
from botocore.exceptions import ClientError
from celery import Celery
from celery.app.trace import build_tracer, setup_worker_optimizations

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.engine.delivery import Delivery
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.integration.settings import CONTROL_FLOW, runtime_of
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.dynamodb.store import DynamoDBStore
from lab.benchmarks.environment import DynamoDB

_POWERTOOLS_TABLE = "powertools"
_WORKER, _TASK_ID = "celery@benchmark", "0b8d1a5e-7c2f-4a52-9d0c-6f6f3b1f4a11"


def order(number: int) -> dict[str, Any]:
    lines = [{"sku": "s-0000", "qty": 1}]
    return {"id": f"ord-{number:019d}", "customer": "cus-471142", "currency": "EUR", "total": 42.5, "lines": lines}


def result_of(order: dict[str, Any]) -> dict[str, Any]:
    return {"order": order["id"], "charge": "ch_3PqkT2eZvKYlo2C", "amount": order["total"]}


def make_app(store: Store) -> Celery:
    """An app whose broker is never used: the benchmarks deliver by hand."""
    app = Celery("benchmark", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_store=store, task_acks_late=True, task_reject_on_worker_lost=True)
    return app


def dynamodb_store(dynamodb: DynamoDB, session: boto3.Session, transport: str = "direct") -> DynamoDBStore:
    """The library's store on the table of the benchmarks, which is there afterwards."""
    store = DynamoDBStore("benchmark", endpoint_url=dynamodb.endpoint, session=session, transport=transport)
    store.provision()
    return store


class GuardedCall:
    """The library without Celery: key derivation, delivery, codec, store."""

    name = "celery-idempotent, Delivery.run"

    def __init__(self, store: Store) -> None:
        self._policy, self._store = Policy(), store
        self._app = make_app(store)  # its runtime holds it weakly
        make = self._app.task(name="charge", base=IdempotentTask, idempotent=self._policy, shared=False)
        self._task: Any = make(result_of)
        self._codec = runtime_of(self._app).codec

    def delivery(self, number: int) -> Callable[[], object]:
        sent = order(number)

        def deliver() -> object:
            identity = self._task.idempotency_identity((), {"order": sent}, headers={}, task_id=_TASK_ID)
            return self.of(identity, lambda: result_of(sent))()

        return deliver

    def of(self, identity: Identity, body: Callable[[], object]) -> Callable[[], object]:
        """A delivery of the operation with that identity."""
        operation = Operation(
            identity=identity, policy=self._policy, task="charge", task_id=_TASK_ID, worker=_WORKER, grace=0
        )
        delivery = Delivery(operation, self._store, self._codec, heartbeat, CONTROL_FLOW, lambda event: None)
        return lambda: delivery.run(lambda claim: body())


class Tracers:
    """A plain task and an idempotent one, as a worker's process executes them."""

    def __init__(self, store: Store) -> None:
        self.app = app = make_app(store)
        app.conf.task_ignore_result = True
        app.task(name="plain", shared=False)(result_of)
        app.task(name="idempotent", base=IdempotentTask, idempotent=Policy(), shared=False)(result_of)
        app.finalize()
        setup_worker_optimizations(app, _WORKER)
        tracer = partial(build_tracer, app=app, loader=app.loader, hostname=_WORKER)
        self._tracers: Mapping[str, Any] = {name: tracer(name, app.tasks[name]) for name in ("plain", "idempotent")}

    def delivery(self, name: str, number: int) -> Callable[[], object]:
        """A message of order ``number``, taken off the queue and decoded."""
        task_id, kwargs, trace = f"0b8d1a5e-7c2f-4a52-9d0c-{number:012d}", {"order": order(number)}, self._tracers[name]
        request: dict[str, Any] = {"id": task_id, "root_id": task_id, "task": name, "lang": "py", "hostname": _WORKER}
        request |= {"args": [], "kwargs": kwargs, "argsrepr": "()", "kwargsrepr": "{}", "headers": {}}
        request |= {"delivery_info": {}, "properties": {}, "ignore_result": True, "retries": 0}
        return lambda: trace(task_id, [], kwargs, request)


class BareBoto3:
    """The library's own requests, replayed by nothing but boto3: the least that any code must pay.

    The items are ready made: only the key and the result are put into them, so the attributes, expressions
    and lengths are those of the library, and no time is spent on anything but boto3 and JSON.
    """

    name = "bare boto3"

    def __init__(self, dynamodb: DynamoDB) -> None:
        self._client: Any = dynamodb.session().client("dynamodb", endpoint_url=dynamodb.endpoint)
        recorded = dynamodb.session()
        seen: list[Mapping[str, Any]] = []
        recorded.events.register("provide-client-params.dynamodb.PutItem", lambda params, **_: seen.append(params))
        call = GuardedCall(dynamodb_store(dynamodb, recorded, "boto3"))
        call.delivery(time.time_ns())()  # no earlier run on a lasting server can have used that number
        *_, self._claim, self._complete = seen  # after those of its preparation

    def delivery(self, number: int) -> Callable[[], object]:
        length = len(self._claim["Item"]["idempotencyKey"]["S"])
        prefix = f"{self.name}:"
        sent, key = order(number), {"S": prefix + str(number).rjust(length - len(prefix), "0")}
        return lambda: self._deliver(sent, key)

    def _deliver(self, sent: dict[str, Any], key: dict[str, str]) -> object:
        claim, complete = self._claim, self._complete
        try:
            self._client.put_item(**{**claim, "Item": {**claim["Item"], "idempotencyKey": key}})
        except ClientError as error:
            if error.response["Error"]["Code"] != "ConditionalCheckFailedException":
                raise
            response: Mapping[str, Any] = error.response
            return json.loads(response["Item"]["resultData"]["S"])
        result = result_of(sent)
        done = {**complete["Item"], "idempotencyKey": key, "resultData": {"S": json.dumps(result)}}
        self._client.put_item(**{**complete, "Item": done})
        return result


def powertools(client: Any, body: Callable[..., Any], argument: str, seconds: int, **options: Any) -> Any:
    """The body under AWS Powertools, in a Lambda context with so many seconds left, so that it has a lease."""
    with suppress(client.exceptions.ResourceInUseException):  # somebody was here before
        client.create_table(
            TableName=_POWERTOOLS_TABLE,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        )
    client.get_waiter("table_exists").wait(TableName=_POWERTOOLS_TABLE)
    config = IdempotencyConfig(**options)
    context: Any = SimpleNamespace(get_remaining_time_in_millis=lambda: seconds * 1000)
    config.register_lambda_context(context)
    layer = DynamoDBPersistenceLayer(_POWERTOOLS_TABLE, boto3_client=client)
    decorate: Any = idempotent_function(data_keyword_argument=argument, persistence_store=layer, config=config)
    return decorate(body)


class Powertools:
    """AWS Powertools Idempotency, its cache off."""

    name = "Powertools"

    def __init__(self, dynamodb: DynamoDB) -> None:
        client = dynamodb.session().client("dynamodb", endpoint_url=dynamodb.endpoint)
        self._charge = powertools(client, result_of, "order", 60, use_local_cache=False)

    def delivery(self, number: int) -> Callable[[], object]:
        sent = order(number)
        return lambda: self._charge(order=sent)
