"""Replay a journal, or an archive, through a fresh core: the same inputs must bring the same
decisions.

A record holds what the core was told since the record before it, and what came of it. Given the
bodies of the requests (the journal names them by sequence id only), a replay makes every plan and
every ending again, and says of each what was recorded and what it got. A new epoch is a new core,
which resumes from what the records before had committed. Pure: records in, comparisons out.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, Protocol

from kaiten.v1.archive_pb2 import (
    ArchivedRequest,
    ArchiveEntry,
    ArchiveGap,
    ArchiveHeader,
    Snapshot,
)
from kaiten.v1.common_pb2 import Leader
from kaiten.v1.ledger_pb2 import (
    CoreInput,
    JournalRecord,
    PlanInput,
    SequenceFinished,
    SubmitInput,
    SubmitRecord,
)
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import InboxEntry
from scheduler_svc import wire
from scheduler_svc.command_wire import command_from_proto
from scheduler_svc.core.commands import Command, Configured
from scheduler_svc.core.outcome import Event, Finished, Outcome, Plan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Request, ResultRejected, Rules, SequenceId
from scheduler_svc.journal import plan_digest
from scheduler_svc.snapshot_wire import VERSION
from scheduler_svc.timeline import Timelines

Token = tuple[SequenceId, int, int]
Told = Callable[[Command, Outcome, int, Scheduler], None]
NO_SNAPSHOT: Final = "no snapshot that this version knows is there"


class Outcomes(Protocol):
    """Reads what records say came of every command, in order."""

    def begin(self, snapshot: Snapshot, epoch: int) -> None: ...

    def take_in(self, request: ArchivedRequest) -> None: ...

    def feed(self, record: JournalRecord) -> str:
        """What of it cannot be told, in words; empty: nothing. ValueError: nobody writes that."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One decision, as the journal has it and as the replay made it."""

    seq: int
    what: str
    recorded: object
    replayed: object

    @property
    def is_equal(self) -> bool:
        return self.recorded == self.replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What of a leadership's archive is not told: from here on to its end, or to the next starting
    point, and why; `goes_on`: this alone.
    """

    epoch: int
    seq: int
    why: str
    goes_on: bool = False


@dataclass(slots=True)
class _Outputs:
    """What the records so far have committed."""

    tokens: dict[SequenceId, list[int]] = field(default_factory=dict)
    ended: set[SequenceId] = field(default_factory=set)

    def take(self, record: JournalRecord) -> None:
        for sequence_id, token in zip(record.sequence_ids, record.token_ids, strict=True):
            self.tokens.setdefault(sequence_id, []).append(token)
        self.ended.update(ending.sequence_id for ending in record.finished)

    def forget(self, sequence_id: SequenceId) -> None:
        self.tokens.pop(sequence_id, None)
        self.ended.discard(sequence_id)

    def of(self, sequence_id: SequenceId) -> tuple[int, ...] | None:
        return None if sequence_id in self.ended else tuple(self.tokens.get(sequence_id, ()))


class Replay:
    """Replays the records it is fed, in order from the first of the journal.

    `policy`: decide by that one and all its rules, whatever was configured, and see what it would
    have changed. `timelines`: are told of everything, so that they explain every request. `told`:
    hears of every command, what came of it, when, and of the core as it is then.
    """

    def __init__(
        self,
        entries: Iterable[InboxEntry] = (),
        policy: str | None = None,
        timelines: Timelines | None = None,
        told: Told | None = None,
    ) -> None:
        self._policy = policy
        self._timelines = timelines
        self._told = told
        self._bodies: dict[SequenceId, tuple[InboxEntry, SubmitRecord]] = {}
        # First sequence ids by those of every choice.
        self._first_ids: dict[SequenceId, SequenceId] = {}
        self._outputs = _Outputs()
        self._core = Scheduler()
        self._epoch = 0
        for entry in entries:
            if isinstance(entry.record, SubmitRecord):
                self._take_in(entry, entry.record)

    def take_in(self, request: ArchivedRequest) -> None:
        """A request of an archive, with what was committed of it before its leader."""
        submit = request.submit
        entry = InboxEntry(
            entry_id=request.entry_id, sequence_id=request.sequence_id, record=submit
        )
        self._take_in(entry, submit)
        for sequence_id, choice in enumerate(request.choices, request.sequence_id):
            self._outputs.tokens[sequence_id] = list(choice.token_ids)
            if choice.is_finished:
                self._outputs.ended.add(sequence_id)

    def _take_in(self, entry: InboxEntry, record: SubmitRecord) -> None:
        self._bodies[entry.sequence_id] = (entry, record)
        for choice in range(record.n):
            self._first_ids[entry.sequence_id + choice] = entry.sequence_id

    def _forget(self, last: SequenceId) -> None:
        """The request of this choice is over."""
        first = self._first_ids[last]
        _, record = self._bodies.pop(first)
        for sequence_id in range(first, first + record.n):
            del self._first_ids[sequence_id]
            self._outputs.forget(sequence_id)

    def feed(self, record: JournalRecord) -> Iterator[Compared]:
        """Every plan of the record, then its tokens, then its endings."""
        if record.epoch != self._epoch:
            self._epoch = record.epoch
            self._core = Scheduler()
            if self._timelines is not None and record.inputs:
                self._timelines.lead_anew(record.inputs[0].now_ns)
        events: list[Event] = []
        tokens: list[Token] = []
        for item in record.inputs:
            command = self._command(item, record.token_ids)
            outcome = self._core.apply(command, item.now_ns)
            if self._timelines is not None:
                self._timelines.take(command, outcome, item.now_ns, self._core.waiting)
            if self._told is not None:
                self._told(command, outcome, item.now_ns, self._core)
            events += outcome.events
            if (step := outcome.tokens) is not None:
                tokens += zip(step.sequence_ids, step.positions, step.tokens, strict=True)
            if item.WhichOneof("input") == "plan":
                yield self._compare_plan(record.seq, item.plan, outcome.plan)
        recorded = list(zip(record.sequence_ids, record.positions, record.token_ids, strict=True))
        yield Compared(seq=record.seq, what="tokens", recorded=recorded, replayed=tokens)
        yield _compare_endings(record, events)
        self._outputs.take(record)
        for ending in record.finished:
            if ending.HasField("done"):
                self._forget(ending.sequence_id)

    def _command(self, item: CoreInput, record_tokens: Sequence[int]) -> Command:
        command = command_from_proto(item, self._request, record_tokens)
        if isinstance(command, Configured) and self._policy is not None:
            return replace(command, policy=self._policy, rules=Rules())
        return command

    def _compare_plan(self, seq: int, recorded: PlanInput, plan: Plan | None) -> Compared:
        return Compared(
            seq=seq,
            what=f"plan {recorded.plan_id} of {recorded.worker_id}",
            recorded=recorded.digest,
            replayed=None if plan is None else self._digest(plan),
        )

    def _digest(self, plan: Plan) -> int:
        samplings = [self._sampling(join.sequence_id) for join in plan.joins]
        most = self._core.workers[plan.worker_id].spec.slot_tokens_max
        return plan_digest(wire.plan_to_proto(plan, Leader(), samplings, slot_tokens_max=most))

    def _sampling(self, sequence_id: SequenceId) -> RowSampling:
        first = self._first_ids[sequence_id]
        return wire.sampling_of_choice(self._bodies[first][1].sampling, sequence_id - first)

    def _request(self, submit: SubmitInput) -> Request:
        """With what the records so far have committed of it."""
        entry, record = self._bodies[submit.sequence_id]
        outputs: tuple[tuple[int, ...] | None, ...] = ()
        if submit.committed_tokens:
            sequence_ids = range(entry.sequence_id, entry.sequence_id + record.n)
            outputs = tuple(self._outputs.of(sequence_id) for sequence_id in sequence_ids)
        arrived_ns = submit.arrived_ns or wire.entry_time_ns(entry.entry_id)
        return wire.request_from_proto(
            entry, record, arrived_ns, outputs, submit.prompt_logprobs_from or 1
        )


def replay_archive(
    entries: Iterable[ArchiveEntry],
    policy: str | None = None,
    timelines: Timelines | None = None,
    told: Told | None = None,
    *,
    recorded: Outcomes | None = None,
    behind_seq: int = 0,
) -> Iterator[Compared | Skipped]:
    """Every decision that is there from the beginning of its leadership on.

    A core is what all commands since then have made of it, so behind a gap nothing can be compared
    until the next leadership begins; nor where it is decided otherwise now, by a later version or
    another policy: what a worker answered is no answer to what it would have been told.
    `recorded`: has, in place of a core, the leaderships whose records say what came of everything,
    and goes on at the next snapshot. `behind_seq`: the first has entries from there on only.
    """
    place = _Place(Replay(policy=policy, timelines=timelines, told=told), recorded, behind_seq)
    for entry in entries:
        kind = entry.WhichOneof("entry")
        if kind == "header":
            yield from place.head(entry.header)
        elif place.is_lost:
            place.begin(entry.snapshot)
        elif kind == "request":
            place.take_in(entry.request)
        elif kind == "record":
            yield from place.feed(entry.record)
        elif kind == "gap":
            yield from place.gap(entry.gap)


class _Place:
    """Where a reader of an archive stands."""

    def __init__(self, replay: Replay, recorded: Outcomes | None, behind_seq: int) -> None:
        self._replay, self._recorded, self._behind_seq = replay, recorded, behind_seq
        self._reader: Outcomes | None = None
        self._epoch = self._seq = 0
        # Until it may begin again; or for the first time in this leadership.
        self.is_lost, self._has_begun = False, True

    def head(self, header: ArchiveHeader) -> Iterator[Skipped]:
        """A segment begins, and maybe a leadership."""
        if header.epoch == self._epoch:
            return
        if self.is_lost and not self._has_begun:
            yield Skipped(epoch=self._epoch, seq=self._behind_seq, why=NO_SNAPSHOT)
        is_first, self._epoch, self._seq = not self._epoch, header.epoch, header.journal_seq
        self._reader = self._recorded if header.has_outcomes else None
        self.is_lost = is_first and self._behind_seq > header.journal_seq
        self._has_begun = not self.is_lost
        if not self.is_lost:
            yield from self._lose(_why_not(header, needs_tokens=self._reader is None))

    def begin(self, snapshot: Snapshot) -> None:
        """Of another version, or none: nothing."""
        if self._reader is not None and snapshot.version == VERSION:
            self._reader.begin(snapshot, self._epoch)
            self._seq, self.is_lost, self._has_begun = snapshot.seq, False, True

    def take_in(self, request: ArchivedRequest) -> None:
        (self._reader or self._replay).take_in(request)

    def feed(self, record: JournalRecord) -> Iterator[Compared | Skipped]:
        if record.seq != self._seq + 1:
            yield from self._lose("records are missing")
        elif self._reader is not None:
            yield from self._read(self._reader, record)
        else:
            yield from self._lose((yield from _until_otherwise(self._replay, record)))
        self._seq += not self.is_lost

    def _read(self, reader: Outcomes, record: JournalRecord) -> Iterator[Skipped]:
        try:
            if missed := reader.feed(record):
                yield Skipped(epoch=self._epoch, seq=record.seq, why=missed, goes_on=True)
        except ValueError as error:
            yield from self._lose(str(error))

    def gap(self, gap: ArchiveGap) -> Iterator[Skipped]:
        """Who only reads outcomes goes on, if no record is missing: the next one says so."""
        if self._reader is None or gap.last_seq:
            yield from self._lose(gap.reason or "records are missing")

    def _lose(self, why: str) -> Iterator[Skipped]:
        if why:
            self.is_lost = True
            yield Skipped(epoch=self._epoch, seq=self._seq, why=why)


def _until_otherwise(replay: Replay, record: JournalRecord) -> Generator[Compared, None, str]:
    """What is compared up to the first difference; and that there is one, or nothing."""
    try:
        for compared in replay.feed(record):
            yield compared
            if not compared.is_equal:
                return f"it is decided otherwise now: {compared.what}"
    except ResultRejected as error:
        return f"it is decided otherwise now: {error}"
    return ""


def _why_not(header: ArchiveHeader, *, needs_tokens: bool) -> str:
    if header.segment:
        return "its beginning is gone"
    return "it was written without tokens" if needs_tokens and not header.has_tokens else ""


def _compare_endings(record: JournalRecord, events: Iterable[Event]) -> Compared:
    """Who ended, why and at which length; that a request is over is said by its last choice."""
    described = attrgetter("sequence_id", "reason", "output_tokens", "error")
    endings: list[SequenceFinished] = []
    overs: list[SequenceId] = []
    for event in events:
        if isinstance(event, Finished):
            endings.append(wire.finished_to_proto(event))
        else:
            overs.append(endings[-1].sequence_id)
    recorded_overs = [ending.sequence_id for ending in record.finished if ending.HasField("done")]
    return Compared(
        seq=record.seq,
        what="endings",
        recorded=([described(ending) for ending in record.finished], recorded_overs),
        replayed=([described(ending) for ending in endings], overs),
    )
