"""linear_int4: y = x W^T + bias, the weight as 4-bit codes, a scale and a zero for each 32 inputs.

shapes   x       [rows, in_features]             float32 | bfloat16, contiguous
         codes   [out_features, in_features / 2] uint8, of two inputs the first in the low half
         scales  [out_features, in_features / 32] bfloat16
         zeros   the same                        uint8, 0..15; weight = (code - zero) * scale
         bias    [out_features] or None          dtype of x
returns  [rows, out_features], dtype of x, accumulated in float32
kinds    symmetric: zeros of 8, the number farthest from 0 has code 0 (llama.cpp's Q4_0)
         asymmetric: the least and the greatest number, or 0 if it lies beyond, have 0 and 15 (AWQ)
paths    native   cpp/linear/linear_int4.cpp, where `linear` has its native path; where pairs of
                  bfloat16 are multiplied the weights are rounded to bfloat16, else they are exact
         torch    in float32, some outputs at a time
cost     reads out * in * 0.583 bytes once per call, 2 * rows * out * in flops

`kernels.linear.packed_linear.PackedLinear(..., weight_dtype="int4")` is the layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from kernels import native
from kernels.linear import weight_memory
from kernels.linear.linear_int8 import linear, parts_of

GROUP: Final = 32
CODE_MAX: Final = 15
_MIDDLE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    codes: Tensor
    scales: Tensor
    zeros: Tensor

    @classmethod
    def of(cls, weight: Tensor, *, is_symmetric: bool) -> Self:
        """The nearest code of each weight [out, in], by scales as they are kept.

        What is not finite in a group makes all of it so.
        """
        outputs, inputs = weight.shape
        groups = outputs, inputs // GROUP
        codes = torch.empty((outputs, inputs // 2), dtype=torch.uint8, device=weight.device)
        scales = torch.empty(groups, dtype=torch.bfloat16, device=weight.device)
        zeros = torch.empty(groups, dtype=torch.uint8, device=weight.device)
        for part in parts_of(weight):
            wide = weight[part].float().view(-1, groups[1], GROUP)
            scales[part] = _scales(wide, is_symmetric).to(torch.bfloat16)
            scale = scales[part].float().unsqueeze(2)
            near = wide / torch.where(scale != 0, scale, 1.0)
            # A group of zeros, or of so small weights that its scale is none, has its zero's code.
            zero = torch.full_like(scale, _MIDDLE) if is_symmetric else -near.amin(2, keepdim=True)
            zero = zero.round().nan_to_num(0.0).clamp(0, CODE_MAX)
            zeros[part] = zero.squeeze(2).to(torch.uint8)
            found = (near.round() + zero).nan_to_num(0.0).clamp(0, CODE_MAX).to(torch.uint8)
            first, second = found.view(-1, inputs // 2, 2).unbind(2)
            codes[part] = first | second << 4
        return cls(codes=codes, scales=scales, zeros=zeros)

    def rows(self, which: slice | Tensor) -> Tensor:
        """Rows of the weight they stand for, float32 and exact."""
        pairs = self.codes[which]
        codes = torch.stack((pairs & CODE_MAX, pairs >> 4), dim=2)
        grouped = codes.view(len(pairs), -1, GROUP).float()
        wide = (grouped - self.zeros[which].unsqueeze(2)) * self.scales[which].float().unsqueeze(2)
        return wide.view(len(pairs), -1)


def _scales(grouped: Tensor, is_symmetric: bool) -> Tensor:
    """[out, groups] of [out, groups, GROUP]."""
    least, most = grouped.amin(2), grouped.amax(2)
    if is_symmetric:
        return torch.where(most > -least, most, least) / -_MIDDLE
    return (most.clamp(min=0.0) - least.clamp(max=0.0)) / CODE_MAX


def linear_int4_reference(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """The definition of correct."""
    wide = x.float() @ weight.rows(slice(None)).T
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


_Multiply = Callable[[Tensor], Tensor]


def native_path(
    weight: Tensor, bias: Tensor | None, *, is_symmetric: bool
) -> tuple[_Multiply, None, tuple[Tensor, None]]:
    library, (outputs, inputs) = native.compiled(), weight.shape
    kept = Int4Weight.of(weight, is_symmetric=is_symmetric)
    packed = weight_memory.empty((library.packed_int4_bytes(outputs, inputs),), torch.uint8)
    library.pack_int4(kept.codes, kept.scales, kept.zeros, packed, weight.dtype)
    return lambda x: library.linear(x, packed, bias, outputs), None, (packed, None)


def torch_path(
    weight: Tensor, bias: Tensor | None, *, is_symmetric: bool
) -> tuple[_Multiply, None, None]:
    kept = Int4Weight.of(weight, is_symmetric=is_symmetric)
    parts, dtype = parts_of(weight), weight.dtype
    wide_bias = None if bias is None else bias.float()

    def multiply(x: Tensor) -> Tensor:
        wide = x.float()
        y = torch.cat([linear(wide, kept.rows(part)) for part in parts], dim=1)
        return (y if wide_bias is None else y + wide_bias).to(dtype)

    return multiply, None, None
