"""What the services may do in the store, as its user: the ledger's commands, on a cell's keys.

`python -m ledger.acl` writes deploy/valkey/valkey-commands.acl.
"""

import sys

from ledger.keys import Keys
from ledger.servers.commands import ALL


def commands_rule() -> str:
    """For `ACL SETUSER`, or a line `user` of the store's configuration."""
    return " ".join(("resetchannels", "-@all", *(f"+{name}" for name in ALL)))


def keys_rule(cell: str) -> str:
    """The cell's keys and no others. The name is taken as it is, whatever patterns make of it."""
    literal = "".join(f"\\{each}" if each in r"*?[]\^-" else each for each in Keys(cell).prefix)
    return f"resetkeys ~{literal}*"


if __name__ == "__main__":
    sys.stdout.write(commands_rule() + "\n")
