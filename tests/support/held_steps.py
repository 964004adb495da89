"""Steps of `tests.fakes.held_worker` that wait, without the imports of a worker."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Workers that were told of this file are held in the block, however long that takes."""
    with lock.open("a") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        yield
