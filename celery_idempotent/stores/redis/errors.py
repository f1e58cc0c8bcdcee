"""What redis-py's errors mean for a store: whether somebody must change something, and what."""

import ssl

from redis.exceptions import (
    AuthenticationError,
    ChildDeadlockedError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)
from redis.sentinel import MasterNotFoundError

from celery_idempotent.stores.failures import NO_RULE, Meaning, Rule, rule_of

DRIVER_ERRORS = (RedisError, RedisClusterException, ChildDeadlockedError, OSError)


READ_ONLY = Rule(
    errors=(ReadOnlyError,),
    text="-READONLY",
    meaning=Meaning.READ_ONLY,
    remedy="this server is a replica; name its primary, or the sentinels that know it",
)

OTHER_TYPE = Rule(
    text=r"\bWRONGTYPE\b", remedy="a key of another program begins with the store's prefix; choose another by ?prefix="
)

# The patterns were read off Redis 6.2, Redis 7.0 and Valkey 9.1.
_RULES = (
    READ_ONLY,
    Rule(errors=(AuthenticationError,), remedy="the server does not accept user and password"),
    Rule(
        errors=(NoPermissionError,),
        text="ACL failure in script|can't run this command",
        remedy="the user may not do this; grant it "
        "+evalsha +eval +time +hgetall +hset +hdel +persist +pexpireat on keys that begin with the store's prefix, "
        "+client|setname, and to an operator also +scan +hmget +del",
    ),
    OTHER_TYPE,
    Rule(
        errors=(MovedError,),
        text=r"^MOVED \d",  # redis-py before 6 has the class only in a cluster
        remedy="the server is part of a cluster; write redis+cluster:// or rediss+cluster://",
    ),
    Rule(text="Cluster mode is not enabled", remedy="the server is not part of a cluster; write redis:// or rediss://"),
    Rule(text="DB index is out of range", remedy="the server has no database with this number"),
    Rule(text="unknown command", remedy="the server lacks a command; it must be Redis 6.2 or later, or Valkey"),
    Rule(
        errors=(ssl.SSLCertVerificationError,),
        remedy="the server's certificate is not trusted; name the authority by ssl_ca_certs, and the host as certified",
    ),
    Rule(
        errors=(OutOfMemoryError,),
        text="-OOM",
        meaning=Meaning.UNAVAILABLE,
        remedy="the server's memory is full, so it accepts no claims; raise maxmemory, or shorten retain",
    ),
    Rule(
        errors=(MasterNotFoundError,),
        meaning=Meaning.UNAVAILABLE,
        remedy="no sentinel names a primary that is up; if it stays so, check master_name and the sentinels",
    ),
)


def trouble_of(error: BaseException | None) -> Rule:
    """What kind of failure ``error`` is, or else its cause; a lost connection has none."""
    while error is not None:
        rule = rule_of(_RULES, error, "", str(error))
        if rule is not NO_RULE:
            return rule
        error = error.__cause__ or error.__context__
    return NO_RULE


def quotable(error: BaseException) -> str:
    """What the error says, but not the arguments that a server quotes of a command unknown to it."""
    return str(error).partition(", with args")[0] or type(error).__name__
