"""Random histories of a cell against a dictionary: counters, outputs and recovery always agree."""

import random

import pytest

from kaiten.v1.ledger_pb2 import SubmitRecord
from ledger import Ledger, Load
from tests.support.play_leader import PlayLeader, stopped, submit_record

STEPS = 150


class Cell:
    """A leader, its live requests, and what they have put out; every action checks itself."""

    def __init__(self, ledger: Ledger, rng: random.Random) -> None:
        self.ledger = ledger
        self.rng = rng
        self.leader: PlayLeader
        self.live: dict[str, tuple[int, int]] = {}
        self.ended: dict[int, int] = {}
        self.count = 0

    @property
    def sequence_ids(self) -> list[int]:
        return [
            s for sequence_id, n in self.live.values() for s in range(sequence_id, sequence_id + n)
        ]

    @property
    def running(self) -> list[int]:
        return [sequence_id for sequence_id in self.sequence_ids if sequence_id not in self.ended]

    async def submit(self) -> None:
        self.count += 1
        id, n = f"r{self.count}", self.rng.randint(1, 3)
        submitted = await self.ledger.submit(submit_record(id, n=n), b"h")
        self.live[id] = (submitted.sequence_id, n)
        assert submitted.journal_seq == self.leader.seq

    async def step(self) -> None:
        members = [sequence_id for sequence_id in self.running if self.rng.random() < 0.7]
        tokens = {s: [self.rng.randrange(2**17)] * self.rng.randint(1, 2) for s in members}
        await self.leader.step(tokens)

    async def end_choice(self) -> None:
        if self.running:
            sequence_id = self.rng.choice(self.running)
            output_tokens = len(self.leader.outputs.get(sequence_id, []))
            self.ended[sequence_id] = output_tokens
            await self.leader.step({}, [stopped(sequence_id, output_tokens)])

    async def finish(self) -> None:
        if self.live:
            id = self.rng.choice(list(self.live))
            sequence_id, n = self.live.pop(id)
            await self.leader.finish(id, sequence_id, n=n)
            result = await self.ledger.result(id)
            assert result is not None
            for choice, kept in enumerate(result.choices):
                output = self.leader.outputs.get(sequence_id + choice, [])
                assert list(kept.output.token_ids) == output

    async def cancel(self) -> None:
        if self.live:
            assert await self.ledger.cancel(self.rng.choice(list(self.live)))

    async def fold(self) -> None:
        ends = [record.seq for record in self.leader.unfolded]
        through_seq = self.rng.choice([*ends, self.leader.seq])
        await self.leader.fold(through_seq, self.sequence_ids, parts=self.rng.randint(1, 3))

    async def change_leader(self) -> None:
        old = self.leader
        self.leader = await PlayLeader.elected(self.ledger, nonce=self.rng.randrange(1, 2**64))
        self.leader.outputs, self.leader.unfolded = old.outputs, old.unfolded
        recovered = await self.ledger.recover(self.leader.leader)
        submits = [e.record.id for e in recovered.entries if isinstance(e.record, SubmitRecord)]
        assert submits == list(self.live)
        assert recovered.journal_seq == self.leader.base > old.seq
        last = old.seq if old.seq > old.base else old.leader.after_seq
        assert self.leader.leader.after_seq == last
        assert recovered.tokens.keys() == set(self.sequence_ids)
        for sequence_id, output in recovered.tokens.items():
            assert list(output.token_ids) == old.outputs.get(sequence_id, [])
            unfolded = sum(list(record.sequence_ids).count(sequence_id) for record in old.unfolded)
            assert recovered.folded_counts[sequence_id] == len(output.token_ids) - unfolded
        ends = {s: f.output_tokens for s, f in recovered.finished.items()}
        assert ends == {s: n for s, n in self.ended.items() if s in self.sequence_ids}

    async def look(self) -> None:
        assert await self.ledger.load() == Load(
            choices=len(self.sequence_ids), prompt_tokens=3 * len(self.live)
        )
        if self.sequence_ids:
            sequence_id = self.rng.choice(self.sequence_ids)
            output, finished = await self.ledger.history(sequence_id, through_seq=self.leader.seq)
            assert list(output.token_ids) == self.leader.outputs.get(sequence_id, [])
            assert (finished is not None) == (sequence_id in self.ended)


@pytest.mark.parametrize("seed", range(4))
async def test_any_history_agrees_with_the_dictionary(ledger: Ledger, seed: int) -> None:
    rng = random.Random(seed)
    cell = Cell(ledger, rng)
    cell.leader = await PlayLeader.elected(ledger)
    actions = [cell.submit, cell.step, cell.end_choice, cell.finish, cell.cancel, cell.fold]
    actions += [cell.change_leader, cell.look]
    weights = [4, 8, 2, 2, 1, 2, 1, 3]
    for action in rng.choices(actions, weights, k=STEPS):
        await action()
    while cell.live:
        await cell.finish()
    await cell.look()
    assert await ledger.inbox_all() == []
