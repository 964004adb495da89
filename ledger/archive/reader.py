"""Reads archives: any number of folders as one, from a cursor on, over whatever is torn in them.

A leadership is one scheduler's, so segments of several schedulers are merged by their names; the
same segment in two folders is read once.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kaiten.v1.archive_pb2 import (
    ArchivedRequest,
    ArchiveEntry,
    ArchiveGap,
    ArchiveHeader,
    Snapshot,
)
from kaiten.v1.ledger_pb2 import CoreInput, JournalRecord
from ledger.archive.segment import FORMAT, SUFFIX, Chunk, Damage, Span, read


class Cursor(NamedTuple):
    """Behind this record of this leadership."""

    epoch: int = 0
    seq: int = 0


START: Final = Cursor()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Records behind a cursor, of [since, until) on the ledger's clock, with what stands between
    them; of one request, by its ledger id: it, and the records that tell of its sequences.
    """

    after: Cursor = START
    since_ns: int = 0
    # 0: no end.
    until_ns: int = 0
    id: str = ""

    def is_over(self, unix_ns: int) -> bool:
        return self.until_ns != 0 and unix_ns >= self.until_ns

    def passes_over(self, span: Span, seq: int) -> bool:
        """Nothing of a chunk is wanted, of a leadership whose records behind `seq` are."""
        is_past = span.last_seq < seq or span.last_ns < self.since_ns
        return is_past or self.is_over(span.first_ns)


EVERYTHING: Final = Wanted()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One file that says what it is."""

    path: Path
    header: ArchiveHeader

    @property
    def epoch(self) -> int:
        return self.header.epoch

    def parts(self) -> list[Chunk | Damage]:
        """Everything in it now, its header first. None of it when it was just deleted."""
        try:
            return list(read(self.path.read_bytes()))
        except FileNotFoundError:
            return []


class Problem(NamedTuple):
    """What a reader of the whole archive should know. `is_told`: the writer said so itself."""

    path: Path
    what: str
    is_told: bool


def segments(folders: Iterable[Path]) -> list[Segment]:
    """In order of their leaderships; a file without a header is none. ValueError: a later format.

    Folders are searched through.
    """
    paths: dict[str, Path] = {}
    for folder in folders:
        for path in folder.rglob(f"*{SUFFIX}"):
            paths.setdefault(path.name, path)
    found = ((paths[name], _header(paths[name])) for name in sorted(paths))
    return [Segment(path=path, header=header) for path, header in found if header is not None]


def _header(path: Path) -> ArchiveHeader | None:
    try:
        with path.open("rb") as file:
            first = next(read(file.read(1 << 16)), None)
    except FileNotFoundError:
        return None
    if not isinstance(first, Chunk):
        return None
    header = first.entries()[0].header
    if header.format > FORMAT:
        raise ValueError(f"{path}: format {header.format} is of a later version; update kaiten")
    return header


def entries(folders: Iterable[Path], wanted: Wanted = EVERYTHING) -> Iterator[ArchiveEntry]:
    """As `chunks`, one by one."""
    for chunk in chunks(folders, wanted):
        yield from chunk


def chunks(
    folders: Iterable[Path], wanted: Wanted = EVERYTHING
) -> Iterator[Sequence[ArchiveEntry]]:
    """What is wanted as it was written, some entries at a time.

    A segment of which something is wanted begins with its header. Damage in the middle of a file is
    a gap; a torn end is the end.
    """
    about = _Request(wanted.id) if wanted.id else None
    for segment in segments(folders):
        if segment.epoch < wanted.after.epoch:
            continue
        if about is not None and not segment.header.segment:
            about.begin_anew()
        header = [ArchiveEntry(header=segment.header)]
        for part in segment.parts()[1:]:
            kept = list(_wanted_of(part, wanted, segment.epoch, about))
            if about is not None:
                kept = [entry for entry in kept if about.concerns(entry)]
            if kept:
                yield header + kept
                header = []


def _wanted_of(
    part: Chunk | Damage, wanted: Wanted, epoch: int, about: "_Request | None"
) -> Iterator[ArchiveEntry]:
    """Records behind the cursor and of the time; what is no record goes with the one before it."""
    if isinstance(part, Damage):
        if not part.is_tail:
            reason = f"{part.end - part.start} bytes are damaged"
            yield ArchiveEntry(gap=ArchiveGap(reason=reason))
        return
    seq = wanted.after.seq if epoch == wanted.after.epoch else 0
    if wanted.passes_over(part.span, seq) or (about is not None and about.is_elsewhere(part)):
        return
    passed = part.span.first_seq - 1
    for entry in part.entries():
        if entry.HasField("record"):
            record, passed = entry.record, entry.record.seq
            if passed <= seq or record.unix_ns < wanted.since_ns or wanted.is_over(record.unix_ns):
                continue
        if passed >= seq:
            yield entry


class _Request:
    """Which entries tell of one request. It may be taken in by several leaders, and its id be used
    again.
    """

    def __init__(self, id: str) -> None:
        self._id = id
        self._sequence_ids: Container[int] = range(0)
        self._is_over = True

    def begin_anew(self) -> None:
        """A leader who has it takes it in before anything else."""
        self._sequence_ids, self._is_over = range(0), True

    def is_elsewhere(self, chunk: Chunk) -> bool:
        """It comes later, if at all: known without a look at every entry, which is most of what
        looking for a request costs.
        """
        return self._is_over and self._id.encode() not in chunk.raw()

    def concerns(self, entry: ArchiveEntry) -> bool:
        match entry.WhichOneof("entry"):
            case "gap":
                return True
            case "request":
                return self._is_it(entry.request)
            case "snapshot":
                # What is told of it besides comes first: this is said where its own entry is gone.
                return self._is_over and self._lives_at(entry.snapshot)
            case "block":
                return entry.block.sequence_id in self._sequence_ids
            case "record":
                return self._is_told_of(entry.record)
            case _:
                return False

    def _is_it(self, request: ArchivedRequest) -> bool:
        if request.submit.id != self._id:
            return False
        first = request.sequence_id
        self._sequence_ids, self._is_over = range(first, first + request.submit.n), False
        return True

    def _lives_at(self, snapshot: Snapshot) -> bool:
        for request in snapshot.requests:
            if request.id == self._id:
                own = [request.sequence_id + choice.choice for choice in request.choices]
                self._sequence_ids, self._is_over = own, False
                return True
        return any(self._is_it(request) for request in snapshot.taken)

    def _is_told_of(self, record: JournalRecord) -> bool:
        # Blocks that its last record has filled are told of behind it.
        if self._is_over:
            self._sequence_ids = range(0)
            return False
        own = self._sequence_ids
        ended = [each for each in record.finished if each.sequence_id in own]
        self._is_over = any(each.HasField("done") for each in ended)
        return (
            bool(ended)
            or any(sequence_id in own for sequence_id in record.sequence_ids)
            or any(self._is_input(item) for item in record.inputs)
        )

    def _is_input(self, item: CoreInput) -> bool:
        own = self._sequence_ids
        match item.WhichOneof("input"):
            case "submit":
                return item.submit.sequence_id in own
            case "cancel":
                return item.cancel.sequence_id in own
            case "plan":
                return any(each in own for each in (*item.plan.admitted, *item.plan.preempted))
            case _:
                return False


def verify(folders: Iterable[Path]) -> Iterator[Problem]:
    """Read everything; what is damaged, torn, marked as missing, or missing without a mark."""
    checks: defaultdict[tuple[str, str], _Check] = defaultdict(_Check)
    for segment in segments(folders):
        check = checks[segment.header.store, segment.header.cell]
        yield from (Problem(segment.path, what, is_told) for what, is_told in check.of(segment))


class _Check:
    """Where the records of a cell read so far end."""

    def __init__(self) -> None:
        self._epoch = self._seq = 0
        # What comes next need not follow: the writer has said so.
        self._is_told = False

    def of(self, segment: Segment) -> Iterator[tuple[str, bool]]:
        """What is wrong with the next segment, and whether its writer said so."""
        yield from self._begins(segment.header)
        for part in segment.parts():
            if isinstance(part, Damage):
                kind = "torn" if part.is_tail else "damaged"
                yield f"bytes {part.start} to {part.end} are {kind}", False
                continue
            for entry in part.entries():
                if entry.HasField("gap"):
                    self._is_told = True
                    yield _said(entry.gap), True
                elif entry.HasField("record"):
                    yield from self._follows(entry.record.seq)

    def _begins(self, header: ArchiveHeader) -> Iterator[tuple[str, bool]]:
        if header.epoch == self._epoch:
            return
        if self._epoch and header.after_seq > self._seq:
            yield f"records {self._seq + 1} to {header.after_seq} were never written", False
        self._epoch, self._seq = header.epoch, header.journal_seq
        self._is_told = header.segment > 0
        if self._is_told:
            yield "the leadership's beginning is gone", True

    def _follows(self, seq: int) -> Iterator[tuple[str, bool]]:
        if seq != self._seq + 1 and not self._is_told:
            yield f"record {seq} stands behind {self._seq}", False
        self._seq, self._is_told = seq, False


def _said(gap: ArchiveGap) -> str:
    records = f"records {gap.first_seq} to {gap.last_seq}" if gap.last_seq else "no records"
    return f"{records} and {gap.requests} requests are missing: {gap.reason}"
