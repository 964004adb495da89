"""Who missed something is given it by few reads, however many come, and when."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from kaiten.v1.ledger_pb2 import FoldedTokens, JournalRecord, SequenceFinished
from ledger import Follower, History, Lease
from ledger.shared_history import SharedHistory

CLIENTS = 50


class CountedReads:
    """A journal that answers after `read_s`, and says which sequences were read together."""

    def __init__(self, clock: "Gate | None" = None, read_s: float = 0.0) -> None:
        self.reads: list[tuple[int, ...]] = []
        self._clock, self._read_s = clock, read_s

    async def histories(
        self, sequence_ids: Sequence[int], *, through_seq: int
    ) -> Mapping[int, History | Exception]:
        self.reads.append(tuple(sequence_ids))
        if self._clock is not None:
            self._clock.now_s += self._read_s
        ended = {one: SequenceFinished(sequence_id=one, output_tokens=1) for one in sequence_ids}
        return {one: History(FoldedTokens(token_ids=[one]), ended[one]) for one in sequence_ids}

    async def leader(self) -> Lease | None:
        return None

    async def journal_read(
        self, after_seq: int, *, block_ms: int, count: int
    ) -> list[JournalRecord]:
        raise AssertionError("nobody follows")


class Gate:
    """A clock that moves when it is told to; nobody's sleep ends until it is opened."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.asked_s: list[float] = []
        self.opened = asyncio.Event()

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    async def sleep(self, seconds: float) -> None:
        self.asked_s.append(seconds)
        await self.opened.wait()


@pytest.mark.parametrize(("read_s", "apart_s"), [(0.001, 0.01), (0.015, 0.15), (0.5, 0.2)])
async def test_who_comes_soon_after_a_read_shares_the_next_one_with_all_others(
    read_s: float, apart_s: float
) -> None:
    gate = Gate()
    journal = CountedReads(gate, read_s)
    history = SharedHistory(journal, lambda: 7, clock=gate)
    (first,) = await history.of([0])
    assert list(first.output.token_ids) == [0], "the first waits for nobody"
    waiting = []
    for sequence_id in range(1, CLIENTS):
        waiting.append(asyncio.create_task(history.of([sequence_id])))
        # Each comes alone, when a read for the one before it would be over.
        for _ in range(5):
            await asyncio.sleep(0)
    assert journal.reads == [(0,)]
    gate.opened.set()
    found = await asyncio.gather(*waiting)
    assert [list(each.output.token_ids) for (each,) in found] == [[n] for n in range(1, CLIENTS)]
    assert journal.reads == [(0,), tuple(range(1, CLIENTS))]
    assert gate.asked_s == [pytest.approx(apart_s)]


async def test_who_comes_long_after_a_read_waits_for_nobody() -> None:
    """Seen: a finished response, streamed anew event by event, took 0.4 s each time."""
    gate = Gate()
    journal = CountedReads(gate, read_s=0.002)
    history = SharedHistory(journal, lambda: 7, clock=gate)
    for sequence_id in range(3):
        await history.of([sequence_id])
        gate.now_s += 0.021
    assert journal.reads == [(0,), (1,), (2,)]
    assert not gate.asked_s


async def test_all_choices_of_one_request_are_read_together() -> None:
    """Seen: a finished request of eight choices took 1.5 s to look at, 0.2 s for each after one."""
    journal = CountedReads()
    follower = Follower(journal)
    follower.start_at(9)
    choices = range(8)
    subscription = follower.subscribe(choices, from_seq=0, positions=dict.fromkeys(choices, 0))
    updates = [update async for update in subscription]
    assert [update.sequence_id for update in updates] == list(choices)
    assert [update.token_ids for update in updates] == [[each] for each in choices]
    assert journal.reads == [tuple(choices)]
