"""Steps of `tests.fakes.held_worker` that wait, without the imports of a worker."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(lock: Path, position: int = 0) -> Iterator[None]:
    """Workers that were told of this file compute up to this output position in the block, and are
    held there, however long that takes.
    """
    with lock.open("w") as ours:
        ours.write(str(position))
        ours.flush()
        fcntl.flock(ours, fcntl.LOCK_EX)
        yield
