"""Attention on the device, over every size that models have, beside a formula in float64.

Beside it stand the tests of `tests/unit/kernels/interpreted` (see conftest.py). Sizes are combined
so that any two values of two columns meet in some case: each is kernels of its own to compile.
"""

import random
from itertools import combinations
from typing import Any, Final

import pytest
import torch

from kernels.attention.paged_attention import paged_attention
from kernels.attention.plan import LONG_SPLIT, LONG_TILE, SPLIT
from tests.support.on_device import DEVICE, MadeOn
from tests.unit.kernels.interpreted.interpreted_fp8 import quantised
from tests.unit.kernels.paged_cases import PagedCase, excess_over, paged_case, widened

pytestmark = pytest.mark.gpu

COLUMNS: Final[dict[str, tuple[Any, ...]]] = {
    "head_dim": (64, 80, 96, 128, 256),
    "block_size": (1, 5, 16, 64, 128),
    "group": (1, 2, 3, 4, 8, 16),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "window": (None, 1, 100, SPLIT + 1),
    "softcap": (None, 5.0),
    "is_fp8": (False, True),
}
Case = dict[str, Any]


def cases() -> list[Case]:
    """Each time the one that has the most pairs that no case before it has."""
    names = list(COLUMNS)
    draw = random.Random(1)
    some = [{name: draw.choice(COLUMNS[name]) for name in names} for _ in range(400)]
    pairs = [set(combinations(each.items(), 2)) for each in some]
    unmet, chosen = set().union(*pairs), []
    while unmet:
        best = max(range(len(some)), key=lambda at: len(unmet & pairs[at]))
        unmet -= pairs[best]
        chosen.append(some[best])
    return chosen


def shown(case: Case) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


# At, beside and between the borders of blocks, tiles and splits; of one token, of several that are
# short rows, of chunks with a prefix and without, in several tiles, and padding.
COUNTS: Final = (1, 1, 1, 0, 2, 5, 40, 1, LONG_TILE + 1, 2 * LONG_TILE + 2, 1)
CONTEXTS: Final = (
    1, 63, SPLIT, 0, SPLIT + 1, 3 * SPLIT + 7, 40, 2 * SPLIT - 1, 700, 2 * LONG_TILE + 2,
    4 * SPLIT + 1,
)  # fmt: skip


def sized(case: Case, counts: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[Any, Any]:
    """A step of that kind, and the scales of its pages."""
    kv_heads = 1 if case["group"] > 4 else 2
    made = paged_case(
        torch.Generator().manual_seed(8), counts=list(counts), contexts=list(contexts),
        heads=kv_heads * case["group"], kv_heads=kv_heads,
        **{name: case[name] for name in ("head_dim", "block_size", "dtype", "window", "softcap")},
    )  # fmt: skip
    if not case["is_fp8"]:
        return made, None
    scales = torch.tensor([[0.01, 0.03], [0.02, 0.005]])[:, :kv_heads].contiguous()
    return quantised(made, scales), scales


def excess_of(case: PagedCase, scales: torch.Tensor | None) -> float:
    """Of a step over what arithmetic allows: above 1 is wrong."""
    result = paged_attention(*case.arguments(), scales=scales, **case.options())
    return excess_over(case if scales is None else widened(case, scales), result)


@pytest.mark.parametrize("case", cases(), ids=shown)
def test_attention(case: Case) -> None:
    with MadeOn(DEVICE):
        assert excess_of(*sized(case, COUNTS, CONTEXTS)) <= 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_rows_in_several_splits(dtype: torch.dtype) -> None:
    """Of their true size: what is added up are parts of thousands of positions."""
    case = {"head_dim": 128, "block_size": 16, "group": 4, "dtype": dtype, "window": None}
    case |= {"softcap": None, "is_fp8": False}
    with MadeOn(DEVICE):
        contexts = (LONG_SPLIT + 70, 2 * LONG_SPLIT + 1, LONG_SPLIT)
        assert excess_of(*sized(case, (70, 20, LONG_TILE), contexts)) <= 1.0


def test_every_two_sizes_meet() -> None:
    """Otherwise the above would prove less than it says."""
    met = {pair for each in cases() for pair in combinations(each.items(), 2)}
    wanted = [len(a) * len(b) for a, b in combinations(COLUMNS.values(), 2)]
    assert len(met) == sum(wanted)
