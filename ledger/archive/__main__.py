"""`kaiten archive`: look at what schedulers have kept of their decisions."""

import re
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Final

import grpc
from cyclopts import App, CycloptsError, Parameter
from google.protobuf.json_format import MessageToJson

from kaiten.v1.archive_pb2 import ArchiveEntry
from ledger.archive.reader import Cursor, Segment, Wanted, entries, segments, verify
from ledger.archive.remote import remote_entries
from ledger.archive.segment import Chunk
from service_kit.errors import ConfigError
from service_kit.peers import Credential, Peers

NS: Final = 1_000_000_000
FOLDER: Final = ".kaiten"
# What a header's value may hold.
KEY: Final = re.compile(r"[!-~]{1,512}")

app = App(
    name="kaiten archive",
    help="Look at what schedulers have kept of their decisions.",
    version_flags=(),
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)
Folders = Annotated[Path, Parameter(help=f"searched for segments; default: {FOLDER}")]


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, and nothing is wrong. 1: verify found something that nobody had told."""
    try:
        return int(app(argv, exit_on_error=False) or 0)
    except CycloptsError:
        return 2
    except (OSError, ValueError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except grpc.RpcError as error:
        sys.stderr.write(f"{error.code().name}: {error.details()}\n")
        return 2


@app.command
def ls(
    *folders: Folders, json: Annotated[bool, Parameter(help="as lines of JSON")] = False
) -> None:
    """One line for each segment."""
    for facts in map(_facts, segments(_existing(folders))):
        sys.stdout.write((dumps(facts) if json else _line(facts)) + "\n")


@app.command
def cat(
    *folders: Folders,
    id: Annotated[str, Parameter(help="one request: TENANT:REQUEST_ID")] = "",
    after: Annotated[str, Parameter(help="behind this record: EPOCH:SEQ")] = "0:0",
    since: Annotated[str, Parameter(help="from this time on: 2026-11-22T17:00")] = "",
    until: Annotated[str, Parameter(help="before this time")] = "",
    address: Annotated[
        tuple[str, ...],
        Parameter(help="host:port of a gateway or of a scheduler, not folders; repeatable"),
    ] = (),
    api_key_file: Annotated[
        Path | None, Parameter(help="holds an operator's API key, for a gateway with keys")
    ] = None,
    peer_credential_file: Annotated[
        Path | None, Parameter(help="the cell's own, for a scheduler with one")
    ] = None,
) -> None:
    """Every entry as a line of JSON."""
    wanted = Wanted(after=_cursor(after), since_ns=_time_ns(since), until_ns=_time_ns(until), id=id)
    found: Iterator[ArchiveEntry]
    if address:
        file = peer_credential_file
        peers = None if file is None else Peers(Credential(file))
        found = remote_entries(address, wanted, _api_key(api_key_file), peers)
    else:
        found = entries(_existing(folders), wanted)
    for entry in found:
        line = MessageToJson(entry, indent=None, preserving_proto_field_name=True)
        sys.stdout.write(line + "\n")


@app.command(name="verify")
def check(*folders: Folders) -> int:
    """Read all of it, and say what is torn, damaged or missing."""
    existing = _existing(folders)
    is_well = True
    for problem in verify(existing):
        is_well &= problem.is_told
        sys.stdout.write(f"{problem.path}: {problem.what}\n")
    sys.stdout.write(f"{len(segments(existing))} segments were read\n")
    return int(not is_well)


def _cursor(text: str) -> Cursor:
    epoch, _, seq = text.partition(":")
    try:
        return Cursor(int(epoch), int(seq))
    except ValueError:
        raise ValueError(f"--after: {text!r} is not EPOCH:SEQ, as in 1763830000:7") from None


def _time_ns(text: str) -> int:
    """Without a zone: in that of this machine."""
    try:
        return int(datetime.fromisoformat(text).timestamp() * NS) if text else 0
    except ValueError:
        raise ValueError(f"{text!r} is no time: write 2026-11-22 or 2026-11-22T17:00") from None


def _shown(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _existing(folders: Sequence[Path]) -> list[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
    return list(folders) or _existing([Path(FOLDER)])


def _facts(segment: Segment) -> dict[str, object]:
    header = segment.header
    spans = [part.span for part in segment.parts() if isinstance(part, Chunk)]
    filled = [span for span in spans if span.first_seq <= span.last_seq]
    return {
        "path": str(segment.path),
        "epoch": header.epoch,
        "segment": header.segment,
        "cell": header.cell,
        "version": header.version,
        "policy": header.configured.policy,
        "has_tokens": header.has_tokens,
        "records": [filled[0].first_seq, filled[-1].last_seq] if filled else [],
        "times": [_shown(filled[0].first_ns), _shown(filled[-1].last_ns)] if filled else [],
    }


def _line(facts: dict[str, Any]) -> str:
    what = "empty"
    if facts["records"]:
        what = "records {} to {}, {} to {}".format(*facts["records"], *facts["times"])
    tokens = "with" if facts["has_tokens"] else "without"
    return (
        "{path}  epoch {epoch} segment {segment}, cell {cell}, kaiten {version}, {policy}, "
        "{tokens} tokens, {what}"
    ).format(**facts, tokens=tokens, what=what)


def _api_key(file: Path | None) -> str:
    """ValueError for a file that holds something else; what, nobody is told."""
    if file is None:
        return ""
    key = file.read_text("ascii", "replace").strip()
    if not KEY.fullmatch(key):
        raise ValueError(f"--api-key-file {file} holds no API key")
    return key


if __name__ == "__main__":
    sys.exit(main())
