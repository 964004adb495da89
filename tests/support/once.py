"""What costs seconds to make is made once per run of the tests, however many processes run them.

folder = made_once(tmp_path_factory, "checkpoints", write)    write(folder) fills an empty one
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of this run, filled by who comes first; the others wait, and only read it.

    Who fails or dies leaves nothing behind, and the next tries again.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A worker's own folder lies in that of the run.
        root = root.parent
    folder, unfinished = root / f"once-{name}", root / f"once-{name}.unfinished"
    with (root / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder
