"""The API key that a command sends: from a file or the environment.

There is no flag that takes the key itself: every user of a machine can read command lines.
"""

import os
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from cyclopts import Parameter

VARIABLE: Final = "KAITEN_API_KEY"
HOW_TO_GIVE: Final = f"give its API key in {VARIABLE}, or with --api-key-file"
# What a header's value may hold, and more than any key has.
KEY: Final = re.compile(rb"[!-~]{1,512}")

ApiKeyFile: TypeAlias = Annotated[
    Path | None,
    Parameter(help=f"holds the gateway's API key; default: what {VARIABLE} holds"),
]


def api_key(file: Path | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The key to send, or None. ValueError says which place holds something else, not what."""
    if file is None:
        place, content = VARIABLE, os.fsencode(environ.get(VARIABLE, ""))
        if not content:
            return None
    else:
        place = f"--api-key-file {file}"
        try:
            with open(os.path.expanduser(file), "rb") as opened:
                content = opened.read(1024)
        except OSError as error:
            raise ValueError(f"{place} cannot be read: {error.strerror}") from error
    key = content.removeprefix(BOM_UTF8).strip()
    if not KEY.fullmatch(key):
        raise ValueError(
            f"{place} must hold an API key: 1 to 512 visible ASCII characters, no more"
        )
    return key.decode("ascii")


def api_key_of(file: Path | None) -> str | None:
    """The key to send; a file that holds none ends the command."""
    try:
        return api_key(file)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
