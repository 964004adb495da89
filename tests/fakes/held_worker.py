"""A real worker whose steps can be held, as by a device that does not answer.

    python -m tests.fakes.held_worker --model FOLDER --lock FILE

A step that samples the output position in the file or a later one waits while another process has
an exclusive `flock` of it (`tests.support.held_steps`). That takes no processor time, and answers
nobody.
"""

import fcntl
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from gpu_worker.batch.step_types import BlockPairs, ModelRunner, StepInputs, StepSamples
from gpu_worker.runner.eager_runner import EagerRunner
from gpu_worker.service import runtime
from gpu_worker.service.loading import Loaded, load
from gpu_worker.service.process import WorkerProcess
from gpu_worker.settings import WorkerSettings
from service_kit import lifecycle, logs
from service_kit.settings import load as load_settings
from tests.support.held_steps import NEVER


class HeldSettings(WorkerSettings):
    """A worker, and what holds it."""

    lock: Path = Field(description="a file: who has an exclusive flock of it holds steps")


class HeldDevice:
    """A `ModelRunner` that waits for the lock before such a step."""

    def __init__(self, device: ModelRunner, settings: HeldSettings) -> None:
        self._device = device
        self._lock = settings.lock

    def swap_blocks(self, pairs: BlockPairs) -> None:
        self._device.swap_blocks(pairs)

    def copy_blocks(self, pairs: BlockPairs) -> None:
        self._device.copy_blocks(pairs)

    def execute(self, step: StepInputs) -> StepSamples:
        with self._lock.open("a+") as lock:
            lock.seek(0)
            if (step.sampling.position >= int(lock.read() or NEVER)).any():
                fcntl.flock(lock, fcntl.LOCK_SH)
        return self._device.execute(step)


def load_held(settings: WorkerSettings) -> Loaded:
    """In place of `service.loading.load`."""
    assert isinstance(settings, HeldSettings)
    loaded = load(settings)
    assert isinstance(loaded.runner, EagerRunner)
    return replace(loaded, runner=HeldDevice(loaded.runner, settings))


def main(argv: Sequence[str] | None = None) -> int:
    """As `gpu_worker.main.main`."""

    def build() -> WorkerProcess:
        settings = load_settings(HeldSettings, "worker", argv)
        logs.configure("worker", settings.log_level)
        runtime.prepare()
        runtime.take_short_turns()
        return WorkerProcess(settings, load_held)

    return lifecycle.launch(build)


if __name__ == "__main__":
    sys.exit(main())
