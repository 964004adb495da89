"""Where the services' packages lie, for the processes that run them.

Installed they are below `kaiten/services`, on nobody's path: as top-level names they would meet
those of others. In a checkout they lie beside `kaiten`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import kaiten

# What runs each, by the name that people use.
MODULES: Final = {
    "archive": "ledger.archive",
    "gateway": "gateway",
    "scheduler": "scheduler_svc",
    "worker": "gpu_worker",
    "profile": "gpu_worker.profile",
}

# Of the archive's commands those that make decisions again: a scheduler's core does.
REPLAY: Final = "scheduler_svc.archive_replay"
REPLAYED: Final = ("steps", "explain")


def module(name: str, arguments: Sequence[str]) -> str:
    """What runs `kaiten NAME ARGUMENTS`."""
    is_replayed = name == "archive" and bool(arguments) and arguments[0] in REPLAYED
    return REPLAY if is_replayed else MODULES[name]


def command(module: str) -> tuple[str, ...]:
    """Runs a service's module. -P: a file of that name in the current folder must not be run."""
    return (sys.executable, "-P", "-m", module)


def environ() -> dict[str, str]:
    """What that process finds the services' packages by."""
    found = [str(_folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(found)}


def _folder() -> Path:
    package = Path(kaiten.__file__).parent
    installed = package / "services"
    return installed if installed.is_dir() else package.parent
