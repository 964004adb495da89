"""Blocks copied on the device by way of little memory."""

import pytest
import torch

from gpu_worker.runner import block_copies
from gpu_worker.runner.block_copies import BlockCopies
from kernels.kv import fp8


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
