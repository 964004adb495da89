"""Blocks copied on the device by way of little memory, and to and from the host's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpu_worker.batch.step_types import BlockPairs
from gpu_worker.runner import block_copies
from gpu_worker.runner.block_copies import BlockCopies
from gpu_worker.runner.eager_runner import EagerRunner
from kernels.kv import fp8

Swap = Callable[[torch.Tensor, torch.Tensor, BlockPairs], None]


@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, fp8.DTYPE])
def test_as_if_all_at_once(
    at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = fp8.as_bytes(torch.randn(3, 2, 20, 2, 4, 8).to(dtype))
    block_bytes = pages[:, :, 0].numel() * pages.itemsize
    monkeypatch.setattr(block_copies, "_ROOM_BYTES", at_once * block_bytes)
    sources = torch.tensor([0, 3, 3, 7, 19, 2, 0])
    targets = torch.tensor([1, 18, 4, 8, 5, 6, 17])
    expected = pages.clone()
    expected[:, :, targets] = pages[:, :, sources]
    copies = BlockCopies(pages)
    taken = copies._room.nbytes
    assert taken == min(at_once, 20) * block_bytes
    with torch.inference_mode():
        copies.copy(sources, targets)
        copies.copy(sources[:0], targets[:0])
    assert torch.equal(pages, expected)
    assert copies._room.nbytes == taken


BLOCKS, HOST_BLOCKS = 7, 5
swaps = st.lists(
    st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, HOST_BLOCKS - 1), st.booleans()).map(
        lambda drawn: (drawn[0], BLOCKS + drawn[1]) if drawn[2] else (BLOCKS + drawn[1], drawn[0])
    ),
    min_size=1,
    max_size=30,
).map(tuple)


def shown(pages: torch.Tensor, host_blocks: torch.Tensor) -> dict[int, bytes]:
    """The content of each block, by its number in a plan."""
    blocks = [pages[:, :, index] for index in range(BLOCKS)] + list(host_blocks)
    return {
        number: block.contiguous().view(torch.uint8).numpy().tobytes()
        for number, block in enumerate(blocks)
    }


def drawn_blocks(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of any kind, also such as are no numbers."""
    tile = (2, 4, 8)
    shapes = ((3, 2, BLOCKS, *tile), (HOST_BLOCKS, 3, 2, *tile))
    generator = torch.Generator().manual_seed(3)
    pages, host_blocks = (
        torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator)
        .to(torch.uint8)
        .view(dtype)
        for shape in shapes
    )
    return pages, host_blocks


def swap_on_a_device(pages: torch.Tensor, host_blocks: torch.Tensor, pairs: BlockPairs) -> None:
    copies = BlockCopies(fp8.as_bytes(pages), fp8.as_bytes(host_blocks))
    with torch.inference_mode():
        copies.swap(pairs, torch.tensor([min(pair) for pair in pairs], dtype=torch.int64))


def swap_eagerly(pages: torch.Tensor, host_blocks: torch.Tensor, pairs: BlockPairs) -> None:
    no_decoder: Any = None
    EagerRunner(no_decoder, pages, host_blocks).swap_blocks(pairs)


@pytest.mark.parametrize("swap", [swap_on_a_device, swap_eagerly])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, fp8.DTYPE])
@pytest.mark.parametrize("at_once", [1, 3, 100])
@given(pairs=swaps)
@example(pairs=((0, 8), (9, 0)))
@example(pairs=((9, 0), (0, 8)))
@example(pairs=((8, 0), (9, 0)))
@example(pairs=((0, 8), (1, 8)))
@example(pairs=((0, 8), (8, 1), (1, 9)))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_swaps_are_made_one_after_the_other(
    swap: Swap,
    dtype: torch.dtype,
    at_once: int,
    pairs: BlockPairs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, host_blocks = drawn_blocks(dtype)
    monkeypatch.setattr(block_copies, "_ROOM_BYTES", at_once * host_blocks[0].nbytes)
    expected = shown(pages, host_blocks)
    for source, target in pairs:
        expected[target] = expected[source]
    swap(pages, host_blocks, pairs)
    assert shown(pages, host_blocks) == expected


def test_swaps_that_do_not_touch_each_other_go_together() -> None:
    """Few launches for many blocks: a batch ends where one would undo another, or the room does."""
    out = tuple((block, BLOCKS + block) for block in range(5))
    back = tuple((host, own) for own, host in out)
    assert _parts(out + back) == [(0, 5), (5, 10)]
    assert _parts((*out[:2], (3, BLOCKS), *out[3:])) == [(0, 2), (2, 5)]
    assert _parts(out, most=2) == [(0, 2), (2, 4), (4, 5)]


def _parts(pairs: BlockPairs, most: int = 100) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in block_copies._batches(pairs, BLOCKS, most)]
