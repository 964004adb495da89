"""An archive with snapshots is read from the newest before a request, and tells the same."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kaiten.v1.archive_pb2 import ArchiveChunk, ArchivedRequest, ArchiveEntry
from kaiten.v1.ledger_pb2 import (
    ExpireInput,
    JournalRecord,
    PlanInput,
    SubmitInput,
    SubmitRecord,
    ThrottledChange,
    WorkerJoinedInput,
)
from kaiten.v1.scheduler_service_pb2 import ReplayTimelineResponse
from ledger import Commit
from ledger.archive import ArchiveBounds, Wanted, entries, segments, verify, writer
from ledger.archive.segment import HEAD_BYTES, Chunk
from ledger.archive.segment import read as parts_of
from scheduler_svc import archive_replay
from scheduler_svc import archived_timeline as reading
from scheduler_svc.archived_timeline import archived_timeline
from scheduler_svc.command_wire import described
from scheduler_svc.core.commands import Command
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.recorded import Recorded
from scheduler_svc.replay import NO_SNAPSHOT, Skipped, replay_archive
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.snapshots import Snapshots
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_intervals import timelines_of
from scheduler_svc.timeline_track import BEHIND, NOT_ARCHIVED
from tests.compat.release import RELEASES
from tests.support.archives import until_written
from tests.support.cell import spec
from tests.unit.scheduler_svc import test_archive_hour as hour

EVERY = 60
SEGMENTS = 64
BOUNDS = ArchiveBounds(bytes_max=SEGMENTS * (12 << 10), age_s_max=3600.0)
SECONDS = 600
# Records that are decided before the store has acknowledged them.
LAG = 7
# Two requests have it.
AGAIN = "t:again"


class Leader(hour.Leader):
    """One who knows where time goes, and whose store is some records behind."""

    def __init__(self, world: hour.World, epoch: int) -> None:
        self.timelines = Timelines()
        self.uncommitted: list[Commit] = []
        super().__init__(world, epoch, SchedulerSettings(mix="prefill_first"))
        self.snapshots = Snapshots(self.archive, self.timelines, self.core)

    def write(self, command: Command, outcome: Outcome, message: Any = None) -> Commit | None:
        now_ns = self.world.now_ns
        self.timelines.take(command, outcome, now_ns, self.core.waiting)
        return super().write(command, outcome, message)

    def put(self, commit: Commit | None) -> None:
        if commit is not None:
            self.world.commit(commit)
            self.uncommitted.append(commit)
            self.acknowledge(LAG)

    def acknowledge(self, left: int) -> None:
        while len(self.uncommitted) > left:
            commit = self.uncommitted.pop(0)
            self.archive.record(commit.record, commit.data)

    def second(self) -> None:
        super().second()
        settings = SchedulerSettings(mix="prefill_first").configured
        self.put(self.snapshots.due(self.journal, settings, self.world.now_ns))
        # What the thread finds out of its segment is known before the next.
        until_written(self.archive)


class Story(NamedTuple):
    folder: Path
    ids: list[str]


def lead(world: hour.World, epoch: int, seconds: int, rng: random.Random) -> None:
    leader = Leader(world, epoch)
    for second in range(seconds):
        if rng.random() < 0.1 or second == 100:
            entry = world.accept(rng)
            assert isinstance(entry.record, SubmitRecord)
            if second == 100:
                entry.record.id = AGAIN
            leader.take_in(entry)
        leader.second()
    leader.acknowledge(0)
    leader.archive.close(60.0)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Of two leaders, in several segments each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SNAPSHOT_RECORDS", EVERY)
        patch.setattr(writer, "SEGMENTS", SEGMENTS)
        patch.setattr(writer, "FULL", 0.6)
        patch.setattr(writer, "CHUNK_BYTES", 1 << 10)
        patch.setattr(writer, "FLUSH_S", 0.001)
        patch.setattr(hour, "BOUNDS", BOUNDS)
        patch.setattr(reading, "BACK_RECORDS", 2 * EVERY)
        folder = tmp_path_factory.mktemp("archive")
        world, rng = hour.World(folder), random.Random(3)
        for epoch in (1, 2):
            lead(world, epoch, SECONDS, rng)
        found = (
            entry.request.submit.id for entry in entries([folder]) if entry.HasField("request")
        )
        yield Story(folder, list(dict.fromkeys(found)))


def requests_of(folder: Path) -> list[str]:
    """Their ids, in order."""
    found = (one.request.submit.id for one in entries([folder]) if one.HasField("request"))
    return list(dict.fromkeys(found))


class Reader:
    """Reads some segments, as they are or changed, and counts."""

    def __init__(self, *paths: Path, change: Callable[[ArchiveEntry], bool] = lambda entry: True):
        self.paths, self.change, self.num_records = paths, change, 0

    def __call__(self, wanted: Wanted) -> Iterator[ArchiveEntry]:
        for entry in entries(self.paths, wanted):
            self.num_records += entry.HasField("record")
            if self.change(entry):
                yield entry


def older(entry: ArchiveEntry) -> bool:
    """As a scheduler wrote that made no snapshots."""
    if entry.HasField("request"):
        entry.request.snapshot_seq = 0
    return not entry.HasField("snapshot")


def later(entry: ArchiveEntry) -> bool:
    """As one writes whose snapshots are made otherwise."""
    if entry.HasField("snapshot"):
        entry.snapshot.version = 2
    return True


def is_whole(told: ReplayTimelineResponse) -> bool:
    whys = {each.why for choice in told.choices for each in choice.intervals}
    return bool(told.choices) and NOT_ARCHIVED not in whys


def test_there_is_one_every_so_many_records_and_at_the_head_of_each_segment(story: Story) -> None:
    assert not list(verify([story.folder]))
    seqs: list[int] = []
    for segment in segments([story.folder]):
        kinds = [
            entry.WhichOneof("entry")
            for part in segment.parts()
            if isinstance(part, Chunk)
            for entry in part.entries()
        ]
        assert kinds[0] == "header"
        assert (kinds[1] == "snapshot") == (segment.header.segment > 0), segment.path
    last_seq = 0
    for entry in entries([story.folder]):
        if entry.HasField("record"):
            last_seq = entry.record.seq
        elif entry.HasField("snapshot"):
            assert entry.snapshot.seq == last_seq
            seqs.append(last_seq)
    assert len(segments([story.folder])) > 6
    assert max(b - a for a, b in pairwise(seqs)) < EVERY + 3 * LAG
    assert any(entry.snapshot.taken for entry in entries([story.folder]))


@pytest.mark.parametrize("change", [lambda entry: True, later], ids=["known", "of a later version"])
def test_it_is_told_as_from_the_beginning(
    story: Story, change: Callable[[ArchiveEntry], bool]
) -> None:
    """Also who lived under both leaders; and where snapshots cannot be read."""
    from_beginning = Reader(story.folder, change=older)
    for id in story.ids[::9]:
        read = Reader(story.folder, change=change)
        told = archived_timeline(read, id)
        assert told.choices
        whole = archived_timeline(from_beginning, id)
        if any(NO_SNAPSHOT in sentence for sentence in told.skipped):
            # How the leader before its own ended is not worth a reading of all that it decided.
            assert change is later
            assert told.choices[0].intervals[-1] == whole.choices[0].intervals[-1]
            continue
        assert told == whole
        # Two periods at most, and what it lived for.
        assert change is later or read.num_records < 8 * EVERY


def test_where_the_beginning_is_gone(story: Story) -> None:
    """Of whom all is left, all is told; of others from the first snapshot they lived at."""
    kept = [segment.path for segment in segments([story.folder])][2:]
    folder = kept[0].parent
    names = {path.name for path in kept}
    with_beginning = Reader(story.folder)
    tried = partly = 0
    pruned = _copy(folder, names)
    read = Reader(pruned)
    still = requests_of(pruned)
    (first, *_) = (entry.snapshot for entry in entries([pruned]) if entry.HasField("snapshot"))
    for id in still[::7]:
        assert archived_timeline(read, id) == archived_timeline(with_beginning, id)
        tried += 1
    for request in first.requests:
        if request.id not in still:
            told = archived_timeline(read, request.id)
            whole = archived_timeline(with_beginning, request.id)
            assert told.choices[0].intervals[0].why == NOT_ARCHIVED
            assert told.choices[-1].ended == whole.choices[-1].ended
            partly += 1
    assert tried > 10
    assert partly
    assert not archived_timeline(read, story.ids[0]).choices


def _copy(folder: Path, names: set[str]) -> Path:
    there = folder / "pruned"
    there.mkdir()
    for name in names:
        (there / name).write_bytes((folder / name).read_bytes())
    return there


def test_a_damaged_snapshot_costs_the_way_from_the_one_before(story: Story, tmp_path: Path) -> None:
    paths = [segment.path for segment in segments([story.folder])]
    for path in paths:
        data = bytearray(path.read_bytes())
        at = 0
        for part in parts_of(bytes(data)):
            assert isinstance(part, Chunk)
            size = HEAD_BYTES + len(part.payload)
            if path == paths[1] and any(e.HasField("snapshot") for e in part.entries()) and at:
                data[at + size - 3] ^= 255
            at += size
        (tmp_path / path.name).write_bytes(data)
    damaged = {
        entry.request.submit.id for entry in entries([tmp_path]) if entry.HasField("request")
    }
    read, well = Reader(tmp_path), Reader(story.folder)
    for id in sorted(damaged)[::9]:
        told = archived_timeline(read, id)
        assert told.choices == archived_timeline(well, id).choices


def test_what_is_missing_is_said_and_the_rest_is_told(story: Story) -> None:
    """A chunk with a request is gone: not that of who asks, but of another who is told of."""
    gone = story.ids[20]

    def without(entry: ArchiveEntry) -> bool:
        return entry.request.submit.id != gone

    read = Reader(story.folder, change=without)
    told = [archived_timeline(read, id) for id in story.ids[21:24]]
    assert all(is_whole(each) for each in told)
    said = [sentence for each in told for sentence in each.skipped]
    assert all("stands nowhere before it" in sentence for sentence in said)
    assert said


def test_an_older_reader_passes_over_them(story: Story) -> None:
    """By what 0.2.0 knew of an entry: none of what it knows."""
    pool = descriptor_pool.DescriptorPool()
    known = descriptor_pb2.FileDescriptorSet.FromString(
        (RELEASES / "0.2.0" / "protos.binpb").read_bytes()
    )
    for file in known.file:
        pool.Add(file)
    old: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("kaiten.v1.ArchiveChunk"))
    new, told = ArchiveChunk(entries=entries([story.folder])), []
    for entry, theirs in zip(
        new.entries, old.FromString(new.SerializeToString()).entries, strict=True
    ):
        told.append(theirs.WhichOneof("entry"))
        assert told[-1] == (None if entry.HasField("snapshot") else entry.WhichOneof("entry"))
    assert None in told


def test_an_id_that_was_used_twice_is_told_of_by_its_newest_use(story: Story) -> None:
    """Or by the newest before a moment."""
    uses = [
        entry.request
        for entry in entries([story.folder])
        if entry.HasField("request") and entry.request.submit.id == AGAIN
    ]
    assert len({use.sequence_id for use in uses}) == 2
    read = Reader(story.folder)
    told = archived_timeline(read, AGAIN)
    assert told.choices[0].sequence_id == uses[-1].sequence_id
    moment_ns = told.choices[0].intervals[0].start_unix_ns
    before = archived_timeline(read, AGAIN, until_ns=moment_ns)
    assert before.choices[0].sequence_id == uses[0].sequence_id
    assert is_whole(told)
    assert is_whole(before)


def test_what_a_later_version_knows_ends_no_answer() -> None:
    record = JournalRecord(epoch=1, seq=1)
    joined = WorkerJoinedInput(worker_id="w", worker=described(spec()))
    plan = PlanInput(worker_id="w", passed_over=[4], passed_over_whys=[77])  # type: ignore[list-item]
    record.inputs.add(now_ns=4, worker_joined=joined)
    record.inputs.add(now_ns=5, submit=SubmitInput(sequence_id=4, arrived_ns=5))
    record.inputs.add(now_ns=6, plan=plan)
    record.inputs.add(now_ns=9)
    timelines = Timelines()
    recorded = Recorded(timelines)
    request = ArchivedRequest(sequence_id=4, entry_id="0-0")
    request.submit.id, request.submit.n = "t:4", 1
    recorded.take_in(request)
    assert recorded.feed(record) == "it has an input that only a later version knows"
    (told,) = timelines_of(timelines.snapshot("t:4", now_ns=10))
    assert told.intervals[-1].why == "unknown reason 77"


def test_who_was_throttled_under_the_leader_before_is_not_under_the_next() -> None:
    joined = WorkerJoinedInput(worker_id="w", worker=described(spec()))
    first, next = JournalRecord(epoch=1, seq=1), JournalRecord(epoch=2, seq=2)
    for record, tenant in ((first, "a"), (next, "b")):
        record.inputs.add(now_ns=record.seq * 10, worker_joined=joined)
        change = ThrottledChange(begun=[tenant])
        record.inputs.add(now_ns=record.seq * 10 + 1, expire=ExpireInput(), throttled=change)
    next.inputs.add(now_ns=22, submit=SubmitInput(sequence_id=4, arrived_ns=22))
    timelines = Timelines()
    recorded = Recorded(timelines)
    assert recorded.feed(first) == ""
    request = ArchivedRequest(sequence_id=4, entry_id="0-0")
    request.submit.id, request.submit.n, request.submit.tenant = "a:4", 1, "a"
    recorded.take_in(request)
    assert recorded.feed(next) == ""
    (told,) = timelines_of(timelines.snapshot("a:4", now_ns=30))
    assert told.intervals[-1].why == BEHIND


def test_who_lived_across_a_hole_is_told_of_on_both_sides(story: Story) -> None:
    """Between the last record before it and the next snapshot nothing is known."""
    found = list(entries([story.folder]))
    places = [index for index, entry in enumerate(found) if entry.HasField("snapshot")]
    snapshot = found[places[2]].snapshot
    hole = range(places[2] - 12, places[2] - 4)
    left = [entry for index, entry in enumerate(found) if index not in hole]
    timelines = Timelines()
    skipped = list(replay_archive(left, recorded=Recorded(timelines)))
    assert [one.why for one in skipped if isinstance(one, Skipped)] == ["records are missing"]
    across = 0
    for request in snapshot.requests:
        for told in timelines_of(timelines.snapshot(request.id)):
            assert all(a.end_ns == b.start_ns for a, b in pairwise(told.intervals))
            holes = [each for each in told.intervals if each.why == NOT_ARCHIVED]
            if holes:
                assert holes[0].end_ns == snapshot.now_ns
                across += told.intervals[0] is not holes[0]
    assert across


def steps(*arguments: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What `kaiten archive steps` says."""
    capsys.readouterr()
    assert archive_replay.main(["steps", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_decisions_are_read_as_they_would_be_made_again(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for what only a core knows; also from the middle on, and of one request."""
    read = steps(str(story.folder), capsys=capsys)
    made = steps(str(story.folder), "--again", capsys=capsys)
    assert len(read) == len(made) > 500
    for own, whole in zip(read, made, strict=True):
        assert own["expected_us"] == 0
        if own["kind"] == "plan":
            assert own.pop("blocks") == {n: whole["blocks"][n] for n in ("free", "total")}
            waits = {each["sequence_id"]: each for each in whole["waits"]}
            for each in own["waits"]:
                known = waits.get(each["sequence_id"], each)
                assert [each[n] for n in ("request_id", "why")] == [
                    known[n] for n in ("request_id", "why")
                ]
        for name in ("blocks", "waits", "stages", "expected_us"):
            whole.pop(name, None)
            own.pop(name, None)
        assert own == whole
    middle = read[len(read) // 2]
    after = f"{middle['epoch']}:{middle['record']}"
    later = steps(str(story.folder), "--after", after, capsys=capsys)
    for each in later:
        for name in ("blocks", "waits", "stages", "expected_us"):
            each.pop(name, None)
    behind = (middle["epoch"], middle["record"])
    assert later == [each for each in read if (each["epoch"], each["record"]) > behind]
    ways = ((), ("--again",))
    of_one = [steps(str(story.folder), "--id", story.ids[50], *way, capsys=capsys) for way in ways]
    plans = [{one["plan_id"] for one in some if one["kind"] == "plan"} for some in of_one]
    assert plans[0]
    assert plans[0] <= plans[1]
    assert archive_replay.main(["steps", str(story.folder), "--after", after]) == 0
    assert " free\n" in capsys.readouterr().out
