"""What the services may do in the store, as its user: the ledger's commands, on a cell's keys.

`python -m ledger.acl` writes deploy/valkey-commands.acl.
"""

import sys
from typing import Final

from ledger.keys import Keys

# Ours, by what they are for. What a script calls is looked at as if its caller did.
COMMANDS: Final = (
    *("evalsha", "script|load", "multi", "exec"),
    *("exists", "get", "mget", "set", "append", "del", "expire", "ttl", "pttl"),
    *("hget", "hmget", "hset", "hsetnx", "hstrlen", "hdel", "hincrby", "hgetall", "hkeys"),
    *("xadd", "xdel", "xrange", "xread", "xtrim"),
    # Is the store fit for it (ledger/durability.py), and what time is it there?
    *("info", "config|get", "time"),
    # Of the connection, and for health checks.
    *("client|setinfo", "ping"),
)


def commands_rule() -> str:
    """For `ACL SETUSER`, or a line `user` of the store's configuration."""
    return " ".join(("resetchannels", "-@all", *(f"+{name}" for name in COMMANDS)))


def keys_rule(cell: str) -> str:
    """The cell's keys and no others. The name is taken as it is, whatever patterns make of it."""
    literal = "".join(f"\\{each}" if each in r"*?[]\^-" else each for each in Keys(cell).prefix)
    return f"resetkeys ~{literal}*"


if __name__ == "__main__":
    sys.stdout.write(commands_rule() + "\n")
