import pytest
import torch

from kernels.linear import weight_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_do_not_overlap(dtype: torch.dtype) -> None:
    tensors = [weight_memory.empty((rows, 7), dtype) for rows in (1, 3, 64, 5)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert torch.equal(tensor, torch.full_like(tensor, value))


def test_a_weight_larger_than_a_chunk_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "_CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(weight_memory, "_chunk", None)
    small, large = (weight_memory.empty((n,), torch.float32) for n in (10, 5000))
    starts = {tensor.untyped_storage().data_ptr() for tensor in (small, large)}
    assert len(starts) == 2
    assert float(large.fill_(1.0).sum()) == 5000.0
