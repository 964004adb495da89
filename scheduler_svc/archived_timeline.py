"""Where the time of a request went, as archives tell it from the newest snapshot before it.

What records say of every command's outcome is enough. Where an older scheduler wrote none, all is
decided again from the beginning of the leadership, which takes seven times as long a record.
"""

from collections.abc import Callable, Iterator
from typing import Final

from kaiten.v1.archive_pb2 import ArchivedRequest, ArchiveEntry, ArchiveHeader, Snapshot
from kaiten.v1.scheduler_service_pb2 import ReplayTimelineResponse
from ledger.archive.reader import Cursor, Wanted
from ledger.archive.writer import SNAPSHOT_RECORDS
from scheduler_svc.core.types import SequenceId
from scheduler_svc.recorded import Recorded
from scheduler_svc.replay import Skipped, replay_archive
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_intervals import mentioned, timelines_of
from scheduler_svc.timeline_track import NOT_ARCHIVED
from scheduler_svc.timeline_wire import timeline_to_proto
from scheduler_svc.wire import entry_time_ns

Read = Callable[[Wanted], Iterator[ArchiveEntry]]

# A snapshot more is among so many records.
BACK_RECORDS: Final = 2 * SNAPSHOT_RECORDS
# So far before a leadership the end of the one before is looked for; 0: however far.
BACK_NS: Final = (60_000_000_000, 3_600_000_000_000, 0)
# Of one answer.
SENTENCES_MAX: Final = 16


class Asked:
    """The request that is asked for, of those that had this id the newest: its sequences, and where
    to begin.
    """

    def __init__(self, read: Read, id: str, since_ns: int = 0, until_ns: int = 0) -> None:
        """It was accepted in [since_ns, until_ns); 0: no end."""
        self._read, self._id = read, id
        self.begin = Cursor()
        self.ids: set[SequenceId] = set()
        self.traceparent = ""
        header = ArchiveHeader()
        for entry in read(Wanted(id=id, since_ns=since_ns, until_ns=until_ns)):
            match entry.WhichOneof("entry"):
                case "header":
                    header = entry.header
                case "request" if not until_ns or _accepted_ns(entry.request) < until_ns:
                    self._take_in(entry.request, header)
                case "snapshot":
                    self._lives_at(entry.snapshot, header)

    def _take_in(self, request: ArchivedRequest, header: ArchiveHeader) -> None:
        submit, first = request.submit, request.sequence_id
        self.traceparent = submit.traceparent
        if first in self.ids:
            # By the next leader.
            return
        self.ids = {*range(first, first + submit.n)}
        self.begin = Cursor(header.epoch, request.snapshot_seq)
        if _accepted_ns(request) < header.unix_ns:
            self.begin = _end_of_before(self._read, header) or self.begin

    def _lives_at(self, snapshot: Snapshot, header: ArchiveHeader) -> None:
        """What says that it was accepted is gone."""
        for request in snapshot.taken:
            if request.submit.id == self._id:
                self._take_in(request, header)
        for known in snapshot.requests:
            if known.id == self._id and known.sequence_id not in self.ids:
                self.ids = {known.sequence_id + one.choice for one in known.choices}
                self.begin = Cursor(header.epoch, snapshot.seq)

    def beginnings(self) -> Iterator[Cursor]:
        """Where to begin to read; and where else, if that does not tell of all of it."""
        yield from dict.fromkeys((self.begin, _back(self.begin)))

    def until_over(self, entries: Iterator[ArchiveEntry]) -> Iterator[ArchiveEntry]:
        """Up to the record that says that all of it has ended, or to what knows it no more."""
        is_met = False
        for entry in entries:
            yield entry
            ends = entry.record.finished
            if any(end.sequence_id in self.ids and end.HasField("done") for end in ends):
                return
            if entry.HasField("snapshot") and not entry.snapshot.is_cut:
                lives = self._is_at(entry.snapshot)
                if is_met and not lives:
                    return
                is_met |= lives
            is_met |= entry.request.sequence_id in self.ids

    def _is_at(self, snapshot: Snapshot) -> bool:
        return any(each.id == self._id for each in snapshot.requests) or any(
            each.submit.id == self._id for each in snapshot.taken
        )


def _accepted_ns(request: ArchivedRequest) -> int:
    return entry_time_ns(request.entry_id)


def _back(cursor: Cursor) -> Cursor:
    """There is a snapshot more from there on."""
    return Cursor(cursor.epoch, max(0, cursor.seq - BACK_RECORDS))


def shortly_before(read: Read, behind: Cursor, since_ns: int) -> Cursor:
    """Where to begin for what stands behind this record and is of `since_ns` or later."""
    header = ArchiveHeader()
    for entry in read(Wanted(after=behind, since_ns=since_ns)):
        if entry.HasField("header"):
            header = entry.header
        elif entry.HasField("record"):
            found = Cursor(entry.record.epoch, entry.record.seq)
            return _back(found) if header.has_outcomes else Cursor(found.epoch, 0)
    return behind


def _end_of_before(read: Read, header: ArchiveHeader) -> Cursor | None:
    """Of the leadership before, whose end says since when a request of then waited for another."""
    for back_ns in BACK_NS:
        wanted = Wanted(since_ns=max(0, header.unix_ns - back_ns) if back_ns else 0)
        before, last = ArchiveHeader(), Cursor()
        for entry in read(wanted):
            if entry.HasField("header"):
                if entry.header.epoch >= header.epoch:
                    break
                before = entry.header
            elif entry.HasField("record"):
                last = Cursor(entry.record.epoch, entry.record.seq)
        if last.epoch:
            return _back(last) if before.has_outcomes else Cursor(last.epoch, 0)
    return None


def archived_timeline(
    read: Read, id: str, since_ns: int = 0, until_ns: int = 0
) -> ReplayTimelineResponse:
    """By the request's id in the ledger, of those accepted in [since_ns, until_ns) the newest;
    without choices: these archives do not tell of it.
    """
    asked = Asked(read, id, since_ns, until_ns)
    best = ReplayTimelineResponse(id=id)
    if not asked.ids:
        return best
    for begin in asked.beginnings():
        told = _told(read, id, asked, begin)
        if _is_whole(told):
            return told
        best = best if best.choices else told
    # As a scheduler wrote whose snapshots are not known here.
    whole = Cursor(asked.begin.epoch, 0)
    return best if best.choices or whole == begin else _told(read, id, asked, whole)


def _is_whole(told: ReplayTimelineResponse) -> bool:
    intervals = [each for choice in told.choices for each in choice.intervals]
    return bool(told.choices) and all(each.why != NOT_ARCHIVED for each in intervals)


def _told(read: Read, id: str, asked: Asked, begin: Cursor) -> ReplayTimelineResponse:
    told, timelines = ReplayTimelineResponse(id=id), Timelines()
    entries = asked.until_over(read(Wanted(after=begin)))
    for found in replay_archive(
        entries, timelines=timelines, recorded=Recorded(timelines), behind_seq=begin.seq
    ):
        if isinstance(found, Skipped) and len(told.skipped) < SENTENCES_MAX:
            told.skipped.append(why_skipped(found))
    choices = timelines_of(timelines.snapshot(id))
    names = timelines.names(mentioned(choices))
    told.choices.extend(timeline_to_proto(each, names) for each in choices)
    told.traceparent = asked.traceparent
    return told


def why_skipped(found: Skipped) -> str:
    if found.goes_on:
        return f"epoch {found.epoch}, record {found.seq}: {found.why}"
    return f"epoch {found.epoch} cannot be replayed behind {found.seq}: {found.why}"
