"""A scheduler process that fails in its next plan once it is told to: all of the real one besides.

    python -m tests.fakes.faulty_scheduler --grpc-port 50052 --fault raise --fault-folder F

It is told by the file F/50052, so that a test chooses the moment, and the leader.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from scheduler_svc.core.commands import Command, MakePlan
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.main import SchedulerProcess
from scheduler_svc.settings import SchedulerSettings
from service_kit import lifecycle, logs
from service_kit.settings import load as load_settings


class FaultySettings(SchedulerSettings):
    """A scheduler with a fault."""

    fault: Literal["raise", "hang"] = Field(default="raise", description="what a plan does")
    fault_folder: Path = Field(description="a file here, named by our port, brings the fault on")


def plant(kind: str, told: Path) -> None:
    """From now on a plan of this process fails if the file is there."""
    truth = Scheduler.apply

    def apply(core: Scheduler, command: Command, now_ns: int) -> Outcome:
        if isinstance(command, MakePlan) and told.exists():
            assert kind == "hang", "the fault that was planted"
            time.sleep(3600)
        return truth(core, command, now_ns)

    Scheduler.apply = apply  # type: ignore[method-assign, assignment]


def main(argv: Sequence[str] | None = None) -> int:
    """As `scheduler_svc.main.main`."""

    def build() -> SchedulerProcess:
        settings = load_settings(FaultySettings, "scheduler", argv)
        logs.configure("scheduler", settings.log_level)
        plant(settings.fault, settings.fault_folder / str(settings.grpc_port))
        return SchedulerProcess(settings)

    return lifecycle.launch(build)


if __name__ == "__main__":
    sys.exit(main())
