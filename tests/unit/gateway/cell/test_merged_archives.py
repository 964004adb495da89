"""Archives of several schedulers are one story, each part of it once."""

from collections.abc import AsyncGenerator

import pytest

from gateway.cell.archives import Part, merged
from kaiten.v1.archive_pb2 import ArchiveEntry
from kaiten.v1.ledger_pb2 import JournalRecord


def part(epoch: int, segment: int, *seqs: int) -> Part:
    return Part(epoch, segment, [ArchiveEntry(record=JournalRecord(seq=seq)) for seq in seqs])


async def source(*parts: Part) -> AsyncGenerator[Part, None]:
    for each in parts:
        yield each


async def told(*sources: AsyncGenerator[Part, None]) -> list[int]:
    parts = [each async for each in merged(sources)]
    return [entry.record.seq for each in parts for entry in each.entries]


async def test_leaderships_of_several_schedulers_take_turns() -> None:
    one = source(part(1, 0, 1, 2), part(1, 1, 3), part(5, 0, 8), part(5, 0, 9))
    other = source(part(3, 0, 4), part(3, 0, 5, 6), part(3, 1, 7), part(7, 0, 10))
    assert await told(one, source(), other) == list(range(1, 11))


async def test_a_folder_that_two_schedulers_share_is_read_once() -> None:
    parts = [part(1, 0, 1), part(1, 0, 2), part(1, 1, 3), part(2, 0, 4)]
    assert await told(source(*parts), source(*parts)) == [1, 2, 3, 4]


async def test_no_archive_is_none() -> None:
    assert await told() == []
    assert await told(source()) == []


@pytest.mark.parametrize("taken", [1, 2])
async def test_whoever_stops_reading_leaves_nothing_open(taken: int) -> None:
    closed: list[int] = []

    async def endless(epoch: int) -> AsyncGenerator[Part, None]:
        try:
            while True:
                yield part(epoch, 0, 1)
        finally:
            closed.append(epoch)

    parts = merged([endless(1), endless(2)])
    for _ in range(taken):
        assert (await anext(parts)).epoch == 1
    await parts.aclose()
    assert closed == [1, 2]
