"""Static batching as its users know it, played by the client over any target.

Who asks while a batch is computed waits. When all of it is done, the first `seats` of those who
wait go together, and every row computes as many tokens as the longest of them needs: a batch of
fixed shape computes its finished rows to the end. An asker gets its own tokens as they come, and
has its answer with the last of them; what its row computes from there on is thrown away.

That is kind to static batching, which usually answers when the whole batch is done.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from kaiten.bench.outcomes import AskError, Ending, OnTokens
from kaiten.bench.targets import Target
from kaiten.bench.workload import Job


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asker:
    job: Job
    on_tokens: OnTokens
    answer: "asyncio.Future[Ending]"


class StaticBatches:
    """A target whose requests are computed in batches of at most `seats`."""

    def __init__(self, target: Target, seats: int) -> None:
        self._target = target
        self._seats = seats
        self._waiting: deque[_Asker] = deque()
        self._turn: asyncio.Task[None] | None = None
        self.vocab_size = target.vocab_size
        self.context_tokens = target.context_tokens

    @property
    def says(self) -> str:
        return f"{self._target.says}, in static batches of {self._seats}"

    async def prepare(self) -> None:
        await self._target.prepare()

    async def ask(self, job: Job, on_tokens: OnTokens, timeout_s: float) -> Ending:
        """One answer of exactly `job.output_tokens`, waiting for its batch included."""
        asker = _Asker(job=job, on_tokens=on_tokens, answer=asyncio.Future())
        self._waiting.append(asker)
        if self._turn is None or self._turn.done():
            # Runs when everybody who asks at this very moment has been heard.
            self._turn = asyncio.create_task(self._batches(timeout_s))
        return await asker.answer

    async def close(self) -> None:
        """Also waits for the rows that are computed in vain."""
        if self._turn is not None:
            await self._turn
        await self._target.close()

    async def _batches(self, timeout_s: float) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._seats, len(self._waiting)))]
            longest = max(asker.job.output_tokens for asker in batch)
            async with asyncio.TaskGroup() as group:
                for asker in batch:
                    group.create_task(self._row(asker, longest, timeout_s))

    async def _row(self, asker: _Asker, tokens: int, timeout_s: float) -> None:
        wanted = asker.job.output_tokens
        job = Job(index=asker.job.index, prompt=asker.job.prompt, output_tokens=tokens)
        seen = 0

        def on_tokens(count: int) -> None:
            nonlocal seen
            if (own := min(count, wanted - seen)) > 0:
                asker.on_tokens(own)
            seen += count
            if seen >= wanted and not asker.answer.done():
                asker.answer.set_result(Ending(output_tokens=wanted))

        try:
            ending = await self._target.ask(job, on_tokens, timeout_s)
        except AskError as error:
            if not asker.answer.done():
                asker.answer.set_exception(error)
            return
        if not asker.answer.done():
            asker.answer.set_result(ending)  # It stopped early: the count will tell.
