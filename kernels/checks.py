"""Argument checks of the launchers: a refusal is a ValueError that names the argument.

They run before every launch of a step that is not recorded: sentences are made when one is refused.
"""

from typing import NoReturn

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def refuse(name: str, rule: str) -> NoReturn:
    """Raise ValueError("name: rule")."""
    raise ValueError(f"{name}: {rule}")


def require(is_met: bool, name: str, rule: str) -> None:
    """Refuse unless `is_met`; `rule` is a constant, or it would be made for nothing."""
    if not is_met:
        refuse(name, rule)


def require_float(x: Tensor, name: str, *, dim: int) -> None:
    """`x` is a fp32, bf16 or fp16 tensor of `dim` dimensions whose last one is dense."""
    require(x.dtype in FLOATS, name, "must be float32, bfloat16 or float16")
    if x.dim() != dim:
        refuse(name, f"must have {dim} dimensions")
    require(x.stride()[-1] == 1 or x.shape[-1] <= 1, name, "last dimension must have stride 1")


def require_like(x: Tensor, reference: Tensor, name: str, reference_name: str) -> None:
    """Same dtype and device as the leading argument: no kernel converts or copies across."""
    if x.dtype != reference.dtype:
        refuse(name, f"must have the dtype of {reference_name}")
    if x.device != reference.device:
        refuse(name, f"must be on the device of {reference_name}")


def require_ids(x: Tensor, name: str, *, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """`x` is a contiguous integer tensor of exactly this dtype and shape."""
    if x.dtype != dtype:
        refuse(name, f"must be {str(dtype).removeprefix('torch.')}")
    require_shape(x, name, shape)
    require(x.is_contiguous(), name, "must be contiguous")


def require_shape(x: Tensor, name: str, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        refuse(name, f"must have shape {list(shape)}")
