"""Real servers on this machine, without Docker: `with EmbeddedRedis() as redis: redis.url`.

Each is private, listens on 127.0.0.1 only, lives as long as its `with` block and never longer than this
process. What a server needs beyond Python packages, `missing()` says.
"""

from lab.embedded.aws import REGION, EmbeddedAws
from lab.embedded.mariadb import EmbeddedMariaDB
from lab.embedded.postgres import EmbeddedPostgres
from lab.embedded.rabbitmq import EmbeddedRabbitMQ
from lab.embedded.redis import EmbeddedRedis, EmbeddedRedisCluster, EmbeddedSentinel
from lab.embedded.server import Server

__all__ = [
    "REGION",
    "EmbeddedAws",
    "EmbeddedMariaDB",
    "EmbeddedPostgres",
    "EmbeddedRabbitMQ",
    "EmbeddedRedis",
    "EmbeddedRedisCluster",
    "EmbeddedSentinel",
    "Server",
]
