"""rms_norm: scale each row to unit root mean square, alone or fused with the residual addition.

formula  y = x / sqrt(mean(x^2) + eps) * weight            add_rms_norm: x := x + residual first
shapes   x, residual   [..., hidden]   float32 | bfloat16
         weight        [hidden]        same dtype
returns  rms_norm -> y ; add_rms_norm -> (y, x + residual); new tensors, nothing in place
math     float32 throughout, one rounding at the end (the sum is rounded to the dtype before it is
         squared, so that the residual stream and the norm see the same number)
cost     reads 1 (fused 2) and writes 1 (fused 2) elements per element; memory bound
"""

import torch
from torch import Tensor

from kernels import native
from kernels.checks import require, require_float, require_like


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition of correct."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The definition of correct, with the residual."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def _rms_norm_native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y: Tensor = native.compiled().rms_norm(x, weight, eps)
    return y


def _add_rms_norm_native(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    y, total = native.compiled().add_rms_norm(x, residual, weight, eps)
    return y, total


_RMS_NORM = {"native": _rms_norm_native, "torch": rms_norm_reference}
_ADD_RMS_NORM = {"native": _add_rms_norm_native, "torch": add_rms_norm_reference}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised copy of `x` [..., hidden]."""
    _check(x, weight, eps)
    return _RMS_NORM[_path(x)](x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual)."""
    _check(x, weight, eps)
    require(residual.shape == x.shape, "residual", "must have the shape of x")
    require_like(residual, x, "residual", "x")
    return _ADD_RMS_NORM[_path(x)](x, residual, weight, eps)


def _path(x: Tensor) -> str:
    # The compiled path walks rows, or heads of rows, by their strides; a decoder has no others.
    return native.path_for(x) if x.dim() in (2, 3) else "torch"


def _check(x: Tensor, weight: Tensor, eps: float) -> None:
    require(x.dim() >= 1, "x", "must have at least 1 dimension")
    require_float(x, "x", dim=x.dim())
    require(weight.shape == x.shape[-1:], "weight", "must have shape [hidden]")
    require_like(weight, x, "weight", "x")
    require(eps >= 0.0, "eps", "must not be negative")
