"""Results on their way back: a few buffers, all taken at the start, and nothing lost in them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.runner.device_streams import CpuStreams, Fetch
from gpu_worker.runner.results import Result, Results, results_bytes

LIMITS = RowLimits(
    slots=4, context_tokens=40, step_tokens=24, block_size=4, block_count=40, vocab_size=97
)


class Late(CpuStreams):
    """Its copies are made when somebody waits for them, no sooner."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []

    def host_buffer(self, size_bytes: int) -> Tensor:
        self.buffers.append(super().host_buffer(size_bytes))
        return self.buffers[-1]

    def fetch(self, tensors: Sequence[Tensor], targets: Sequence[Tensor], begun: int) -> Fetch:
        return _Late(tensors, targets)


class _Late:
    is_done = False

    def __init__(self, tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._tensors, self._targets = tensors, targets
        self.waits = 0

    def wait(self) -> int:
        self.waits += 1
        assert self.waits == 1
        for target, tensor in zip(self._targets, self._tensors, strict=True):
            target.copy_(tensor)
        return 7


def told(seed: int) -> list[Tensor]:
    """As a step answers: its tokens, and log-probabilities of no and of some likeliest."""
    return [
        torch.arange(3) + seed,
        torch.full((2,), seed / 2),
        torch.zeros((2, 0), dtype=torch.int64),
        torch.full((2, 5), -seed),
    ]


def assert_told(result: Result, seed: int) -> None:
    arrays, elapsed_us = result.read()
    assert elapsed_us == 7
    for array, tensor in zip(arrays, told(seed), strict=True):
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())


def test_results_are_read_in_any_order_however_many_are_on_their_way() -> None:
    streams = Late()
    results = Results(streams, results_bytes(LIMITS))
    count = len(streams.buffers)
    flying = [results.fetch(told(seed), 0) for seed in range(3 * count)]
    # The last ones wait in their buffers, those before had to make room.
    assert [result.is_done for result in flying] == [True] * 2 * count + [False] * count
    for seed in reversed(range(3 * count)):
        assert_told(flying[seed], seed)
        assert_told(flying[seed], seed)
    assert len(streams.buffers) == count


def test_what_was_read_stays_what_it_was() -> None:
    streams = Late()
    results = Results(streams, results_bytes(LIMITS))
    first = results.fetch(told(1), 0)
    assert_told(first, 1)
    for seed in range(20):
        assert_told(results.fetch(told(seed), 0), seed)
    assert_told(first, 1)


def test_the_largest_answer_fits_and_a_larger_one_takes_memory_that_is_not_pinned() -> None:
    streams = Late()
    results = Results(streams, results_bytes(LIMITS))
    rows, tokens, k = LIMITS.slots, LIMITS.step_tokens, 32

    def answer(k: int) -> list[Tensor]:
        parts: list[Tensor] = [torch.arange(rows)]
        for count in (rows, tokens):
            ids = torch.arange(count * k).view(count, k)
            parts += [torch.ones(count), ids, ids.float()]
        return parts

    def lies_in_a_buffer(result: Result) -> bool:
        spans = [(each.data_ptr(), each.data_ptr() + len(each)) for each in streams.buffers]
        return all(
            any(start <= place.data_ptr() < end for start, end in spans) for place in result._places
        )

    fits, too_large = results.fetch(answer(k), 0), results.fetch(answer(k + 1), 0)
    assert lies_in_a_buffer(fits)
    assert not lies_in_a_buffer(too_large)
    for result, width in ((fits, k), (too_large, k + 1)):
        for array, tensor in zip(result.read()[0], answer(width), strict=True):
            np.testing.assert_array_equal(array, tensor.numpy())


def test_a_result_that_is_lost_says_so_to_each_reader() -> None:
    class Lost:
        is_done = True

        def wait(self) -> int:
            raise RuntimeError("lost")

    fetch: Any = Lost()
    result = Result([], fetch)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            result.read()
