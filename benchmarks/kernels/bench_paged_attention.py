"""paged_attention, all 12 layers of a 128M Llama shape (12/4 heads of 64): GB/s of KV and of peak.

python -m benchmarks.kernels.bench_paged_attention
"""

import torch
from torch import Tensor

from benchmarks.kernels.recorded import record
from gpu_worker.service.machine_rates import read_bytes_per_s, times_s
from kernels import native
from kernels.attention.paged_attention import paged_attention, paged_attention_reference

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 12, 12, 4, 64, 16
# rows, query tokens of each, context of each
CASES = ((1, 1, 150), (16, 1, 150), (64, 1, 150), (16, 1, 1024), (1, 512, 512), (1, 512, 2048))


def layer(rows: int, queries: int, context: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    blocks = -(-context // BLOCK_SIZE)
    shape = (rows * blocks + 8, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    k_pages, v_pages = (torch.randn(shape).to(dtype) for _ in range(2))
    tables = torch.randperm(shape[0])[: rows * blocks].view(rows, blocks).int()
    starts = (torch.arange(rows + 1) * queries).int()
    q = torch.randn(rows * queries, HEADS, HEAD_DIM).to(dtype)
    return q, k_pages, v_pages, tables, starts, torch.full((rows,), context).int()


def main() -> None:
    torch.manual_seed(0)
    native.build()
    peak = read_bytes_per_s()
    for dtype in (torch.bfloat16, torch.float32):
        for rows, queries, context in CASES:
            layers = [layer(rows, queries, context, dtype) for _ in range(LAYERS)]
            kv_bytes = LAYERS * rows * context * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize
            for name, run in (("launcher", paged_attention), ("torch", paged_attention_reference)):
                scale = HEAD_DIM**-0.5
                repeats = 15 if name == "launcher" else 3
                best, median = times_s(
                    lambda run=run, layers=layers, scale=scale: [run(*a, scale) for a in layers],  # type: ignore[misc]
                    repeats=repeats,
                )
                record(
                    "paged_attention",
                    path=name,
                    dtype=str(dtype).removeprefix("torch."),
                    rows=rows,
                    queries=queries,
                    context=context,
                    layers=LAYERS,
                    median_ms=round(median * 1e3, 3),
                    best_ms=round(best * 1e3, 3),
                    kv_gb_per_s=round(kv_bytes / median / 1e9, 2),
                    read_gb_per_s=round(peak / 1e9, 2),
                    read_fraction=round(kv_bytes / median / peak, 3),
                )


if __name__ == "__main__":
    main()
