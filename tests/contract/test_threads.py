"""Many processes of tests share few cores: none of them may burn one while it waits."""

import os

import torch


def test_torch_has_the_threads_that_it_was_told_of() -> None:
    """Told before it is imported, or it has one for each core, which spin between two calls."""
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    assert os.environ["OMP_WAIT_POLICY"]
