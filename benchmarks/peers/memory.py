"""Peak resident memory and CPU time of everything this process has started, all together."""

import os
import threading
from types import TracebackType
from typing import Final, Self

import psutil

EVERY_S: Final = 0.1


def children_cpu_s() -> float:
    """CPU seconds so far of all that live. On a machine with other work it tells more than the
    clock."""
    used_s = 0.0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # It ended between the two calls.
        used_s += times.user + times.system
    return used_s


class PeakMemory:
    """A context manager: `peak_mb` is the largest sum seen. Pages shared by processes count in
    each, as in the published figures of the peers."""

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process(os.getpid())
        while not self._stop.wait(EVERY_S):
            now_mb = 0.0
            for process in me.children(recursive=True):
                try:
                    now_mb += process.memory_info().rss / 2**20
                except psutil.Error:
                    continue  # It ended between the two calls.
            self.peak_mb = max(self.peak_mb, now_mb)
