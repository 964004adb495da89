"""rms_norm: scale each row to unit root mean square, alone or fused with the residual addition.

formula  y = x / sqrt(mean(x^2) + eps) * weight            add_rms_norm: x := x + residual first
         norm_add_rms_norm: x := norm of x (a branch's output norm) + residual first
         rms_norm_rows: of rows x[ids], as a model's first norm reads its embedding
         add_rms_norm_rows: of rows x[ids] + residual[ids], as its last norm reads the sampled ones
shapes   x, residual   [..., hidden]   float32 | bfloat16 | float16
         weight        [hidden]        same dtype
         ids           [n] int64       with x and residual [rows, hidden]; below rows
returns  rms_norm -> y ; add_rms_norm -> (y, x + residual); new tensors, nothing in place
         norm_add_rms_norm -> (y, the sum), or without a weight (the sum, the sum)
         rms_norm_rows -> (y, x[ids]) ; add_rms_norm_rows -> y
math     float32 throughout, one rounding at the end (the sum is rounded to the dtype before it is
         squared, so that the residual stream and the norm see the same number)
cost     reads 1 (fused 2) and writes 1 (fused 2) elements per element; memory bound
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch, jit, native
from kernels.checks import require, require_float, require_ids, require_like
from kernels.jit import constexpr, pointer, scalar, stride, tl


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
    return native.compiled().rms_norm(x, weight, eps)


def _add_rms_norm_native(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return native.compiled().add_rms_norm(x, residual, weight, eps)


def rms_norm_rows_reference(
    x: Tensor, ids: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The definition of correct, of some rows."""
    found = x.index_select(0, ids)
    return rms_norm_reference(found, weight, eps), found


def add_rms_norm_rows_reference(
    x: Tensor, residual: Tensor, ids: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """The definition of correct, of some rows with the residual."""
    return add_rms_norm_reference(x[ids], residual[ids], weight, eps)[0]


@jit.compiled
def _rms_norm_kernel(
    x: pointer, residual: pointer, ids: pointer, before: pointer, weight: pointer,
    y: pointer, total: pointer,
    rows: scalar, rows_there: scalar, inner: stride,
    x_outer_stride: stride, x_inner_stride: stride,
    residual_outer_stride: stride, residual_inner_stride: stride, eps: scalar,
    HIDDEN: constexpr, ROWS_TILE: constexpr, TILE: constexpr,
    ADDS: constexpr, GATHERS: constexpr, STORES: constexpr, BEFORE: constexpr, NORMS_SUM: constexpr,
    PDL: constexpr,
) -> None:  # fmt: skip
    """ADDS: the residual first. GATHERS: rows `ids`. STORES: what is normed in `total`.

    BEFORE: what the residual is added to is normed, by `before`. Without NORMS_SUM the sum is not.
    """
    jit.wait_for_neighbour(PDL)
    row = tl.program_id(0) * ROWS_TILE + tl.arange(0, ROWS_TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    is_in = (row < rows) & (column < HIDDEN)
    if GATHERS:
        outer, within = tl.load(ids + row, mask=row < rows, other=0), 0
        is_in = is_in & (outer >= 0) & (outer < rows_there)
    else:
        outer, within = (row // inner).to(tl.int64), row % inner
    at = x + outer * x_outer_stride + within * x_inner_stride + column
    value = tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    dense = row.to(tl.int64) * HIDDEN + column
    if BEFORE:
        value *= tl.rsqrt(tl.sum(value * value, axis=1) / HIDDEN + eps)[:, None]
        value *= tl.load(before + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        value = value.to(y.dtype.element_ty).to(tl.float32)
    if ADDS:
        at = residual + outer * residual_outer_stride + within * residual_inner_stride + column
        value += tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    rounded = value.to(y.dtype.element_ty)
    if STORES:
        tl.store(total + dense, rounded, mask=(row < rows) & (column < HIDDEN))
    if NORMS_SUM:
        value = rounded.to(tl.float32)
        mean = tl.sum(value * value, axis=1) / HIDDEN
        scaled = value * tl.rsqrt(mean + eps)[:, None]
        scaled *= tl.load(weight + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        tl.store(y + dense, scaled.to(y.dtype.element_ty), mask=(row < rows) & (column < HIDDEN))


# Short rows, as those of heads, share a program up to this many elements.
_TILE = 1024


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float,
    ids: Tensor | None = None, before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, what was normed), as `_rms_norm_kernel` computes them of all rows of x or of `ids`."""
    hidden, gathers = x.size(-1), ids is not None
    stores = gathers != (residual is not None)
    shape = x.shape if ids is None else (ids.numel(), hidden)
    y = x.new_empty(shape)
    total = torch.empty_like(y) if stores and weight is not None else y
    rows = y.numel() // hidden if hidden else 0
    if rows == 0:
        return y, total
    other = x if residual is None else residual
    tile = jit.power_of_two(hidden)
    rows_tile = max(1, _TILE // tile)
    _rms_norm_kernel[(-(-rows // rows_tile),)](
        x, other, x if ids is None else ids, x if before is None else before,
        x if weight is None else weight, y, total,
        rows, x.size(0), x.size(1) if x.dim() == 3 else 1, *_strides(x), *_strides(other), eps,
        HIDDEN=hidden, ROWS_TILE=rows_tile, TILE=tile,
        ADDS=residual is not None, GATHERS=gathers, STORES=stores,
        BEFORE=before is not None, NORMS_SUM=weight is not None, **jit.neighbourly(x.device),
        num_warps=16 if tile >= 4096 else 4,
    )  # fmt: skip
    return y, total


def _strides(x: Tensor) -> tuple[int, int]:
    """Of [outer, inner, hidden], where a matrix has inner = 1."""
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0


def _rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, None, weight, eps)[0]


def _add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _launch(x, residual, weight, eps)


_RMS_NORM = {
    "triton": _rms_norm_triton,
    "native": _rms_norm_native,
    "torch": rms_norm_reference,
}
_ADD_RMS_NORM = {
    "triton": _add_rms_norm_triton,
    "native": _add_rms_norm_native,
    "torch": add_rms_norm_reference,
}


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


def norm_add_rms_norm(
    x: Tensor, residual: Tensor, first: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum) of the norm of x by `first` and the residual.

    Without `weight` the sum is not normed: (the sum, the sum).
    """
    _check(x, first, eps)
    _check(x, first if weight is None else weight, eps)
    require(residual.shape == x.shape, "residual", "must have the shape of x")
    require_like(residual, x, "residual", "x")
    if _path(x) == "triton":
        return _launch(x, residual, weight, eps, before=first)
    normed = rms_norm(x, first, eps)
    if weight is not None:
        return add_rms_norm(normed, residual, weight, eps)
    total = residual + normed
    return total, total


def rms_norm_rows(x: Tensor, ids: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x[ids], x[ids]) of a matrix x."""
    _check_rows(x, ids, weight, eps)
    if _path(x) == "triton":
        return _launch(x, None, weight, eps, ids)
    found = x.index_select(0, ids)
    return rms_norm(found, weight, eps), found


def add_rms_norm_rows(
    x: Tensor, residual: Tensor, ids: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Norm of x[ids] + residual[ids] of matrices."""
    _check_rows(x, ids, weight, eps)
    require(residual.shape == x.shape, "residual", "must have the shape of x")
    require_like(residual, x, "residual", "x")
    if _path(x) == "triton":
        return _launch(x, residual, weight, eps, ids)[0]
    return add_rms_norm(x[ids], residual[ids], weight, eps)[0]


def _check_rows(x: Tensor, ids: Tensor, weight: Tensor, eps: float) -> None:
    require(x.dim() == 2, "x", "must have 2 dimensions")
    require_ids(ids, "ids", dtype=torch.int64, shape=(ids.numel(),))
    _check(x, weight, eps)


def _path(x: Tensor) -> str:
    # The compiled paths walk rows, or heads of rows, by their strides; a decoder has no others.
    return dispatch.path_for(x) if x.dim() in (2, 3) else "torch"


def _check(x: Tensor, weight: Tensor, eps: float) -> None:
    require(x.dim() >= 1, "x", "must have at least 1 dimension")
    require_float(x, "x", dim=x.dim())
    require(weight.shape == (x.shape[-1],), "weight", "must have shape [hidden]")
    require_like(weight, x, "weight", "x")
    require(eps >= 0.0, "eps", "must not be negative")
