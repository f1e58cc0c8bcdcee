"""Cluster, worker and AWS classes: pytest-celery's own, with the verbs that crash tests need."""
# mypy: allow-subclassing-any

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_celery
from celery import VERSION as CELERY
from pytest_celery import CeleryTestBroker, CeleryTestWorker, CeleryWorkerCluster, CeleryWorkerContainer

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
POOLS = {"greenlets": "gevent", "solo": "solo", "threads": "threads"}
"""By name of a scene: Redis, with workers of that pool."""
MARKS = {name: [pytest.mark.worker(pool=pool)] for name, pool in POOLS.items()}
MARKS["greenlets"].append(pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="needs gevent"))
MARKS["quorum"] = [pytest.mark.skipif(CELERY < (5, 5), reason="Celery knows quorum queues since 5.5")]


def on(*by_day: Any, at_night: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Once on each of these brokers, of which `POOLS` are Redis with another pool."""
    scenes = [pytest.param(each, marks=MARKS.get(each, [])) if isinstance(each, str) else each for each in by_day]
    nights = [pytest.param(each, marks=[*MARKS.get(each, []), pytest.mark.nightly]) for each in at_night]
    return pytest.mark.parametrize("celery_broker", [*scenes, *nights], indirect=True)


on_every_broker = on("redis", "sqs", "classic", at_night=("quorum", "greenlets"))


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
    def of(cls, node: pytest.Item) -> "WorkerOptions":
        """Merge the marks of a test: the nearest one wins."""
        marks = reversed(list(node.iter_markers("worker")))
        return cls(**{name: value for mark in marks for name, value in mark.kwargs.items()})

    def arguments(self) -> list[str]:
        """The words of the command line."""
        chosen = ["--pool", self.pool, "--concurrency", str(self.concurrency), "--queues", self.queues]
        # Workers here never need to find each other; looking for neighbours costs a second per start.
        return [*chosen, "--without-mingle", "--without-gossip", "--without-heartbeat"]

    def app_settings(self, broker_url: str) -> dict[str, Any]:
        """The settings of the app, with which a lost message comes back in seconds instead of minutes."""
        transport = broker_url.partition(":")[0]
        quick: dict[str, dict[str, Any]] = {
            "redis": {"unacked_restore_interval": 0.5, "unacked_restore_throttle": 1, "unacked_mutex_expire": 2},
            "sqs": {"region": "us-east-1", "is_secure": False, "wait_time_seconds": 1, "polling_interval": 0.1},
            "amqp": {"confirm_publish": True},
        }
        timeout = {} if transport == "amqp" else {"visibility_timeout": self.visibility_timeout}
        return {
            "broker_channel_error_retry": transport == "amqp",
            "broker_transport_options": {**quick[transport], **timeout, **self.transport_options},
            "worker_prefetch_multiplier": 1,
            **self.settings,
        }


class Cluster(CeleryWorkerCluster):
    """The workers of one test."""

    def worker_of(self, row: Row) -> "Worker":
        """The worker that wrote the row."""
        workers: dict[str, Worker] = {worker.hostname(): worker for worker in self}
        return workers[row.worker]

    def kill_child(self, row: Row) -> None:
        """SIGKILL the process that wrote the row, and nothing else."""
        self.worker_of(row).run_beside(f"import os; os.kill({row.pid}, 9)")


class Worker(CeleryTestWorker):
    """One worker, with its pool."""

    def run_beside(self, code: str) -> None:
        """Run Python beside the worker, in its folder."""
        exit_code, output = self.container.exec_run(["python", "-c", code])
        assert exit_code == 0, output

    def freeze(self) -> None:
        """Stop the whole worker in its tracks (SIGSTOP), as a long pause of its machine would."""
        self.container._container.pause()

    def thaw(self) -> None:
        """Let a frozen worker go on (SIGCONT), unaware that time has passed."""
        self.container._container.unpause()

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


class WorkerContainer(CeleryWorkerContainer):
    """A worker with the tasks of this folder."""

    @classmethod
    def command(cls, *args: str, **kwargs: Any) -> list[str]:
        name = f"{cls.worker_name()}@%h"
        return ["celery", "-A", "app", "worker", f"--loglevel={cls.log_level()}", "-n", name, *args]

    @classmethod
    def tasks_modules(cls) -> set[Any]:
        from tests.integration import idempotent_tasks

        return {short_delays, waiting, ledger, idempotent_tasks}

    @classmethod
    def signals_modules(cls) -> set[Any]:
        from tests.integration import sent_to_workers

        return {sent_to_workers}


class AwsContainer(pytest_celery.CeleryTestContainer):
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
    """SQS in an AWS account of its own, so that no test meets the queues of another; workers find it at an address."""

    def __init__(self, container: AwsContainer, account: str, address: str = "") -> None:
        super().__init__(container)
        self._account, self._address = account, address or container.inside_address

    def config(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        return {
            "url": f"sqs://{self._account}:secret@{self._address}//",
            "host_url": f"sqs://{self._account}:secret@{self.container.outside_address}//",
        }


class RabbitMQBroker(CeleryTestBroker):
    """A virtual host of its own, and Celery's settings for its queues."""

    def __init__(self, server: EmbeddedRabbitMQ, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(None)
        self.server = server
        self.vhost = server.new_vhost()
        self.settings = settings or {}

    def config(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        url = self.server.url_of(self.vhost)
        return {"url": url, "host_url": url}

    def ready(self) -> bool:
        return True

    def teardown(self) -> None:
        """The server goes on."""


def record_of(store: Store, key: str) -> Record:
    """The record that the store holds for a key."""
    record = store.get(key)
    assert record is not None, key
    return record
