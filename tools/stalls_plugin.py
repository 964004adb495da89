"""pytest plugin: the process of a test stands still at random moments, as one that has no core.

    make test ARGS='tests/integration -p tools.stalls_plugin'
    make flakes ARGS='-- -n 4 -p tools.stalls_plugin'

Services that a test started go on meanwhile, so what a test takes for granted because it is quick
shows itself: who waits for conditions does not mind. A test's moments follow from its name and
`--stalls-seed`; its threads other than the main one go on.
"""

import random
import signal
import threading
import time
from collections.abc import Generator
from typing import Final

import pytest

# Seconds, at most: of one standstill, and between two.
STILL_S: Final = 1.2
BETWEEN_S: Final = 2.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stalls")
    group.addoption("--stalls-seed", type=int, default=0, help="seed of the moments")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    seed = f"{item.config.getoption('--stalls-seed')} {item.nodeid}"
    between, still = random.Random(seed), random.Random(seed)
    over, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def disturb() -> None:
        while not over.wait(between.uniform(0, BETWEEN_S)):
            signal.pthread_kill(main, signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, lambda *_: time.sleep(still.uniform(0, STILL_S)))
    disturbing = threading.Thread(target=disturb, daemon=True)
    disturbing.start()
    try:
        return (yield)
    finally:
        over.set()
        disturbing.join()
        signal.signal(signal.SIGUSR2, before)
