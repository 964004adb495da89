"""`kaiten archive steps` and `explain`: what archives tell of decisions (docs/archive.md).

Of what cannot be told, why is said on stderr.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from json import dumps
from typing import Annotated, Final

from cyclopts import App, Parameter
from google.protobuf.json_format import MessageToJson

from kaiten.v1.archive_pb2 import ArchiveEntry
from kaiten.v1.inference_service_pb2 import ExplainResponse
from ledger.archive.reader import START, Cursor, Wanted
from ledger.archive.source import (
    NS,
    Addresses,
    ApiKeyFile,
    Folders,
    PeerCredentialFile,
    Source,
    cursor,
    run,
    time_ns,
)
from scheduler_svc.archived_timeline import Asked, archived_timeline, shortly_before, why_skipped
from scheduler_svc.core.commands import Command
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.decisions import Decision, Decisions, Free, Measured
from scheduler_svc.recorded_decisions import RecordedDecisions
from scheduler_svc.replay import Skipped, replay_archive

NS_PER_MS: Final = 1_000_000
app = App(
    name="kaiten archive",
    help="What schedulers have decided, as their archives tell it.",
    version_flags=(),
    default_parameter=Parameter(negative=(), show_default=False),
    result_action="return_value",
)


def main(argv: Sequence[str] | None = None) -> int:
    """0: done. 1: the request is in none of these archives. 2: they cannot be read so."""
    return run(app, argv)


@app.command
def steps(
    *folders: Folders,
    id: Annotated[str, Parameter(help="that tell of one request: TENANT:REQUEST_ID")] = "",
    worker: Annotated[str, Parameter(help="of this worker")] = "",
    after: Annotated[str, Parameter(help="behind this record: EPOCH:SEQ")] = "0:0",
    since: Annotated[str, Parameter(help="from this time on: 2026-11-22T17:00")] = "",
    until: Annotated[str, Parameter(help="before this time")] = "",
    again: Annotated[
        bool,
        Parameter(help="decide it again: more is told of blocks, costs and the queue, slowly"),
    ] = False,
    json: Annotated[bool, Parameter(help="as lines of JSON")] = False,
    address: Addresses = (),
    api_key_file: ApiKeyFile = None,
    peer_credential_file: PeerCredentialFile = None,
) -> int:
    """Every iteration's decision, with whom it passed over and why, and what its steps took."""
    source = Source(folders, address, api_key_file, peer_credential_file)
    behind = cursor(after)
    asked = Asked(source.entries, id) if id else None
    if asked is not None and not asked.ids:
        return _not_found(id)
    begin = asked.begin if asked else shortly_before(source.entries, behind, time_ns(since))
    begin = Cursor(begin.epoch, 0) if again else begin
    entries = source.entries(Wanted(after=begin, until_ns=time_ns(until)))
    entries = asked.until_over(entries) if asked else entries
    printer = _Printer(worker=worker, since_ns=time_ns(since), behind=behind, asked=asked)
    printer.is_json = json
    recorded = None if again else RecordedDecisions(printer.say)
    for found in replay_archive(
        printer.read(entries), told=printer.told, recorded=recorded, behind_seq=begin.seq
    ):
        if isinstance(found, Skipped):
            _skipped(found)
    return 0


@app.command
def explain(
    id: Annotated[str, Parameter(help="TENANT:REQUEST_ID")],
    *folders: Folders,
    until: Annotated[str, Parameter(help="the newest of this id accepted before this time")] = "",
    address: Addresses = (),
    api_key_file: ApiKeyFile = None,
    peer_credential_file: PeerCredentialFile = None,
) -> int:
    """Where the time of a request went, as JSON (kaiten.v1.ExplainResponse)."""
    source = Source(folders, address, api_key_file, peer_credential_file)
    told = archived_timeline(source.entries, id, until_ns=time_ns(until))
    sys.stderr.writelines(f"{each}\n" for each in told.skipped)
    if not told.choices:
        return _not_found(id)
    response = ExplainResponse(choices=told.choices)
    sys.stdout.write(MessageToJson(response, indent=None, preserving_proto_field_name=True) + "\n")
    return 0


def _not_found(id: str) -> int:
    sys.stderr.write(f"request {id!r} is in none of these archives\n")
    return 1


def _skipped(found: Skipped) -> None:
    sys.stderr.write(why_skipped(found) + "\n")


class _Printer:
    """Prints what is asked for, of all that is replayed."""

    def __init__(self, *, worker: str, since_ns: int, behind: Cursor, asked: Asked | None) -> None:
        self._worker, self._since_ns, self._behind, self._asked = worker, since_ns, behind, asked
        self._decisions, self._at = Decisions(), START
        self._shown: set[tuple[str, int]] = set()
        self.is_json = False

    def read(self, entries: Iterator[ArchiveEntry]) -> Iterator[ArchiveEntry]:
        """As they are, noting where they stand."""
        for entry in entries:
            if entry.HasField("header") and entry.header.epoch != self._at.epoch:
                self._decisions, self._at = Decisions(), Cursor(entry.header.epoch, 0)
            elif entry.HasField("record"):
                self._at = Cursor(entry.record.epoch, entry.record.seq)
            yield entry

    def told(self, command: Command, outcome: Outcome, now_ns: int, core: Scheduler) -> None:
        if (said := self._decisions.take(command, outcome, now_ns, core)) is not None:
            self.say(said)

    def say(self, said: Decision | Measured) -> None:
        """If it is asked for."""
        if said.unix_ns < self._since_ns or self._at <= self._behind:
            return
        if self._worker not in ("", said.worker_id) or not self._concerns(said):
            return
        if self.is_json:
            kind = "plan" if isinstance(said, Decision) else "step"
            place = {"kind": kind, "epoch": self._at.epoch, "record": self._at.seq}
            sys.stdout.write(dumps(place | plain(said)) + "\n")
        else:
            sys.stdout.write("\n".join(lines_of(said, self._at)) + "\n")

    def _concerns(self, said: Decision | Measured) -> bool:
        """Steps go with their plans."""
        if self._asked is None:
            return True
        key = (said.worker_id, said.plan_id)
        if isinstance(said, Decision) and said.concerns(self._asked.ids):
            self._shown.add(key)
        return key in self._shown


def plain(said: Decision | Measured) -> dict[str, object]:
    """For JSON: named tuples by their names."""
    values = asdict(said)
    for name, value in values.items():
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            values[name] = value._asdict()
        elif isinstance(value, tuple):
            values[name] = [
                each._asdict()
                if hasattr(each, "_asdict")
                else list(each)
                if isinstance(each, tuple)
                else each
                for each in value
            ]
    return values


def lines_of(said: Decision | Measured, at: Cursor) -> Iterator[str]:
    """For people: a heading, and a line for each thing that happened."""
    moment = datetime.fromtimestamp(said.unix_ns / NS, UTC).strftime("%H:%M:%S.%f")[:-3]
    where = f"{moment}  {at.epoch}:{at.seq}  worker {said.worker_id}  plan {said.plan_id}"
    if isinstance(said, Measured):
        expected = f", {said.expected_us / 1000:.1f} ms expected" if said.expected_us else ""
        how = "one graph" if said.is_graph else "eager"
        took = f"{said.step_us / 1000:.1f} ms{expected}"
        rows = f"{said.rows} row{'s' * (said.rows != 1)}"
        yield f"{where}.{said.step}  {took}, {rows} with a token, {how}"
        return
    rows = f"{said.decode_rows} decode" + (f", {len(said.chunks)} prefill" if said.chunks else "")
    tokens = f"{said.tokens} of {said.budget} tokens"
    yield f"{where}  lease {said.lease_steps}  {rows}  {tokens}  {said.waiting} wait  {said.policy}"
    for admitted in said.admitted:
        cached = f", {admitted.cached_tokens} cached" if admitted.cached_tokens else ""
        shared = f", {admitted.shared_blocks} shared" if admitted.shared_blocks else ""
        if admitted.swapped_in_blocks:
            shared += f", {admitted.swapped_in_blocks} from host memory"
        yield (
            f"    admitted   {admitted.sequence_id} ({admitted.request_id}), slot {admitted.slot}:"
            f" {admitted.tokens} tokens{cached}; {admitted.blocks} blocks{shared}"
        )
    if said.chunks:
        yield f"    chunks     {', '.join(f'{one}: {count}' for one, count in said.chunks)}"
    if said.sat_out:
        yield f"    sat out    {', '.join(map(str, said.sat_out))}"
    for one, why in said.preempted:
        yield f"    preempted  {one}: {why}"
    yield _blocks(said)
    for stage, why in said.stages:
        yield f"    {stage:10} {why}"
    for waits in said.waits:
        behind = "" if waits.behind is None else f" (of {waits.behind}, which is before it)"
        yield f"    waits      {waits.sequence_id} ({waits.request_id}): {waits.why}{behind}"
    if (more := said.waiting - len(said.waits)) > 0:
        yield f"    waits      and {more} behind them"


def _blocks(said: Decision) -> str:
    blocks = said.blocks
    if isinstance(blocks, Free):
        return f"    blocks     {blocks.free} of {blocks.total} free"
    evicted = f" ({blocks.evicted} evicted)" if blocks.evicted else ""
    swapped = f", {blocks.swapped_out} swapped out, {blocks.swapped_in} in"
    return (
        f"    blocks     {blocks.allocated} taken{evicted}, {blocks.shared} from the cache,"
        f" {blocks.freed} given back{swapped if any(blocks[4:6]) else ''};"
        f" {blocks.free} of {blocks.total} free"
    )


if __name__ == "__main__":
    sys.exit(main())
