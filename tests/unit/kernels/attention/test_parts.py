"""Room for the parts of attention: what the worst step takes is enough for every other."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.plan import (
    SPLIT,
    AttentionPlan,
    Parts,
    PartsSize,
    tiles_for,
)

CPU = torch.device("cpu")
NONE = torch.zeros(1, dtype=torch.int32)


def plan_of(*, group: int, dtype: torch.dtype, queries_max: int, context_max: int) -> AttentionPlan:
    """As `plan_attention` makes it, without its tables."""
    short, long = tiles_for(group, dtype, 64, CPU)
    return AttentionPlan(
        short_ends=NONE,
        long_ends=NONE,
        short_starts=NONE,
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
        device=CPU,
    )
    assert size.parts <= worst.parts
    assert size.short_tokens <= worst.short_tokens


def test_the_worst_step_is_no_more_than_what_some_step_needs() -> None:
    """16 rows of 4 tokens, each with all the context there is."""
    plan = plan_of(group=4, dtype=torch.bfloat16, queries_max=4, context_max=5 * SPLIT)
    size = PartsSize.of(plan, rows=16, tokens=64, kv_heads=2, group=4, head_dim=64)
    worst = PartsSize.worst(
        rows=16,
        tokens=64,
        positions=5 * SPLIT,
        kv_heads=2,
        group=4,
        head_dim=64,
        dtype=torch.bfloat16,
        device=CPU,
    )
    assert size.parts == worst.parts == 64 * 5 * 8
    Parts.of(worst, CPU).require_room(size)
