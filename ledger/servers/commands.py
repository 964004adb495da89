"""The commands that the ledger uses, which is what its user in the store must be allowed."""

from collections.abc import Mapping
from typing import Final

# By what they are for. What a script calls is looked at as if its caller did.
ALWAYS: Final = (
    *("evalsha", "script|load", "multi", "exec"),
    *("exists", "get", "mget", "set", "append", "del", "expire", "ttl", "pttl"),
    *("hget", "hmget", "hset", "hsetnx", "hstrlen", "hdel", "hincrby", "hgetall", "hkeys"),
    *("zadd", "zrem", "zcard", "zrank", "zrevrank", "zrange", "zrevrange", "zrangebyscore"),
    *("xadd", "xdel", "xrange", "xread", "xtrim"),
    # Is the store fit for it (ledger/durability.py), and what time is it there?
    *("info", "config|get", "time"),
)
# Of the connection, and for health checks.
IF_ALLOWED: Final = ("client|setinfo", "ping")
# Which of several servers is the primary; a user made for a single one goes without.
TO_FIND: Final[Mapping[str, tuple[str, ...]]] = {
    "single": (),
    "cluster": ("asking", "cluster|slots"),
    "sentinel": ("role",),
}
# What do its replicas have?
TO_WAIT: Final = ("wait", "waitaof")
ALL: Final = (*ALWAYS, *IF_ALLOWED, *TO_FIND["cluster"], *TO_FIND["sentinel"], *TO_WAIT)


def needed(kind: str, replicas_min: int) -> tuple[str, ...]:
    """Those without which nothing works on a store of that kind."""
    return (*ALWAYS, *TO_FIND[kind], *(TO_WAIT if replicas_min else ()))
