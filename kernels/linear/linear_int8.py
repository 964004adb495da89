"""linear_int8: y = (x C^T) * scales + bias, the weight as int8 codes with a scale per output.

shapes   x       [rows, in_features]           float32 | bfloat16, contiguous
         codes   [out_features, in_features]   int8, -127..127
         scales  [out_features]                float32; weight = codes * scales
         bias    [out_features] or None        dtype of x
returns  [rows, out_features], dtype of x; the sums are float32 and scaled before they are rounded
paths    native   cpp/linear/linear_int8.cpp, where `linear` has its native path
         torch    in float32, some outputs at a time
cost     reads out * in bytes once per call (memory bound to ~8 rows), 2 * rows * out * in flops

`kernels.linear.packed_linear.PackedLinear(..., weight_dtype="int8")` is the layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from kernels import native
from kernels.linear import weight_memory
from kernels.linear.fixed_rows import by_fixed_rows

CODE_MAX: Final = 127
# Weights brought to float32 at once: 4 MB.
_PART: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """The nearest code of each weight, scaled so that an output's largest is 127.

        What is not finite in an output makes all of its scale so.
        """
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(len(weight), device=weight.device)
        for part in parts_of(weight):
            wide = weight[part].float()
            largest = wide.abs().amax(dim=1)
            scales[part] = largest / CODE_MAX
            # An output of zeros, or of so small weights that their scale is none, has codes of 0.
            divisor = torch.where(scales[part] > 0, scales[part], 1.0)
            near = (wide / divisor[:, None]).round_().nan_to_num_(0.0)
            codes[part] = near.clamp_(-CODE_MAX, CODE_MAX).to(torch.int8)
        return cls(codes=codes, scales=scales)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids [n] of the weight they stand for, float32."""
        return self.codes.index_select(0, ids).float() * self.scales.index_select(0, ids)[:, None]


def linear_int8_reference(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """The definition of correct."""
    wide = x.float() @ weight.codes.float().T * weight.scales
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def parts_of(weight: Tensor) -> list[slice]:
    """Outputs, a few at a time: whoever widens them all takes four times their memory."""
    step = max(1, _PART // weight.size(1))
    return [slice(start, start + step) for start in range(0, len(weight), step)]


_Multiply = Callable[[Tensor], Tensor]
_Rows = Callable[[Tensor], Tensor]


def native_path(
    weight: Tensor, bias: Tensor | None
) -> tuple[_Multiply, _Rows, tuple[Tensor, Tensor]]:
    library, outputs, dtype = native.compiled(), len(weight), weight.dtype
    quantised = Int8Weight.of(weight)
    packed = weight_memory.empty(library.packed_shape(weight), torch.int8)
    library.pack_int8(quantised.codes, packed, dtype)
    scales = quantised.scales
    return (
        lambda x: library.linear(x, packed, bias, outputs, scales),
        lambda ids: library.unpack_int8_rows(packed, scales, ids, dtype),
        (packed, scales),
    )


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return by_fixed_rows(lambda rows: torch.nn.functional.linear(rows, weight), x)


def torch_path(weight: Tensor, bias: Tensor | None) -> tuple[_Multiply, _Rows, None]:
    kept, dtype = Int8Weight.of(weight), weight.dtype
    parts = parts_of(weight)
    wide_bias = None if bias is None else bias.float()

    def multiply(x: Tensor) -> Tensor:
        wide = x.float()
        sums = [linear(wide, kept.codes[part].float()) for part in parts]
        y = torch.cat(sums, dim=1) * kept.scales
        return (y if wide_bias is None else y + wide_bias).to(dtype)

    return multiply, lambda ids: kept.rows(ids).to(dtype), None
