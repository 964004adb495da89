"""A test that takes `path` runs on the torch path and, given a compiler, on the compiled one."""

from collections.abc import Iterator

import pytest
import torch

from kernels import native


@pytest.fixture(scope="session")
def is_compiled() -> bool:
    return native.build()


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    """Two, whatever the machine has.

    Many more share out the small calls of a test, and on a loaded machine wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["torch", "native"])
def path(request: pytest.FixtureRequest, is_compiled: bool) -> Iterator[str]:
    if request.param == "native":
        if not is_compiled:
            pytest.skip(f"no compiled kernels here: {native.reason()}")
        assert native.build()
    else:
        # Of a matrix library threads wait for each other without sleeping.
        torch.set_num_threads(1)
        native.disable("torch path under test")
    yield request.param
    native.build()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1234)
