"""Room for the parts of attention: what the worst step takes is enough for every other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels import attention_tasks
from kernels.attention.plan import (
    LONG_ALIKE,
    LONG_SPLIT,
    PARTS_MAX,
    SPLIT,
    AttentionPlan,
    Parts,
    PartsSize,
    Tasks,
    long_parts,
    tiles_for,
)

CPU = torch.device("cpu")
ZERO = torch.zeros(1, dtype=torch.int32)
NONE = Tasks(table=ZERO, total=ZERO, kept_starts=ZERO)


def plan_of(*, group: int, dtype: torch.dtype, queries_max: int, context_max: int) -> AttentionPlan:
    """As `plan_attention` makes it, without its tables."""
    short, long = tiles_for(group, dtype)
    return AttentionPlan(
        short=NONE,
        long=NONE,
        short_tile=short,
        long_tile=long,
        short_tokens=min(short // group, queries_max),
        has_long=queries_max > short // group,
        context_max=context_max,
    )


@given(
    group=st.sampled_from([1, 3, 4, 8, 20]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    limits=st.tuples(st.integers(1, 64), st.integers(1, 600), st.integers(1, 40_000)),
    data=st.data(),
)
def test_the_worst_step_needs_the_most(
    group: int, dtype: torch.dtype, limits: tuple[int, int, int], data: st.DataObject
) -> None:
    rows, tokens, positions = (data.draw(st.integers(1, limit)) for limit in limits)
    queries_max = data.draw(st.integers(1, tokens))
    plan = plan_of(group=group, dtype=dtype, queries_max=queries_max, context_max=positions)
    size = PartsSize.of(plan, rows=rows, tokens=tokens, kv_heads=2, group=group, head_dim=64)
    worst = PartsSize.worst(
        rows=limits[0],
        tokens=limits[1],
        positions=limits[2],
        kv_heads=2,
        group=group,
        head_dim=64,
        dtype=dtype,
    )
    assert size.parts <= worst.parts


def test_the_worst_step_is_no_more_than_what_some_step_needs() -> None:
    """16 rows of 4 tokens, each with all the context there is."""
    plan = plan_of(group=4, dtype=torch.bfloat16, queries_max=4, context_max=5 * SPLIT)
    size = PartsSize.of(plan, rows=16, tokens=64, kv_heads=2, group=4, head_dim=64)
    worst = worst_of(rows=16, tokens=64, positions=5 * SPLIT)
    assert size.parts == worst.parts == 64 * 5 * 8
    Parts.of(worst, CPU).require_room(size)


@pytest.mark.parametrize("positions", [1 << 17, 1 << 20, 1 << 24])
def test_long_contexts_do_not_make_the_room_of_decode_larger(positions: int) -> None:
    """An 8B model's: 256 rows of 131k tokens took 4.4 GB, of 1M tokens 35 GB."""
    decode = worst_of(rows=256, tokens=256, positions=positions, kv_heads=8)
    assert decode.parts == 256 * PARTS_MAX * 32
    # With prompts, a few parts more for each time that contexts are twice as long.
    tokens, twice = 8192, (positions - 1).bit_length() - LONG_SPLIT.bit_length() + 1
    worst = worst_of(rows=256, tokens=tokens, positions=positions, kv_heads=8)
    assert worst.parts == long_parts(tokens, positions) * 32
    assert worst.parts <= tokens * LONG_ALIKE * (twice + 1) * 32


def worst_of(*, rows: int, tokens: int, positions: int, kv_heads: int = 2) -> PartsSize:
    return PartsSize.worst(
        rows=rows,
        tokens=tokens,
        positions=positions,
        kv_heads=kv_heads,
        group=4,
        head_dim=64,
        dtype=torch.bfloat16,
    )


def test_longest_first_leaves_programs_idle_for_less_time() -> None:
    """Of batches of many lengths; of even ones it changes nothing."""
    for name, contexts in attention_tasks.batches().items():
        before = attention_tasks.fraction(attention_tasks.row_after_row(contexts, SPLIT))
        after = attention_tasks.fraction(attention_tasks.planned(contexts))
        # A row alone has fewer tasks than there are programs.
        assert after >= before or len(contexts) == 1, name
        if " to " in name or "lognormal" in name:
            assert after >= before + 0.08, name
