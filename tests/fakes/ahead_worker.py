"""A real worker whose device is one step ahead of the host, as a GPU is, and fails as one does.

    python -m tests.fakes.ahead_worker --scheduler HOST:PORT --model FOLDER --lost-if FILE

The CPU plays the device. From the moment that FILE is there it fails while it computes, and with it
everything that is asked of it afterwards. With `--full-if FILE` no step finds memory from then on.
A launch that computes `refused_token` is refused.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import Field

from gpu_worker.batch.step_types import BlockPairs, Flight, RowChanges, StepInputs, StepSamples
from gpu_worker.runner.device_streams import CpuStreams, losing
from gpu_worker.runner.eager_runner import EagerRunner
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.warm_up import make_ready
from gpu_worker.service.loading import Loaded, load
from gpu_worker.service.process import WorkerProcess
from gpu_worker.settings import WorkerSettings
from service_kit import lifecycle, logs
from service_kit.settings import load as load_settings

_NOBODY = Path("/nonexistent")


class AheadSettings(WorkerSettings):
    """A worker that is a step ahead, and when it fails."""

    lost_if: Path = Field(default=_NOBODY, description="the device fails once this file is there")
    full_if: Path = Field(default=_NOBODY, description="no memory is left once this file is there")
    refused_token: int = Field(default=-1, description="a launch that computes it is refused")


class FailingDevice:
    """What an `AheadRunner` does when the GPU under it fails, or refuses some of its work."""

    def __init__(self, device: GraphRunner, settings: AheadSettings) -> None:
        self._device = device
        self._lost_if = settings.lost_if
        self._full_if = settings.full_if
        self._refused_token = settings.refused_token

    def clear(self) -> None:
        self._raise_if_lost()
        self._device.clear()

    def apply(self, changes: RowChanges, swaps: BlockPairs, copies: BlockPairs) -> None:
        self._raise_if_lost()
        self._device.apply(changes, swaps, copies)

    def launch(self, step: StepInputs) -> Flight:
        self._raise_if_lost()
        if self._full_if.exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        if (step.token_ids == self._refused_token).any():
            raise RuntimeError("no memory for this one")
        return _Failing(self._device.launch(step), self)

    def finish(self) -> None:
        self.wait()
        self._device.finish()

    def wait(self) -> None:
        """As the host does for the device."""
        with losing():
            self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost_if.exists():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class _Failing:
    def __init__(self, flight: Flight, device: FailingDevice) -> None:
        self._flight = flight
        self._device = device

    @property
    def is_done(self) -> bool:
        self._device.wait()
        return self._flight.is_done

    def result(self) -> StepSamples:
        self._device.wait()
        return self._flight.result()


def load_ahead(settings: WorkerSettings) -> Loaded:
    """In place of `service.loading.load`: the same weights and pages, ahead of the host."""
    assert isinstance(settings, AheadSettings)
    loaded = load(settings)
    assert isinstance(loaded.runner, EagerRunner)
    runner = loaded.runner
    device = GraphRunner(
        runner._decoder,
        runner._pages,
        loaded.limits,
        CpuStreams(),
        host_blocks=runner._host_blocks,
    )
    make_ready(device)
    failing = FailingDevice(device, settings)
    return replace(loaded, runner=failing, device_name="played by the CPU")


def main(argv: Sequence[str] | None = None) -> int:
    """As `gpu_worker.main.main`."""

    def build() -> WorkerProcess:
        settings = load_settings(AheadSettings, "worker", argv)
        logs.configure("worker", settings.log_level)
        return WorkerProcess(settings, load_ahead)

    return lifecycle.launch(build)


if __name__ == "__main__":
    sys.exit(main())
