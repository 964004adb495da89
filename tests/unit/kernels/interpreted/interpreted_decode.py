"""decode_attention: one launch says what its parts say, bit for bit."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import jit
from kernels.attention import decode_attention as decode_module
from kernels.attention import plan as attention_plan
from kernels.attention import triton_launch
from kernels.attention.decode_attention import (
    IN_ONE_GROUP_MAX,
    decode_attention,
    decode_attention_reference,
)
from kernels.attention.paged_attention import paged_attention
from kernels.attention.plan import AttentionPlan, plan_attention, with_parts
from kernels.kv import fp8
from kernels.kv.rope_write_kv import rope_write_kv
from kernels.norms_rope.rope import rope_table
from tests.unit.kernels.paged_cases import PagedCase, paged_case

# Contexts of one split and of several, in few steps of the loop.
SPLIT = 64
# Of a number, through to the result.
ROUNDING = {torch.float32: 2.0**-20, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
POSITIONS_MAX = 400


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(77)


@pytest.fixture(autouse=True)
def _small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention_plan, triton_launch, decode_module):
        monkeypatch.setattr(module, "SPLIT", SPLIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A token of each row on its way to its page."""

    case: PagedCase
    qkv: tuple[Tensor, Tensor, Tensor]
    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    scales: Tensor | None = None

    def plan(self, tasks_wanted: int | None = None) -> AttentionPlan:
        case, q = self.case, self.qkv[0]
        kv_heads, head_dim = case.k_pages.size(1), q.size(2)
        tokens, group = len(q), q.size(1) // kv_heads
        plan = plan_attention(
            case.query_starts, case.context_lengths, dtype=q.dtype, queries_max=1,
            context_max=POSITIONS_MAX, tokens=tokens, group=group, tasks_wanted=tasks_wanted,
        )  # fmt: skip
        rows = len(case.context_lengths)
        return with_parts(
            plan, rows=rows, kv_heads=kv_heads, head_dim=head_dim, tokens=tokens, group=group
        )

    def fused(self, plan: AttentionPlan | None) -> tuple[Tensor, Tensor, Tensor]:
        """(result, pages of keys, of values)."""
        return self._called(decode_attention, plan)

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._called(decode_attention_reference, None)

    def in_place(self, plan: AttentionPlan | None, function: Any = decode_attention) -> Tensor:
        """What is written lies in the pages of the case."""
        case, (q, k, v) = self.case, (each.clone() for each in self.qkv)
        rows = case.block_tables, case.query_starts, case.context_lengths
        result: Tensor = function(
            q, k, v, self.positions, self.cos_sin, case.k_pages, case.v_pages, self.slots, *rows,
            case.scale, *(self.norms or (None, None)), 1e-6, plan, self.scales, **case.options(),
        )  # fmt: skip
        return result

    def _called(self, function: Any, plan: AttentionPlan | None) -> tuple[Tensor, Tensor, Tensor]:
        pages = self.case.k_pages.clone(), self.case.v_pages.clone()
        own = replace(self, case=replace(self.case, k_pages=pages[0], v_pages=pages[1]))
        return own.in_place(plan, function), *pages

    def apart(self) -> tuple[Tensor, Tensor, Tensor]:
        """By the kernels that it is made of."""
        case, (q, k, v) = self.case, (each.clone() for each in self.qkv)
        pages = case.k_pages.clone(), case.v_pages.clone()
        rows = case.block_tables, case.query_starts, case.context_lengths
        q_norm, k_norm = self.norms or (None, None)
        q = rope_write_kv(
            q, k, v, self.positions, self.cos_sin, *pages, self.slots, q_norm, k_norm, 1e-6,
            self.scales,
        )  # fmt: skip
        return (
            paged_attention(
                q, *pages, *rows, case.scale, self.plan(), self.scales, **case.options()
            ),
            *pages,
        )


def step_of(
    generator: torch.Generator, contexts: list[int], *, half: int | None = None,
    is_normed: bool = False, is_fp8: bool = False, **shape: Any,
) -> Step:  # fmt: skip
    """Rows at the end of `contexts`, of which those of 0 have ended."""
    counts = [min(1, context) for context in contexts]
    case = paged_case(generator, counts=counts, contexts=contexts, **shape)
    kv_heads, block_size, head_dim = case.k_pages.shape[1:]
    live = [row for row, context in enumerate(contexts) if context]
    positions = case.context_lengths[live].long() - 1
    slots = torch.empty_like(positions)
    for at, row in enumerate(live):
        block, within = divmod(int(positions[at]), block_size)
        place = int(case.block_tables[row, block])
        slots[at] = place * block_size + within
        # Not there yet, and its owner writes it before anybody reads it.
        for page in (case.k_pages, case.v_pages):
            page[place, :, within] = float("nan")
    tokens, heads = len(live), case.q.size(1)
    # As a projection leaves them.
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator)
    qkv = torch.split(fused.to(case.q.dtype), [heads, kv_heads, kv_heads], dim=1)
    half = head_dim // 2 if half is None else half
    inverse = 10.0 ** -torch.linspace(0, 3, half) if half else torch.empty(0)
    norms, scales = None, None
    if is_normed:
        q_norm, k_norm = 1 + 0.3 * torch.randn(2, head_dim, generator=generator)
        norms = q_norm.to(case.q.dtype), k_norm.to(case.q.dtype)
    if is_fp8:
        scales = torch.tensor([[0.02], [0.03]]).repeat(1, kv_heads)
        coded = [
            fp8.encode(page.nan_to_num().transpose(1, 2), scale).transpose(1, 2).contiguous()
            for page, scale in zip((case.k_pages, case.v_pages), scales, strict=True)
        ]
        case = replace(case, k_pages=coded[0], v_pages=coded[1])
    return Step(
        case=case,
        qkv=(qkv[0], qkv[1], qkv[2]),
        positions=positions,
        slots=slots,
        cos_sin=rope_table(POSITIONS_MAX, inverse),
        norms=norms,
        scales=scales,
    )


def same(left: Tensor, right: Tensor) -> bool:
    """To the bit; NaN is what nobody wrote. On a GPU to a rounding of each number on its way: two
    kernels are compiled apart, and may make one operation of a product and a sum elsewhere.
    """
    left, right = (fp8.as_bytes(each).nan_to_num() for each in (left, right))
    if not left.is_cuda:
        return torch.equal(left, right)
    if left.dtype == torch.uint8:
        return bool(((left.int() - right.int()).abs() <= 1).all())
    return torch.allclose(left, right, rtol=ROUNDING[left.dtype], atol=ROUNDING[left.dtype])


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 32},
        {"heads": 14, "kv_heads": 2, "head_dim": 80, "dtype": torch.float16, "half": 20},
        {"heads": 2, "kv_heads": 2, "head_dim": 16, "dtype": torch.bfloat16, "block_size": 5},
        # As many heads as a tile has lines: the key needs one more.
        {"heads": 16, "kv_heads": 1, "head_dim": 16, "dtype": torch.float16, "block_size": 64},
        {"heads": 4, "kv_heads": 1, "head_dim": 64, "window": 70},
        {"heads": 4, "kv_heads": 1, "head_dim": 64, "window": 70, "softcap": 5.0},
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "is_fp8": True, "dtype": torch.float16},
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "is_fp8": True, "window": 30},
    ],
    ids=lambda shape: "-".join(f"{key}{value}" for key, value in shape.items()),
)
def test_one_launch_is_its_parts(generator: torch.Generator, shape: dict[str, Any]) -> None:
    step = step_of(generator, [1, 0, SPLIT, SPLIT + 1, 0, 3 * SPLIT + 20], **shape)
    found = step.fused(step.plan())
    for one, expected in zip(found, step.apart(), strict=True):
        assert same(one, expected)
    # Of as few tasks as there may be: no bit is another.
    wide = step.plan(tasks_wanted=1)
    assert int(wide.short.total[0]) < int(step.plan().short.total[0])
    for one, expected in zip(step.fused(wide), found, strict=True):
        assert torch.equal(*(fp8.as_bytes(each).nan_to_num() for each in (one, expected)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normed(generator: torch.Generator, dtype: torch.dtype) -> None:
    """Their sums have another order: one rounding of a number, through to the result."""
    contexts = [3, SPLIT + 9]
    step = step_of(generator, contexts, head_dim=64, is_normed=True, dtype=dtype)
    rounding = ROUNDING[dtype]
    for found, expected in zip(step.fused(step.plan()), step.reference(), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=rounding, atol=rounding, equal_nan=True, check_stride=False
        )


@pytest.mark.parametrize("programs", [1, 7])
@pytest.mark.parametrize("tasks_wanted", [None, 2, 5])
def test_bits_do_not_depend_on_who_arrives_last(
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    programs: int,
    tasks_wanted: int | None,
) -> None:
    step = step_of(generator, [5 * SPLIT, 2 * SPLIT + 1, 9], heads=4, kv_heads=2, head_dim=16)
    expected = step.fused(step.plan())[0]
    monkeypatch.setattr(jit, "programs", lambda device, each: programs)
    assert torch.equal(step.fused(step.plan(tasks_wanted))[0], expected)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    contexts=st.lists(
        st.integers(0, POSITIONS_MAX) | st.integers(POSITIONS_MAX // 2, POSITIONS_MAX),
        min_size=1,
        max_size=3,
    ),
    window=st.none() | st.integers(1, POSITIONS_MAX),
    tasks_wanted=st.integers(1, 9),
    parts_max=st.sampled_from([8, 24]),
    programs=st.integers(1, 5),
    is_fp8=st.booleans(),
)
# Who arrives first has some splits behind the window, and others that it counts.
@example(contexts=[370], window=300, tasks_wanted=2, parts_max=24, programs=1, is_fp8=False)
def test_tasks_of_several_splits_say_what_those_of_one_say(
    contexts: list[int],
    window: int | None,
    tasks_wanted: int,
    parts_max: int,
    programs: int,
    is_fp8: bool,
) -> None:
    """Of splits of every size, some behind the window, or all of a task; and all have arrived."""
    generator = torch.Generator().manual_seed(sum(contexts))
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention_plan, triton_launch, decode_module):
            # No shorter than a tile of codes.
            patch.setattr(module, "SPLIT", 64 if is_fp8 else 32)
            patch.setattr(module, "PARTS_MAX", parts_max)
        patch.setattr(jit, "programs", lambda device, each: programs)
        step = step_of(generator, contexts, head_dim=16, window=window, is_fp8=is_fp8)
        alone, several = step.plan(), step.plan(tasks_wanted)
        expected, found = step.fused(alone), step.fused(several)
        assert all(map(same, expected, step.apart()))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(*(fp8.as_bytes(each).nan_to_num() for each in (one, other)))
    for plan in (alone, several):
        assert plan.parts is not None
        assert not plan.parts.arrived.any()
    assert int(several.short.total[0]) <= int(alone.short.total[0])


def test_a_plan_serves_step_after_step(generator: torch.Generator) -> None:
    """What counted arrivals counts from nothing again."""
    step = step_of(generator, [3 * SPLIT, SPLIT + 1], head_dim=16)
    plan = step.plan()
    first = step.fused(plan)[0]
    assert plan.parts is not None
    assert not plan.parts.arrived.any()
    assert torch.equal(step.fused(plan)[0], first)


def test_what_has_no_slot_is_written_nowhere(generator: torch.Generator) -> None:
    step = step_of(generator, [5, 40], head_dim=16)
    nowhere = replace(step, slots=torch.tensor([-1, 10**6]))
    result, *pages = nowhere.fused(step.plan())
    assert result.shape == step.qkv[0].shape
    assert same(pages[0], step.case.k_pages)
    assert same(pages[1], step.case.v_pages)


def test_plans_of_other_steps_are_refused(generator: torch.Generator) -> None:
    step = step_of(generator, [5], head_dim=16)
    case = step.case
    several = plan_attention(
        case.query_starts, case.context_lengths, tokens=9, group=2, dtype=torch.float32,
        context_max=9,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^plan: must be of one token a row"):
        step.fused(several)
    # Only the launch that decodes goes through several splits of a task.
    with pytest.raises(ValueError, match=r"^plan: must have tasks of one split"):
        paged_attention(step.qkv[0], *case.arguments()[1:6], case.scale, step.plan(tasks_wanted=1))
    counting = step.plan()
    assert counting.parts is not None
    few = replace(counting, parts=replace(counting.parts, arrived=counting.parts.arrived[:1]))
    with pytest.raises(ValueError, match=r"^parts: must count those of 2 rows and KV heads"):
        step.fused(few)


@pytest.mark.parametrize("heads", [4, 2 * (IN_ONE_GROUP_MAX + 1)])
def test_without_a_plan_or_of_many_heads_it_is_the_parts(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    monkeypatch.setattr(decode_module, "decode_kernel", None)
    step = step_of(generator, [5, 70], heads=heads, head_dim=16)
    plan = None if heads == 4 else step.plan()
    for found, expected in zip(step.fused(plan), step.apart(), strict=True):
        assert same(found, expected)
