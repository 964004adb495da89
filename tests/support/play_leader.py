"""A scheduler reduced to its ledger calls, and small builders for records."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from redis.asyncio import Redis

from kaiten.v1.common_pb2 import FinishReason, TokenLogprobs
from kaiten.v1.ledger_pb2 import (
    ChoiceResult,
    FoldedTokens,
    JournalRecord,
    RequestResult,
    SequenceFinished,
    SequenceLogprobs,
    SubmitRecord,
)
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import FoldPart, Leader, Ledger, pieces_of


def submit_record(
    id: str, *, n: int = 1, prompt: Sequence[int] = (1, 2, 3), tenant: str = "default"
) -> SubmitRecord:
    sampling = RowSampling(max_tokens=16)
    return SubmitRecord(id=id, tenant=tenant, n=n, prompt_token_ids=prompt, sampling=sampling)


def stopped(sequence_id: int, output_tokens: int) -> SequenceFinished:
    return SequenceFinished(
        sequence_id=sequence_id, reason=FinishReason.FINISH_REASON_STOP, output_tokens=output_tokens
    )


async def outlive_results(redis_url: str, cell: str) -> None:
    """As if everything that is kept for a time had been kept for it."""
    async with Redis.from_url(redis_url) as store:
        keys = [key async for key in store.scan_iter(f"kaiten:{{{cell}}}:*", count=1000)]
        expiring = [key for key in keys if await store.ttl(key) > 0]
        assert expiring, "nothing of this cell would ever expire"
        for key in expiring:
            await store.pexpire(key, 1)
        async with asyncio.timeout(60):
            while await store.exists(*expiring):  # noqa: ASYNC110 - the store's own doing
                await asyncio.sleep(0.002)


async def eventually(is_met: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait for a condition that another task brings about."""
    give_up_at = time.monotonic() + timeout_s
    while not is_met():
        assert time.monotonic() < give_up_at, "the condition was never met"
        await asyncio.sleep(0.002)


class PlayLeader:
    """Leads a cell by hand and remembers every token it has committed."""

    def __init__(self, ledger: Ledger, leader: Leader) -> None:
        self.ledger = ledger
        self.leader = leader
        self.seq = leader.journal_seq
        self.outputs: dict[int, list[int]] = {}
        self.unfolded: list[JournalRecord] = []

    @classmethod
    async def elected(cls, ledger: Ledger, nonce: int = 1) -> "PlayLeader":
        leader = await ledger.elect("127.0.0.1:1", nonce, seen=await ledger.leader())
        assert leader is not None
        return cls(ledger, leader)

    @property
    def base(self) -> int:
        """What the first record of this leadership comes after: the n-th is base + n."""
        return self.leader.journal_seq

    def record(
        self,
        tokens: Mapping[int, Sequence[int]],
        finished: Sequence[SequenceFinished] = (),
        *,
        with_logprobs: bool = False,
    ) -> JournalRecord:
        """The next record; the tokens continue what has been recorded before."""
        self.seq += 1
        record = JournalRecord(seq=self.seq, epoch=self.leader.epoch, finished=finished)
        if self.seq == self.base + 1:
            record.after_seq = self.leader.after_seq
        for sequence_id, token_ids in tokens.items():
            output = self.outputs.setdefault(sequence_id, [])
            for token_id in token_ids:
                record.sequence_ids.append(sequence_id)
                record.positions.append(len(output))
                record.token_ids.append(token_id)
                output.append(token_id)
                if with_logprobs:
                    logprobs = TokenLogprobs(logprob=-float(token_id))
                    record.logprobs.append(
                        SequenceLogprobs(sequence_id=sequence_id, logprobs=logprobs)
                    )
        self.unfolded.append(record)
        return record

    async def step(
        self,
        tokens: Mapping[int, Sequence[int]],
        finished: Sequence[SequenceFinished] = (),
        endings: Sequence[RequestResult] = (),
        *,
        with_logprobs: bool = False,
    ) -> JournalRecord:
        record = self.record(tokens, finished, with_logprobs=with_logprobs)
        await self.ledger.commit(self.leader, record, endings)
        return record

    def ending(
        self, id: str, sequence_id: int, *, n: int = 1, prompt_tokens: int = 3
    ) -> RequestResult:
        """The end of a request whose choices have put out what `outputs` says."""
        choices = []
        for choice in range(sequence_id, sequence_id + n):
            output = self.outputs.get(choice, [])
            choices.append(
                ChoiceResult(
                    output=FoldedTokens(token_ids=output), finished=stopped(choice, len(output))
                )
            )
        return RequestResult(
            id=id, sequence_id=sequence_id, prompt_tokens=prompt_tokens, choices=choices
        )

    async def finish(self, id: str, sequence_id: int, *, n: int = 1) -> None:
        """End a request with a record of its own."""
        ends = [
            stopped(s, len(self.outputs.get(s, []))) for s in range(sequence_id, sequence_id + n)
        ]
        await self.step({}, ends, [self.ending(id, sequence_id, n=n)])

    async def fold(
        self, through_seq: int, live: Sequence[int], *, parts: int = 1, ended_by: int | None = None
    ) -> None:
        """In so many parts, each sent twice; of those the first `ended_by` alone."""
        due = [record for record in self.unfolded if record.seq <= through_seq]
        pieces = {
            sequence_id: piece
            for sequence_id, piece in pieces_of(due).items()
            if sequence_id in live
        }
        for number in range(parts if ended_by is None else ended_by):
            some = dict(list(pieces.items())[number::parts])
            for _ in range(2):
                await self.ledger.fold(self.leader, through_seq, some, part=FoldPart(number, parts))
        if ended_by is None:
            self.unfolded = [record for record in self.unfolded if record.seq > through_seq]
