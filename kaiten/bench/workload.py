"""What is asked: shapes (lengths, and which prefixes are shared), and the jobs made of them.

A shape says how long; a job has the very tokens. The same seed gives the same jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Final

import numpy as np

# Below are the special and byte tokens of most vocabularies.
TOKEN_ID_MIN: Final = 300
BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One request of a law or a trace.

    `blocks` names the prompt's blocks of `block_tokens`: equal names are equal tokens. Empty: a
    prompt that nobody shares. `due_s` counts from the trace's start; None: no arrival is known.
    """

    prompt_tokens: int
    output_tokens: int
    due_s: float | None = None
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        assert self.prompt_tokens >= 1
        assert self.output_tokens >= 1
        assert len(self.blocks) * self.block_tokens >= self.prompt_tokens or not self.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request as it is sent: these prompt tokens, exactly so many output tokens."""

    index: int
    prompt: tuple[int, ...]
    output_tokens: int
    due_s: float | None = None


def fill(shapes: Sequence[Shape], rng: np.random.Generator, vocab_size: int) -> tuple[Job, ...]:
    """Jobs with random tokens in [300, vocab_size), shared where the shapes share."""
    lowest = min(TOKEN_ID_MIN, vocab_size // 2)
    # Drawn only where needed: a law without shared blocks must give the same tokens as ever.
    salt = int(rng.integers(2**31)) if any(shape.blocks for shape in shapes) else 0

    @cache
    def tokens_in(block: int, count: int) -> list[int]:
        own = np.random.default_rng([salt, block])
        drawn: list[int] = own.integers(lowest, vocab_size, count).tolist()
        return drawn

    def tokens_of(shape: Shape) -> tuple[int, ...]:
        if not shape.blocks:
            return tuple(rng.integers(lowest, vocab_size, shape.prompt_tokens).tolist())
        drawn = chain.from_iterable(tokens_in(block, shape.block_tokens) for block in shape.blocks)
        return tuple(drawn)[: shape.prompt_tokens]

    return tuple(
        Job(
            index=index,
            prompt=tokens_of(shape),
            output_tokens=shape.output_tokens,
            due_s=shape.due_s,
        )
        for index, shape in enumerate(shapes)
    )


def scaled(shape: Shape, factor: float) -> Shape:
    """All lengths times `factor`, blocks too, so that the same shares stay shared."""
    block_tokens = max(1, round(shape.block_tokens * factor)) if shape.blocks else BLOCK_TOKENS
    prompt_tokens = max(1, round(shape.prompt_tokens * factor))
    if shape.blocks:
        prompt_tokens = min(prompt_tokens, len(shape.blocks) * block_tokens)
    return replace(
        shape,
        prompt_tokens=prompt_tokens,
        output_tokens=max(1, round(shape.output_tokens * factor)),
        block_tokens=block_tokens,
    )


def limited(shape: Shape, context_tokens: int) -> Shape:
    """The shape within prompt + output <= context_tokens: the output keeps up to half of it."""
    output_tokens = min(shape.output_tokens, max(context_tokens // 2, 1))
    prompt_tokens = min(shape.prompt_tokens, max(context_tokens - output_tokens, 1))
    return replace(shape, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
