"""Real brokers, stores and workers: containers where Docker exists, local processes where it does not.

`CI_RUNTIME=process` (the default) or `CI_RUNTIME=docker` chooses; the tests cannot tell the difference.
Unverified: the second was written on a machine without a Docker engine and has never run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import pytest_docker_tools.wrappers.container
from celery import Celery
from pytest_celery import CeleryTestBroker, RedisTestBackend
from pytest_docker_tools import build, container, fxtr, network

from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from lab.embedded import EmbeddedRabbitMQ, EmbeddedRedis
from tests.integration.canvas import KINDS, Canvas, canvas_of
from tests.integration.cluster import (
    AWS_PORT,
    QUORUM,
    AwsContainer,
    IdempotentCluster,
    IdempotentSetup,
    IdempotentWorker,
    IdempotentWorkerContainer,
    RabbitMQBroker,
    SqsBroker,
    WorkerOptions,
)
from tests.support.ledger import Ledger
from tests.support.local_docker import ROOT, LocalDockerClient, missing_packages
from tests.support.tcp_proxy import TcpProxy

if os.environ.get("CI_RUNTIME", "process") == "process":

    @pytest.fixture(scope="session")
    def docker_client() -> Iterator[LocalDockerClient]:
        """Processes of this machine in place of containers."""
        if missing := missing_packages():
            verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
            verdict(f"worker tests need the packages {', '.join(missing)}: pip install -e '.[dev]'")
        # Where the tests themselves run in a container, published ports would be taken for inner ones.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pytest_docker_tools.wrappers.container, "tests_inside_container", lambda: False)
            client = LocalDockerClient()
            yield client
            client.close()


def worker_container(version: str = "default") -> Any:
    """A fixture that starts one worker, by the fixtures with the environment and the command of its version."""
    return container(
        image="{celery_base_worker_image.id}",
        environment=fxtr(f"{version}_worker_env"),
        network="{default_pytest_celery_network.name}",
        volumes={"{default_worker_volume.name}": {"bind": "/app", "mode": "rw"}},
        wrapper_class=IdempotentWorkerContainer,
        timeout=60,
        command=fxtr(f"{version}_worker_command"),
    )


default_pytest_celery_network = network(scope="session")
celery_base_worker_image = build(
    path=str(ROOT), dockerfile="tests/integration/Dockerfile", tag="celery-idempotent/tests"
)
default_worker_container = worker_container()
second_worker_container = worker_container()
third_worker_container = worker_container()
EXTRA_WORKERS = ("second_worker_container", "third_worker_container")
aws = container(
    scope="session",
    image="{celery_base_worker_image.id}",
    command=["ministack"],
    environment={"SERVICES": "dynamodb,sqs", "IOT_MTLS_ENABLED": "0"},
    network="{default_pytest_celery_network.name}",
    ports={AWS_PORT: None},
    wrapper_class=AwsContainer,
    timeout=60,
)


@pytest.fixture
def aws_account() -> str:
    """An AWS account that no other test uses."""
    return f"{random.randrange(10**12):012}"


@pytest.fixture
def celery_sqs_broker(aws: AwsContainer, aws_account: str) -> SqsBroker:
    """SQS as a broker."""
    return SqsBroker(aws, aws_account)


@pytest.fixture
def celery_classic_broker(rabbitmq_server: EmbeddedRabbitMQ) -> RabbitMQBroker:
    """RabbitMQ as a broker, with classic queues; a process of this machine under Docker, too."""
    return RabbitMQBroker(rabbitmq_server)


@pytest.fixture
def celery_quorum_broker(rabbitmq_server: EmbeddedRabbitMQ) -> RabbitMQBroker:
    """RabbitMQ as a broker, with quorum queues."""
    return RabbitMQBroker(rabbitmq_server, QUORUM)


@pytest.fixture(params=["redis", "sqs"])
def celery_broker(request: pytest.FixtureRequest) -> Any:
    """The broker: every test runs on Redis and on SQS, unless it is marked with others, as `on_every_broker`."""
    return request.getfixturevalue(f"celery_{request.param}_broker")


@pytest.fixture
def celery_backend(celery_redis_backend: RedisTestBackend) -> RedisTestBackend:
    """The result backend."""
    return celery_redis_backend


@pytest.fixture
def worker_options(request: pytest.FixtureRequest) -> WorkerOptions:
    """What `@pytest.mark.worker(...)` asks for."""
    return WorkerOptions.of(request.node)


@pytest.fixture
def default_worker_container_cls() -> type[IdempotentWorkerContainer]:
    """Workers with the tasks of this folder."""
    return IdempotentWorkerContainer


@pytest.fixture
def default_worker_cls() -> type[IdempotentWorker]:
    """Workers with verbs for crashes."""
    return IdempotentWorker


@pytest.fixture
def default_worker_command(worker_options: WorkerOptions) -> list[str]:
    """The worker's command line."""
    return IdempotentWorkerContainer.command(*worker_options.arguments())


@pytest.fixture
def celery_worker(celery_setup_worker: IdempotentWorker) -> IdempotentWorker:
    """The first worker."""
    return celery_setup_worker


@pytest.fixture
def celery_worker_cluster(
    request: pytest.FixtureRequest, celery_worker: IdempotentWorker, worker_options: WorkerOptions
) -> IdempotentCluster:
    """As many workers as the test asks for."""
    names = EXTRA_WORKERS[: worker_options.count - 1]
    extra = [IdempotentWorker(request.getfixturevalue(name), celery_worker.app) for name in names]
    return IdempotentCluster(celery_worker, *extra)


@pytest.fixture
def celery_setup_cls() -> type[IdempotentSetup]:
    """The setup with our cluster."""
    return IdempotentSetup


@pytest.fixture
def celery_setup_app(
    celery_setup_app: Celery,
    celery_broker: CeleryTestBroker,
    worker_options: WorkerOptions,
    store_url: Callable[[str], str],
    store: Store,
    faults: TcpProxy,
) -> Iterator[Celery]:
    """The app of the test and of its workers: pytest-celery sends them what differs from the defaults."""
    celery_setup_app.conf.update(
        idempotency_store=store_url(f"{faults.host}:{faults.port}"),
        idempotency_grace=0.2,
        **getattr(celery_broker, "settings", {}),
        **worker_options.app_settings(celery_setup_app.conf.broker_url),
    )
    yield celery_setup_app
    celery_setup_app.close()


@pytest.fixture
def store_url(aws_account: str) -> Callable[[str], str]:
    """The URL of the store for a DynamoDB at a given address."""
    return lambda address: f"dynamodb://{aws_account}:secret@{address}/idempotency?region=us-east-1"


@pytest.fixture
def store(aws: AwsContainer, store_url: Callable[[str], str]) -> Iterator[Store]:
    """The workers' store, provisioned, and seen past the faults."""
    store = open_store(store_url(aws.outside_address))
    store.provision()
    yield store
    store.close()


@pytest.fixture
def faults(aws: AwsContainer, default_pytest_celery_network: Any) -> Iterator[TcpProxy]:
    """The proxy between the workers and DynamoDB, listening where containers reach their host."""
    default_pytest_celery_network.reload()
    gateway = default_pytest_celery_network.attrs["IPAM"]["Config"][0]["Gateway"]
    host, _, port = aws.outside_address.partition(":")
    with TcpProxy(int(port), host=host, listen_on=gateway, keeps_trips=True) as proxy:
        yield proxy


@pytest.fixture
def ledger(celery_backend: RedisTestBackend) -> Iterator[Ledger]:
    """What the tasks did."""
    ledger = Ledger(celery_backend.config()["host_url"])
    yield ledger
    ledger.close()


@pytest.fixture(scope="session", params=KINDS)
def canvas(
    request: pytest.FixtureRequest, redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Canvas]:
    """An app of each kind, with a worker that all claims about canvases share."""
    server = redis_server.url.rsplit("/", 1)[0]
    with canvas_of(request.param, server, tmp_path_factory.mktemp("canvas")) as canvas:
        yield canvas


@pytest.fixture
def of() -> str:
    """A name that no other test uses: what bodies wrote for this one is found by it."""
    return uuid4().hex
