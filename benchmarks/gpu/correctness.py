"""Kernels against their references on the device, and greedy tokens against transformers."""

import json
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.crowd import Crowd, Job
from benchmarks.gpu.in_process import compute_in_process
from benchmarks.gpu.models import TINY, TINY_QWEN3, Shape, limits_of, resident
from benchmarks.worker.kv_fp8 import SHIPPED, Model, compare
from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.weights import Weights, load_weights
from kernels import dispatch
from kernels.attention.decode_attention import decode_attention, decode_attention_reference
from kernels.attention.paged_attention import paged_attention, paged_attention_reference
from kernels.attention.plan import plan_attention
from kernels.kv.rope_write_kv import rope_write_kv, rope_write_kv_reference
from kernels.norms_rope.gate_mul import gate_mul, gate_mul_reference
from kernels.norms_rope.rms_norm import add_rms_norm, add_rms_norm_reference
from kernels.norms_rope.rope import rope_table
from kernels.sampling.logprobs import token_logprobs
from kernels.sampling.sample import SamplingTensors, sample, sample_reference

# One rounding of the dtype, twice over where a sum was rounded before.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
# Of a trained model's likeliest tokens; 0.99 in benchmarks/results/kv_fp8.jsonl.
FP8_AGREED_MIN = 0.9
Check = Callable[[Bench], list[tuple[Tensor, Tensor]]]


def kernels(bench: Bench) -> None:
    wrong = []
    for name, check in CHECKS.items():
        bound = 0.0 if name == "sampling" else BOUNDS[bench.dtype]
        try:
            error = max(_error(own, known) for own, known in check(bench))
        except Exception as failure:  # the others are looked at all the same
            wrong.append(f"{name}: {type(failure).__name__}: {failure}")
            continue
        bench.row("kernels right", what=name, error=error, bound=bound, ok=error <= bound)
        wrong += [] if error <= bound else [f"{name} is off by {error}, more than {bound}"]
    assert not wrong, "; ".join(wrong)


def _error(own: Tensor, known: Tensor) -> float:
    """Relative to values above 1."""
    difference = (own.float() - known.float()).abs() / known.float().abs().clamp(min=1.0)
    return float(difference.max()) if difference.numel() else 0.0


def _randn(bench: Bench, *size: int) -> Tensor:
    return torch.randn(size, device=bench.device, dtype=bench.dtype)


def _norms(bench: Bench) -> list[tuple[Tensor, Tensor]]:
    width = bench.sized(4096, 48)
    x, residual, weight = _randn(bench, 33, width), _randn(bench, 33, width), _randn(bench, width)
    return list(
        zip(
            add_rms_norm(x, residual, weight, 1e-5),
            add_rms_norm_reference(x, residual, weight, 1e-5),
            strict=True,
        )
    )


def _gates(bench: Bench) -> list[tuple[Tensor, Tensor]]:
    x = _randn(bench, 17, 2 * bench.sized(14336, 40))
    kinds = (False, True)
    return [(gate_mul(x, is_gelu), gate_mul_reference(x, is_gelu)) for is_gelu in kinds]


def _rope(bench: Bench) -> list[tuple[Tensor, Tensor]]:
    tokens, head_dim = 9, 128
    table = rope_table(64, torch.rand(head_dim // 2, device=bench.device))
    positions = torch.arange(tokens, device=bench.device) * 5
    slots = torch.arange(tokens, device=bench.device) * 3 - 1
    qkv, norm = _randn(bench, tokens, 48, head_dim), _randn(bench, head_dim)
    results = []
    for run in (rope_write_kv, rope_write_kv_reference):
        pages = torch.zeros(2, 4, 8, 16, head_dim, device=bench.device, dtype=bench.dtype)
        q, k, v = torch.split(qkv.clone(), [32, 8, 8], dim=1)
        turned = run(
            q, k, v, positions, table, pages[0], pages[1], slots, norm, norm, 1e-6
        )  # fmt: skip
        results.append((turned, pages))
    return list(zip(*results, strict=True))


def _attention(bench: Bench) -> list[tuple[Tensor, Tensor]]:
    """Decode and prefill beside each other, at and beside the borders of blocks and splits."""
    counts = (1, 1, 1, 40, 1, 70) if bench.is_gpu else (1, 1, 5)
    contexts = (1, 16, 513, 40, 1025, 600) if bench.is_gpu else (1, 17, 21)
    blocks = [-(-context // 16) for context in contexts]
    order = torch.split(torch.randperm(sum(blocks), device=bench.device).int(), blocks)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    k, v = (_randn(bench, sum(blocks), 8, 16, 128) for _ in range(2))
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(bench.device)
    context_lengths = torch.tensor(contexts).int().to(bench.device)
    q = _randn(bench, sum(counts), 32, 128)
    given = (q, k, v, tables.contiguous(), starts, context_lengths, 128**-0.5)
    return [(paged_attention(*given), paged_attention_reference(*given))]


def _decode(bench: Bench) -> list[tuple[Tensor, Tensor]]:
    """Rows of a token, on their way from their projection, at and beside the borders of splits,
    of which the longest has several in a task.
    """
    contexts = (1, 16, 513, 1500) if bench.is_gpu else (1, 17, 33)
    rows, width = len(contexts), -(-max(contexts) // 16)
    tables = torch.randperm(rows * width, device=bench.device).int().view(rows, width)
    ends = torch.tensor(contexts, device=bench.device)
    positions, starts = ends - 1, torch.arange(rows + 1, device=bench.device).int()
    slots = tables.gather(1, (positions // 16)[:, None])[:, 0].long() * 16 + positions % 16
    cos_sin = rope_table(max(contexts), torch.rand(64, device=bench.device))
    pages, qkv = _randn(bench, 2, rows * width, 8, 16, 128), _randn(bench, rows, 48, 128)
    plan = plan_attention(
        starts, ends.int(), tokens=rows, group=4, dtype=bench.dtype, queries_max=1,
        context_max=max(contexts), tasks_wanted=rows,
    )  # fmt: skip
    results = []
    for run in (decode_attention, decode_attention_reference):
        k_pages, v_pages = pages.clone()
        q, k, v = torch.split(qkv.clone(), [32, 8, 8], dim=1)
        attended = run(
            q, k, v, positions, cos_sin, k_pages, v_pages, slots, tables, starts, ends.int(),
            128**-0.5, plan=plan,
        )  # fmt: skip
        results.append((attended, k_pages, v_pages))
    return list(zip(*results, strict=True))


def _sampling(bench: Bench) -> list[tuple[Tensor, Tensor]]:
    rows, vocab = 12, bench.sized(128256, 97)
    logits = torch.randn(rows, vocab, device=bench.device)
    order = torch.arange(rows, device=bench.device)
    params = SamplingTensors(
        temperature=(order % 3) * 0.5,
        top_k=(order % 4) * 10,
        top_p=torch.where(order % 2 == 0, 1.0, 0.9),
        min_p=torch.zeros(rows, device=bench.device),
        seed=order * 7919,
        choice=order % 2,
        position=order,
    )
    return list(zip(sample(logits, params), sample_reference(logits, params), strict=True))


def _logprobs(bench: Bench) -> list[tuple[Tensor, Tensor]]:
    logits = torch.randn(5, bench.sized(128256, 97), device=bench.device)
    ids = logits.argmax(-1)
    own, _, top = token_logprobs(logits, ids, 4)
    known = logits.log_softmax(-1)
    return [(own, known.amax(-1)), (top, known.topk(4).values)]


CHECKS: dict[str, Check] = {
    "add_rms_norm": _norms,
    "gate_mul": _gates,
    "rope_write_kv": _rope,
    "paged_attention": _attention,
    "decode_attention": _decode,
    "sampling": _sampling,
    "logprobs": _logprobs,
}


class _Tensors(Protocol):
    def state_dict(self) -> dict[str, Tensor]: ...


# As safetensors names them.
_NAMES: Final[dict[torch.dtype, str]] = {torch.float32: "F32", torch.bfloat16: "BF16"}


class _Loaded:
    """A model in memory, read like a checkpoint."""

    def __init__(self, model: _Tensors, *, is_tied: bool) -> None:
        self._tensors = dict(model.state_dict())
        if is_tied:
            self._tensors.pop("lm_head.weight", None)

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        return _NAMES[self._tensors[name].dtype]

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def oracle(shape: Shape, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model of this shape, with random weights."""
    import transformers

    kind = "Qwen3" if shape.has_qk_norm else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=shape.is_tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype)
    return model.eval()


def weights_of(model: _Tensors, shape: Shape, dtype: torch.dtype, device: torch.device) -> Weights:
    """The same numbers for the worker."""
    checkpoint = cast(Checkpoint, _Loaded(model, is_tied=shape.is_tied))
    return load_weights(checkpoint, shape.config, dtype=dtype, device=device)


def tokens(bench: Bench) -> None:
    """The worker a step ahead says, greedily, what transformers says: in float32."""
    bench = Bench(device=bench.device, is_tiny=bench.is_tiny, dtype=torch.float32, out=bench.out)
    dispatch.force(None if bench.is_gpu else "torch")
    count = bench.sized(48, 6)
    for shape in (TINY, TINY_QWEN3):
        model = oracle(shape, torch.float32, bench.device)
        weights = weights_of(model, shape, torch.float32, bench.device)
        limits = limits_of(shape, slots=4, context=128, step_tokens=32)
        jobs = [
            Job(
                prompt=tuple((7 * row + 3 * at) % 90 + 5 for at in range(5 + 9 * row)), output=count
            )
            for row in range(4)
        ]
        crowd = Crowd(limits, jobs)
        compute_in_process(resident(shape, weights, limits, bench), crowd)
        agreed = sum(
            _greedy(model, job, bench) == crowd.outputs[sequence_id]
            for sequence_id, job in enumerate(jobs)
        )
        bench.row("tokens as transformers", what=shape.name, rows=len(jobs), agreed=agreed)
        assert agreed == len(jobs), f"{shape.name}: {agreed} of {len(jobs)} outputs agree"
    dispatch.force(None)


def fp8_kv(bench: Bench) -> None:
    """KV in fp8 beside KV as the model computes: the shipped model."""
    with Checkpoint(SHIPPED) as checkpoint:
        config = shipped_shape().config
        weights = load_weights(checkpoint, config, dtype=bench.dtype, device=bench.device)
    dispatch.force(None if bench.is_gpu else "torch")
    model = Model(config=config, weights=weights)
    figures = compare(model, rows=bench.sized(32, 3), length=bench.sized(256, 24))
    bench.row("fp8 KV agreement", what="kaiten-mini", **figures)
    assert figures["agreed"] >= FP8_AGREED_MIN, f"{figures}, less than {FP8_AGREED_MIN}"
    dispatch.force(None)


def shipped_shape() -> Shape:
    """Of the shipped model; what reads any checkpoint's needs a package more."""
    known = json.loads((SHIPPED / "config.json").read_text())
    return Shape(
        name="kaiten-mini",
        hidden=known["hidden_size"],
        inner=known["intermediate_size"],
        layers=known["num_hidden_layers"],
        heads=known["num_attention_heads"],
        kv_heads=known["num_key_value_heads"],
        head_dim=known["head_dim"],
        vocab=known["vocab_size"],
        is_tied=known["tie_word_embeddings"],
        theta=known["rope_parameters"]["rope_theta"],
        positions=known["max_position_embeddings"],
    )


def _greedy(model: Any, job: Job, bench: Bench) -> list[int]:
    made = model.generate(
        torch.tensor([job.prompt], device=bench.device), max_new_tokens=job.output, do_sample=False
    )
    return list(made[0, len(job.prompt) :].tolist())
