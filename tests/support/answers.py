"""What a client sees of one request: tokens by position, one end per choice."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable

from kaiten.v1.common_pb2 import FINISH_REASON_STOP, FinishReason
from kaiten.v1.ledger_pb2 import SequenceFinished, SubmitRecord
from ledger import Subscription, Update

WAIT_S = 60.0
POLL_S, POLL_S_MAX = 0.01, 0.1
# Times as long as it took to ask it is not asked again, within these, nor for this share of what it
# waited: who waits for seconds asks ten times in one, and leaves the cores to the others.
REST, REST_OF_WAIT = 4, 0.05


async def until(
    question: Callable[[], object] | Callable[[], Awaitable[object]],
    what: str,
    timeout_s: float = WAIT_S,
) -> None:
    """Wait for a condition."""
    began_at = time.monotonic()
    while True:
        asked_at = time.monotonic()
        answer = question()
        if await answer if isawaitable(answer) else answer:
            return
        now = time.monotonic()
        assert now < began_at + timeout_s, f"still not after {timeout_s:g} s: {what}"
        rest_s = max(POLL_S, REST * (now - asked_at), REST_OF_WAIT * (now - began_at))
        await asyncio.sleep(min(rest_s, POLL_S_MAX))


class Answer:
    """Follows a request; every update is checked as it comes."""

    def __init__(self, record: SubmitRecord, sequence_id: int, subscription: Subscription) -> None:
        self.record = record
        self.sequence_id = sequence_id
        self.sequence_ids = range(sequence_id, sequence_id + record.n)
        self.outputs: dict[int, list[int]] = {one: [] for one in self.sequence_ids}
        self.endings: dict[int, SequenceFinished] = {}
        # On this process's monotonic clock, one per update.
        self.heard_s: list[float] = []
        self._following = asyncio.create_task(self._follow(subscription))

    @property
    def token_count(self) -> int:
        return sum(map(len, self.outputs.values()))

    @property
    def is_over(self) -> bool:
        return len(self.endings) == self.record.n

    @property
    def reasons(self) -> list[FinishReason]:
        """Of each choice, in order."""
        return [self.endings[sequence_id].reason for sequence_id in self.sequence_ids]

    @property
    def gap_s_max(self) -> float:
        """The longest silence between two updates."""
        pairs = zip(self.heard_s, self.heard_s[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)

    @property
    def silence_s(self) -> float:
        """Since the last update."""
        return time.monotonic() - self.heard_s[-1]

    async def has_tokens(self, count: int) -> None:
        """Wait until so many tokens have been shown; the request must not end before."""
        await until(lambda: self.token_count >= count or self._following.done(), f"{count} tokens")
        if self._following.done():
            self._following.result()
        assert self.token_count >= count

    async def done(self, timeout_s: float = WAIT_S) -> None:
        """Wait for the end of every choice. Raises what the subscription raised."""
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._following)
        assert self.is_over

    async def fails_with(self, kind: type[Exception], timeout_s: float = WAIT_S) -> None:
        """Wait for the subscription to raise."""
        await asyncio.wait((self._following,), timeout=timeout_s)
        assert self._following.done(), f"no {kind.__name__} after {timeout_s:g} s"
        assert isinstance(self._following.exception(), kind)

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    async def _follow(self, subscription: Subscription) -> None:
        with subscription:
            async for update in subscription:
                self._take(update)

    def _take(self, update: Update) -> None:
        output = self.outputs[update.sequence_id]
        assert update.sequence_id not in self.endings, "nothing comes after the end"
        assert update.position == len(output) or not update.token_ids, "positions are contiguous"
        output += update.token_ids
        self.heard_s.append(time.monotonic())
        if update.finished is not None:
            # A stop string found downstream ends a sequence before the last token shown.
            if update.finished.reason == FINISH_REASON_STOP:
                del output[update.finished.output_tokens :]
            assert update.finished.output_tokens == len(output)
            self.endings[update.sequence_id] = update.finished
