"""Laws of length: each row of `LAWS` draws the shapes of a workload.

Azure's and Mooncake's laws are fitted to the published traces (means and percentiles in the
comments); their CSV and JSONL files themselves are read by `traces`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kaiten.bench.workload import BLOCK_TOKENS, Shape

Draw = Callable[[np.random.Generator, int], list[Shape]]
MOONCAKE_REUSE: Final = 0.366


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """How to draw, with the seed and the count it is usually drawn with."""

    draw: Draw
    says: str
    seed: int = 0
    count: int = 64


def ragged(rng: np.random.Generator, count: int) -> list[Shape]:
    """Prompt and output log-uniform in 8..256: the crowd of the side-by-side comparison."""
    low, high = math.log(8), math.log(257)
    prompts = np.exp(rng.uniform(low, high, count)).astype(int).clip(8, 256)
    outputs = np.exp(rng.uniform(low, high, count)).astype(int).clip(8, 256)
    return _zipped(prompts.tolist(), outputs.tolist())


def exponential(cap: int) -> Draw:
    """512-token prompts, outputs exponential with mean 128 cut at `cap`."""

    def draw(rng: np.random.Generator, count: int) -> list[Shape]:
        outputs = rng.exponential(128.0, count).astype(int).clip(1, cap)
        return _zipped([512] * count, outputs.tolist())

    return draw


def uniform(rng: np.random.Generator, count: int) -> list[Shape]:
    """Both lengths uniform in 100..1024."""
    prompts = rng.integers(100, 1025, count)
    return _zipped(prompts.tolist(), rng.integers(100, 1025, count).tolist())


def azure_conversation(rng: np.random.Generator, count: int) -> list[Shape]:
    """Input mean 1155, p50 1020, p90 2734; output mean 211, p50 129, p90 424."""
    prompts = _lognormal(rng, 6.63, 0.99, 14_000, count)
    return _zipped(prompts, _lognormal(rng, 5.02, 0.86, 1000, count))


def azure_code(rng: np.random.Generator, count: int) -> list[Shape]:
    """Input mean 2048, p50 1469, p90 5188; output mean 27.9, p50 13, p90 55, p99 251."""
    prompts = _lognormal(rng, 7.29, 0.815, 7500, count)
    return _zipped(prompts, _lognormal(rng, 2.565, 1.236, 1000, count))


def mooncake(rng: np.random.Generator, count: int) -> list[Shape]:
    """Input mean 12035, p50 6909; output mean 343; 36.6 % of 512-token blocks were seen before.

    The share is steered: whenever it is below, a request continues a random earlier one.
    """
    prompts = _lognormal(rng, 8.84, 1.053, 120_000, count)
    outputs = rng.normal(345.0, 190.0, count).astype(int).clip(1, 2000).tolist()
    known: list[tuple[int, ...]] = []
    shapes, blocks_made, blocks_all, blocks_reused = [], 0, 0, 0
    for prompt_tokens, output_tokens in zip(prompts, outputs, strict=True):
        needed = -(-prompt_tokens // BLOCK_TOKENS)
        prefix: tuple[int, ...] = ()
        if known and blocks_reused < MOONCAKE_REUSE * (blocks_all + needed):
            # The last block is the request's own: nobody asks the same thing twice.
            prefix = known[int(rng.integers(len(known)))][: needed - 1]
        fresh = needed - len(prefix)
        blocks = prefix + tuple(range(blocks_made, blocks_made + fresh))
        blocks_made += fresh
        blocks_all += needed
        blocks_reused += len(prefix)
        known.append(blocks)
        shapes.append(
            Shape(prompt_tokens=prompt_tokens, output_tokens=output_tokens, blocks=blocks)
        )
    return shapes


def reused_share(shapes: Sequence[Shape]) -> float:
    """Of all named blocks, how many an earlier request had named."""
    seen: set[int] = set()
    total = reused = 0
    for shape in shapes:
        total += len(shape.blocks)
        reused += sum(block in seen for block in shape.blocks)
        seen.update(shape.blocks)
    return reused / total if total else 0.0


def _lognormal(
    rng: np.random.Generator, mean: float, sigma: float, cap: int, count: int
) -> list[int]:
    drawn: list[int] = rng.lognormal(mean, sigma, count).astype(int).clip(1, cap).tolist()
    return drawn


def _zipped(prompts: Sequence[int], outputs: Sequence[int]) -> list[Shape]:
    return [
        Shape(prompt_tokens=prompt, output_tokens=output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


LAWS: Final[dict[str, Law]] = {
    "ragged": Law(draw=ragged, says="prompt and output log-uniform 8..256", seed=1234),
    "exponential-32": Law(draw=exponential(32), says="prompt 512, output exponential 128, cap 32"),
    "exponential-128": Law(draw=exponential(128), says="the same, cap 128"),
    "exponential-512": Law(draw=exponential(512), says="the same, cap 512"),
    "exponential-1536": Law(draw=exponential(1536), says="the same, cap 1536"),
    "uniform": Law(draw=uniform, says="prompt and output uniform 100..1024", count=256),
    "azure-conversation": Law(draw=azure_conversation, says="Azure 2023 chat", count=256),
    "azure-code": Law(draw=azure_code, says="Azure 2023 code completion", count=256),
    "mooncake": Law(draw=mooncake, says="long prompts that share prefixes", count=128),
}
