"""sampling: one token id per row, greedy or seeded, and log-probabilities.

formula  t = logits / temperature
         top_k   keep t >= k-th largest t                                   (0: off)
         top_p   keep t if the kept mass strictly above it is < top_p        (1: off)
         min_p   keep t >= max t + log(min_p)                               (0: off)
         id = argmax over kept of t + gumbel(seed, choice, position, id); temperature 0: argmax
         Each filter keeps what is above a bound, so equal logits share their fate: of flat
         logits every token stays, even with top_k 1 or the smallest top_p.
noise    bits = Philox4x32-10(key = seed, counter = (id // 4, position, choice, 0))[id % 4], a pure
         function: batch-mates, preemption and migration cannot change it. u = (bits + 0.5) / 2^32;
         gumbel = -log(-log1p(-u)), so the large values, which decide, come from small u, where
         float32 is fine-grained.
shapes   logits       [rows, vocab] float32, contiguous
         SamplingTensors, each [rows]: temperature (0, or >= 1e-5 so that the division is finite),
         top_p, min_p float32; the others int64
returns  sample -> (token_ids [rows] int64, ok [rows] bool); ok is False where a row holds NaN, +inf
         or only -inf (its id is 0); ties go to the lowest id
cost     greedy: reads the logits once, memory bound; sampled: ~25 integer operations per logit
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import native
from kernels.checks import require, require_ids

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
# The largest float32 below 1: keeps log1p(-u) finite when u rounds up.
_U_MAX = 1.0 - 2.0**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """Resolved parameters of the rows to sample, parallel tensors [rows]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.temperature.shape)
        require(len(shape) == 1, "temperature", "must have 1 dimension")
        for name in ("temperature", "top_p", "min_p"):
            require_ids(getattr(self, name), name, dtype=torch.float32, shape=shape)
        for name in ("top_k", "seed", "choice", "position"):
            require_ids(getattr(self, name), name, dtype=torch.int64, shape=shape)

    def rows(self, index: Tensor) -> "SamplingTensors":
        """The parameters of some rows."""
        return SamplingTensors(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seed=self.seed[index],
            choice=self.choice[index],
            position=self.position[index],
        )


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


def filter_bounds(tempered: Tensor, params: SamplingTensors) -> Tensor:
    """[rows] float32: a row keeps its tempered logits >= bound. -inf where no filter is on."""
    bounds = tempered.amax(-1) + torch.log(params.min_p)
    is_sorted = (params.top_k > 0) | (params.top_p < 1.0)
    rows = is_sorted.nonzero().squeeze(1)
    if rows.numel():
        sorted_bounds = _sorted_bounds(tempered[rows], params.top_k[rows], params.top_p[rows])
        bounds[rows] = torch.maximum(bounds[rows], sorted_bounds)
    return bounds


def _sorted_bounds(tempered: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The bound of top_k and then top_p, which renormalises over what top_k kept."""
    vocab = tempered.size(1)
    ordered = tempered.sort(dim=-1, descending=True).values
    count = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).unsqueeze(1)
    bound_k = ordered.gather(1, count - 1)
    mass = torch.where(ordered >= bound_k, (ordered - ordered[:, :1]).double().exp(), 0.0)
    above = mass.cumsum(-1) - mass
    is_kept = (above < top_p.double().unsqueeze(1) * mass.sum(-1, keepdim=True)) & (mass > 0.0)
    # At least the largest stays, also at top_p = 0.
    last = (is_kept.sum(-1, keepdim=True) - 1).clamp(min=0)
    return torch.maximum(ordered.gather(1, last), bound_k).squeeze(1)


def sample_reference(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """The definition of correct."""
    ok = logits.amax(-1).isfinite()
    token_ids = logits.argmax(-1)
    rows = ((params.temperature > 0.0) & ok).nonzero().squeeze(1)
    if rows.numel():
        chosen = params.rows(rows)
        tempered = logits[rows] / chosen.temperature.unsqueeze(1)
        is_kept = tempered >= filter_bounds(tempered, chosen).unsqueeze(1)
        noisy = tempered + gumbel_noise(chosen, logits.size(1))
        token_ids[rows] = noisy.masked_fill(~is_kept, -math.inf).argmax(-1)
    return token_ids.masked_fill(~ok, 0), ok


def _sample_native(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    token_ids, ok = native.compiled().sample(
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.choice,
        params.position,
    )
    return token_ids, ok


_PATHS = {"native": _sample_native, "torch": sample_reference}


def sample(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """(token_ids [rows] int64, ok [rows] bool). Rows are independent; greedy ones need no noise."""
    _check_logits(logits)
    require(
        params.temperature.size(0) == logits.size(0), "params", "must have a row per logits row"
    )
    return _PATHS[native.path_for(logits)](logits, params)


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob [rows], top_ids [rows, k] int64, top_logprobs [rows, k]), untempered.

    The top k are ordered by falling log-probability, then rising id.
    """
    _check_logits(logits)
    require_ids(token_ids, "token_ids", dtype=torch.int64, shape=(logits.size(0),))
    require(0 <= k <= logits.size(1), "k", "must be between 0 and the vocabulary size")
    logprobs = logits.log_softmax(-1)
    top_ids = (
        _likeliest(logits, k) if k else logits.new_empty((logits.size(0), 0), dtype=torch.int64)
    )
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return chosen, top_ids, logprobs.gather(1, top_ids)


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """[rows, k] ids by falling logit, then rising id."""
    top = logits.topk(k, dim=-1)
    # Among equals topk chooses by chance, so all that reach the last one's logit are ranked.
    reaching = int((logits >= top.values[:, -1:]).sum(-1).max()) if logits.size(0) else 0
    if reaching > k:
        top = logits.topk(reaching, dim=-1)
    ids, by_id = top.indices.sort(dim=-1)
    by_logit = top.values.gather(1, by_id).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, by_logit)[:, :k].contiguous()


def _check_logits(logits: Tensor) -> None:
    require(logits.dtype == torch.float32, "logits", "must be float32")
    require(logits.dim() == 2 and logits.size(1) >= 1, "logits", "must be [rows, vocab]")
    require(logits.is_contiguous(), "logits", "must be contiguous")
