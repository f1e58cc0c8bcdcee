"""What redis-py's errors mean for a store: whether somebody must change something, and what."""

import re
import ssl
from dataclasses import dataclass

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

__all__ = ["DRIVER_ERRORS", "OTHER_TYPE", "READ_ONLY", "Trouble", "quotable", "trouble_of"]

DRIVER_ERRORS = (RedisError, RedisClusterException, ChildDeadlockedError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A kind of failure: how it is told, and what to do about it."""

    errors: tuple[type[BaseException], ...] = ()
    #: In the text of an error that has no class of its own, as those from within a script have none.
    pattern: str = r"(?!)"
    is_permanent: bool = True
    remedy: str

    def is_in(self, error: BaseException) -> bool:
        """Whether ``error`` is of this kind."""
        return isinstance(error, self.errors) or re.search(self.pattern, str(error)) is not None


READ_ONLY = Trouble(
    errors=(ReadOnlyError,),
    pattern="-READONLY",
    is_permanent=False,
    remedy="this server is a replica; name its primary, or the sentinels that know it",
)

OTHER_TYPE = Trouble(
    pattern=r"\bWRONGTYPE\b",
    remedy="a key of another program begins with the store's prefix; choose another by ?prefix=",
)

# The patterns were read off Redis 6.2, Redis 7.0 and Valkey 9.1.
_TROUBLES = (
    READ_ONLY,
    Trouble(errors=(AuthenticationError,), remedy="the server does not accept user and password"),
    Trouble(
        errors=(NoPermissionError,),
        pattern="ACL failure in script|can't run this command",
        remedy="the user may not do this; grant it "
        "+evalsha +eval +time +hgetall +hset +hdel +persist +pexpireat on keys that begin with the store's prefix, and "
        "to an operator also +scan +del",
    ),
    OTHER_TYPE,
    Trouble(
        errors=(MovedError,), remedy="the server belongs to a cluster; write redis+cluster:// or rediss+cluster://"
    ),
    Trouble(
        pattern="Cluster mode is not enabled", remedy="the server belongs to no cluster; write redis:// or rediss://"
    ),
    Trouble(pattern="DB index is out of range", remedy="the server has no database of this number"),
    Trouble(pattern="unknown command", remedy="the server lacks a command; it must be Redis 6.2 or later, or Valkey"),
    Trouble(
        errors=(ssl.SSLCertVerificationError,),
        remedy="the server's certificate is not trusted; name the authority by ssl_ca_certs, and the host as certified",
    ),
    Trouble(
        errors=(OutOfMemoryError,),
        pattern="-OOM",
        is_permanent=False,
        remedy="the server's memory is full, so it takes no claims; raise maxmemory, or retain outcomes for less long",
    ),
    Trouble(
        errors=(MasterNotFoundError,),
        is_permanent=False,
        remedy="no sentinel names a primary that is up; if it stays so, check master_name and the sentinels",
    ),
)


def trouble_of(error: BaseException | None) -> Trouble | None:
    """What kind of failure ``error`` is, or else its cause; None: one without a name, such as a lost connection."""
    while error is not None:
        for trouble in _TROUBLES:
            if trouble.is_in(error):
                return trouble
        error = error.__cause__ or error.__context__
    return None


def quotable(error: BaseException) -> str:
    """What the error says, but not the arguments that a server quotes of a command unknown to it."""
    return str(error).partition(", with args")[0] or type(error).__name__
