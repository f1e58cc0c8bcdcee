"""Every store and broker by name: its address, and the server that is embedded for it."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import click

from lab import embedded

STORES = ("dynamodb", "redis", "redis-cluster", "postgres", "mariadb", "sqlite")
BROKERS = ("sqs", "redis", "rabbitmq")
"""The names; the first of each is the default."""

IMPATIENT = {"consumer_timeout": 10_000, "channel_tick_interval": 500}
"""Milliseconds after which RabbitMQ delivers again what nobody has acknowledged, as the other brokers do in a demo. In
production it is half an hour."""

TABLE = "celery-idempotent-example"

_Place = tuple[embedded.Server | embedded.EmbeddedRedisCluster | None, Callable[[], str]]
"""A server, if one is needed, and how to reach it once it runs."""


class Servers:
    """A store and a broker on this machine, for as long as the `with` block runs."""

    def __init__(self, store: str, broker: str, folder: Path) -> None:
        aws = embedded.EmbeddedAws()
        redis, cluster = embedded.EmbeddedRedis(), embedded.EmbeddedRedisCluster()
        postgres, mariadb = embedded.EmbeddedPostgres(), embedded.EmbeddedMariaDB()
        # Not the store's Redis: that one is killed, and kombu loses the message that it is fetching then.
        queue, rabbitmq = embedded.EmbeddedRedis(), embedded.EmbeddedRabbitMQ(settings=IMPATIENT)
        stores: dict[str, _Place] = {
            "memory": (None, str),
            "dynamodb": (aws, lambda: aws.store_url(TABLE)),
            "redis": (redis, lambda: redis.url),
            "redis-cluster": (cluster, lambda: f"redis+cluster://{cluster.address}"),
            "postgres": (postgres, lambda: postgres.url),
            "mariadb": (mariadb, lambda: mariadb.url),
            "sqlite": (None, lambda: f"sqlite:///{folder.absolute()}/idempotency.sqlite3"),
        }
        brokers: dict[str, _Place] = {
            "": (None, str),
            "sqs": (aws, lambda: aws.broker_url),
            "redis": (queue, lambda: queue.url),
            "rabbitmq": (rabbitmq, lambda: rabbitmq.broker_url),
        }
        self._store, self._store_url = stores[store]
        self._broker, self._broker_url = brokers[broker]
        self._folder = folder
        self._running = ExitStack()

    @property
    def store_url(self) -> str:
        return self._store_url()

    @property
    def broker_url(self) -> str:
        return self._broker_url()

    @property
    def missing(self) -> str | None:
        """What must be installed before the store can start; None where nothing is missing."""
        return self._store.missing() if self._store else None

    @property
    def durable_store(self) -> embedded.Server | None:
        """The store's server, if it comes back from a kill with all that it has acknowledged."""
        if self._store is None or isinstance(self._store, embedded.EmbeddedAws | embedded.EmbeddedRedisCluster):
            return None
        return self._store

    @property
    def pids(self) -> list[int]:
        """All processes of the servers that are one each."""
        return [pid for each in {self._store, self._broker} if isinstance(each, embedded.Server) for pid in each.pids]

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as starting:
            for server in {id(each): each for each in (self._store, self._broker) if each}.values():
                try:
                    starting.enter_context(server)
                except RuntimeError as error:
                    raise click.ClickException(str(error)) from error
            self._running = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
