"""What the archive holds beside records: hashes in place of tokens, snapshots; and what the command
shows of all.
"""

import json
import os
from pathlib import Path

import pytest

from kaiten.v1.archive_pb2 import ArchiveEntry, Snapshot
from kaiten.v1.ledger_pb2 import FoldedTokens, SubmitRecord
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
from ledger.archive.__main__ import main
from tests.support.archives import (
    archive_of,
    entry,
    header,
    kinds,
    record,
    take_in,
    until,
    until_written,
)

PROMPT = list(range(40))


def redacted(folder: Path) -> list[ArchiveEntry]:
    """Two requests with 32 prompt tokens in common; the first has an output of 30 tokens."""
    with archive_of(folder, header(has_tokens=False)) as archive:
        take_in(archive, entry(1, PROMPT))
        take_in(archive, entry(2, [*PROMPT[:35], 9999]))
        for position in range(30):
            told = record(101 + position, (1,))
            told.positions[:] = [position]
            told.inputs.add().result.step.token_ids.append(told.token_ids[0])
            archive.record(told)
    return list(entries([folder]))


def test_without_tokens_no_text_of_a_client_is_kept(tmp_path: Path) -> None:
    one = entry(1, PROMPT)
    assert isinstance(one.record, SubmitRecord)
    one.record.render.stop.append("a secret")
    one.record.sampling.grammar = 'start: "a secret"'
    with archive_of(tmp_path, header(has_tokens=False)) as archive:
        take_in(archive, one)
    kept = [each.SerializeToString() for each in entries([tmp_path])]
    assert len(kept) >= 2
    assert b"secret" not in b"".join(kept)


def test_without_tokens_there_are_lengths_and_hashes_of_blocks(tmp_path: Path) -> None:
    found = redacted(tmp_path)
    first, second = (each.request for each in found if each.HasField("request"))
    assert (first.prompt_tokens, second.prompt_tokens) == (40, 36)
    assert len(first.block_hashes) == 2
    assert first.block_hashes == second.block_hashes
    assert not first.submit.prompt_token_ids
    blocks = [each.block for each in found if each.HasField("block")]
    # 8 tokens of the prompt and 24 of the output are two more.
    assert [(each.sequence_id, each.index) for each in blocks] == [(1, 2), (1, 3)]
    records = [each.record for each in found if each.HasField("record")]
    assert [each.positions[0] for each in records] == list(range(30))
    assert not any(each.token_ids for each in records)
    assert not any(item.result.step.token_ids for each in records for item in each.inputs)


def test_hashes_do_not_compare_beyond_a_leadership(tmp_path: Path) -> None:
    one, other = (redacted(tmp_path / name) for name in "ab")
    assert one[1].request.block_hashes != other[1].request.block_hashes


def test_a_hash_follows_a_resumed_output_and_not_one_with_a_hole(tmp_path: Path) -> None:
    with archive_of(tmp_path, header(has_tokens=False)) as archive:
        resumed = FoldedTokens(token_ids=range(15))
        take_in(archive, entry(1, [1]), [resumed])
        take_in(archive, entry(2, [1, *range(15)]))
        take_in(archive, entry(3, [1] * 15))
        missed = record(101, (3,))
        missed.positions[:] = [5]
        archive.record(missed)
        for position in range(15, 31):
            told = record(87 + position, (1,))
            told.positions[:] = [position]
            archive.record(told)
    found = list(entries([tmp_path]))
    assert [each.block.sequence_id for each in found if each.HasField("block")] == [1]
    resumed_request, same = (each.request for each in found[1:3])
    assert resumed_request.choices[0].tokens == 15
    assert not resumed_request.choices[0].token_ids
    assert len(same.block_hashes) == 1


def point(seq: int) -> Snapshot:
    return Snapshot(version=1, seq=seq)


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_request_says_behind_which_record_the_newest_snapshot_stands(
    tmp_path: Path, has_tokens: bool
) -> None:
    """Who comes while its record is on its way is in it, for its own entry stands before."""
    with archive_of(tmp_path, header(has_tokens=has_tokens)) as archive:
        archive.record(record(101))
        archive.snapshot(103, lambda: point(103))
        archive.record(record(102))
        take_in(archive, entry(5))
        archive.record(record(103))
        take_in(archive, entry(6))
        archive.record(record(104))
    found = list(entries([tmp_path]))
    told = [each for each in kinds(iter(found)) if each != "block"]
    assert told == [
        *("header", "record", "record", "request", "record"),
        *("snapshot", "request", "record"),
    ]
    (snapshot,) = (each.snapshot for each in found if each.HasField("snapshot"))
    assert (snapshot.seq, [each.sequence_id for each in snapshot.taken]) == (103, [5])
    assert not snapshot.taken[0].submit.prompt_token_ids
    starts = [each.request.snapshot_seq for each in found if each.HasField("request")]
    assert starts == [0, 103]
    assert not list(verify([tmp_path]))
    # A reader who begins there has it, and nothing before.
    behind = list(entries([tmp_path], Wanted(after=Cursor(7, 103))))
    assert kinds(iter(behind)) == ["header", "snapshot", "request", "record"]


def test_a_snapshot_whose_record_never_comes_is_none(tmp_path: Path) -> None:
    with archive_of(tmp_path) as archive:
        archive.snapshot(102, lambda: point(102))
        assert not archive.wants_snapshot
        archive.record(record(101))
        archive.record(record(103))
        take_in(archive, entry(6))
        archive.record(record(104))
    found = list(entries([tmp_path]))
    assert "snapshot" not in kinds(iter(found))
    assert [each.request.snapshot_seq for each in found if each.HasField("request")] == [0]


def is_due(archive: ArchiveWriter) -> bool:
    return archive.wants_snapshot


def test_a_snapshot_is_due_by_records_by_bytes_and_for_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FLUSH_S", 0.001)
    monkeypatch.setattr(writer, "SNAPSHOT_RECORDS", 3)
    monkeypatch.setattr(writer, "SNAPSHOT_BYTES", 1 << 12)
    bounds = ArchiveBounds(bytes_max=8 << 14, age_s_max=3600.0)
    archive = ArchiveWriter(tmp_path, header(), bounds)
    for seq in (101, 102, 103):
        assert not is_due(archive)
        archive.record(record(seq))
    assert is_due(archive)
    archive.snapshot(104, lambda: point(104))
    archive.record(record(104))
    assert not is_due(archive)
    take_in(archive, entry(1, prompt=range(1 << 12)))
    assert is_due(archive)
    monkeypatch.setattr(writer, "SNAPSHOT_BYTES", 1 << 30)
    archive.snapshot(105, lambda: point(105))
    archive.record(record(105))
    # Of more than a segment at a time the next one begins without.
    noise = [int.from_bytes(os.urandom(4), "little") for _ in range(1 << 12)]
    take_in(archive, entry(2, prompt=noise))
    until_written(archive)
    take_in(archive, entry(3, prompt=noise))
    until(lambda: is_due(archive))
    archive.close()
    assert len(segments([tmp_path])) > 1


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(arguments)
    return code, capsys.readouterr().out.splitlines()


def test_the_command_lists_shows_and_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with archive_of(tmp_path) as archive:
        for index in range(4):
            take_in(archive, entry(index))
            archive.record(record(101 + index, (index,)))
    code, lines = said_by(capsys, "ls", str(tmp_path))
    assert code == 0
    assert "epoch 7 segment 0, cell 0, kaiten 0.2.0, fair, with tokens" in lines[0]
    assert "records 101 to 104, 1970-01-01T00:01:41Z to 1970-01-01T00:01:44Z" in lines[0]
    told = json.loads(said_by(capsys, "ls", "--json", str(tmp_path))[1][0])
    assert (told["epoch"], told["records"]) == (7, [101, 104])
    code, lines = said_by(capsys, "cat", str(tmp_path), "--id", "t:2")
    assert [*json.loads(lines[2])] == ["record"]
    assert len(lines) == 3
    assert len(said_by(capsys, "cat", str(tmp_path), "--after", "7:102")[1]) == 5
    times = ("--since", "1970-01-01T00:01:42Z", "--until", "1970-01-01T00:01:43Z")
    code, lines = said_by(capsys, "cat", str(tmp_path), *times)
    assert sum('"record"' in line for line in lines) == 1
    assert said_by(capsys, "verify", str(tmp_path)) == (0, ["segments read: 1"])
    (segment,) = segments([tmp_path])
    os.truncate(segment.path, segment.path.stat().st_size - 1)
    code, lines = said_by(capsys, "verify", str(tmp_path))
    assert code == 1
    assert "torn" in lines[0]


def test_the_command_says_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("--after", "7", "is not EPOCH:SEQ"),
        ("--after", "7:x", "is not EPOCH:SEQ"),
        ("--since", "nan", "is no time"),
        ("--until", "tomorrow", "is no time"),
        ("--aftre", "7:1", "Did you mean --after?"),
    ],
)
def test_the_command_says_what_an_argument_should_be(
    capsys: pytest.CaptureFixture[str], flag: str, text: str, said: str
) -> None:
    assert main(["cat", flag, text]) == 2
    assert said in capsys.readouterr().err
