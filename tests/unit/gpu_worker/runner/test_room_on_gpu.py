"""What a GPU worker takes beside weights and KV is found by being one for a moment."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.batch.step_types import StepInputs
from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.config import read_config
from gpu_worker.model.weights import load_weights
from gpu_worker.runner.device_streams import CpuStreams
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.step_graphs import buckets_of
from gpu_worker.service import loading
from gpu_worker.settings import WorkerSettings
from kernels import dispatch
from tests.support.random_model import write_random_model

CPU = torch.device("cpu")
CONTEXT = 256


class Memory:
    """The GPU's, played: what is kept stays, a step takes a byte per token while it runs, and a
    recorded one 7 bytes of the driver's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept, self.peak, self.drivers, self.each_graph = 1000, 0, 5000, 7
        self.steps: list[StepInputs] = []
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.kept)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * self.kept)
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (10**6 - 2 * self.kept - self.drivers, 10**6)
        )
        build, launch, record = GraphRunner.__init__, GraphRunner.launch, GraphRunner.record

        def recorded(device: GraphRunner, *given: Any) -> None:
            record(device, *given)
            self.drivers += self.each_graph

        def built(device: GraphRunner, *given: object, **named: object) -> None:
            build(device, *given, **named)  # type: ignore[arg-type]
            self.limits = device.limits
            self.kept += 300

        def launched(device: GraphRunner, step: StepInputs) -> object:
            self.steps.append(step)
            self.peak = max(self.peak, self.kept + step.token_count)
            return launch(device, step)

        monkeypatch.setattr(GraphRunner, "__init__", built)
        monkeypatch.setattr(GraphRunner, "launch", launched)
        monkeypatch.setattr(GraphRunner, "record", recorded)

    def _reset(self, device: torch.device) -> None:
        self.peak = self.kept


@pytest.fixture(autouse=True)
def reference_path() -> Iterator[None]:
    dispatch.force("torch")
    yield
    dispatch.force(None)


@pytest.mark.parametrize("neighbour", [0, 1 << 30])
def test_what_is_kept_the_worst_step_and_recorded_ones_count(
    neighbour: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that takes its memory meanwhile counts for no more than a step may."""
    folder = write_random_model(tmp_path / "tiny", seed=3)
    settings = WorkerSettings(model=str(folder), slots=3, step_tokens=40, block_size=4)
    config = read_config(folder)
    with Checkpoint(folder) as checkpoint:
        weights = load_weights(checkpoint, config, dtype=torch.float32, device=CPU)
    memory = Memory(monkeypatch)
    memory.each_graph += neighbour
    taken = loading.measure_step(settings, config, weights, torch.float32, None, CpuStreams())
    each_graph = loading._GRAPH_BYTES_MAX if neighbour else 7
    graphs = each_graph * len(buckets_of(memory.limits))
    assert taken == 300 + 2 * settings.step_tokens + graphs + loading._HANDLES_BYTES
    worst, recorded = memory.steps[0], memory.steps[-1]
    assert (worst.context_lengths == CONTEXT).all()
    assert (recorded.context_lengths == CONTEXT).all()
    # Whatever can be wanted is wanted in it.
    assert worst.prompt_logprobs is not None
    assert worst.sampling.edits() is not None
    assert [len(memory.steps), recorded.token_count] == [4, settings.step_tokens]
