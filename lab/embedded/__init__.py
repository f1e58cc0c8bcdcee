"""Real servers on this machine, without Docker: `with EmbeddedRedis() as redis: redis.url`.

Each is private, listens on 127.0.0.1 only, lives as long as its `with` block and never longer than this
process. What a server needs beyond Python packages, `missing()` says.
"""

from lab.embedded.aws import REGION as REGION
from lab.embedded.aws import EmbeddedAws as EmbeddedAws
from lab.embedded.mariadb import EmbeddedMariaDB as EmbeddedMariaDB
from lab.embedded.postgres import EmbeddedPostgres as EmbeddedPostgres
from lab.embedded.rabbitmq import EmbeddedRabbitMQ as EmbeddedRabbitMQ
from lab.embedded.redis import EmbeddedRedis as EmbeddedRedis
from lab.embedded.redis import EmbeddedRedisCluster as EmbeddedRedisCluster
from lab.embedded.redis import EmbeddedSentinel as EmbeddedSentinel
from lab.embedded.server import Server as Server
