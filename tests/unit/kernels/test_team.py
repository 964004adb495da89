"""The threads that share a compiled kernel's work (cpp/parallel.cpp)."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import native
from kernels.linear.packed_linear import PackedLinear

SIZES = [(64, 192), (192, 4096), (768, 64)]


@pytest.fixture(autouse=True)
def _compiled(is_compiled: bool) -> None:
    if not (is_compiled and native.compiled().has_linear(torch.empty(SIZES[0]))):
        pytest.skip(f"no compiled linear here: {native.reason()}")


def cases() -> list[tuple[PackedLinear, torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    made = []
    for inputs, outputs in SIZES:
        layer = PackedLinear(torch.randn(outputs, inputs, generator=g), path="native")
        x = torch.randn(40, inputs, generator=g)
        made.append((layer, x, layer(x)))
    return made


def test_callers_on_many_threads_get_their_own_results() -> None:
    """One caller has the helpers, the others compute alone; nobody gets another's job."""
    made = cases()

    def call(turn: int) -> bool:
        layer, x, expected = made[turn % len(made)]
        return torch.equal(layer(x), expected)

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, range(400)))


def test_helpers_that_sleep_are_woken_and_more_are_hired() -> None:
    made = cases()
    for threads_used in (1, 3, 5, 2):
        torch.set_num_threads(threads_used)
        for layer, x, expected in made:
            assert torch.equal(layer(x), expected)
