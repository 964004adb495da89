"""What a scheduler keeps of its decisions: everything committed, readable and replayed tomorrow."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from kaiten.v1.archive_pb2 import ArchiveEntry
from kaiten.v1.ledger_pb2 import JournalRecord
from kaiten.v1.scheduler_service_pb2 import ReplayTimelineRequest
from kaiten.v1.timeline_pb2 import TimelinePhase
from ledger.archive import Cursor, Wanted, entries, segments, verify
from ledger.archive import __main__ as archive_command
from ledger.archive.remote import remote_entries
from ledger.archive.segment import name_of
from scheduler_svc import archive_replay
from scheduler_svc.archived_timeline import archived_timeline
from scheduler_svc.archiving import folder_of
from scheduler_svc.recorded import Recorded
from scheduler_svc.replay import Compared, Skipped, replay_archive
from scheduler_svc.replaying import CHILD, replayed
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_intervals import Timeline, timelines_of
from scheduler_svc.timeline_track import Phase
from service_kit.errors import NotFound
from tests.support.answers import until
from tests.support.cluster import SCHEDULER_FLAGS, UNDISTURBED, Cluster, argv_of
from tests.support.commands import kaiten
from tests.support.processes import ServiceProcess, command_lines

# Nothing is trimmed, so that the journal can be compared with.
UNTRIMMED = {"fold_records": 1_000_000}
SHORT_PERIODS = "tests.support.short_periods"
QUEUE = TimelinePhase.TIMELINE_PHASE_QUEUE
WORKER_FLAGS = {
    "step_ms": 4,
    "slots": 8,
    "step_tokens": 40,
    "block_size": 4,
    "kv_blocks": 60,
    "context_tokens": 200,
}


def records_of(folder: Path, wanted: Wanted | None = None) -> list[JournalRecord]:
    found = entries([folder], wanted or Wanted())
    return [entry.record for entry in found if entry.HasField("record")]


async def journal_of(cluster: Cluster) -> list[JournalRecord]:
    records: list[JournalRecord] = []
    while page := await cluster.ledger.journal_read(
        records[-1].seq if records else 0, block_ms=1, count=256
    ):
        records += page
    return records


def start_with(cluster: Cluster, process: ServiceProcess, **flags: object) -> None:
    """The same scheduler by other flags."""
    port = cluster.scheduler_addresses[0].rpartition(":")[2]
    base = {"redis_url": cluster.store.url, "grpc_port": port, **SCHEDULER_FLAGS, **UNTRIMMED}
    process.argv = argv_of({**base, **flags})
    process.start()


async def more_work(cluster: Cluster) -> None:
    """Of several choices, preempted and cut; some of it outlives its leader."""
    for index in range(8):
        await cluster.submit(prompt_tokens=20 + index, max_tokens=40 + index, n=1 + index % 2)
    for answer in cluster.answers[-2:]:
        await answer.has_tokens(3)


def told_by_commands(
    archive: Path,
    compared: Sequence[Compared],
    choices: Sequence[Timeline],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`kaiten archive steps` tells every decision, and `kaiten explain --archive` one request."""
    capsys.readouterr()
    one = choices[0]
    assert archive_replay.main(["steps", str(archive), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    plans = [line for line in lines if line["kind"] == "plan"]
    assert len(plans) == len([each for each in compared if "plan" in each.what])
    assert all(wait["why"] for plan in plans for wait in plan["waits"])
    assert any(plan["waits"] for plan in plans)
    assert {line["epoch"] for line in lines if line["kind"] == "step"} == {
        plan["epoch"] for plan in plans
    }
    assert archive_replay.main(["steps", str(archive), "--id", one.id, "--json"]) == 0
    own = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert 0 < len(own) < len(lines)
    admitted = [each["request_id"] for line in own for each in line.get("admitted", ())]
    assert one.id in admitted
    assert archive_replay.main(["steps", str(archive), "--id", "default:nobody"]) == 1
    assert "'default:nobody' is in none" in capsys.readouterr().err

    tenant, _, name = one.id.partition(":")
    flags = ["--archive", str(archive), "--tenant", tenant]
    for id, code, said in ((f"cmpl-{name}", 0, "ended: length"), ("nobody", 1, "is in none")):
        ended, out, err = kaiten("explain", id, *flags)
        assert ended == code, err
        assert said in out + err
        assert ("is in none" in err) == bool(code)
        shown = re.findall(r"^ +[\d,.]+ +[\d,.]+  ", out, re.MULTILINE)
        assert code or len(shown) == sum(len(each.intervals) for each in choices)


async def test_leaders_of_several_minds_are_replayed_from_the_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every decision again, bit for bit, though each leader decided by other flags."""
    archive = tmp_path / "archive"
    async with Cluster(
        tmp_path,
        worker_flags=WORKER_FLAGS,
        scheduler_flags={**UNTRIMMED, "archive_dir": archive, "mix": "prefill_first"},
    ) as cluster:
        (scheduler,) = cluster.schedulers
        await more_work(cluster)
        scheduler.send(signal.SIGTERM)
        scheduler.join()
        start_with(cluster, scheduler, archive_dir=archive, policy="priority")
        await more_work(cluster)
        await until(lambda: len({one.epoch for one in records_of(archive)}) == 2, "its records")
        scheduler.kill()
        start_with(cluster, scheduler, archive_dir=archive, order="shortest", lease_steps_max=1)
        await more_work(cluster)
        await cluster.all_done()
        journal = await journal_of(cluster)
        scheduler.send(signal.SIGTERM)
        scheduler.join()
        found = records_of(archive)
        cluster.is_checked = False
    by_seq = {record.seq: record for record in journal}
    assert all(by_seq[record.seq] == record for record in found)
    # The one that was killed took its last quarter of a second along, and that is noticed.
    missing = set(by_seq) - {record.seq for record in found}
    assert all(by_seq[seq].epoch == segments([archive])[1].epoch for seq in missing)
    assert len([problem for problem in verify([archive]) if not problem.is_told]) == bool(missing)
    timelines = Timelines()
    decided = list(replay_archive(entries([archive]), timelines=timelines))
    compared = [one for one in decided if isinstance(one, Compared)]
    assert len(compared) == len(decided)
    assert all(one.is_equal for one in compared)
    assert len([one for one in compared if "plan" in one.what]) > 100
    ids = {entry.request.submit.id for entry in entries([archive]) if entry.HasField("request")}
    told = [each for id in ids for each in timelines_of(timelines.snapshot(id))]
    # The records alone say the same.
    read = Timelines()
    assert not list(replay_archive(entries([archive]), timelines=read, recorded=Recorded(read)))
    assert [each for id in ids for each in timelines_of(read.snapshot(id))] == told
    # Where their time went, under however many leaders. The end of some went with the one killed.
    assert {each.id for each in told} == ids
    for each in told:
        assert all(one.end_ns == other.start_ns for one, other in pairwise(each.intervals))
    whole = [each for each in told if each.ended == "length"]
    assert whole
    # One that was resumed for its last token has it of the prefill.
    last = {each.intervals[-1].phase for each in whole}
    assert last <= {Phase.DECODE, Phase.PREFILL, Phase.STALL}
    told_by_commands(archive, compared, [t for t in told if t.id == whole[0].id], capsys)
    headers = [segment.header for segment in segments([archive])]
    assert [header.configured.policy for header in headers] == ["fair", "priority", "fair"]
    assert [header.configured.mix for header in headers] == ["prefill_first", "", ""]
    assert len({header.store for header in headers} - {""}) == 1
    others = replay_archive(entries([archive]), policy="static")
    assert not all(isinstance(one, Compared) and one.is_equal for one in others)


async def test_what_came_late_is_told_from_the_newest_snapshot(tmp_path: Path) -> None:
    """As from the beginning."""
    archive = tmp_path / "archive"
    async with Cluster(
        tmp_path,
        worker_flags=WORKER_FLAGS,
        scheduler_flags={**UNTRIMMED, "archive_dir": archive},
        scheduler_module=SHORT_PERIODS,
    ) as cluster:
        for _ in range(3):
            await more_work(cluster)
            await cluster.all_done()
        last = (await journal_of(cluster))[-1].seq
        await until(lambda: [r.seq for r in records_of(archive)][-1:] >= [last], "all of it")
        cluster.is_checked = False
    assert not list(verify([archive]))
    found = list(entries([archive]))
    starts = [entry.snapshot for entry in found if entry.HasField("snapshot")]
    assert len(starts) > 3
    assert all(start.workers[0].HasField("worker") for start in starts)
    read = Archived(archive)
    late = [one.request for one in found if one.HasField("request") and one.request.snapshot_seq]
    assert len(late) > 8
    for request in late[::4]:
        told, of_all = (
            archived_timeline(some, request.submit.id) for some in (read, read.without_starts)
        )
        assert not told.skipped
        assert [each.ended for each in told.choices] == ["length"] * request.submit.n
        # What a look at the queue found that made no plan only a snapshot says.
        spans = [
            [(one.phase, one.start_unix_ns) for one in choice.intervals if one.phase != QUEUE]
            for each in (told, of_all)
            for choice in each.choices
        ]
        assert spans[: request.submit.n] == spans[request.submit.n :]


class Archived:
    """An archive, also as it was written before there were snapshots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, wanted: Wanted) -> Iterator[ArchiveEntry]:
        return entries([self.folder], wanted)

    def without_starts(self, wanted: Wanted) -> Iterator[ArchiveEntry]:
        for entry in self(wanted):
            if entry.HasField("request"):
                entry.request.snapshot_seq = 0
            if not entry.HasField("snapshot"):
                yield entry


async def test_a_disk_that_refuses_stops_no_stream_and_leaves_a_marked_gap(
    tmp_path: Path,
) -> None:
    archive = tmp_path / "archive"
    # A file where the folder should be, as good as a full disk.
    archive.touch()
    flags = {**UNTRIMMED, "archive_dir": archive}
    async with Cluster(tmp_path, scheduler_flags=flags) as cluster:
        (scheduler,) = cluster.schedulers
        await cluster.submit_many(4, max_tokens=40)
        await cluster.all_done()
        await until(lambda: cluster.events(scheduler, "archive.gap"), "the gap in the log")
        first, *_, refused = [record.seq for record in await journal_of(cluster)]
        archive.unlink()
        await cluster.submit(max_tokens=10)
        await cluster.all_done()
        await until(lambda: cluster.events(scheduler, "archive.goes_on"), "the archive")
        last = (await journal_of(cluster))[-1].seq
        await until(lambda: [r.seq for r in records_of(archive)][-1:] >= [last], "all of it")
    (gap,) = (entry.gap for entry in entries([archive]) if entry.HasField("gap"))
    assert gap.first_seq == first
    assert gap.last_seq <= refused
    assert gap.requests == 4
    assert [problem.is_told for problem in verify([archive])] == [True]
    (skipped,) = replay_archive(entries([archive]))
    assert isinstance(skipped, Skipped)


async def test_every_scheduler_serves_what_it_wrote_and_they_are_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also who only stands by; the same as the files say, from any cursor."""
    folders = [tmp_path / "one", tmp_path / "other"]
    cluster = Cluster(tmp_path, schedulers=2, scheduler_flags={**UNTRIMMED, **UNDISTURBED})
    for scheduler, folder in zip(cluster.schedulers, folders, strict=True):
        scheduler.argv += ["--archive-dir", str(folder)]
    async with cluster:
        await more_work(cluster)
        leader = await cluster.leader()
        leader.send(signal.SIGTERM)
        leader.join()
        # There is something left for the other, however much is over by now.
        await cluster.submit(max_tokens=10)
        await cluster.all_done()
        last = (await journal_of(cluster))[-1].seq
        leader.start()
        await until(lambda: [r.seq for r in records_of(tmp_path)][-1:] >= [last], "all of it")
        addresses = cluster.scheduler_addresses
        await until(lambda: cluster.state_of(addresses[cluster.schedulers.index(leader)]), "back")
        told: list[ArchiveEntry] = []
        written: list[ArchiveEntry] = []

        async def are_merged() -> bool:
            """Who was put aside for a moment has something to record of it."""
            written[:] = entries(folders)
            told[:] = await asyncio.to_thread(lambda: list(remote_entries(addresses, Wanted())))
            return told == written

        await until(are_merged, "both archives, merged")
        twice = await asyncio.to_thread(lambda: list(remote_entries(addresses * 2, Wanted())))
        assert twice == written, "as of schedulers that share a folder"
        assert len({entry.header.epoch for entry in told if entry.HasField("header")}) == 2
        # Of either leader: their numbers do not follow each other.
        records = records_of(tmp_path)
        middle = records[len(records) // 2]
        behind = Wanted(after=Cursor(middle.epoch, middle.seq))
        told = await asyncio.to_thread(lambda: list(remote_entries(addresses, behind)))
        assert [entry.record.seq for entry in told if entry.HasField("record")] == [
            record.seq for record in records if record.seq > middle.seq
        ]
        words = ["cat", *(f"--address={each}" for each in addresses)]
        assert await asyncio.to_thread(archive_command.main, words) == 0
        assert len(capsys.readouterr().out.splitlines()) == len(written)


async def test_a_scheduler_that_keeps_none_says_so(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        with pytest.raises(grpc.RpcError, match="--archive-dir") as caught:
            await asyncio.to_thread(
                lambda: list(remote_entries(cluster.scheduler_addresses, Wanted()))
            )
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_archive_without_tokens_has_none(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    cluster = Cluster(tmp_path, scheduler_flags={"archive_dir": archive})
    cluster.schedulers[0].argv.append("--no-archive-prompts")
    async with cluster:
        answer = await cluster.submit(prompt_tokens=40, max_tokens=40, logprobs=1)
        await cluster.all_done()
        await until(lambda: any(one.finished for one in records_of(archive)), "the end")
    found = list(entries([archive]))
    (request,) = (entry.request for entry in found if entry.HasField("request"))
    assert (request.prompt_tokens, len(request.block_hashes)) == (40, 2)
    assert len([entry for entry in found if entry.HasField("block")]) == 3
    assert not request.submit.prompt_token_ids
    assert not any(record.token_ids or record.logprobs for record in records_of(archive))
    assert sum(len(record.positions) for record in records_of(archive)) == answer.token_count
    (skipped,) = replay_archive(iter(found))
    assert isinstance(skipped, Skipped)
    assert "without tokens" in skipped.why
    # Where its time went is told all the same.
    told = archived_timeline(partial(entries, [archive]), request.submit.id)
    (choice,) = told.choices
    assert choice.ended == "length"
    assert sum(each.num_steps for each in choice.intervals) == 39


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_replay_ends_with_its_time_and_with_who_asked(
    tmp_path: Path, *, is_cancelled: bool
) -> None:
    """Of an archive that is read for ever."""
    settings = SchedulerSettings(archive_dir=tmp_path, replay_s=600 if is_cancelled else 1)
    folder = folder_of(settings)
    assert folder is not None
    folder.mkdir()
    os.mkfifo(endless := folder / name_of(1, 0))
    asking = asyncio.create_task(replayed(settings, ReplayTimelineRequest(ids=["default:x"]), []))
    if is_cancelled:

        def is_read() -> bool:
            with suppress(OSError):
                os.close(os.open(endless, os.O_WRONLY | os.O_NONBLOCK))
                return True
            return False

        await until(is_read, "the child")
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
    else:
        told = await asking
        assert not told.choices
        assert list(told.skipped) == ["it takes longer than 1 s (--replay-s of the scheduler)"]
    assert not [words for words in command_lines() if CHILD in words]


def test_a_replay_that_nobody_ends_any_more_ends(tmp_path: Path) -> None:
    """Its scheduler was killed, and what it reads never ends."""
    os.mkfifo(tmp_path / name_of(1, 0))
    question = {"ids": ["default:x"], "since_ns": 0, "folders": [str(tmp_path)], "addresses": []}
    bounds = {"peer": {}, "cpu_s_max": 60, "wall_s_max": 1}
    done = subprocess.run(
        [sys.executable, "-m", CHILD], input=json.dumps(question | bounds).encode(), check=False
    )
    assert done.returncode == -signal.SIGALRM


async def test_nothing_is_replayed_where_that_is_not_wanted(tmp_path: Path) -> None:
    for settings in (SchedulerSettings(archive_dir=tmp_path, replay_s=0), SchedulerSettings()):
        with pytest.raises(NotFound, match="--archive-dir, --replay-s"):
            await replayed(settings, ReplayTimelineRequest(ids=["default:x"]), [])
