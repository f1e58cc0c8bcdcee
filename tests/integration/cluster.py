"""Setup, cluster, worker and AWS classes: pytest-celery's own, with the verbs that crash tests need."""
# mypy: allow-subclassing-any

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from celery import VERSION as CELERY
from celery import Celery
from pytest_celery import (
    CeleryTestBroker,
    CeleryTestContainer,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
    CeleryWorkerContainer,
)

from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from lab import short_delays
from lab.embedded import EmbeddedRabbitMQ
from tests.support import ledger, waiting
from tests.support.ledger import Row
from tests.support.waiting import wait_until

AWS_PORT = "4566/tcp"
QUORUM = {"task_default_queue_type": "quorum", "task_default_exchange_type": "topic"}
"""Celery delays a message in RabbitMQ itself only where queues are quorum queues on a topic exchange."""


def on(*brokers: Any) -> pytest.MarkDecorator:
    """Once on each of these brokers."""
    return pytest.mark.parametrize("celery_broker", brokers, indirect=True)


def in_pool(name: str) -> list[pytest.MarkDecorator]:
    """With workers of that pool, where it is installed; others than prefork at night."""
    is_missing = name in GREEN_POOLS and importlib.util.find_spec(name) is None
    marks = [pytest.mark.worker(pool=name), pytest.mark.skipif(is_missing, reason=f"needs {name}")]
    return marks if name == "prefork" else [*marks, pytest.mark.nightly]


def in_pools(*names: str) -> pytest.MarkDecorator:
    """Once for each pool of these that is installed."""
    return pytest.mark.parametrize("pool", [pytest.param(name, marks=in_pool(name)) for name in names])


GREEN_POOLS = ("gevent",)
green = [pytest.param("redis", id=f"redis-{name}", marks=in_pool(name)) for name in GREEN_POOLS]
"""Redis with workers whose tasks are greenlets."""

without_quorum = pytest.mark.skipif(CELERY < (5, 5), reason="Celery knows quorum queues since 5.5")
quorum = pytest.param("quorum", marks=without_quorum)
quorum_at_night = pytest.param("quorum", marks=[without_quorum, pytest.mark.nightly])
attentive = pytest.mark.worker(settings={"broker_heartbeat": 2})
attentive_rabbitmq = [
    pytest.param("classic", marks=attentive),
    pytest.param("quorum", marks=[attentive, without_quorum, pytest.mark.nightly]),
]
"""RabbitMQ that closes the connection of a frozen worker within seconds instead of minutes."""

on_redis = on("redis")
on_sqs = on("sqs")
on_rabbitmq = on("classic", quorum)
on_every_broker = on("redis", "sqs", "classic", quorum_at_night)
on_every_broker_and_green = on("redis", "sqs", "classic", quorum_at_night, *green)

short_visibility = pytest.mark.worker(visibility_timeout=3)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The arguments of `@pytest.mark.worker`: which workers a test needs."""

    count: int = 1
    pool: str = "prefork"
    concurrency: int = 2
    queues: str = "celery"
    visibility_timeout: int = 120
    transport_options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, node: pytest.Item) -> WorkerOptions:
        """Merge the marks of a test: the nearest one wins."""
        marks = reversed(list(node.iter_markers("worker")))
        return cls(**{name: value for mark in marks for name, value in mark.kwargs.items()})

    def arguments(self) -> list[str]:
        """The words of the command line."""
        chosen = ["--pool", self.pool, "--concurrency", str(self.concurrency), "--queues", self.queues]
        # Workers here never need to find each other; looking for neighbours costs a second per start.
        return [*chosen, "--without-mingle", "--without-gossip", "--without-heartbeat"]

    def app_settings(self, broker_url: str) -> dict[str, Any]:
        """The settings of the app."""
        options = quick_transport(broker_url)
        if not broker_url.startswith("amqp"):
            options["visibility_timeout"] = self.visibility_timeout
        return {
            "broker_channel_error_retry": broker_url.startswith("amqp"),
            "broker_transport_options": {**options, **self.transport_options},
            "worker_prefetch_multiplier": 1,
            **self.settings,
        }


class IdempotentSetup(CeleryTestSetup):
    """Everything a test needs to drive its workers."""

    worker: IdempotentWorker
    worker_cluster: IdempotentCluster
    app: Celery


class IdempotentCluster(CeleryWorkerCluster):
    """The workers of one test."""

    def worker_of(self, row: Row) -> IdempotentWorker:
        """The worker that wrote the row."""
        workers: dict[str, IdempotentWorker] = {worker.hostname(): worker for worker in self}
        return workers[row.worker]

    def kill_child(self, row: Row) -> None:
        """SIGKILL the process that wrote the row, and nothing else."""
        self.worker_of(row).send_signal(row.pid, signal.SIGKILL)


class IdempotentWorker(CeleryTestWorker):
    """One worker, with its pool."""

    def send_signal(self, pid: int, number: signal.Signals) -> None:
        """Signal one process of this worker, such as the pool child that runs a task."""
        code, output = self.container.exec_run(["python", "-c", f"import os; os.kill({pid}, {number.value})"])
        assert code == 0, output

    def create_file(self, name: str) -> None:
        """Create an empty file in the folder that workers run in: what a task sees without any I/O that yields."""
        code, output = self.container.exec_run(["python", "-c", f"open({name!r}, 'x').close()"])
        assert code == 0, output

    def freeze(self) -> None:
        """Stop the whole worker in its tracks (SIGSTOP), as a long pause of its machine would."""
        self.container.pause()

    def thaw(self) -> None:
        """Let a frozen worker go on (SIGCONT), unaware that time has passed."""
        self.container.unpause()

    def shut_down(self, *, cold: bool = False) -> None:
        """Ask for a warm (SIGTERM) or a cold (SIGQUIT) shutdown and wait for its end."""
        self.kill(signal="SIGQUIT" if cold else "SIGTERM", reload_container=False)
        wait_until(self.has_exited, f"{self.hostname()} shuts down")

    def has_exited(self) -> bool:
        """Whether the worker's main process is gone."""
        self.container.reload()
        return bool(self.container.status == "exited")

    def start_again(self) -> None:
        """Start a worker that has ended, and wait until it consumes."""
        starts = self.logs().count(self.container.ready_prompt)
        self.container.restart(timeout=10)
        wait_until(lambda: self.logs().count(self.container.ready_prompt) > starts, f"{self.hostname()} starts again")


class IdempotentWorkerContainer(CeleryWorkerContainer):
    """A worker with the tasks of this folder."""

    @classmethod
    def command(cls, *args: str, **kwargs: Any) -> list[str]:
        name = f"{cls.worker_name()}@%h"
        return ["celery", "-A", "app", "worker", f"--loglevel={cls.log_level()}", "-n", name, *args]

    @classmethod
    def tasks_modules(cls) -> set[Any]:
        from tests.integration import idempotent_tasks, plain_tasks

        return {short_delays, waiting, ledger, idempotent_tasks, plain_tasks}

    @classmethod
    def signals_modules(cls) -> set[Any]:
        from tests.integration import blindness, quick_pool, witness

        return {blindness, quick_pool, witness}

    def pause(self) -> None:
        """Freeze all processes."""
        self._container.pause()

    def unpause(self) -> None:
        """Thaw all processes."""
        self._container.unpause()


class AwsContainer(CeleryTestContainer):
    """DynamoDB and SQS."""

    @property
    def inside_address(self) -> str:
        """`host:port` as other containers see it."""
        hostname: str = self.attrs["Config"]["Hostname"]
        return hostname if ":" in hostname else f"{hostname}:{AWS_PORT.split('/')[0]}"

    @property
    def outside_address(self) -> str:
        """`host:port` as the tests see it."""
        return f"localhost:{self._wait_port(AWS_PORT)}"

    @property
    def ready_prompt(self) -> str:
        return "Running on http"


class SqsBroker(CeleryTestBroker):
    """SQS in an AWS account of its own, so that no test meets the queues of another."""

    def __init__(self, container: AwsContainer, account: str) -> None:
        super().__init__(container)
        self._account = account

    def config(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        return {
            "url": f"sqs://{self._account}:secret@{self.container.inside_address}//",
            "host_url": f"sqs://{self._account}:secret@{self.container.outside_address}//",
        }


class RabbitMQBroker(CeleryTestBroker):
    """A virtual host of its own.

    Args:
        server: The RabbitMQ.
        settings: Celery's for its queues.
    """

    def __init__(self, server: EmbeddedRabbitMQ, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(None)
        self.server = server
        self.vhost = server.new_vhost()
        self.settings = settings or {}

    def config(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        url = self.server.url_of(self.vhost)
        return {"url": url, "host_url": url}

    def refuse_messages(self, queue: str) -> None:
        """Have a queue that rejects take none: it is full."""
        full = {"pattern": f"^{queue}$", "definition": {"max-length": 0}}
        self.server.ask("PUT", f"policies/{self.vhost}/full", full)

    def take_messages(self) -> None:
        """Have the queue take them again."""
        self.server.ask("DELETE", f"policies/{self.vhost}/full")

    def ready(self) -> bool:
        return True

    def teardown(self) -> None:
        """The server goes on."""


def quick_transport(broker_url: str) -> dict[str, Any]:
    """Broker options with which a lost message comes back in seconds instead of minutes."""
    if broker_url.startswith("redis"):
        return {"unacked_restore_interval": 0.5, "unacked_restore_throttle": 1, "unacked_mutex_expire": 2}
    if broker_url.startswith("amqp"):
        return {"confirm_publish": True}
    return {"region": "us-east-1", "is_secure": False, "wait_time_seconds": 1, "polling_interval": 0.1}


def record_of(store: Store, key: str) -> Record:
    """The record that the store holds for a key."""
    record = store.get(key)
    assert record is not None, key
    return record
