"""What the GPU script looks at first sees a worker that attends to the wrong tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import smoke
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.crowd import jobs_uniform
from benchmarks.gpu.models import TINY_QWEN3
from gpu_worker.model import decoder


def played(folder: Path) -> Bench:
    device = torch.device("cpu")
    return Bench(device=device, is_tiny=True, dtype=torch.float32, out=folder / "said")


def test_a_worker_that_is_right_passes_and_its_outputs_tell(tmp_path: Path) -> None:
    bench = played(tmp_path)
    smoke.worker(bench)
    (row,) = map(json.loads, (tmp_path / "said").read_text().splitlines())
    assert (row["recorded"], row["unrecorded"], row["ok"]) == (0, 0, True)
    weights = smoke.telling_weights(bench)
    jobs = jobs_uniform(smoke.JOBS, smoke.SHORTEST, smoke.LONGEST, TINY_QWEN3.vocab)
    for job in jobs:
        output: list[int] = []
        for _ in range(job.output):
            output.append(smoke.likeliest(weights, bench, job, [*output, 0])[-1])
        assert len(set(output)) > 10
        # Another order of the same sums decides otherwise nowhere.
        best, second = smoke.tops(weights, bench, job, output).values.unbind(1)
        assert (best - second).min() > 1e-2


@pytest.mark.parametrize(
    "read_wrongly",
    [
        lambda tables: tables.roll(1, dims=0),
        lambda tables: tables.roll(1, dims=1),
        lambda tables: torch.cat([tables[:, :1], tables[:, 1:].flip(1)], dim=1),
    ],
    ids=["another row's blocks", "blocks one on", "blocks in another order"],
)
def test_a_worker_that_attends_to_other_tokens_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_wrongly: Callable[[Tensor], Tensor]
) -> None:
    real = vars(decoder)["paged_attention"]

    def wrong(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, *rest: Any, **named: Any) -> Any:
        # Of a single row it is what the outputs are compared with.
        its_tables = read_wrongly(tables) if len(tables) > 1 else tables
        return real(q, k, v, its_tables.contiguous(), *rest, **named)

    monkeypatch.setattr(decoder, "paged_attention", wrong)
    with pytest.raises(AssertionError, match="not what the model says"):
        smoke.worker(played(tmp_path))
