"""Real brokers, stores and workers: containers where Docker exists, local processes where it does not.

`CI_RUNTIME=process` (the default) or `CI_RUNTIME=docker` chooses; the tests cannot tell the difference.
Unverified: the second was written on a machine without a Docker engine and has never run.
"""

import os
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from uuid import uuid4

import pytest
import pytest_docker_tools.wrappers.container
from celery import Celery
from pytest_celery import CeleryTestBroker, CeleryTestSetup, RedisTestBackend
from pytest_docker_tools import build, container, fxtr, network

from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from lab.embedded import EmbeddedRabbitMQ, EmbeddedRedis
from tests.integration.canvas import Canvas, canvas_of
from tests.integration.cluster import (
    AWS_PORT,
    POOLS,
    QUORUM,
    AwsContainer,
    Cluster,
    RabbitMQBroker,
    SqsBroker,
    Worker,
    WorkerContainer,
    WorkerOptions,
)
from tests.support.ledger import Ledger
from tests.support.local_docker import ROOT, LocalDockerClient, missing_packages
from tests.support.tcp_proxy import TcpProxy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """RabbitMQ takes long to start: the tests on it come first, so that one process of pytest has most of them."""
    items.sort(key=lambda item: not any(name in item.nodeid for name in ("classic", "quorum")))


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


def worker_container() -> Any:
    """A fixture that starts one worker."""
    return container(
        image="{celery_base_worker_image.id}",
        environment=fxtr("default_worker_env"),
        network="{default_pytest_celery_network.name}",
        volumes={"{default_worker_volume.name}": {"bind": "/app", "mode": "rw"}},
        wrapper_class=WorkerContainer,
        timeout=60,
        command=fxtr("default_worker_command"),
    )


default_pytest_celery_network = network(scope="session")
celery_base_worker_image = build(
    path=str(ROOT), dockerfile="tests/integration/Dockerfile", tag="celery-idempotent/tests"
)
default_worker_container = worker_container()
second_worker_container = worker_container()
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
    return SqsBroker(aws, aws_account)


@pytest.fixture
def celery_classic_broker(rabbitmq_server: EmbeddedRabbitMQ) -> RabbitMQBroker:
    """RabbitMQ with classic queues; a process of this machine under Docker, too."""
    return RabbitMQBroker(rabbitmq_server)


@pytest.fixture
def celery_quorum_broker(rabbitmq_server: EmbeddedRabbitMQ) -> RabbitMQBroker:
    return RabbitMQBroker(rabbitmq_server, QUORUM)


@pytest.fixture(params=["redis"])
def celery_broker(request: pytest.FixtureRequest) -> Any:
    """The broker: Redis, unless a test is marked with others, as `on_every_broker`."""
    name = "redis" if request.param in POOLS else request.param
    return request.getfixturevalue(f"celery_{name}_broker")


@pytest.fixture
def celery_backend(celery_redis_backend: RedisTestBackend) -> RedisTestBackend:
    return celery_redis_backend


@pytest.fixture
def worker_options(request: pytest.FixtureRequest) -> WorkerOptions:
    """What `@pytest.mark.worker(...)` asks for."""
    return WorkerOptions.of(request.node)


@pytest.fixture
def default_worker_container_cls() -> type[WorkerContainer]:
    return WorkerContainer


@pytest.fixture
def default_worker_cls() -> type[Worker]:
    return Worker


@pytest.fixture
def default_worker_command(worker_options: WorkerOptions) -> list[str]:
    return WorkerContainer.command(*worker_options.arguments())


@pytest.fixture
def celery_worker(celery_setup_worker: Worker) -> Worker:
    return celery_setup_worker


@pytest.fixture
def celery_worker_cluster(
    request: pytest.FixtureRequest, celery_worker: Worker, worker_options: WorkerOptions
) -> Cluster:
    """One or two workers, as the test asks for."""
    if worker_options.count == 1:
        return Cluster(celery_worker)
    second = Worker(request.getfixturevalue("second_worker_container"), celery_worker.app)
    return Cluster(celery_worker, second)


@pytest.fixture
def cluster(celery_setup: CeleryTestSetup) -> Any:
    """The workers of a test."""
    return celery_setup.worker_cluster


@pytest.fixture
def worker(celery_setup: CeleryTestSetup) -> Any:
    """The only worker of a test, or the first one."""
    return celery_setup.worker


@pytest.fixture
def celery_setup_app(
    celery_setup_app: Celery,
    celery_broker: CeleryTestBroker,
    worker_options: WorkerOptions,
    aws_account: str,
    store: Store,
    faults: TcpProxy,
) -> Iterator[Celery]:
    """The app of the test and of its workers: pytest-celery sends them what differs from the defaults."""
    celery_setup_app.conf.update(
        idempotency_store=store_url(aws_account, f"{faults.host}:{faults.port}"),
        idempotency_grace=0.2,
        **getattr(celery_broker, "settings", {}),
        **worker_options.app_settings(celery_setup_app.conf.broker_url),
    )
    yield celery_setup_app
    celery_setup_app.close()


def store_url(account: str, address: str) -> str:
    return f"dynamodb://{account}:secret@{address}/idempotency?region=us-east-1"


@pytest.fixture
def store(aws: AwsContainer, aws_account: str) -> Iterator[Store]:
    """The workers' store, provisioned, and seen past the faults."""
    with closing(open_store(store_url(aws_account, aws.outside_address))) as store:
        store.provision()
        yield store


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
    with closing(Ledger(celery_backend.config()["host_url"])) as ledger:
        yield ledger


@pytest.fixture(scope="session", params=["idempotent", pytest.param("once", marks=pytest.mark.nightly)])
def canvas(
    request: pytest.FixtureRequest, redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Canvas]:
    """An app of each kind, with a worker that all claims about canvases share."""
    with canvas_of(request.param, redis_server.url.rsplit("/", 1)[0], tmp_path_factory.mktemp("canvas")) as canvas:
        yield canvas


@pytest.fixture
def of() -> str:
    """A name that no other test uses: what bodies wrote for this one is found by it."""
    return uuid4().hex
