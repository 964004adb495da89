"""How far a result may lie from its formula: bounds that arithmetic gives, so no seed can pass one.

Kernels compute in float32 and round once, to the dtype of the result. So a test compares with a
formula in float64 and allows a slack, one number per element, for what happens in float32; the last
rounding is known exactly and takes nothing of it:

    assert rms_norm_exact(x, weight, eps).excess(result) <= 1.0

A slack counts worst cases (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3 and 4):
a sum of n terms in any order is off by at most gamma(n) times the sum of their sizes. Measured
errors have random signs and stay far below it; a dropped term or a sum in 16 bits does not.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Half a unit in the last place of a number in [1, 2).
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# e^x or 2^x, relative. float32: 2 units in the last place (simd.h: vexp; torch and numpy are within
# one). For results in 16 bits simd.h has vexp2_coarse, within 2^-14.
POWER = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-14, torch.float16: 2.0**-14}


def gamma(terms: int) -> float:
    """The relative error of so many float32 operations one upon another."""
    error = terms * UNIT[torch.float32]
    assert error < 0.01, "a bound to first order"
    return error / (1.0 - error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """A formula in float64, and by how much float32 may miss it before the last rounding."""

    value: Tensor
    slack: Tensor

    def excess(self, result: Tensor, *, truncates: bool = False) -> float:
        """The largest error beyond the last rounding, as a share of the slack; above 1 is wrong.

        NaN in any place is infinitely wrong. `truncates`: rounded towards zero, not to nearest, as
        Triton's interpreter does for bfloat16.
        """
        assert result.shape == self.value.shape
        assert self.value.dtype == self.slack.dtype == torch.float64
        if not result.numel():
            return 0.0
        half = UNIT[result.dtype]
        _, exponent = torch.frexp(result.double())
        smallest = torch.finfo(result.dtype).smallest_normal
        unit = (half * torch.exp2(exponent.double())).clamp(min=2 * half * smallest)
        error = (result.double() - self.value).abs().masked_fill(result == self.value, 0.0)
        beyond = (error - (unit if truncates else unit / 2)).clamp(min=0.0)
        # 0 / 0 is no excess.
        return float((beyond / (self.slack + 2.0**-1000)).nan_to_num(nan=torch.inf).max())

    def at(self, columns: Tensor) -> "Exact":
        """Of matrices, some columns [rows, n] of each row."""
        return Exact(value=self.value.gather(1, columns), slack=self.slack.gather(1, columns))


def linear_exact(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Exact:
    """(x weight^T) * scales + bias: sums of in_features products, a scale, a bias."""
    wide, transposed = x.double(), weight.double().T
    value, sizes = wide @ transposed, wide.abs() @ transposed.abs()
    if scales is not None:
        value, sizes = value * scales.double(), sizes * scales.double()
    if bias is not None:
        value, sizes = value + bias.double(), sizes + bias.double().abs()
    # The sum is rounded before its scale, and that before the bias.
    return Exact(value=value, slack=gamma(x.size(1) + 2) * sizes)


def rms_norm_exact(x: Tensor, weight: Tensor, eps: float) -> Exact:
    """Of the fused norm, x is the sum with the residual as it was rounded.

    A sum of n squares and its mean are off by gamma(n + 2), which a root halves; 1 / root, within 2
    units in the last place, and two products are 6 roundings more.
    """
    wide = x.double()
    value = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return Exact(value=value, slack=gamma(x.size(-1) // 2 + 8) * value.abs())


def silu_mul_exact(gate_up: Tensor) -> Exact:
    """gate / (1 + e^-gate) * up: an exponent, its power, a sum, a quotient and a product."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    value = gate * gate.sigmoid() * up
    relative = gamma(2) * gate.abs() + POWER[gate_up.dtype] + gamma(4)
    # e^88 stands for all beyond it: there a quotient is below 2^-120 of the product, or flushed.
    return Exact(value=value, slack=relative * value.abs() + 2.0**-120 * (1 + (gate * up).abs()))


def gelu_mul_exact(gate_up: Tensor) -> Exact:
    """gelu(gate) * up by tanh: as silu_mul_exact, of an exponent that takes five roundings.

    torch sums 1 and a tanh: what is left of it is off by a rounding of 1.
    """
    gate, up = gate_up.double().chunk(2, dim=-1)
    exponent = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    value = gate * exponent.sigmoid() * up
    relative = gamma(7) * exponent.abs().clamp(max=100) + POWER[gate_up.dtype] + gamma(4)
    product = (gate * up).abs()
    return Exact(value=value, slack=relative * value.abs() + gamma(4) * product + 2.0**-120)


def rope_exact(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    norm: tuple[Tensor, float] | None = None,
    *,
    truncates: bool = False,
) -> Exact:
    """x [tokens, heads, head_dim] turned, after a norm (weight, eps) that is rounded itself."""
    value, slack = x.double(), torch.zeros(x.shape, dtype=torch.float64)
    if norm is not None:
        normed = rms_norm_exact(x, *norm)
        value, rounding = normed.value, UNIT[x.dtype] * (2 if truncates else 1)
        slack = 1.01 * (normed.slack + rounding * value.abs())
    half = cos_sin.size(2)
    cos, sin = cos_sin[positions].double().unsqueeze(2).unbind(1)
    parts = [slice(0, half), slice(half, 2 * half)]
    turned, off = value.clone(), slack.clone()
    for own, other, sign in ((parts[0], parts[1], -1), (parts[1], parts[0], 1)):
        turned[..., own] = value[..., own] * cos + sign * value[..., other] * sin
        # Two products and their sum, of numbers that were off.
        sizes = value.abs() * gamma(2) + slack
        off[..., own] = sizes[..., own] * cos.abs() + sizes[..., other] * sin.abs()
    return Exact(value=turned, slack=off)


def logprobs_exact(logits: Tensor) -> Exact:
    """log_softmax of float32 [rows, vocab].

    Chunks of 4096 summed as trees or by 16 lanes: below 64 + vocab / 4096 sums on any way. Beside
    it each exponent is rounded, a power within 2 units in the last place, a logarithm too, which is
    at most log(vocab), and two differences.
    """
    wide = logits.double()
    value = wide.log_softmax(-1)
    spread = wide.amax(-1, keepdim=True) - wide
    # Of the sum, relative: x e^-x is below 1 for every exponent -x.
    sums = gamma(64 + logits.size(1) // 4096) + gamma(2) + POWER[torch.float32]
    slack = sums + gamma(4) * (spread + value.abs())
    return Exact(value=value, slack=slack)


def are_one(own: Tensor, known: Tensor) -> bool:
    """To the bit, but in float32 on a GPU, whose compiler makes one operation of a product and a
    sum: then the product is not rounded, of which a result is two roundings of its largest off.
    """
    if not own.is_cuda or own.dtype != torch.float32:
        return torch.equal(own, known)
    finite = known.isfinite()
    largest = known[finite].abs().amax() if bool(finite.any()) else known.new_zeros(())
    is_near = (own - known).abs() <= gamma(2) * largest
    return bool((is_near | (own == known)).all())
