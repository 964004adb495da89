"""What is exact on a GPU (docs/operating.md): the bits of a row do not depend on its batch-mates.

Nor on whether its step was recorded, on what the host knew of the step, on how a prompt was cut, or
on which program came first. Of matrix products nothing of this is promised, so no model is asked.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from gpu_worker.runner.device_streams import streams_for
from kernels import jit, variants
from kernels.attention import triton_launch
from kernels.attention.paged_attention import paged_attention
from kernels.attention.plan import LONG_TILE, SPLIT, AttentionPlan
from kernels.kv import fp8
from kernels.kv.rope_write_kv import rope_write_kv
from kernels.linear.packed_linear import PackedLinear
from kernels.norms_rope.rms_norm import add_rms_norm
from kernels.rows.edit_rows import edit_rows
from kernels.sampling.edited_rows import EditedRows, sampled_logits
from kernels.sampling.logprobs import token_logprobs
from kernels.sampling.sample import sample
from tests.support.on_device import DEVICE, IS_GPU, MadeOn
from tests.unit.kernels.interpreted import interpreted_decode
from tests.unit.kernels.interpreted.interpreted_decode import Step, step_of
from tests.unit.kernels.interpreted.interpreted_edit_rows import SLOTS, device_rows
from tests.unit.kernels.interpreted.interpreted_prefill import (
    SHORT_SPLIT,
    plan_of,
    row_of,
    split_every,
)
from tests.unit.kernels.interpreted.interpreted_sampling import ROWS, params
from tests.unit.kernels.paged_cases import PagedCase, paged_case

pytestmark = pytest.mark.gpu

# Of one split, at its border, of several; and as many rows as a GPU has no processors for.
CONTEXTS: Final = [1, SPLIT, SPLIT + 1, 9, 4 * SPLIT + 5, 2 * SPLIT]
CROWD: Final = CONTEXTS + [17 * each for each in range(1, 59 if IS_GPU else 5)]
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16},
    "qwen3": {"heads": 16, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "is_normed": 1},
    "fp8": {"heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "is_fp8": True},
    "gemma": {
        "heads": 8, "kv_heads": 4, "head_dim": 256, "dtype": torch.bfloat16, "window": SPLIT + 1,
        "softcap": 50.0,
    },
    "float32": {"heads": 6, "kv_heads": 2, "head_dim": 80, "dtype": torch.float32},
}  # fmt: skip
NEEDS_TRITON: Final = pytest.mark.skipif(not jit.IS_THERE, reason="TRITON_INTERPRET=1 runs it")
EACH: Final = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
REPEATS: Final = 20 if IS_GPU else 1


@pytest.fixture(autouse=True)
def _made_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interpreted_decode, "POSITIONS_MAX", 5 * SPLIT)
    with MadeOn(DEVICE):
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(6)


def alone(step: Step, row: int) -> Step:
    """A row of a token, without its mates; its pages are the step's."""
    at = slice(row, row + 1)
    q, k, v = step.qkv
    case = replace(
        step.case,
        q=step.case.q[at],
        block_tables=step.case.block_tables[at],
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lengths=step.case.context_lengths[at],
    )
    return replace(
        step,
        case=case,
        qkv=(q[at], k[at], v[at]),
        positions=step.positions[at],
        slots=step.slots[at],
    )


def written(pages: Tensor) -> Tensor:
    """NaN is what nobody wrote."""
    return fp8.as_bytes(pages).nan_to_num()


@NEEDS_TRITON
@EACH
def test_a_token_alone_and_in_a_crowd(generator: torch.Generator, shape: dict[str, Any]) -> None:
    crowd = step_of(generator, CROWD, **shape)
    result, k_pages, v_pages = crowd.fused(crowd.plan(tasks_wanted=8))
    assert bool(result.isfinite().all())
    for row in range(len(CONTEXTS)):
        own = alone(crowd, row)
        found, *pages = own.fused(own.plan())
        assert torch.equal(found[0], result[row]), f"context {CROWD[row]}"
        block = int(own.slots[0]) // k_pages.size(2)
        for mine, all_of_them in zip(pages, (k_pages, v_pages), strict=True):
            assert torch.equal(written(mine[block]), written(all_of_them[block]))


@NEEDS_TRITON
@EACH
def test_recorded_and_again_and_again(generator: torch.Generator, shape: dict[str, Any]) -> None:
    """Whichever program comes last, and whatever was there before."""
    crowd = step_of(generator, CROWD, **shape)
    plan = crowd.plan()
    expected, *_ = crowd.fused(plan)
    assert all(torch.equal(crowd.fused(plan)[0], expected) for _ in range(REPEATS))
    out, streams = torch.zeros_like(expected), streams_for(DEVICE)

    def attend() -> None:
        out.copy_(crowd.in_place(plan))

    streams.finish()
    with streams.computing():
        launch = streams.record(attend)
        for _ in range(REPEATS):
            out.zero_()
            launch()
            assert torch.equal(out, expected)
    streams.finish()


def mixed(generator: torch.Generator, **changes: Any) -> PagedCase:
    """Prompts in chunks, with a prefix and without, beside rows that decode."""
    counts = [1, 300, 1, 3, LONG_TILE + 1, 1]
    contexts = [4 * SPLIT + 5, 300, 9, SPLIT + 3, 2 * SPLIT, SPLIT]
    shape: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16}
    return paged_case(generator, counts=counts, contexts=contexts, **(shape | changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"head_dim": 256}, {"dtype": torch.float32, "head_dim": 64}, {"window": 200}],
    ids=["wide", "256", "float32", "window"],
)
def test_prompts_and_tokens_beside_each_other(
    generator: torch.Generator, changes: dict[str, Any]
) -> None:
    case = mixed(generator, **changes)
    result = paged_attention(*case.arguments(), **case.options())
    for row in range(len(case.context_lengths)):
        start, end = case.query_starts[row : row + 2].tolist()
        own = row_of(case, row)
        assert torch.equal(paged_attention(*own.arguments(), **own.options()), result[start:end])


@NEEDS_TRITON
@pytest.mark.parametrize("window", [None, 200])
def test_on_two_streams_or_on_one(
    generator: torch.Generator, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that keep parts, short and long; layer after layer in the same room, as in a step."""
    split_every(SHORT_SPLIT, monkeypatch)
    case = mixed(generator, window=window)
    layers = [case, replace(case, q=case.q.flip(0).contiguous()), case]

    def attended(plan: AttentionPlan) -> list[Tensor]:
        return [paged_attention(*each.arguments(), plan, **each.options()) for each in layers]

    with variants.forced("chunks-beside-decodes", False):
        expected = attended(plan_of(case))
    assert not torch.equal(expected[0], expected[1])
    plan, out, streams = plan_of(case), torch.zeros_like(torch.stack(expected)), streams_for(DEVICE)
    # Otherwise nothing is beside anything.
    assert plan.parts is not None
    assert plan.parts.are_apart
    for kept in (plan.short.kept_starts, plan.long.kept_starts):
        assert int(kept[-1]) > 0

    def attend() -> None:
        torch.stack(attended(plan), out=out)

    for _ in range(REPEATS):
        attend()
        assert torch.equal(out, torch.stack(expected))
    assert (triton_launch._side_stream.cache_info().currsize > 0) is IS_GPU
    streams.finish()
    with streams.computing():
        launch = streams.record(attend)
        for _ in range(REPEATS):
            out.zero_()
            launch()
            assert torch.equal(out, torch.stack(expected))
    streams.finish()


def test_however_a_prompt_is_cut(generator: torch.Generator) -> None:
    whole = row_of(mixed(generator), 1)
    result = paged_attention(*whole.arguments())
    for begin, end in ((0, 1), (0, 70), (70, 300), (100, 200), (299, 300)):
        chunk = replace(
            whole,
            q=whole.q[begin:end],
            query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
            context_lengths=torch.tensor([end], dtype=torch.int32),
        )
        found = paged_attention(*chunk.arguments())
        # A token or a few are a short row, whose tile is another: its bits are those of decode.
        if end - begin > LONG_TILE:
            assert torch.equal(found, result[begin:end])
        torch.testing.assert_close(found, result[begin:end], rtol=2.0**-6, atol=2.0**-6)


def test_keys_norms_and_sums(generator: torch.Generator) -> None:
    crowd = step_of(generator, CROWD, **SHAPES["qwen3"])

    def stored(step: Step) -> tuple[Tensor, ...]:
        q, k, v = (each.clone() for each in step.qkv)
        pages = step.case.k_pages.clone(), step.case.v_pages.clone()
        assert step.norms is not None
        turned = rope_write_kv(
            q, k, v, step.positions, step.cos_sin, *pages, step.slots, *step.norms, 1e-6
        )
        return turned, k, v

    together = stored(crowd)
    x, residual = (torch.randn(len(CROWD), 4096, generator=generator).bfloat16() for _ in range(2))
    weight = torch.rand(4096, generator=generator).bfloat16()
    normed = add_rms_norm(x, residual, weight, 1e-5)
    for row in (0, 5, len(CROWD) - 1):
        for own, all_of_them in zip(stored(alone(crowd, row)), together, strict=True):
            assert torch.equal(own[0], all_of_them[row])
        at = slice(row, row + 1)
        for own, all_of_them in zip(
            add_rms_norm(x[at], residual[at], weight, 1e-5), normed, strict=True
        ):
            assert torch.equal(own, all_of_them[at])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_noise_filters_and_log_probabilities(
    generator: torch.Generator, dtype: torch.dtype
) -> None:
    """Of as many tokens as large vocabularies have."""
    logits = (torch.randn(len(ROWS), 151_936, generator=generator) * 3).to(dtype)
    wanted = params(ROWS)
    tokens, ok = sample(logits, wanted)
    told = token_logprobs(logits, tokens, 5)
    assert bool(ok.all())
    # As wide as they are, and not converted: nobody can tell.
    assert torch.equal(sample(logits.float(), wanted)[0], tokens)
    wide = token_logprobs(logits.float(), tokens, 5)
    assert all(torch.equal(own, known) for own, known in zip(wide, told, strict=True))
    for row in range(len(ROWS)):
        at = slice(row, row + 1)
        one = wanted.rows(torch.tensor([row]))
        assert torch.equal(sample(logits[at].clone(), one)[0], tokens[at])
        found = token_logprobs(logits[at].clone(), tokens[at], 5)
        assert all(torch.equal(own, known[at]) for own, known in zip(found, told, strict=True))


def test_penalties_biases_and_masks(generator: torch.Generator) -> None:
    vocab = 4099
    rows, slots = device_rows(vocab), torch.arange(SLOTS)
    before = torch.randn(SLOTS, vocab, generator=generator).bfloat16()

    def edited(logits: Tensor, of: Tensor) -> Tensor:
        apart = EditedRows.of(len(of), vocab, logits.device)
        edit_rows(logits, apart, rows.state, rows.rules, of)
        return sampled_logits(logits, apart)

    together = edited(before, slots)
    assert not torch.equal(together, before.float())
    for row in range(SLOTS):
        at = slice(row, row + 1)
        assert torch.equal(edited(before[at].clone(), slots[at]), together[at])


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_a_product_is_the_same_where_it_stays(generator: torch.Generator, rows: int) -> None:
    """As logits are written: the same call of the same library."""
    head = PackedLinear(torch.randn(8003, 256, generator=generator).bfloat16())
    x = torch.randn(rows, 256, generator=generator).bfloat16()
    out = torch.zeros(rows + 1, 8003, dtype=torch.bfloat16)
    assert torch.equal(head.into(x, out[:rows]), head(x))
    assert not out[rows].any()


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_among_others_and_alone(generator: torch.Generator, dtype: torch.dtype) -> None:
    """With a program for each part, and with one for all of them."""
    x = torch.randn(1500, 2100, generator=generator).to(dtype)
    layer = PackedLinear(torch.randn(700, 2100, generator=generator).to(dtype), path="triton")
    whole = layer(x)
    for first, count in ((0, 1), (1499, 1), (63, 2), (5, 64), (40, 300), (7, 1024)):
        part = x[first : first + count].contiguous()
        assert torch.equal(layer(part), whole[first : first + count])
