"""Steps of `tests.fakes.held_worker` that wait, without the imports of a worker."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# Of a file that holds nobody: a step that has read it, and comes to the lock late, goes on.
NEVER: Final = 1 << 30


@contextmanager
def held(lock: Path, position: int = 0) -> Iterator[None]:
    """Workers that were told of this file compute up to this output position in the block, and are
    held there, however long that takes.
    """
    ours = os.open(lock, os.O_RDWR | os.O_CREAT)
    try:
        _write(ours, position)
        fcntl.flock(ours, fcntl.LOCK_EX)
        yield
    finally:
        _write(ours, NEVER)
        os.close(ours)


def _write(lock: int, position: int) -> None:
    """At once: who reads it meanwhile has this one or the one before."""
    os.pwrite(lock, b"%16d" % position, 0)
