"""Any interleaving of commits, folds, deliveries and subscriptions: no gap, no repeat, one end."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kaiten.v1.ledger_pb2 import FoldedTokens, JournalRecord
from ledger import Follower, History, Lease, Update
from service_kit.errors import Unavailable
from tests.support.play_leader import eventually, stopped

SEQUENCE_IDS = (1, 2, 3)


class MemoryJournal:
    """The ledger as a follower sees it: a journal that can be trimmed, and whole outputs."""

    def __init__(self) -> None:
        self.records: list[JournalRecord] = []
        self.outputs: dict[int, list[int]] = {sequence_id: [] for sequence_id in SEQUENCE_IDS}
        self.ended: set[int] = set()
        self.trimmed_seq = 0
        self.failures_left = self.reads = 0
        # For the next one who reads.
        self.is_away = False
        self.arrived = asyncio.Event()

    @property
    def seq(self) -> int:
        return len(self.records)

    def commit(self, sequence_ids: list[int], ending: list[int]) -> None:
        record = JournalRecord(seq=self.seq + 1)
        for sequence_id in sequence_ids:
            if sequence_id not in self.ended:
                output = self.outputs[sequence_id]
                record.sequence_ids.append(sequence_id)
                record.positions.append(len(output))
                record.token_ids.append(1000 * sequence_id + len(output))
                output.append(record.token_ids[-1])
        for sequence_id in ending:
            if sequence_id not in self.ended:
                self.ended.add(sequence_id)
                record.finished.append(stopped(sequence_id, len(self.outputs[sequence_id])))
        self.records.append(record)
        self.arrived.set()

    async def leader(self) -> Lease | None:
        return None

    async def histories(
        self, sequence_ids: Sequence[int], *, through_seq: int
    ) -> dict[int, History | Exception]:
        if self.failures_left:
            self.failures_left -= 1
            raise Unavailable("away")
        self.reads += 1
        found = dict[int, History | Exception]()
        for sequence_id in sequence_ids:
            output = FoldedTokens(token_ids=self.outputs[sequence_id])
            end = stopped(sequence_id, len(output.token_ids)) if sequence_id in self.ended else None
            found[sequence_id] = History(output, end)
        # The journal moves on between the snapshot and its arrival.
        for _ in range(3):
            await asyncio.sleep(0)
        return found

    async def journal_read(
        self, after_seq: int, *, block_ms: int, count: int
    ) -> list[JournalRecord]:
        await asyncio.sleep(0)
        while True:
            start = max(after_seq, self.trimmed_seq)
            if self.records[start:]:
                return self.records[start : start + count]
            self.arrived.clear()
            await self.arrived.wait()
            if self.is_away:
                self.is_away = False
                raise Unavailable("away")


class Reader:
    """One subscriber: what it has got, checked at every update."""

    def __init__(
        self, follower: Follower, from_seq: int, positions: dict[int, int], *, is_said: bool
    ) -> None:
        self.subscription = follower.subscribe(
            list(positions), from_seq=from_seq, positions=positions if is_said else None
        )
        self.start = positions
        self.got: dict[int, list[int]] = {sequence_id: [] for sequence_id in positions}
        self.ended: set[int] = set()

    def take(self, update: Update) -> None:
        got = self.got[update.sequence_id]
        assert update.sequence_id not in self.ended, "nothing comes after the end"
        if update.token_ids:
            assert update.position == self.start[update.sequence_id] + len(got)
        got += update.token_ids
        if update.finished is not None:
            self.ended.add(update.sequence_id)

    async def read_to_the_end(self) -> None:
        async for update in self.subscription:
            self.take(update)

    def read_what_is_there(self) -> None:
        """Step the iterator until it would wait; what it waits for is given up and asked again."""
        while True:
            step: Coroutine[Any, Any, Update] = self.subscription.__anext__()
            try:
                step.send(None)
            except StopIteration as stop:
                self.take(stop.value)
            except StopAsyncIteration:
                return
            else:
                step.close()
                return


ACTIONS = st.one_of(
    st.tuples(
        st.just("commit"),
        st.lists(st.sampled_from(SEQUENCE_IDS), unique=True),
        st.lists(st.sampled_from(SEQUENCE_IDS), max_size=1),
    ),
    st.tuples(st.just("deliver"), st.integers(1, 5)),
    st.tuples(st.just("trim"), st.integers(0, 100)),
    st.tuples(st.just("subscribe"), st.sampled_from(["all", "all, unsaid", "new"])),
    st.tuples(st.just("read"), st.integers(0, 3)),
    st.tuples(st.just("stream interval"), st.integers(0, 3), st.integers(1, 4)),
)


@settings(max_examples=300)
@given(
    actions=st.lists(ACTIONS, max_size=60),
    recent_records=st.integers(1, 4),
    failures=st.integers(0, 2),
    live_steps=st.integers(0, 8),
)
def test_every_subscriber_gets_every_token_once(
    actions: list[tuple[Any, ...]], recent_records: int, failures: int, live_steps: int
) -> None:
    async def play() -> None:
        journal = MemoryJournal()
        follower = Follower(journal, recent_records=recent_records)
        readers = _interleave(actions, journal, follower)
        journal.failures_left = failures
        await _read_to_the_end(journal, follower, readers, live_steps)
        for reader in readers:
            for sequence_id, start in reader.start.items():
                assert reader.got[sequence_id] == journal.outputs[sequence_id][start:]
            assert reader.ended == reader.start.keys()
        assert follower.sequence_count == 0

    asyncio.run(asyncio.wait_for(play(), 60))


def _interleave(
    actions: list[tuple[Any, ...]], journal: MemoryJournal, follower: Follower
) -> list[Reader]:
    readers: list[Reader] = []
    passed_seq = 0
    for name, *args in actions:
        if name == "commit":
            journal.commit(*args)
        elif name == "deliver":
            start = max(passed_seq, journal.trimmed_seq)
            for record in journal.records[start : start + args[0]]:
                follower.take(record)
                passed_seq = record.seq
        elif name == "trim":
            journal.trimmed_seq = max(journal.trimmed_seq, journal.seq * args[0] // 100)
        elif name == "subscribe":
            readers.append(_subscribed(args[0], journal, follower))
        elif readers:
            reader = readers[args[0] % len(readers)]
            if name == "read":
                reader.read_what_is_there()
            else:
                reader.subscription.set_stream_interval(args[1])
    return readers


def _subscribed(kind: str, journal: MemoryJournal, follower: Follower) -> Reader:
    """All of it, as a client that comes back; or what is new, as after reading the history."""
    if kind != "new":
        return Reader(follower, 0, dict.fromkeys(SEQUENCE_IDS, 0), is_said=kind == "all")
    live = [sequence_id for sequence_id in SEQUENCE_IDS if sequence_id not in journal.ended]
    known = {sequence_id: len(journal.outputs[sequence_id]) for sequence_id in live}
    return Reader(follower, journal.seq, known, is_said=True)


async def _read_to_the_end(
    journal: MemoryJournal, follower: Follower, readers: list[Reader], live_steps: int
) -> None:
    tail = asyncio.create_task(follower.run())
    reading = asyncio.gather(*(reader.read_to_the_end() for reader in readers))
    for _ in range(live_steps):
        journal.commit(list(SEQUENCE_IDS), [])
        await asyncio.sleep(0)
    journal.commit([], list(SEQUENCE_IDS))
    await reading
    tail.cancel()


async def test_a_subscription_from_now_starts_with_the_next_token() -> None:
    """Attach: what lies before from_seq is known already, wherever the tail is."""
    for delivered in range(6):
        journal = MemoryJournal()
        follower = Follower(journal)
        for _ in range(5):
            journal.commit([1], [])
        for record in journal.records[:delivered]:
            follower.take(record)
        with follower.subscribe([1], from_seq=3) as subscription:
            journal.commit([1], [1])
            for record in journal.records[delivered:]:
                follower.take(record)
            if delivered == 0:
                # Nothing was passed yet when it subscribed: run() decides where the tail starts.
                tail = asyncio.create_task(follower.run())
            updates = [update async for update in subscription]
            if delivered == 0:
                tail.cancel()
        tokens = [token for update in updates for token in update.token_ids]
        assert (updates[0].position, tokens) == (3, [1003, 1004, 1005]), delivered
        assert updates[-1].finished is not None


async def test_updates_coalesce_and_a_stop_string_cuts_what_is_pending() -> None:
    journal = MemoryJournal()
    follower = Follower(journal)
    follower.take(JournalRecord(seq=1))
    subscription = follower.subscribe([1], from_seq=1)
    for _ in range(6):
        journal.commit([1], [])
    for record in journal.records:
        follower.take(JournalRecord(seq=record.seq + 1, **_columns(record)))
    first = await anext(subscription)
    assert (first.position, len(first.token_ids), first.finished) == (0, 6, None)
    late = JournalRecord(seq=8, sequence_ids=[1, 1], positions=[6, 7], token_ids=[5, 6])
    late.finished.append(stopped(1, 7))
    follower.take(late)
    last = await anext(subscription)
    assert (last.position, last.token_ids, last.finished) == (6, [5], stopped(1, 7))
    assert [update async for update in subscription] == []


async def test_what_is_awaited_is_told_when_there_is_enough_or_at_the_end_or_for_a_hole() -> None:
    journal = MemoryJournal()
    follower = Follower(journal)
    follower.start_at(0)
    reader = Reader(follower, 0, {1: 0}, is_said=True)
    reader.subscription.set_stream_interval(3)
    told = []
    for ending in ([], [], [], [], [], [1]):
        journal.commit([1], ending)
        follower.take(journal.records[-1])
        reader.read_what_is_there()
        told.append(len(reader.got[1]))
    assert told == [1, 1, 1, 4, 4, 6]
    reader = Reader(follower, 6, {2: 0}, is_said=True)
    reader.subscription.set_stream_interval(3)
    for seq, lost in ((7, 0), (8, 1)):
        for _ in range(1 + lost):
            journal.commit([2], [])
        follower.take(JournalRecord(seq=seq, **_columns(journal.records[-1])))
        reader.take(await anext(reader.subscription))
    assert (journal.reads, reader.got[2]) == (1, journal.outputs[2])


async def test_a_closed_subscription_leaves_nothing_and_ends() -> None:
    follower = Follower(MemoryJournal())
    early = follower.subscribe([1, 2], from_seq=0)
    follower.take(JournalRecord(seq=1))
    placed = follower.subscribe([1, 2], from_seq=1)
    follower.take(JournalRecord(seq=2, sequence_ids=[1], positions=[0], token_ids=[4]))
    for subscription in (early, placed):
        subscription.close()
        subscription.close()
    assert follower.sequence_count == 0
    follower.take(JournalRecord(seq=3, sequence_ids=[1], positions=[1], token_ids=[5]))
    assert [update async for update in early] == []
    assert [update async for update in placed] == []


async def test_who_waits_for_a_record_that_is_lost_is_told_what_is_known() -> None:
    """A store that has gone back, and whose clock is behind, does not come to that number soon."""
    journal = MemoryJournal()
    follower = Follower(journal)
    journal.commit([1], [])
    tail = asyncio.create_task(follower.run())
    await eventually(lambda: follower.is_connected)
    follower.take(journal.records[0])
    with follower.subscribe([2], from_seq=9) as subscription:
        journal.ended.add(2)
        journal.is_away = True
        journal.arrived.set()
        update = await asyncio.wait_for(anext(subscription), 60)
        assert update.finished is not None
    tail.cancel()


async def test_a_thousand_holes_are_filled_by_a_few_reads() -> None:
    """Everybody who comes back at once shares a read; one who gives up hurts none."""
    journal = MemoryJournal()
    follower = Follower(journal)
    tail = asyncio.create_task(follower.run())
    for _ in range(300):
        journal.commit([1, 2, 3], [])
    await eventually(lambda: follower.is_connected)
    readers = [
        Reader(follower, 0, dict.fromkeys(SEQUENCE_IDS, 0), is_said=True) for _ in range(333)
    ]
    reading = [asyncio.create_task(reader.read_to_the_end()) for reader in readers]
    await asyncio.sleep(0)
    reading[0].cancel()
    await eventually(lambda: all(reader.got[3] for reader in readers[1:]))
    assert journal.reads <= 6
    journal.commit([], [1, 2, 3])
    await asyncio.gather(*reading[1:])
    assert all(reader.got == journal.outputs for reader in readers[1:])
    tail.cancel()


def _columns(record: JournalRecord) -> dict[str, Any]:
    return {
        "sequence_ids": record.sequence_ids,
        "positions": record.positions,
        "token_ids": record.token_ids,
    }
