"""Where the time of a request went, as archives tell it, from the beginning of their leadership on.

What its records say of every command's outcome is enough. Where an older scheduler wrote none, all
of it is decided again, which takes six times as long.
"""

from collections.abc import Callable, Iterator

from kaiten.v1.archive_pb2 import ArchiveEntry, ArchiveHeader
from kaiten.v1.scheduler_service_pb2 import ReplayTimelineResponse
from ledger.archive.reader import EVERYTHING, Cursor, Wanted
from scheduler_svc.core.types import SequenceId
from scheduler_svc.recorded import Recorded
from scheduler_svc.replay import Skipped, replay_archive
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_intervals import mentioned, timelines_of
from scheduler_svc.timeline_wire import timeline_to_proto
from scheduler_svc.wire import entry_time_ns

Read = Callable[[Wanted], Iterator[ArchiveEntry]]


class Asked:
    """The request that is asked for: the leadership in which it came, and its sequences."""

    def __init__(self, read: Read, id: str, since_ns: int = 0) -> None:
        """`since_ns`: it did not come before."""
        self.epoch, header = 0, ArchiveHeader()
        self.ids: set[SequenceId] = set()
        self.traceparent = ""
        for entry in read(Wanted(id=id, since_ns=since_ns)):
            if entry.HasField("header"):
                header = entry.header
            elif entry.HasField("request"):
                first, submit = entry.request.sequence_id, entry.request.submit
                self.ids.update(range(first, first + submit.n))
                self.traceparent = submit.traceparent
                is_older = entry_time_ns(entry.request.entry_id) < header.unix_ns
                self.epoch = _before(read, header.epoch) if is_older else header.epoch
                break

    def until_over(self, entries: Iterator[ArchiveEntry]) -> Iterator[ArchiveEntry]:
        """Up to the record that says that all of it has ended."""
        for entry in entries:
            yield entry
            ends = entry.record.finished
            if any(end.sequence_id in self.ids and end.HasField("done") for end in ends):
                return


def _before(read: Read, epoch: int) -> int:
    """The leadership before, whose end says since when a request of then waited for another."""
    before = epoch
    for entry in read(EVERYTHING):
        if entry.HasField("header"):
            if entry.header.epoch >= epoch:
                break
            before = entry.header.epoch
    return before


def archived_timeline(read: Read, id: str, since_ns: int = 0) -> ReplayTimelineResponse:
    """By the request's id in the ledger; without choices: these archives do not tell of it."""
    told = ReplayTimelineResponse(id=id)
    asked = Asked(read, id, since_ns)
    if not asked.ids:
        return told
    timelines = Timelines()
    entries = asked.until_over(read(Wanted(after=Cursor(asked.epoch, 0))))
    recorded = Recorded(timelines)
    for found in replay_archive(entries, timelines=timelines, recorded=recorded):
        if isinstance(found, Skipped):
            told.skipped.append(why_skipped(found))
    choices = timelines_of(timelines.snapshot(id))
    names = timelines.names(mentioned(choices))
    told.choices.extend(timeline_to_proto(each, names) for each in choices)
    told.traceparent = asked.traceparent
    return told


def why_skipped(found: Skipped) -> str:
    return f"epoch {found.epoch} cannot be replayed behind {found.seq}: {found.why}"
