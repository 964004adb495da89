"""fp8: keys and values in 8 bits, e4m3 with a scale per KV head, as the other kernels use it.

formula  code = e4m3(clamp(x / scale, -448, 448)), to the nearest, ties to even; x ~ code * scale.
         What is no number is stored as 448: a row of NaN is known by its queries
         e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; steps of 2^-9 below 2^-6
shapes   scales [2, kv_heads] float32: of keys, of values; pages float8_e4m3fn
error    |x - code * scale| <= max(2^-4 |x|, 2^-10 scale) while |x| <= 448 scale
triton   By arithmetic on bits, the same on every processor and in the interpreter: not all know the
         type. The 7 bits below the sign are, 7 places up, a float16 that is 2^-8 of the code, exact
         also below 2^-6; the factor goes into the scale. Read in pairs, as words of 16 bits
cost     half the bytes of a 16-bit cache
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels import jit
from kernels.checks import require
from kernels.jit import constexpr, pointer, scalar, tl

DTYPE: Final = torch.float8_e4m3fn
CODE_MAX: Final = 448.0


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """The definition of correct: x [..., kv_heads, head_dim], scale [kv_heads] -> DTYPE."""
    scaled = x.float() / scale.unsqueeze(-1)
    within = torch.where(scaled.abs() <= CODE_MAX, scaled, CODE_MAX * scaled.sign())
    return torch.where(scaled.isnan(), CODE_MAX, within).to(DTYPE)


def decode(tiles: Tensor, scale: Tensor) -> Tensor:
    """The definition of correct: tiles [kv_heads, ..., head_dim] DTYPE -> float32."""
    return tiles.float() * scale.view(-1, *[1] * (tiles.dim() - 1))


def require_scales(scales: Tensor | None, k_pages: Tensor) -> None:
    """Pages of DTYPE come with the scales of their heads, others with none."""
    is_fp8 = k_pages.dtype == DTYPE
    require(is_fp8 == (scales is not None), "scales", "must be given if the pages are fp8")
    if scales is not None:
        require(k_pages.size(-1) % 2 == 0, "k_pages", "head_dim must be even if they are fp8")
        fits = scales.shape == (2, k_pages.size(1)) and scales.is_contiguous()
        require(fits, "scales", "must have shape [2, kv_heads] and be contiguous")
        require(scales.dtype == torch.float32, "scales", "must be float32")


def as_bytes(pages: Tensor) -> Tensor:
    """As the kernels read and write fp8; other pages as they are."""
    return pages.view(torch.uint8) if pages.dtype == DTYPE else pages


# Whether two words of 16 bits are turned in one register; one by one, each takes one of its own.
_IN_PAIRS = jit.constant(not jit.IS_INTERPRETED)


@jit.compiled
def encoded(value: pointer, scale: scalar) -> pointer:
    """The code of float32 values, as uint8."""
    scaled = tl.div_rn(value, scale)
    size = tl.abs(scaled)
    # So that NaN is the largest too.
    size = tl.where(size <= 448.0, size, 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # To three bits of mantissa; the exponent's bias falls from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # One unit in the last place of 2^14 is a step of 2^-9: adding rounds to steps.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | tl.where(scaled == scaled, sign, 0)).to(tl.uint8)


@jit.compiled
def decoded_low(words: pointer, WIDENS: constexpr) -> pointer:
    """Lower bytes of int16 -> float16, 2^-8 of what the code stands for; float32 if WIDENS."""
    if _IN_PAIRS:
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $1, 7; shl.b32 b, $1, 8; and.b32 a, a, 0x3f803f80;"
            " lop3.b32 $0, a, b, 0x80008000, 0xf8; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # Of two copies of the sign the lower one goes.
        found = (((words << 8) >> 1) & -16512).to(tl.float16, bitcast=True)
    return found.to(tl.float32) if WIDENS else found


@jit.compiled
def decoded_high(words: pointer, WIDENS: constexpr) -> pointer:
    """As `decoded_low`, of the upper bytes."""
    if _IN_PAIRS:
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 a; shr.b32 a, $1, 1; and.b32 a, a, 0x3f803f80;"
            " lop3.b32 $0, a, $1, 0x80008000, 0xf8; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = ((words >> 1) & -16512).to(tl.float16, bitcast=True)
    return found.to(tl.float32) if WIDENS else found
