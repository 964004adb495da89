"""`kaiten archive`: look at what schedulers have kept of their decisions."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import grpc
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


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, and nothing is wrong. 1: verify found something that nobody had told."""
    chosen = _parser().parse_args(argv)
    try:
        for line in chosen.lines(chosen):
            sys.stdout.write(line + "\n")
    except (OSError, ValueError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except grpc.RpcError as error:
        sys.stderr.write(f"{error.code().name}: {error.details()}\n")
        return 2
    return int(chosen.found_something)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kaiten archive", description=__doc__)
    parser.set_defaults(found_something=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, lines, what in (
        ("ls", _ls, "one line for each segment"),
        ("cat", _cat, "every entry as a line of JSON"),
        ("verify", _verify, "read all of it, and say what is torn, damaged or missing"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.set_defaults(lines=lines)
        command.add_argument(
            "folder",
            nargs="*",
            type=Path,
            default=[Path(FOLDER)],
            help=f"searched for segments; default: {FOLDER}",
        )
        if name == "cat":
            _add_wanted(command)
    return parser


def _add_wanted(command: argparse.ArgumentParser) -> None:
    command.add_argument("--id", default="", help="one request: TENANT:REQUEST_ID")
    command.add_argument(
        "--after", type=_cursor, default=Cursor(), metavar="EPOCH:SEQ", help="behind this record"
    )
    for flag, what in (("--since", "from this time on"), ("--until", "before this time")):
        command.add_argument(flag, type=_time_ns, default=0, help=f"{what}: 2026-11-22T17:00")
    command.add_argument(
        "--address",
        action="append",
        metavar="HOST:PORT",
        help="of a gateway, or of a scheduler, in place of folders; repeatable",
    )
    command.add_argument(
        "--api-key-file", type=Path, help="holds an operator's API key, for a gateway with keys"
    )
    command.add_argument(
        "--peer-credential-file",
        type=Path,
        help="the cell's own, for a scheduler with one",
    )


def _cursor(text: str) -> Cursor:
    epoch, _, seq = text.partition(":")
    try:
        return Cursor(int(epoch), int(seq))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not EPOCH:SEQ, as in 1763830000:7") from None


def _time_ns(text: str) -> int:
    """Without a zone: in that of this machine."""
    try:
        return int(datetime.fromisoformat(text).timestamp() * NS)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: write 2026-11-22 or 2026-11-22T17:00"
        ) from None


def _shown(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _folders(chosen: argparse.Namespace) -> list[Path]:
    for folder in chosen.folder:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
    return list(chosen.folder)


def _ls(chosen: argparse.Namespace) -> Iterator[str]:
    for segment in segments(_folders(chosen)):
        yield _line(segment)


def _line(segment: Segment) -> str:
    header = segment.header
    spans = [part.span for part in segment.parts() if isinstance(part, Chunk)]
    filled = [span for span in spans if span.first_seq <= span.last_seq]
    what = "empty"
    if filled:
        first, last = filled[0], filled[-1]
        when = f"{_shown(first.first_ns)} to {_shown(last.last_ns)}"
        what = f"records {first.first_seq} to {last.last_seq}, {when}"
    return (
        f"{segment.path}  epoch {header.epoch} segment {header.segment}, cell {header.cell}, "
        f"kaiten {header.version}, {header.configured.policy}, "
        f"{'with' if header.has_tokens else 'without'} tokens, {what}"
    )


def _cat(chosen: argparse.Namespace) -> Iterator[str]:
    wanted = Wanted(after=chosen.after, since_ns=chosen.since, until_ns=chosen.until, id=chosen.id)
    found: Iterator[ArchiveEntry]
    if chosen.address:
        file = chosen.peer_credential_file
        peers = None if file is None else Peers(Credential(file))
        found = remote_entries(chosen.address, wanted, _api_key(chosen.api_key_file), peers)
    else:
        found = entries(_folders(chosen), wanted)
    for entry in found:
        yield MessageToJson(entry, indent=None, preserving_proto_field_name=True)


def _api_key(file: Path | None) -> str:
    """ValueError for a file that holds something else; what, nobody is told."""
    if file is None:
        return ""
    key = file.read_text("ascii", "replace").strip()
    if not KEY.fullmatch(key):
        raise ValueError(f"--api-key-file {file} holds no API key")
    return key


def _verify(chosen: argparse.Namespace) -> Iterator[str]:
    folders = _folders(chosen)
    for problem in verify(folders):
        chosen.found_something |= not problem.is_told
        yield f"{problem.path}: {problem.what}"
    yield f"{len(segments(folders))} segments were read"


if __name__ == "__main__":
    sys.exit(main())
