"""What a fresh interpreter has that has imported one module of the package and nothing else."""

import subprocess
import sys

from celery_idempotent.stores.sql.schema import OUTBOX, TABLE

MODULES = "print(*sorted({name.partition('.')[0] for name in sys.modules}))\n"


def _printed(program: str) -> list[list[str]]:
    given = [sys.executable, "-c", program]
    return [
        each.split() for each in subprocess.run(given, capture_output=True, text=True, check=True).stdout.splitlines()
    ]


WORKER = """
import sys
from celery import Celery
from celery_idempotent import IdempotentTask
from celery_idempotent.integration import cli  # as Celery's own command does

app = Celery("shop", broker="memory://")
app.conf.update(idempotency_store="memory://", task_acks_late=True, task_reject_on_worker_lost=True)

@app.task(base=IdempotentTask, shared=False)
def charge(order_id): ...

app.Worker(pool="solo")
assert charge.apply(("o-1",)).successful()
print(*sorted(name for name in sys.modules if name.startswith("celery_idempotent.contrib")))
"""


def test_worker_imports_nothing_that_it_does_not_use() -> None:
    """Neither what draws tables and serves pages, nor what measures, nor the drivers of other stores."""
    contrib, packages = _printed(WORKER + MODULES)
    assert {*contrib} <= {f"celery_idempotent.contrib{each}" for each in ("", ".web")}
    unused = "rich starlette jinja2 uvicorn opentelemetry cryptography flask boto3 redis sqlalchemy psycopg asyncio"
    assert not {*packages} & {*unused.split()}


CONSUMER = """
import sys
from celery_idempotent.stores.sql.schema import metadata

print(*sorted(metadata.tables))

from celery import Celery
from celery_idempotent.contrib.sns import Route, consume, unwrap

assert unwrap("{}") is None
consume(Celery("shop"), Route(queue="orders", task="shop.charge"))
"""


def test_publisher_of_an_app_that_consumes_imports_nothing_of_aws() -> None:
    """A worker imports boto3 when it begins to consume; the module that Alembic is given has every table by itself."""
    tables, packages = _printed(CONSUMER + MODULES)
    assert tables == [OUTBOX, TABLE]
    assert not {*packages} & {"boto3", "botocore"}


PUBLISHER = """
import sys
from celery import Celery
from celery_idempotent import IdempotentTask

app = Celery("shop", broker="amqp://", set_as_current=False)

@app.task(base=IdempotentTask, shared=False)
def charge(order_id): ...

app.finalize()
print(*sorted(sys.modules))
"""


def test_publisher_imports_nothing_of_workers() -> None:
    """Nor what few apps use: every process of every web server has a task's module."""
    ((*modules,),) = _printed(PUBLISHER)
    ours = ("integration.operating.worker", "integration.broker.holding", "stores.wrappers", "stores.objects")
    unused = {f"celery_idempotent.{each}" for each in ours} | {"getpass", "kombu.transport.virtual"}
    assert "celery_idempotent.integration.broker.recovery" in modules
    assert not {*modules} & unused


STORES = """
import sys
from celery_idempotent import open_store

for url in ("dynamodb://key:secret@localhost:1/orders", "postgresql+psycopg://localhost/shop"):
    open_store(url).close()
print(*sorted(sys.modules))
"""


def test_store_imports_nothing_of_its_driver_that_it_does_not_use() -> None:
    """Every pool process would have a copy of it."""
    ((*modules,),) = _printed(STORES)
    assert {"botocore.session", "psycopg", "sqlalchemy"} <= {*modules}
    assert not {*modules} & {"boto3", "sqlalchemy.orm"}
