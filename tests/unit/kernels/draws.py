"""When two paths drew the same."""

import torch
from torch import Tensor

from kernels.sampling.gumbel import gumbel_noise
from kernels.sampling.sample import SamplingTensors, sample_reference
from tests.support.tolerances import gamma


def same_draws(logits: Tensor, params: SamplingTensors, drawn: Tensor) -> bool:
    """Token for token as the reference, or one whose noisy logit is as large but for rounding.

    The paths' logarithms differ by an ulp, which decides a draw once in about 10^6: never by
    chance here, and never on another processor.
    """
    expected, _ = sample_reference(logits, params)
    differs = (drawn != expected).nonzero().squeeze(1)
    if not differs.numel():
        return True
    rows = params.rows(differs)
    noise = gumbel_noise(rows, logits.size(1))
    tempered = logits[differs] / rows.temperature.unsqueeze(1)
    noisy = (tempered + noise).gather(1, torch.stack([drawn, expected], dim=1)[differs])
    # Of noise -log(-log u): two logarithms within 2 units in the last place, the inner one's error
    # relative and so absolute in the outer; a quotient and a sum.
    allowed = gamma(8) * (1.0 + noisy.abs().amax(-1))
    return bool((noisy.diff(dim=-1).squeeze(1).abs() <= allowed).all())
