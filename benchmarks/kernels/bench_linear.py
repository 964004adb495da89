"""linear: packed beside F.linear, 768 -> 3072, weights outside the cache: GB/s, GF/s, and of peak.

python -m benchmarks.kernels.bench_linear
"""

import torch

from benchmarks.kernels.recorded import record
from gpu_worker.service.machine_rates import matmul_flops_per_s, read_bytes_per_s, times_s
from kernels.linear.packed_linear import PackedLinear

IN_FEATURES, OUT_FEATURES, LAYERS = 768, 3072, 24
ROWS = (1, 4, 16, 64, 256)


def main() -> None:
    torch.manual_seed(0)
    read_peak = read_bytes_per_s()
    weights = IN_FEATURES * OUT_FEATURES * LAYERS
    for dtype in (torch.bfloat16, torch.float32):
        flops_peak = matmul_flops_per_s(dtype)
        for path in ("auto", "torch"):
            layers = [
                PackedLinear(torch.randn(OUT_FEATURES, IN_FEATURES).to(dtype), path=path)
                for _ in range(LAYERS)
            ]
            for rows in ROWS:
                x = torch.randn(rows, IN_FEATURES).to(dtype)
                best, median = times_s(
                    lambda layers=layers, x=x: [layer(x) for layer in layers],  # type: ignore[misc]
                    repeats=9,
                )
                record(
                    "linear",
                    path=layers[0].path,
                    dtype=str(dtype).removeprefix("torch."),
                    rows=rows,
                    median_ms=round(median * 1e3, 3),
                    best_ms=round(best * 1e3, 3),
                    weight_gb_per_s=round(weights * dtype.itemsize / median / 1e9, 2),
                    read_fraction=round(weights * dtype.itemsize / median / read_peak, 3),
                    gf_per_s=round(2 * rows * weights / median / 1e9, 1),
                    flops_fraction=round(2 * rows * weights / median / flops_peak, 3),
                )


if __name__ == "__main__":
    main()
