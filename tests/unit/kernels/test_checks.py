"""Checks of arguments: what is refused is named, and what is not costs no sentence."""

import pytest
import torch

from kernels import checks


class Silent(str):
    """Not to be put into a sentence."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        raise AssertionError("a sentence was made of it")


class SilentInt(int):
    def __format__(self, spec: str) -> str:
        raise AssertionError("a sentence was made of it")


def test_what_is_not_refused_costs_no_sentence() -> None:
    x, ids = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32)
    checks.require_float(x, Silent("x"), dim=SilentInt(2))
    checks.require_like(x, x, Silent("x"), Silent("y"))
    checks.require_ids(ids, Silent("ids"), dtype=torch.int32, shape=(SilentInt(2),))
    checks.require_shape(x, Silent("x"), (2, 3))
    # Otherwise nothing is proven.
    with pytest.raises(AssertionError, match="a sentence"):
        checks.require_shape(x, Silent("x"), (2, 4))


def test_what_is_refused_is_named() -> None:
    x, ids = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^x: must have 3 dimensions$"):
        checks.require_float(x, "x", dim=3)
    with pytest.raises(ValueError, match=r"^x: must have the dtype of y$"):
        checks.require_like(x, x.double(), "x", "y")
    with pytest.raises(ValueError, match=r"^x: must be on the device of y$"):
        checks.require_like(x, x.to("meta"), "x", "y")
    with pytest.raises(ValueError, match=r"^ids: must be int64$"):
        checks.require_ids(ids, "ids", dtype=torch.int64, shape=(2,))
    with pytest.raises(ValueError, match=r"^ids: must have shape \[3\]$"):
        checks.require_ids(ids, "ids", dtype=torch.int32, shape=(3,))
