"""Argument checks of the launchers: a refusal is a ValueError that names the argument."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def require(is_met: bool, name: str, rule: str) -> None:
    """Raise ValueError("name: rule") unless `is_met`."""
    if not is_met:
        raise ValueError(f"{name}: {rule}")


def require_float(x: Tensor, name: str, *, dim: int) -> None:
    """`x` is a fp32, bf16 or fp16 tensor of `dim` dimensions whose last one is dense."""
    require(x.dtype in FLOATS, name, "must be float32, bfloat16 or float16")
    require(x.dim() == dim, name, f"must have {dim} dimensions")
    require(x.size(-1) <= 1 or x.stride(-1) == 1, name, "last dimension must have stride 1")


def require_like(x: Tensor, reference: Tensor, name: str, reference_name: str) -> None:
    """Same dtype and device as the leading argument: no kernel converts or copies across."""
    require(x.dtype == reference.dtype, name, f"must have the dtype of {reference_name}")
    require(x.device == reference.device, name, f"must be on the device of {reference_name}")


def require_ids(x: Tensor, name: str, *, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """`x` is a contiguous integer tensor of exactly this dtype and shape."""
    require(x.dtype == dtype, name, f"must be {str(dtype).removeprefix('torch.')}")
    require(tuple(x.shape) == shape, name, f"must have shape {list(shape)}")
    require(x.is_contiguous(), name, "must be contiguous")
