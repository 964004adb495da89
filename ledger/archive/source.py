"""Where a command reads archives from: folders here, or a gateway or schedulers elsewhere."""

import errno
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import grpc
from cyclopts import App, CycloptsError, Parameter

from kaiten.v1.archive_pb2 import ArchiveEntry
from ledger.archive.reader import Cursor, Wanted, entries
from ledger.archive.remote import remote_entries
from service_kit.errors import ConfigError
from service_kit.peers import Credential, Peers

NS: Final = 1_000_000_000
# Only writing says so.
UNWRITTEN: Final = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FOLDER: Final = ".kaiten"
# What a header's value may hold.
KEY: Final = re.compile(r"[!-~]{1,512}")

Folders = Annotated[Path, Parameter(help=f"searched for segments; default: {FOLDER}")]
Addresses = Annotated[
    tuple[str, ...],
    Parameter(help="host:port of a gateway or of a scheduler, not folders; repeatable"),
]
ApiKeyFile = Annotated[
    Path | None, Parameter(help="holds an operator's API key, for a gateway with keys")
]
PeerCredentialFile = Annotated[
    Path | None, Parameter(help="the cell's own, for a scheduler with one")
]


class Source(NamedTuple):
    """As it was asked for."""

    folders: Sequence[Path]
    addresses: Sequence[str] = ()
    api_key_file: Path | None = None
    peer_credential_file: Path | None = None

    def entries(self, wanted: Wanted) -> Iterator[ArchiveEntry]:
        """OSError, ValueError: what was asked for is not there; grpc.RpcError: one is away."""
        if not self.addresses:
            return entries(existing(self.folders), wanted)
        file = self.peer_credential_file
        peers = None if file is None else Peers(Credential(file))
        return remote_entries(self.addresses, wanted, _api_key(self.api_key_file), peers)


def run(app: App, argv: Sequence[str] | None) -> int:
    """What the command returned; 2 and a sentence on stderr: it was asked for what is not there."""
    try:
        return int(app(argv, exit_on_error=False) or 0)
    except CycloptsError:
        return 2
    except (OSError, ValueError, ConfigError) as error:
        if isinstance(error, OSError) and error.errno in UNWRITTEN and error.filename is None:
            # Who ran us says what became of the output.
            raise
        sys.stderr.write(f"{error}\n")
        return 2
    except grpc.RpcError as error:
        sys.stderr.write(f"{error.code().name}: {error.details()}\n")
        return 2


def cursor(text: str) -> Cursor:
    epoch, _, seq = text.partition(":")
    try:
        return Cursor(int(epoch), int(seq))
    except ValueError:
        raise ValueError(f"--after: {text!r} is not EPOCH:SEQ, as in 1763830000:7") from None


def time_ns(text: str) -> int:
    """Without a zone: in that of this machine."""
    try:
        return int(datetime.fromisoformat(text).timestamp() * NS) if text else 0
    except ValueError:
        raise ValueError(f"{text!r} is no time: write 2026-11-22 or 2026-11-22T17:00") from None


def existing(folders: Sequence[Path]) -> list[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
    return list(folders) or existing([Path(FOLDER)])


@cache
def _api_key(file: Path | None) -> str:
    """Read once: it may be a pipe. ValueError for a file that holds something else; nobody is told
    what.
    """
    if file is None:
        return ""
    key = file.read_text("ascii", "replace").strip()
    if not KEY.fullmatch(key):
        raise ValueError(f"--api-key-file {file} holds no API key")
    return key
