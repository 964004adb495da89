"""The kernels of a GPU worker's steps asked for before any step, to be compiled several at a time.

A step that is recorded launches the same kernels whatever its rows are, and nothing that it
computes decides which. So what it launches is found without computing, over tensors that have
shapes and no memory: Triton compiles what it is asked to launch (`jit.compiling_ahead`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.model import ModelConfig
from gpu_worker.model.weights import Weights, without_memory
from gpu_worker.runner.device_streams import CpuStreams
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.step_graphs import Bucket, buckets_of
from kernels import dispatch


class NoStreams(CpuStreams):
    """Of a device whose tensors have no memory; what is recorded there is only asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def ask_for_kernels(
    config: ModelConfig,
    weights: Weights,
    pages: Tensor,
    limits: RowLimits,
    kv_scales: Tensor | None,
) -> None:
    """Launch what the steps of a worker do, and compute nothing. `pages`: any of its layout."""
    pages = pages.to("meta")
    with dispatch.forced("triton"):
        decoder = Decoder(
            config,
            without_memory(weights),
            pages,
            context_tokens=limits.context_tokens,
            kv_scales=kv_scales,
        )
        GraphRunner(decoder, pages, limits, NoStreams(), buckets=ends_of(limits)).record()


def ends_of(limits: RowLimits) -> list[Bucket]:
    """The smallest and the largest of each kind: what lies between launches the same kernels."""
    buckets = buckets_of(limits)
    kinds = ([each for each in buckets if each.is_decode is kind] for kind in (True, False))
    return [end for kind in kinds for end in (kind[0], kind[-1])]
