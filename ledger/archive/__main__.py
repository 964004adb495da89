"""`kaiten archive`: look at what schedulers have kept of their decisions."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from json import dumps
from typing import Annotated, Any

from cyclopts import App, Parameter
from google.protobuf.json_format import MessageToJson

from ledger.archive.reader import Segment, Wanted, segments, verify
from ledger.archive.segment import Chunk
from ledger.archive.source import (
    NS,
    Addresses,
    ApiKeyFile,
    Folders,
    PeerCredentialFile,
    Source,
    cursor,
    existing,
    run,
    time_ns,
)

app = App(
    name="kaiten archive",
    help="Look at what schedulers have kept. What they decided, made again: kaiten archive steps.",
    version_flags=(),
    default_parameter=Parameter(negative=(), show_default=False),
    result_action="return_value",
)


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, and nothing is wrong. 1: verify found something that nobody had told."""
    return run(app, argv)


@app.command
def ls(
    *folders: Folders, json: Annotated[bool, Parameter(help="as lines of JSON")] = False
) -> None:
    """One line for each segment."""
    for facts in map(_facts, segments(existing(folders))):
        sys.stdout.write((dumps(facts) if json else _line(facts)) + "\n")


@app.command
def cat(
    *folders: Folders,
    id: Annotated[str, Parameter(help="one request: TENANT:REQUEST_ID")] = "",
    after: Annotated[str, Parameter(help="behind this record: EPOCH:SEQ")] = "0:0",
    since: Annotated[str, Parameter(help="from this time on: 2026-11-22T17:00")] = "",
    until: Annotated[str, Parameter(help="before this time")] = "",
    address: Addresses = (),
    api_key_file: ApiKeyFile = None,
    peer_credential_file: PeerCredentialFile = None,
) -> None:
    """Every entry as a line of JSON."""
    source = Source(folders, address, api_key_file, peer_credential_file)
    wanted = Wanted(after=cursor(after), since_ns=time_ns(since), until_ns=time_ns(until), id=id)
    for entry in source.entries(wanted):
        line = MessageToJson(entry, indent=None, preserving_proto_field_name=True)
        sys.stdout.write(line + "\n")


@app.command(name="verify")
def check(*folders: Folders) -> int:
    """Read all of it, and say what is torn, damaged or missing."""
    found = existing(folders)
    is_well = True
    for problem in verify(found):
        is_well &= problem.is_told
        sys.stdout.write(f"{problem.path}: {problem.what}\n")
    sys.stdout.write(f"segments read: {len(segments(found))}\n")
    return int(not is_well)


def _shown(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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


if __name__ == "__main__":
    sys.exit(main())
