"""The shop of the incident: one task that must never charge twice, labelled by what people call an order."""

from __future__ import annotations

import json
import os
from urllib.request import Request, urlopen

from celery import Celery
from celery.signals import worker_init

from celery_idempotent import IdempotentTask, Policy, current_attempt

app = Celery("shop")
app.conf.update(
    broker_url=os.environ.get("SHOP_BROKER"),
    idempotency_store=os.environ.get("SHOP_STORE"),
    broker_transport_options={"visibility_timeout": 5},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)

CHARGE = Policy(
    "order",
    label="order",
    lease=2,
    on_takeover="refuse",
)


@app.task(base=IdempotentTask, idempotent=CHARGE, name="shop.charge")
def charge(order: str, cents: int) -> str:
    """Charge an order; under `refuse`, as nobody may be charged because a worker died."""
    request = Request(
        f"{os.environ['SHOP_PROVIDER']}/charges",
        data=json.dumps({"order": order, "cents": cents}).encode(),
        headers={"Idempotency-Key": current_attempt().effect_key("charge")},
    )
    with urlopen(request) as answer:
        return str(json.load(answer)["charge"])


@worker_init.connect
def _measure(**_: object) -> None:
    """A pool of threads is one process, so one port is enough; under prefork each process needs its own."""
    from opentelemetry import metrics
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import start_http_server

    from celery_idempotent.contrib import otel

    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))
    otel.instrument()
    start_http_server(int(os.environ["SHOP_METRICS"]), addr="127.0.0.1")
