"""Paged attention as a share of what the device can read or multiply, beside torch and flashinfer.

Decode is timed as a recorded graph, with the step's tasks shared out beforehand, as a worker's
layers run it; keys and values take turns over more memory than any cache holds.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.floors import floors
from benchmarks.gpu.turns import decision, figures
from kernels.attention.decode_attention import decode_attention, tasks_wanted
from kernels.attention.paged_attention import paged_attention
from kernels.attention.plan import AttentionPlan, plan_attention, with_parts
from kernels.norms_rope.rope import rope_table

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
TILE_BLOCK_SIZE = 64
K = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    what: str
    contexts: tuple[int, ...]

    @property
    def kv_bytes(self) -> int:
        """In bfloat16."""
        return sum(self.contexts) * KV_HEADS * HEAD_DIM * 2 * 2


def cases(bench: Bench) -> list[Decode]:
    if bench.is_tiny:
        return [Decode(what="tiny", contexts=(20, 7, 40))]
    uniform = [
        Decode(what=f"{rows} x {context // K}k", contexts=(context,) * rows)
        for rows in (16, 64, 256)
        for context in (2 * K, 8 * K)
    ]
    return [
        *uniform,
        Decode(what="1 x 32k", contexts=(32 * K,)),
        Decode(what="2 x 32k + 30 x 4k", contexts=(32 * K,) * 2 + (4 * K,) * 30),
        Decode(what="1 x 128k + 31 x 4k", contexts=(128 * K,) + (4 * K,) * 31),
    ]


class Pool:
    """Pages of a case's rows, anywhere in memory."""

    def __init__(self, bench: Bench, contexts: Sequence[int], block_size: int = BLOCK_SIZE) -> None:
        device = bench.device
        blocks = [-(-context // block_size) for context in contexts]
        shape = (sum(blocks), KV_HEADS, block_size, HEAD_DIM)
        self.k, self.v = (torch.randn(shape, device=device, dtype=bench.dtype) for _ in range(2))
        order = torch.randperm(sum(blocks), device=device, dtype=torch.int32)
        self.tables = torch.zeros(len(blocks), max(blocks), device=device, dtype=torch.int32)
        for row, owned in enumerate(torch.split(order, blocks)):
            self.tables[row, : len(owned)] = owned
        self.contexts = torch.tensor(contexts, device=device, dtype=torch.int32)


def random_queries(bench: Bench, rows: int) -> Tensor:
    return torch.randn(rows, HEADS, HEAD_DIM, device=bench.device, dtype=bench.dtype)


def decode(bench: Bench) -> None:
    read, _ = floors(bench)
    for case in cases(bench):
        copies = bench.copies(case.kv_bytes)
        pools = [Pool(bench, case.contexts) for _ in range(copies)]
        rows = len(case.contexts)
        q = random_queries(bench, rows)
        seconds = bench.seconds([bench.recorded(attend_decode(bench, q, pool)) for pool in pools])
        figures: dict[str, object] = {
            "us": seconds * 1e6,
            "of_bandwidth": _bytes(case, bench) / seconds / read,
        }
        if len(set(case.contexts)) == 1:
            figures |= _peer(bench, "sdpa", case, q, pools, _sdpa)
        bench.row("decode attention", what=case.what, rows=rows, **figures)
        del pools
        bench.free()


def blocks(bench: Bench) -> None:
    """Decode over blocks as large as a tile, of which a tile reads one entry of the block table."""
    read, _ = floors(bench)
    verdicts = []
    for case in cases(bench)[:3]:
        q, ways = random_queries(bench, len(case.contexts)), {}
        for name, size in (("taken", TILE_BLOCK_SIZE), ("without", BLOCK_SIZE)):
            pools = [Pool(bench, case.contexts, size) for _ in range(bench.copies(case.kv_bytes))]
            calls = [bench.recorded(attend_decode(bench, q, pool)) for pool in pools]
            ways[name] = partial(bench.seconds, calls)
        said = figures(**bench.in_turns(ways))
        verdicts.append(said["so"])
        bench.row(
            "decode attention by block size", what=case.what, block_size=TILE_BLOCK_SIZE,
            instead_of=BLOCK_SIZE, **said,
            of_bandwidth=_bytes(case, bench) / (said["taken_ms"] / 1e3) / read,
        )  # fmt: skip
        del pools, calls, ways
        bench.free()
    bench.row(
        "variants decided", what="blocks of 64", default="off", cases=len(verdicts),
        should_be=decision(verdicts, is_default=False),
    )  # fmt: skip


def beside_flashinfer(bench: Bench) -> None:
    """Last: it may compile for minutes, or not be here."""
    if importlib.util.find_spec("flashinfer") is None:
        bench.row("decode attention, flashinfer", what="skipped: flashinfer is not installed")
        return
    for case in cases(bench):
        pools = [Pool(bench, case.contexts) for _ in range(bench.copies(case.kv_bytes))]
        rows = len(case.contexts)
        q = random_queries(bench, rows)
        figures = _peer(bench, "flashinfer", case, q, pools, _flashinfer)
        bench.row("decode attention, flashinfer", what=case.what, rows=rows, **figures)
        del pools


_Make = Callable[[Bench, Tensor, Pool, Decode], Callable[[], object]]


def _peer(
    bench: Bench, name: str, case: Decode, q: Tensor, pools: Sequence[Pool], make: _Make
) -> dict[str, object]:
    read, _ = floors(bench)
    try:
        seconds = bench.seconds([make(bench, q, pool, case) for pool in pools])
    except Exception as error:  # a peer that refuses is a figure too
        return {name: f"{type(error).__name__}: {error}"[:60]}
    return {f"{name}_of_bandwidth": _bytes(case, bench) / seconds / read}


def _bytes(case: Decode, bench: Bench) -> float:
    return case.kv_bytes * bench.dtype.itemsize / 2


def attend_decode(bench: Bench, q: Tensor, pool: Pool) -> Callable[[], object]:
    """What a step that only decodes does of it: each token turned and written, too."""
    rows, block_size = len(q), pool.k.size(2)
    starts = torch.arange(rows + 1, device=bench.device, dtype=torch.int32)
    wanted = tasks_wanted(q, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    plan = _plan(pool, starts, q, 1, wanted)
    is_fp8 = pool.k.dtype == torch.float8_e4m3fn
    scales = torch.ones(2, KV_HEADS, device=bench.device) if is_fp8 else None
    k, v = torch.randn(2, rows, KV_HEADS, HEAD_DIM, device=bench.device, dtype=q.dtype)
    positions = pool.contexts.long() - 1
    blocks = pool.tables.gather(1, positions[:, None] // block_size)[:, 0]
    slots = blocks * block_size + positions % block_size
    frequencies = 1e-4 ** torch.linspace(0, 1, HEAD_DIM // 2, device=bench.device)
    cos_sin = rope_table(int(pool.contexts.max()), frequencies)
    return lambda: decode_attention(
        q, k, v, positions, cos_sin, pool.k, pool.v, slots, pool.tables, starts, pool.contexts,
        HEAD_DIM**-0.5, plan=plan, scales=scales,
    )  # fmt: skip


def _plan(
    pool: Pool, starts: Tensor, q: Tensor, queries_max: int, wanted: int | None = None
) -> AttentionPlan:
    """As the worker makes it: once for all layers."""
    group = HEADS // KV_HEADS
    plan = plan_attention(
        starts,
        pool.contexts,
        tokens=len(q),
        group=group,
        dtype=q.dtype,
        queries_max=queries_max,
        context_max=int(pool.contexts.max()),
        tasks_wanted=wanted,
    )
    return with_parts(
        plan,
        rows=len(pool.contexts),
        tokens=len(q),
        kv_heads=KV_HEADS,
        group=group,
        head_dim=HEAD_DIM,
    )


def _sdpa(bench: Bench, q: Tensor, pool: Pool, case: Decode) -> Callable[[], object]:
    """On keys and values of one length that lie one after the other, which no server has."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    context = case.contexts[0]
    # Not the plain one on a GPU: it would widen all keys and values first.
    fused = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    backends = list(fused) if bench.is_gpu else [SDPBackend.MATH]
    shape = (len(q), KV_HEADS, context, HEAD_DIM)
    k, v = pool.k.view(-1)[: _size(shape)].view(shape), pool.v.view(-1)[: _size(shape)].view(shape)
    query = q.unsqueeze(2)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        with sdpa_kernel(backends):
            attend(query, k, v, enable_gqa=True)

    return run


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] * shape[2] * shape[3]


def _flashinfer(bench: Bench, q: Tensor, pool: Pool, case: Decode) -> Callable[[], object]:
    import flashinfer  # type: ignore[import-not-found]

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=bench.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    blocks = [-(-context // BLOCK_SIZE) for context in case.contexts]
    starts = torch.tensor([0, *blocks]).cumsum(0).int().to(bench.device)
    ids = torch.cat([pool.tables[row, :count] for row, count in enumerate(blocks)])
    last = torch.tensor([(context - 1) % BLOCK_SIZE + 1 for context in case.contexts]).int()
    wrapper.plan(
        starts, ids, last.to(bench.device), HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, (pool.k, pool.v))


def prefill(bench: Bench) -> None:
    """One prompt, nothing of it done before: its own keys read as computed, or paged."""
    _, rate = floors(bench)
    tokens = bench.sized(8 * K, 24)
    operations = 4 * HEADS * HEAD_DIM * tokens * tokens / 2
    times = {}
    for what, has_own in (("kaiten", True), ("kaiten, paged", False)):
        times[what] = bench.seconds([attend_chunk(bench, tokens, tokens, has_own=has_own)])
        bench.row(
            "prefill attention", what=what, context=tokens, ms=times[what] * 1e3,
            tflops=operations / times[what] / 1e12, of_matmul=operations / times[what] / rate,
        )  # fmt: skip
    seconds = times["kaiten"]
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION") if bench.is_gpu else ("MATH",):
        try:
            other = bench.seconds([_dense(bench, name, tokens)])
            bench.row(
                "prefill attention", what=name, context=tokens, ms=other * 1e3,
                of_matmul=operations / other / rate, kaiten_of_it=other / seconds,
            )  # fmt: skip
        except RuntimeError as error:
            bench.row("prefill attention", what=name, context=tokens, error=str(error)[:80])


def chunks(bench: Bench) -> None:
    """A chunk of a prompt behind a long prefix: few tiles of queries, in splits of positions."""
    _, rate = floors(bench)
    context = bench.sized(100 * K, 40)
    for tokens in (bench.sized(64, 5), bench.sized(512, 9)):
        seconds = bench.seconds([attend_chunk(bench, tokens, context, has_own=True)])
        operations = 4 * HEADS * HEAD_DIM * tokens * (context - tokens / 2)
        bench.row(
            "chunk attention", what=f"{tokens} tokens", context=context, ms=seconds * 1e3,
            of_matmul=operations / seconds / rate,
        )  # fmt: skip


def attend_chunk(bench: Bench, tokens: int, context: int, *, has_own: bool) -> Callable[[], object]:
    """The last `tokens` of a row."""
    pool = Pool(bench, [context])
    qkv = torch.randn(
        tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=bench.device, dtype=bench.dtype
    )
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    starts = torch.tensor([0, tokens], device=bench.device, dtype=torch.int32)
    plan, scale = _plan(pool, starts, q, tokens), HEAD_DIM**-0.5
    return lambda: paged_attention(
        q, pool.k, pool.v, pool.tables, starts, pool.contexts, scale, plan,
        own=(k, v) if has_own else None,
    )  # fmt: skip


def _dense(bench: Bench, name: str, tokens: int) -> Callable[[], object]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (
        torch.randn(1, heads, tokens, HEAD_DIM, device=bench.device, dtype=bench.dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def run() -> None:
        with sdpa_kernel(getattr(SDPBackend, name)):
            attend(q, k, v, is_causal=True, enable_gqa=True)

    return run


def fp8(bench: Bench) -> None:
    """Decode over keys and values in e4m3: how its time grows with the context, beside bf16."""
    read, _ = floors(bench)
    slopes = {}
    for dtype in (bench.dtype, torch.float8_e4m3fn):
        seconds = []
        for context in (bench.sized(2 * K, 16), bench.sized(8 * K, 32)):
            pool = Pool(bench, [context] * bench.sized(64, 2))
            pool.k, pool.v = pool.k.to(dtype), pool.v.to(dtype)
            rows = len(pool.contexts)
            q = random_queries(bench, rows)
            seconds.append(bench.seconds([bench.recorded(attend_decode(bench, q, pool))]))
            size = 2 * rows * context * KV_HEADS * HEAD_DIM * dtype.itemsize
            bench.row(
                "fp8 KV", what=str(dtype), rows=rows, context=context, us=seconds[-1] * 1e6,
                of_bandwidth=size / seconds[-1] / read,
            )  # fmt: skip
        slopes[dtype] = seconds[1] - seconds[0]
    bench.row(
        "fp8 KV", what="slope beside bf16", ratio=slopes[torch.float8_e4m3fn] / slopes[bench.dtype]
    )
