"""Fixtures shared by every layer that meets the real store."""

import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Before torch is imported, which the next lines do: several processes of tests share the cores, and
# threads of each that wait for one another spin. It made some tests ten times as dear.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tests.support.store_server import StoreServer
from tests.support.whole_stack import WholeStack

pytest_plugins = ("tests.support.reporting", "tests.support.order")

_cells = itertools.count()

# How long an example takes says more about the machine than about the code.
settings.register_profile("kaiten", deadline=None)
settings.load_profile("kaiten")


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "write what happened into the golden files; read the diff"
    parser.addoption("--rewrite", action="store_true", help=what)


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """The session's server. Shared: never stop or flush it, start another StoreServer for that."""
    with StoreServer(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def redis_url(store_server: StoreServer) -> str:
    """URL of the session's server; tests keep apart by cell."""
    return store_server.url


@pytest.fixture
def cell() -> str:
    """A cell name that no other test of this session uses."""
    return f"test-{next(_cells)}"


@pytest.fixture(scope="session")
def whole_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeStack]:
    """One real stack for everybody who only talks to it: never kill a part of it."""
    with WholeStack(tmp_path_factory.mktemp("whole-stack")) as stack:
        yield stack
        stack.check()
