"""Fixtures shared by every layer that meets the real store."""

import gc
import itertools
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from service_kit.lifecycle import YOUNG_OBJECTS

if TYPE_CHECKING:
    from tests.support.store_server import StoreServer
    from tests.support.whole_stack import WholeStack

# Before torch is imported: several processes of tests share the cores, and threads of each that
# wait for one another spin. It made some tests ten times as dear.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Every HTTP client reads the machine's certificates, for longer than it then lives, and no door of
# a test has one: they are looked for where none are, by the processes of tests too.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)
# Services that tests start as processes, wherever those stand.
os.environ["PYTHONPATH"] = os.path.dirname(os.path.dirname(__file__))

pytest_plugins = ("tests.support.reporting", "tests.support.order")

_cells = itertools.count()

# How long an example takes, or to draw one, says more about the machine than about the code.
settings.register_profile("kaiten", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kaiten")


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "write what happened into the golden files; read the diff"
    parser.addoption("--rewrite", action="store_true", help=what)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make millions of objects and hardly any garbage, and what is there when the first
    test begins stays: the collector never looks at it, and as seldom at the rest as in a service.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        gc.enable()


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[StoreServer]":
    """The session's server. Shared: never stop or flush it, start another StoreServer for that."""
    from tests.support.store_server import own_store

    with own_store(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def redis_url(store_server: "StoreServer") -> str:
    """URL of the session's server; tests keep apart by cell."""
    return store_server.url


@pytest.fixture
def cell() -> str:
    """A cell name that no other test of this session uses."""
    return f"test-{next(_cells)}"


@pytest.fixture(scope="session")
def whole_stack(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[WholeStack]":
    """One real stack for everybody who only talks to it: never kill a part of it."""
    from tests.support.processes import HELD_WORKER
    from tests.support.whole_stack import WholeStack

    folder = tmp_path_factory.mktemp("whole-stack")
    with WholeStack(folder, worker_module=HELD_WORKER) as stack:
        yield stack
        stack.check()
