"""The archive: what was handed over is read again, over tears, gaps and bounds."""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kaiten.v1.ledger_pb2 import FoldedTokens, SequenceFinished
from ledger.archive import (
    ArchiveBounds,
    ArchiveWriter,
    Cursor,
    Wanted,
    entries,
    segments,
    verify,
    writer,
)
from ledger.archive import segment as segment_files
from tests.support.archives import (
    BOUNDS,
    SECOND,
    archive_of,
    entry,
    header,
    kinds,
    record,
    seqs,
    take_in,
    until,
    until_written,
    write_records,
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FLUSH_S", 0.001)


def test_what_was_handed_over_is_read_in_order(tmp_path: Path) -> None:
    told = [record(101, (1, 2)), record(102, (1, 2))]
    with archive_of(tmp_path) as archive:
        take_in(archive, entry(1))
        take_in(archive, entry(2, n=2), [FoldedTokens(token_ids=[4, 5]), None])
        for each in told:
            archive.record(each)
    found = list(entries([tmp_path]))
    assert kinds(iter(found)) == ["header", "request", "request", "record", "record"]
    assert (found[0].header.version, found[0].header.configured.policy) == ("0.2.0", "fair")
    assert found[1].request.submit == entry(1).record
    assert found[1].request.entry_id == "17-0"
    resumed = found[2].request.choices
    assert [(list(c.token_ids), c.is_finished) for c in resumed] == [([4, 5], False), ([], True)]
    assert [each.record for each in found[3:]] == told
    assert not list(verify([tmp_path]))


def test_files_are_nobody_elses(tmp_path: Path) -> None:
    write_records(tmp_path / "new", 1)
    (segment,) = segments([tmp_path])
    assert segment.path.stat().st_mode & 0o077 == 0
    assert segment.path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_cursor_by_record_by_time_and_by_request(tmp_path: Path, is_apart: bool) -> None:
    with archive_of(tmp_path) as archive:
        for index in range(10):
            take_in(archive, entry(index))
            archive.record(record(101 + index, (index,)))
            if is_apart:
                until_written(archive)
    assert seqs(tmp_path) == list(range(101, 111))
    assert seqs(tmp_path, Wanted(after=Cursor(7, 107))) == [108, 109, 110]
    assert seqs(tmp_path, Wanted(after=Cursor(8, 0))) == []
    assert seqs(tmp_path, Wanted(since_ns=105 * SECOND, until_ns=108 * SECOND)) == [105, 106, 107]
    behind = list(entries([tmp_path], Wanted(after=Cursor(7, 108))))
    # The request that the next record knows of comes along.
    assert kinds(iter(behind)) == ["header", "request", "record", "request", "record"]
    assert behind[1].request.sequence_id == 8
    of_one = list(entries([tmp_path], Wanted(id="t:4")))
    assert kinds(iter(of_one)) == ["header", "request", "record"]
    assert of_one[2].record.seq == 105


def test_a_request_is_told_of_by_every_record_that_names_it(tmp_path: Path) -> None:
    told = [record(101 + index, (9,)) for index in range(7)]
    told[1].inputs.add().submit.sequence_id = 5
    told[2].inputs.add().plan.admitted.append(6)
    told[3].inputs.add().plan.preempted.append(5)
    told[4].inputs.add().cancel.sequence_id = 5
    told[5].finished.append(SequenceFinished(sequence_id=6))
    with archive_of(tmp_path) as archive:
        take_in(archive, entry(5, n=2))
        for each in told:
            archive.record(each)
    assert seqs(tmp_path, Wanted(id="t:5")) == [102, 103, 104, 105, 106]


def test_a_torn_segment_is_read_up_to_the_tear(tmp_path: Path) -> None:
    """Wherever the file ends: every chunk that is whole, and no other."""
    write_records(tmp_path, 6, is_apart=True)
    (segment,) = segments([tmp_path])
    whole = segment.path.read_bytes()
    ends = [0]
    for part in segment_files.read(whole):
        assert isinstance(part, segment_files.Chunk)
        ends.append(ends[-1] + segment_files.HEAD_BYTES + len(part.payload))
    assert len(ends) == 8
    for size in range(ends[1], len(whole)):
        segment.path.write_bytes(whole[:size])
        count = sum(end <= size for end in ends[2:])
        assert seqs(tmp_path) == list(range(101, 101 + count))
    (problem,) = verify([tmp_path])
    assert "torn" in problem.what


def test_a_damaged_chunk_costs_itself_and_is_told(tmp_path: Path) -> None:
    write_records(tmp_path, 6, is_apart=True)
    (segment,) = segments([tmp_path])
    whole = bytearray(segment.path.read_bytes())
    third = [m for m in range(len(whole)) if whole[m : m + 4] == segment_files.MARK][3]
    for offset in (2, 6, 9, segment_files.HEAD_BYTES + 3):
        hurt = bytearray(whole)
        hurt[third + offset] ^= 0x10
        segment.path.write_bytes(hurt)
        assert seqs(tmp_path) == [101, 102, 104, 105, 106]
        assert kinds(entries([tmp_path]))[3] == "gap"
        assert [problem.is_told for problem in verify([tmp_path])] == [False, False]


def test_a_disk_that_is_full_costs_no_record_but_those_it_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a chunk is written, then none; what is missing is said where it is missing."""
    said: list[str] = []
    room = [1 << 30]
    real = os.write

    def write(file: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(file, bytes(data[: room[0]]))
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", write)
    archive = ArchiveWriter(tmp_path, header(), BOUNDS, said.append)
    archive.record(record(101))
    until(lambda: seqs(tmp_path) == [101])
    room[0] = 30
    take_in(archive, entry(3))
    archive.record(record(102))
    until(lambda: said == ["No space left on device"])
    archive.record(record(103))
    until(lambda: archive.dropped == 3)
    room[0] = 1 << 30
    archive.record(record(104))
    archive.close()
    assert said == ["No space left on device", ""]
    assert seqs(tmp_path) == [101, 104]
    (gap,) = (each.gap for each in entries([tmp_path]) if each.HasField("gap"))
    assert (gap.first_seq, gap.last_seq, gap.requests) == (102, 103, 1)
    assert len(segments([tmp_path])) == 1, "a full disk is not littered with beginnings"
    assert [problem.is_told for problem in verify([tmp_path])] == [True]


@pytest.mark.parametrize("room", [0, 20])
def test_a_disk_that_is_full_when_a_segment_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Not even the header fits, or half of it: the segment begins anew, with its header."""
    left = [room]
    real = os.write

    def write(file: int, data: bytes) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(file, bytes(data[: left[0]]))
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", write)
    archive = ArchiveWriter(tmp_path, header(), BOUNDS)
    archive.record(record(101))
    until(lambda: archive.dropped == 1)
    left[0] = 1 << 30
    archive.record(record(102))
    until(lambda: seqs(tmp_path) == [102])
    archive.close()
    assert kinds(entries([tmp_path])) == ["header", "gap", "record"]
    assert [problem.is_told for problem in verify([tmp_path])] == [True]
    assert len(segments([tmp_path])) == 1


def test_an_error_of_the_archive_itself_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it could not write is a gap, as if the disk had refused it."""
    said: list[str] = []
    real = segment_files.seal
    broken = [True]

    def seal(entries: Sequence[bytes], span: segment_files.Span) -> bytes:
        if broken[0]:
            raise ValueError("not of this format")
        return real(entries, span)

    monkeypatch.setattr(writer, "seal", seal)
    archive = ArchiveWriter(tmp_path, header(), BOUNDS, said.append)
    archive.record(record(101))
    until(lambda: said == ["ValueError"])
    broken[0] = False
    archive.record(record(102))
    until(lambda: seqs(tmp_path) == [102])
    archive.close()
    assert kinds(entries([tmp_path])) == ["header", "gap", "record"]


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit the queue meanwhile is dropped, and marked."""
    monkeypatch.setattr(writer, "QUEUE_BYTES_MAX", 10 * len(record(999).SerializeToString()))
    gate, is_in = threading.Event(), threading.Event()
    real = writer._write_all

    def hang(file: int, data: bytes) -> None:
        is_in.set()
        gate.wait()
        real(file, data)

    monkeypatch.setattr(writer, "_write_all", hang)
    archive = ArchiveWriter(tmp_path, header(), BOUNDS)
    archive.record(record(101))
    is_in.wait()
    for seq in range(102, 200):
        archive.record(record(seq))
    assert archive.dropped == 88
    gate.set()
    until_written(archive)
    archive.record(record(200))
    archive.close()
    assert seqs(tmp_path) == [*range(101, 112), 200]
    (gap,) = (each.gap for each in entries([tmp_path]) if each.HasField("gap"))
    assert (gap.first_seq, gap.last_seq, gap.reason) == (112, 199, writer.TOO_SLOW)


def test_segments_are_bounded_in_bytes_and_each_has_its_header(tmp_path: Path) -> None:
    bounds = ArchiveBounds(bytes_max=64 << 10, age_s_max=3600.0)
    archive = ArchiveWriter(tmp_path, header(), bounds)
    noise = iter(lambda: os.urandom(1000), None)
    most = 0
    for seq in range(101, 401):
        told = record(seq)
        told.inputs.add().worker_lost.reason = next(noise).hex()
        archive.record(told)
        until_written(archive)
        # The thread goes on: one that was listed may be deleted before it is looked at.
        found_now = filter(None, map(writer._status, list(tmp_path.iterdir())))
        most = max(most, sum(status.st_size for status in found_now))
    archive.close()
    assert 32 << 10 < most <= 64 << 10
    kept = segments([tmp_path])
    assert 3 < len(kept) <= 10
    assert {each.header.configured.policy for each in kept} == {"fair"}
    found = seqs(tmp_path)
    assert found == list(range(found[0], 401))
    (problem,) = verify([tmp_path])
    assert problem.is_told
    assert "beginning" in problem.what


def test_what_is_too_old_goes_and_nothing_else_in_the_folder(tmp_path: Path) -> None:
    write_records(tmp_path, 1)
    (old,) = segments([tmp_path])
    (tmp_path / "notes.txt").touch()
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    with archive_of(tmp_path, header(8, 101)) as archive:
        archive.record(record(102, epoch=8))
    assert [each.epoch for each in segments([tmp_path])] == [8]
    assert (tmp_path / "notes.txt").exists()
    assert not old.path.exists()


def test_archives_of_several_schedulers_are_one(tmp_path: Path) -> None:
    """Read in the order of their leaderships; a missing end is noticed by the next leader's."""
    for folder, epoch, seq in (("a", 7, 101), ("b", 8, 102), ("a", 9, 104)):
        with archive_of(tmp_path / folder, header(epoch, seq - 1)) as archive:
            archive.record(record(seq, epoch=epoch))
    both = [tmp_path / "b", tmp_path / "a", tmp_path / "a"]
    found = [each.record for each in entries(both) if each.HasField("record")]
    assert [(each.epoch, each.seq) for each in found] == [(7, 101), (8, 102), (9, 104)]
    (problem,) = verify(both)
    assert problem.what == "records 103 to 103 were never written"
    assert not problem.is_told


def test_archives_of_several_stores_may_lie_in_one_folder(tmp_path: Path) -> None:
    """As those of two models under one `kaiten serve`: neither misses what is the other's."""
    for epoch, store, seq in ((7, "a", 101), (8, "b", 900), (9, "a", 102)):
        head = header(epoch, seq - 1)
        head.store = store
        with archive_of(tmp_path / store, head) as archive:
            archive.record(record(seq, epoch=epoch))
    assert not list(verify([tmp_path]))


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FORMAT", 2)
    write_records(tmp_path, 1)
    with pytest.raises(ValueError, match="format 2 is of a later version"):
        segments([tmp_path])
