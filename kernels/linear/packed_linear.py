"""linear: y = x W^T + bias with the weight laid out once for the matrix library.

shapes   x       [rows, in_features]             float32 | bfloat16, contiguous
         weight  [out_features, in_features]     same dtype
         bias    [out_features] or None          same dtype
returns  [rows, out_features], same dtype, accumulated in float32
paths    native   cpp/linear/linear.cpp, where AVX2 with FMA, more, or NEON is compiled in; bfloat16
                  in products of tiles or pairs where the processor has them, else widened
         packed   oneDNN's own layout, through torch's private operators
         torch    F.linear
         triton   batch_invariant.py, on a GPU and where it is asked for by name
         an int8 weight: linear_int8.py; int4: linear_int4.py
exact    a row is the same bits whatever the other rows are and however many, but on a GPU by torch.
         On a CPU libraries, whose sums depend on the number of rows, are called as fixed_rows.py
         says. native and packed: nor do they depend on the number of threads
cost     reads out * in weights once per call (memory bound to ~8 rows), 2 * rows * out * in flops
measured 2026-11-20, 768 -> 3072, 2 threads, GF/s packed / F.linear at 1, 16, 64 rows:
         float32 20/8, 221/69, 374/106; bfloat16 33/24, 442/293, 752/608
         the same day on another machine (Zen 4), 768 -> 6144, 1 thread, native / packed at 1, 8,
         16, 64 rows: bfloat16 21/14, 147/100, 171/137, 201/185
         and on large pages, fetching a panel ahead, all linears of 125M parameters, 1 thread of
         219 GF/s peak, native at 1, 4, 8, 16, 64 rows: bfloat16 34, 121, 211, 220, 216
         2026-11-25, Zen 3 (AVX2), 1 thread of 102 GF/s peak, beside other work, GF/s by CPU time,
         native at 1, 4, 16, 64 rows: bfloat16 17, 66, 79, 80; float32 10, 40, 81, 91; int8 30, 71,
         81, 86; packed in float32 at 16, 64: 36, 58
"""

from collections.abc import Callable
from functools import partial
from typing import Final, Literal, cast

import torch
from torch import Tensor

from kernels import dispatch, native, probe
from kernels.checks import require, require_float, require_ids
from kernels.linear import linear_int4, linear_int8, weight_memory
from kernels.linear.batch_invariant import batch_invariant_linear
from kernels.linear.fixed_rows import ROWS, by_fixed_rows

_CPU_DTYPES = (torch.float32, torch.bfloat16)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The definition of correct."""
    wide = x.float() @ weight.float().T
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def packing_available(dtype: torch.dtype) -> bool:
    """Whether oneDNN's private packing operators exist here and are right for this dtype."""
    if not torch._C._has_mkldnn:
        return False
    if dtype not in _PACKING_WORKS:
        _PACKING_WORKS[dtype] = _packing_works(dtype)
    return _PACKING_WORKS[dtype]


_PACKING_WORKS: dict[torch.dtype, bool] = {}


def _packing_works(dtype: torch.dtype) -> bool:
    """Pack and multiply once: a private operator may be missing or changed in another torch."""
    weight = torch.linspace(-1, 1, 32 * 48).view(32, 48).to(dtype)
    x = torch.linspace(1, -1, 3 * 48).view(3, 48).to(dtype)
    bias = torch.linspace(0, 1, 32).to(dtype)
    try:
        y = _apply_packed(x, _pack(weight), bias)
    except (RuntimeError, AttributeError, TypeError):
        return False
    # One rounding of bfloat16 is 2^-9 of the value; sums here stay below 64.
    return torch.allclose(
        y.float(), linear_reference(x, weight, bias).float(), rtol=8e-3, atol=1e-4
    )


def _pack(weight: Tensor) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, ROWS))


def _apply_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], ""))


def _paths_for(weight: Tensor) -> list[str]:
    """The best first."""
    paths = []
    if (library := native.library_for(weight)) is not None and library.has_linear(weight):
        paths.append("native")
    if weight.device.type == "cpu" and packing_available(weight.dtype):
        paths.append("packed")
    paths.append("torch")
    # Never the best: exact, at a price in speed.
    return [*paths, "triton"] if dispatch.path_for(weight) == "triton" else paths


def is_fast(dtype: torch.dtype) -> bool:
    """Whether a CPU multiplies in this dtype by more than F.linear, which is tens of times slower
    in bfloat16 where the processor has no AVX-512.

    oneDNN packs what the processor has no products of, too (ARM without bf16, AVX-512 without
    BF16), so that is timed.
    """
    path = _paths_for(torch.empty(2, 2, dtype=dtype))[0]
    if path != "packed":
        return path != "torch"
    return not probe.is_emulated(_packed_s(dtype), _packed_s(torch.float32))


def _packed_s(dtype: torch.dtype) -> float:
    """Best seconds of the probe's linear by oneDNN."""
    multiply, _, _ = _packed(torch.full((probe.WIDTH, probe.WIDTH), 0.01, dtype=dtype), None)
    x = torch.ones(probe.ROWS, probe.WIDTH, dtype=dtype)
    return probe.best_s(lambda: multiply(x))


_Multiply = Callable[[Tensor], Tensor]
_Rows = Callable[[Tensor], Tensor]
# As it lies for the compiled kernels, and its scales if it is int8.
NativeWeight = tuple[Tensor, Tensor | None]
# The call, and where there is one: the way to read rows back, and the weight of the native path.
_Built = tuple[_Multiply, _Rows | None, NativeWeight | None]


def _native(weight: Tensor, bias: Tensor | None) -> _Built:
    library, outputs = native.compiled(), weight.size(0)
    packed = weight_memory.empty(library.packed_shape(weight), weight.dtype)
    library.pack_linear(weight, packed)
    return (
        lambda x: library.linear(x, packed, bias, outputs),
        lambda ids: library.unpack_rows(packed, ids, outputs),
        (packed, None),
    )


def _packed(weight: Tensor, bias: Tensor | None) -> _Built:
    packed = _pack(weight)
    # oneDNN's layout is its own affair: nothing is read back from it.
    return lambda x: by_fixed_rows(lambda part: _apply_packed(part, packed, bias), x), None, None


def _plain(weight: Tensor, bias: Tensor | None) -> _Built:
    def multiply(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    is_cpu = weight.device.type == "cpu"
    return (
        (lambda x: by_fixed_rows(multiply, x)) if is_cpu else multiply,
        lambda ids: weight.index_select(0, ids),
        None,
    )


def _batch_invariant(weight: Tensor, bias: Tensor | None) -> _Built:
    return (
        lambda x: batch_invariant_linear(x, weight, bias),
        lambda ids: weight.index_select(0, ids),
        None,
    )


_Build = Callable[[Tensor, Tensor | None], _Built]
# auto: that of what is computed; int4: symmetric codes in groups of 32, asym: with zero points.
WeightDtype = Literal["auto", "int8", "int4", "int4_asym"]


def _int4_paths(*, is_symmetric: bool) -> dict[str, _Build]:
    return {
        "native": partial(linear_int4.native_path, is_symmetric=is_symmetric),
        "torch": partial(linear_int4.torch_path, is_symmetric=is_symmetric),
    }


_PATHS: Final[dict[WeightDtype, dict[str, _Build]]] = {
    "auto": {
        "native": _native,
        "packed": _packed,
        "torch": _plain,
        "triton": _batch_invariant,
    },
    "int8": {"native": linear_int8.native_path, "torch": linear_int8.torch_path},
    "int4": _int4_paths(is_symmetric=True),
    "int4_asym": _int4_paths(is_symmetric=False),
}


def is_int4(weight_dtype: WeightDtype) -> bool:
    return weight_dtype in ("int4", "int4_asym")


class PackedLinear:
    """A linear layer that owns its packed weight; the unpacked one is not kept.

    With int8 it keeps the nearest weights of a byte each, with a scale per output; with int4 those
    of half a byte, with a scale and a zero per output and 32 inputs, of which it must have a
    multiple.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        path: str = "auto",
        weight_dtype: WeightDtype = "auto",
    ) -> None:
        require_float(weight, "weight", dim=2)
        known = _PATHS["auto"]
        require(path in ("auto", *known), "path", f"must be auto, {', '.join(known)}")
        if bias is not None:
            require(bias.shape == weight.shape[:1], "bias", "must have shape [out_features]")
            require(bias.dtype == weight.dtype, "bias", "must have the dtype of weight")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        is_cpu = weight.device.type == "cpu"
        is_known = not is_cpu or weight.dtype in _CPU_DTYPES
        require(is_known, "weight", "must be float32 or bfloat16 on a CPU")
        fits = not is_int4(weight_dtype) or self.in_features % linear_int4.GROUP == 0
        require(fits, "weight", f"must have a multiple of {linear_int4.GROUP} inputs for int4")
        table = _PATHS[weight_dtype]
        paths = [name for name in _paths_for(weight) if name in table]
        require(path in ("auto", *paths), "path", f"{path} is not available here")
        self.path = paths[0] if path == "auto" else path
        with torch.inference_mode():
            weight = weight.contiguous()
            built = table[self.path](weight, bias)
        # `native_weight`: (packed, scales of int8) for the compiled kernels, None on other paths.
        self._multiply, self._rows, self.native_weight = built
        self.bias = bias
        # The weight itself, where it is kept as it is.
        is_kept = self.path in ("torch", "triton") and weight_dtype == "auto"
        self.plain = weight if is_kept else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]."""
        self._check(x)
        return self._multiply(x) if x.shape[0] else x.new_empty((0, self.out_features))

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """The same bits, in `out` [rows, out_features]; what runs on a GPU writes there itself."""
        self._check(x)
        if self.plain is not None and self.path == "triton" and len(x):
            return batch_invariant_linear(x, self.plain, self.bias, out)
        if self.plain is None or self.bias is not None or x.device.type == "cpu":
            return out.copy_(self(x))
        return torch.mm(x, self.plain.T, out=out)

    @property
    def has_rows(self) -> bool:
        """Whether the weight can be read back: an embedding tied to the head then needs no copy."""
        return self._rows is not None

    def rows(self, ids: Tensor) -> Tensor:
        """The weight's rows ids [n] int64 -> [n, in_features]; only if `has_rows`."""
        require_ids(ids, "ids", dtype=torch.int64, shape=(ids.numel(),))
        assert self._rows is not None, f"the layout of {self.path} is not read back"
        return self._rows(ids)

    def _check(self, x: Tensor) -> None:
        require(x.dim() == 2 and x.shape[1] == self.in_features, "x", "must be [rows, in_features]")
        require(x.dtype == self.dtype, "x", "must have the dtype of the weight")
        require(x.is_contiguous(), "x", "must be contiguous")
