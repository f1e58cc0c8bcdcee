"""Servers that several kinds of test share, each started at its first use; and coverage of every thread."""

import _thread
import fcntl
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import _state
from hypothesis import HealthCheck, settings

from lab import embedded
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRabbitMQ, EmbeddedRedis, EmbeddedRedisCluster

_start_new_thread = _thread.start_new_thread


def _start_traced(function: Callable[..., object], arguments: tuple[Any, ...]) -> int:
    def run(*arguments: Any) -> None:
        sys.settrace(threading.gettrace())
        function(*arguments)

    return _start_new_thread(run, arguments)


NIGHTLY = os.environ.get("NIGHTLY") == "1"
settings.register_profile(
    "untimed",  # no test is about how long an example takes
    deadline=None,
    max_examples=300 if NIGHTLY else 40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Let coverage see what ``_thread`` starts, as the heartbeat does: it is told of ``threading`` only."""
    if config.getoption("cov_source", None):
        _thread.start_new_thread = _start_traced  # type: ignore[assignment]


@pytest.fixture(scope="session")
def dynamodb_endpoint() -> Iterator[str]:
    """A DynamoDB over HTTP: the embedded one, or another by TEST_DYNAMODB_ENDPOINT."""
    given = os.environ.get("TEST_DYNAMODB_ENDPOINT")
    if given:
        yield given
        return
    with embedded.EmbeddedAws() as aws:
        yield aws.endpoint


@pytest.fixture(scope="session")
def rabbitmq_server(testrun_uid: str) -> Iterator[EmbeddedRabbitMQ]:
    """One RabbitMQ for all processes of the run, in which each test has a virtual host of its own.

    Its start takes ten times the CPU of all the others together, which each process has for itself: there a test may
    stop, freeze or empty a server. It ends with the process that started it, which waits for those that use it.
    """
    _require(EmbeddedRabbitMQ)
    with (Path(tempfile.gettempdir()) / f"rabbitmq-{testrun_uid}").open("a+") as users:
        for lock in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            fcntl.flock(users, lock)
            users.seek(0)
            if port := users.read():
                fcntl.flock(users, fcntl.LOCK_SH)
                yield EmbeddedRabbitMQ(int(port))
                return
        with EmbeddedRabbitMQ() as server:
            print(server.port, file=users, flush=True)
            fcntl.flock(users, fcntl.LOCK_SH)
            yield server
            fcntl.flock(users, fcntl.LOCK_EX)
            Path(users.name).unlink()


def _of_the_session(kind: Callable[[], Any], program: type[embedded.Server]) -> Any:
    @pytest.fixture(scope="session")
    def server() -> Iterator[Any]:
        _require(program)
        with kind() as server:
            yield server

    return server


redis_server = _of_the_session(EmbeddedRedis, EmbeddedRedis)
redis_cluster = _of_the_session(EmbeddedRedisCluster, EmbeddedRedis)
postgres = _of_the_session(EmbeddedPostgres, EmbeddedPostgres)
mariadb = _of_the_session(EmbeddedMariaDB, EmbeddedMariaDB)


def _require(server: type[embedded.Server]) -> None:
    if missing := server.missing():
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict(f"{server.__name__}: {missing}")


@pytest.fixture
def unchanged_celery() -> Iterator[None]:
    """Documents make apps and tasks as a reader does: each app becomes the thread's, each task every app's."""
    app, finalizers = _state._tls.current_app, set(_state._on_app_finalizers)
    yield
    _state._tls.current_app = app
    _state._on_app_finalizers.clear()
    _state._on_app_finalizers |= finalizers
