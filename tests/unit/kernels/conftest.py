"""A test that takes `path` runs on the torch path and, given a compiler, on the compiled one."""

from collections.abc import Iterator

import pytest
import torch

from kernels import native


@pytest.fixture(scope="session")
def is_compiled() -> bool:
    return native.build()


@pytest.fixture(params=["torch", "native"])
def path(request: pytest.FixtureRequest, is_compiled: bool) -> Iterator[str]:
    if request.param == "native":
        if not is_compiled:
            pytest.skip(f"no compiled kernels here: {native.reason()}")
        assert native.build()
    else:
        native.disable("torch path under test")
    yield request.param
    native.build()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1234)
