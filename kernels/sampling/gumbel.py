"""gumbel: the noise that draws a token, a pure function of who draws it and which token it is.

formula  bits = Philox4x32-10(key = seed, counter = (id // 4, position, choice, 0))[id % 4], so that
         batch-mates, preemption and migration cannot change it. u = (bits + 0.5) / 2^32;
         gumbel = -log(-log1p(-u)), so the large values, which decide, come from small u, where
         float32 is fine-grained. The bits are the same on every path, the logarithms within an ulp
shapes   seed, choice, position of SamplingTensors [rows] int64 -> [rows, vocab]
cost     ~25 integer operations and two logarithms per token
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import jit
from kernels.jit import constexpr, pointer, scalar, tl
from kernels.sampling.params import SamplingTensors

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
# The largest float32 below 1: keeps log1p(-u) finite when u rounds up.
_U_MAX = 1.0 - 2.0**-24


def gumbel_noise(params: SamplingTensors, vocab: int) -> Tensor:
    """[rows, vocab] float32; a pure function of (seed, choice, position, token id)."""
    return gumbel_from_bits(noise_bits(params, vocab))


def noise_bits(params: SamplingTensors, vocab: int) -> Tensor:
    """[rows, vocab] int64 in [0, 2^32): lane id % 4 of Philox at counter id // 4."""
    seed = params.seed.unsqueeze(1)
    quads = torch.arange(-(-vocab // 4), device=seed.device).unsqueeze(0)
    keys = [seed & _LOW, (seed >> 32) & _LOW]
    lanes = [
        quads.expand(seed.size(0), -1),
        (params.position & _LOW).unsqueeze(1),
        (params.choice & _LOW).unsqueeze(1),
        torch.zeros_like(seed),
    ]
    for _ in range(_ROUNDS):
        # 32 x 32 bits wrap in int64, yet shift and mask still give the two unsigned halves.
        first, second = lanes[0] * _MULTIPLIERS[0], lanes[2] * _MULTIPLIERS[1]
        lanes = [
            ((second >> 32) & _LOW) ^ lanes[1] ^ keys[0],
            second & _LOW,
            ((first >> 32) & _LOW) ^ lanes[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [(key + step) & _LOW for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return torch.stack([lane.expand_as(lanes[0]) for lane in lanes], dim=-1).flatten(1)[:, :vocab]


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Standard Gumbel numbers from uniform 32-bit integers."""
    u = (bits.float() * 2.0**-32 + 2.0**-33).clamp_max(_U_MAX)
    return -torch.log(-torch.log1p(-u))


@jit.compiled
def gumbel_tile(
    seed: scalar, choice: scalar, position: scalar, first: scalar, TILE: constexpr
) -> pointer:
    """[TILE] float32, of the tokens from `first` on; both are multiples of 4."""
    quad = first // 4 + tl.arange(0, TILE // 4)
    zero = quad * 0
    a, b, c, d = tl.philox(
        seed, quad, zero + position.to(tl.int32), zero + choice.to(tl.int32), zero
    )
    # Four lanes of a counter are four tokens in a row: [quads, 2, 2] in memory order.
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [TILE])
    u = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    # log1p(-u) through log(1 - u) and what the subtraction rounded away.
    rest = 1.0 - u
    is_tiny = rest == 1.0
    lost = tl.where(is_tiny, 1.0, 1.0 - rest)
    log1p = tl.where(is_tiny, u, -tl.log(rest) * (u / lost))
    return -tl.log(log1p)
