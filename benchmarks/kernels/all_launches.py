"""Every launch that a worker of a model of some shape makes: what `aot` compiles.

Tensors have shapes and no memory: `aot` keeps the launches instead of making them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

MODULES: Final = (
    "attention.decode_attention",
    "attention.paged_attention",
    "attention.plan",
    "attention.triton_launch",
    "kv.rope_write_kv",
    "kv.write_kv",
    "linear.batch_invariant",
    "norms_rope.rms_norm",
    "norms_rope.rope",
    "norms_rope.gate_mul",
    "rows.step_rows",
    "rows.edit_rows",
    "rows.advance_rows",
    "rows.sample_rows",
    "sampling.edited_rows",
    "sampling.top_k_top_p",
    "sampling.logprobs",
    "sampling.sample",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a model the kernels see."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int = 128256
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    is_kv_fp8: bool = False
    # (window, softcap) of the layers of models of this shape, besides those that have neither.
    masks: tuple[tuple[int | None, float | None], ...] = ()


SHAPES: Final = (
    # Of Mistral 7B too, and of Gemma 2 27B, of which every layer is capped and every other slides.
    Shape(
        name="8b", heads=32, kv_heads=8, head_dim=128, hidden=4096, inner=14336,
        masks=((4096, None), (None, 50.0), (4096, 50.0)),
    ),
    Shape(
        name="8b fp8", heads=32, kv_heads=8, head_dim=128, hidden=4096, inner=14336,
        is_kv_fp8=True, masks=((4096, None),),
    ),
    Shape(
        name="8b block 256", heads=32, kv_heads=8, head_dim=128, hidden=4096, inner=14336,
        block_size=256, masks=((4096, None),),
    ),
    Shape(
        name="8b fp16", heads=32, kv_heads=8, head_dim=128, hidden=4096, inner=14336,
        dtype=torch.float16,
    ),
    Shape(
        name="8b fp32", heads=32, kv_heads=8, head_dim=128, hidden=4096, inner=14336,
        dtype=torch.float32,
    ),
    Shape(
        name="0.6b", heads=16, kv_heads=8, head_dim=128, hidden=1024, inner=3072, vocab=151936
    ),
    Shape(name="group 7", heads=28, kv_heads=4, head_dim=128, hidden=3584, inner=18944),
    Shape(
        name="head 64", heads=9, kv_heads=3, head_dim=64, hidden=576, inner=1536,
        masks=((4096, None),),
    ),
    Shape(
        name="head 80", heads=32, kv_heads=32, head_dim=80, hidden=2560, inner=10240, vocab=50257
    ),
    Shape(
        name="head 96", heads=32, kv_heads=8, head_dim=96, hidden=3072, inner=8192,
        masks=((2047, None),),
    ),
    # Of Gemma 1, 2 and 3.
    Shape(
        name="head 256", heads=16, kv_heads=8, head_dim=256, hidden=3584, inner=14336,
        vocab=256000, masks=((None, 50.0), (4096, 50.0), (4096, None)),
    ),
)  # fmt: skip


def launch_all(shape: Shape, modules: Mapping[str, ModuleType]) -> None:
    """`modules`: those of MODULES, by their last names."""
    tokens, heads, kv_heads, head_dim = 256, shape.heads, shape.kv_heads, shape.head_dim
    dtype = shape.dtype
    qkv = torch.empty(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    kv_dtype = torch.float8_e4m3fn if shape.is_kv_fp8 else dtype
    pages = torch.empty(2, 4096, kv_heads, shape.block_size, head_dim, dtype=kv_dtype)
    scales = torch.empty(2, kv_heads) if shape.is_kv_fp8 else None
    positions = slots = torch.empty(tokens, dtype=torch.int64)
    cos_sin = torch.empty(131072, 2, head_dim // 2)
    hidden = torch.empty(tokens, shape.hidden, dtype=dtype)
    weight, norm = hidden[0], q[0, 0]
    modules["rms_norm"].rms_norm(hidden, weight, 1e-5)
    modules["rms_norm"].add_rms_norm(hidden, hidden, weight, 1e-5)
    for after in (weight, None):
        modules["rms_norm"].norm_add_rms_norm(hidden, hidden, weight, after, 1e-5)
    modules["rms_norm"].rms_norm_rows(hidden, positions, weight, 1e-5)
    modules["rms_norm"].add_rms_norm_rows(hidden, hidden, positions, weight, 1e-5)
    gate_up = torch.empty(tokens, 2 * shape.inner, dtype=dtype)
    modules["gate_mul"].gate_mul(gate_up)
    modules["gate_mul"].gate_mul(gate_up, is_gelu=True)
    modules["rope"].rope(q, k, positions, cos_sin)
    modules["write_kv"].write_kv(k, v, *pages, slots, scales)
    fuse = modules["rope_write_kv"].rope_write_kv
    fuse(q, k, v, positions, cos_sin, *pages, slots, scales=scales)
    fuse(q, k, v, positions, cos_sin, *pages, slots, norm, norm, 1e-6, scales)
    tables = torch.empty(64, 8192, dtype=torch.int32)
    step = tables[:4], tables[0, :5], tables[0, :4]
    attend = modules["paged_attention"].paged_attention
    for window, softcap in ((None, None), *shape.masks):
        masked = {"window": window, "softcap": softcap}
        attend(q, *pages, *step, head_dim**-0.5, scales=scales, own=(k, v), **masked)
        for rows in (4, 64):
            _launch_decode(shape, modules, qkv[:rows], pages, tables, scales, masked)
    _launch_linears(shape, modules, hidden)
    logits = torch.empty(tokens, shape.vocab, dtype=dtype)
    token_ids = torch.empty(tokens, dtype=torch.int64)
    edited = modules["edited_rows"].EditedRows.of(tokens, shape.vocab, logits.device)
    ids = dict.fromkeys(("top_k", "seed", "choice", "position"), token_ids)
    floats = {name: torch.empty(tokens) for name in ("temperature", "top_p", "min_p")}
    sampling = modules["sample"]
    sampling.sample(logits, sampling.SamplingTensors(**ids, **floats), None, edited)
    modules["logprobs"].token_logprobs(logits, token_ids, 20)
    _launch_rows(shape, modules, token_ids, logits, edited)


def _launch_linears(shape: Shape, modules: Mapping[str, ModuleType], hidden: Tensor) -> None:
    """Of a deterministic worker: of all rows, and of so few outputs that parts are kept."""
    linear = modules["batch_invariant"].batch_invariant_linear
    wide = torch.empty(len(hidden), shape.inner, dtype=shape.dtype)
    for x, outputs in ((hidden, 2 * shape.inner), (wide[:4], 128)):
        weight = torch.empty(outputs, x.size(1), dtype=shape.dtype)
        for bias in (None, weight[:, 0].contiguous()):
            linear(x, weight, bias)


def _launch_decode(
    shape: Shape, modules: Mapping[str, ModuleType], qkv: Tensor, pages: Tensor, tables: Tensor,
    scales: Tensor | None, masked: Mapping[str, Any],
) -> None:  # fmt: skip
    """A token of each row."""
    heads, kv_heads = shape.heads, shape.kv_heads
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    positions, norm, rows = torch.empty(len(q), dtype=torch.int64), q[0, 0], len(q)
    starts, contexts = tables[0, : rows + 1], tables[0, :rows]
    plan = modules["plan"].plan_attention(
        starts, contexts, tokens=rows, group=heads // kv_heads, dtype=shape.dtype,
        context_max=131072, queries_max=1,
    )  # fmt: skip
    modules["plan"].plan_attention(
        starts, contexts, tokens=rows, group=heads // kv_heads, dtype=shape.dtype,
        context_max=131072, queries_max=1, are_long=True,
    )  # fmt: skip
    cos_sin = torch.empty(131072, 2, shape.head_dim // 2)
    places = *pages, positions, tables[:rows], starts, contexts, shape.head_dim**-0.5
    decode = modules["decode_attention"].decode_attention
    decode(q, k, v, positions, cos_sin, *places, None, None, 0.0, plan, scales, **masked)
    if masked["softcap"] is None:
        decode(q, k, v, positions, cos_sin, *places, norm, norm, 1e-6, plan, scales, **masked)


def _launch_rows(
    shape: Shape, modules: Mapping[str, ModuleType], column: Tensor, logits: Tensor, edited: Any
) -> None:
    """What moves rows from step to step: as many rows as `column` has."""
    rows = len(column)
    step = modules["step_rows"]
    columns = (
        "is_live",
        "num_tokens",
        "num_computed_tokens",
        "limit",
        "masked_until",
        "last_token",
    )
    state = step.RowState(
        **dict.fromkeys(columns, column),
        blocks=torch.empty(1, rows, 8192, dtype=torch.int32),
        stops=torch.empty(rows, 64, dtype=torch.int32),
    )
    starts = torch.empty(rows + 1, dtype=torch.int64)
    asked = step.Asked(slots=column, starts=starts, token_ids=column)
    step.step_rows(state, asked, shape.block_size)
    rules = _rules(modules["edit_rows"].RuleState, rows, shape.vocab)
    sample = modules["sample_rows"]
    floats = dict.fromkeys(("temperature", "top_p", "min_p"), torch.empty(rows))
    wanted = sample.SamplingState(**floats, **dict.fromkeys(("top_k", "seed", "choice"), column))
    sample.sample_rows(state, rules, wanted, column, starts[:rows].int())
    modules["edit_rows"].edit_rows(logits, edited, state, rules, column)
    modules["advance_rows"].advance_rows(state, rules, asked, column, column > 0)


def _rules(kind: Any, rows: int, vocab: int) -> Any:
    ints = dict.fromkeys(("kinds", "logprobs", "prompt"), torch.empty(rows, dtype=torch.int64))
    widths = {"bias_ids": (1024,), "seen": (vocab,), "words": (64, 32), "recent": (32,)}
    tables = {name: torch.empty(rows, *width, dtype=torch.int32) for name, width in widths.items()}
    return kind(
        **ints,
        **dict.fromkeys(("repetition", "presence", "frequency"), torch.empty(rows)),
        **tables,
        biases=torch.empty(rows, 1024),
        allowed=torch.empty(rows, -(-vocab // 32), dtype=torch.int32),
    )
