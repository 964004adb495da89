"""The same streams again and again, and how long each stood still."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from kaiten.client import AsyncClient

PROMPT_TOKENS: Final = (3, 120)
VOCABULARY: Final = 1000
RESUME_S: Final = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Tokens of each stream, the longest that any waited for its next, and for its first."""

    tokens: tuple[tuple[int, ...], ...]
    gap_s: float
    first_s: float
    still_under_way: int

    def changed(self, other: "Heard") -> int:
        """Streams whose tokens are not the other's."""
        return sum(mine != theirs for mine, theirs in zip(self.tokens, other.tokens, strict=True))


class Streams:
    """`count` requests of ragged prompts, half of them greedy, half seeded."""

    def __init__(self, address: str, *, count: int, tokens: int) -> None:
        draw = random.Random(7)
        self._address = address
        self._tokens = tokens
        self._prompts = [
            [7 + draw.randrange(VOCABULARY) for _ in range(draw.randint(*PROMPT_TOKENS))]
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self._prompts)

    async def read(
        self, at: int = 0, disturbance: Callable[[], Awaitable[None]] | None = None
    ) -> Heard:
        """All at once. When the furthest has `at` tokens, the disturbance comes."""
        reading = _Reading(self._tokens, at)
        under_way = 0
        async with (
            AsyncClient(self._address, resume_s=RESUME_S) as client,
            asyncio.TaskGroup() as group,
        ):
            tasks = [
                group.create_task(reading.read(client, number, prompt))
                for number, prompt in enumerate(self._prompts)
            ]
            if disturbance is not None:
                await reading.reached.wait()
                await disturbance()
                under_way = sum(not task.done() for task in tasks)
        return Heard(
            tokens=tuple(task.result() for task in tasks),
            gap_s=round(reading.gap_s, 2),
            first_s=round(reading.first_s, 2),
            still_under_way=under_way,
        )


class _Reading:
    def __init__(self, tokens: int, at: int) -> None:
        self.gap_s = self.first_s = 0.0
        self.reached = asyncio.Event()
        self._tokens = tokens
        self._at = at

    async def read(self, client: AsyncClient, number: int, prompt: list[int]) -> tuple[int, ...]:
        how: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        how |= {"seed": number} if number % 2 else {"temperature": 0}
        found: list[int] = []
        heard_s = time.monotonic()
        async with client.generate(token_ids=prompt, max_tokens=self._tokens, **how) as generation:
            async for delta in generation:
                waited_s, heard_s = time.monotonic() - heard_s, time.monotonic()
                if found:
                    self.gap_s = max(self.gap_s, waited_s)
                else:
                    self.first_s = max(self.first_s, waited_s)
                found += delta.token_ids
                if len(found) >= self._at:
                    self.reached.set()
        assert len(found) == self._tokens, f"stream {number}: {len(found)} tokens"
        return tuple(found)
