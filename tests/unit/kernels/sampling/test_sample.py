import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import native
from kernels.sampling.edited_rows import EditedRows
from kernels.sampling.gumbel import gumbel_noise, noise_bits
from kernels.sampling.logprobs import LogprobBuffers, token_logprobs
from kernels.sampling.sample import SamplingBuffers, SamplingTensors, sample
from kernels.sampling.top_k_top_p import top_k_top_p
from tests.support.tolerances import logprobs_exact
from tests.unit.kernels.draws import same_draws


def params(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 7,
    choice: int = 0,
    position: int | None = None,
) -> SamplingTensors:
    """The same parameters for every row; positions 0, 1, 2, ... unless one is given."""
    positions = torch.arange(rows) if position is None else torch.full((rows,), position)
    return SamplingTensors(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        seed=torch.full((rows,), seed),
        choice=torch.full((rows,), choice),
        position=positions,
    )


def chi_square_limit(degrees: int) -> float:
    """The 0.999 quantile (Wilson and Hilferty); seeds are fixed, so a pass stays a pass."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + 3.0902 * math.sqrt(spread)) ** 3


def chi_square(token_ids: Tensor, expected: Tensor) -> float:
    """Over tokens of non-zero expectation; any token outside them is an outright failure."""
    counts = torch.bincount(token_ids, minlength=expected.numel()).double()
    assert not counts[expected == 0].any(), "a filtered token was drawn"
    wanted = expected[expected > 0].double() * token_ids.numel()
    assert float(wanted.min()) > 5.0, "too few draws for the statistic"
    return float(((counts[expected > 0] - wanted) ** 2 / wanted).sum())


def hugging_face_probabilities(logits: Tensor, p: SamplingTensors) -> Tensor:
    """The processors of transformers in their order, from their formulas, one row without ties."""
    scores = logits.double() / float(p.temperature[0])
    if (k := int(p.top_k[0])) > 0:
        scores[scores < scores.topk(min(k, scores.numel())).values[-1]] = -math.inf
    if (top_p := float(p.top_p[0])) < 1.0:
        ascending, order = scores.sort()
        is_removed = ascending.softmax(0).cumsum(0) <= 1.0 - top_p
        is_removed[-1] = False
        scores[order[is_removed]] = -math.inf
    probabilities = scores.softmax(0)
    if (min_p := float(p.min_p[0])) > 0.0:
        scores[probabilities < min_p * probabilities.max()] = -math.inf
    return scores.softmax(0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "seed": -3},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "choice": 3},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_of_transformers(
    path: str, options: dict[str, float]
) -> None:
    logits = torch.linspace(-2.0, 2.0, 37)[torch.randperm(37, generator=torch.manual_seed(3))]
    p = params(40_000, **options)  # type: ignore[arg-type]
    expected = hugging_face_probabilities(logits, p)
    token_ids, ok = sample(logits.expand(40_000, -1).contiguous(), p)
    assert bool(ok.all())
    kept = int((expected > 0).sum())
    if kept == 1:
        assert bool((token_ids == int(expected.argmax())).all())
    else:
        assert chi_square(token_ids, expected) < chi_square_limit(kept - 1)


@pytest.mark.parametrize("shape", ["zipf", "softmax"])
def test_200_000_draws_reach_every_rank(path: str, shape: str) -> None:
    """Every token of the vocabulary, likely or not, is drawn as often as softmax says."""
    vocab, draws, batch = 128, 200_000, 20_000
    weights = torch.randperm(vocab, generator=torch.manual_seed(8)).double()
    # The unlikeliest token: 1 / (128 * 5.43) of the draws, or e^-4.5 / 29 of them, so > 70.
    logits = -torch.log1p(weights) if shape == "zipf" else 4.5 * weights / vocab
    rows = logits.float().expand(batch, -1).contiguous()
    drawn = []
    for start in range(0, draws, batch):
        base = params(batch, seed=start // batch)
        drawn.append(sample(rows, base)[0])
    limit = chi_square_limit(vocab - 1)
    assert chi_square(torch.cat(drawn), logits.softmax(0)) < limit


@pytest.mark.parametrize("vary", ["seed", "choice", "position"])
def test_each_part_of_the_key_makes_independent_noise(path: str, vary: str) -> None:
    rows = 20_000
    values = {name: torch.zeros(rows, dtype=torch.int64) for name in ("seed", "choice", "position")}
    values[vary] = torch.arange(rows)
    base = params(rows)
    p = SamplingTensors(
        temperature=base.temperature,
        top_k=base.top_k,
        top_p=base.top_p,
        min_p=base.min_p,
        **values,
    )
    logits = torch.zeros(rows, 20)
    token_ids, _ = sample(logits, p)
    assert chi_square(token_ids, torch.full((20,), 0.05)) < chi_square_limit(19)
    # Successive draws are independent too: the 400 pairs are equally likely.
    pairs = token_ids[:-1:2] * 20 + token_ids[1::2]
    assert chi_square(pairs, torch.full((400,), 1 / 400)) < chi_square_limit(399)


def test_philox_known_answers() -> None:
    """From the Random123 distribution: counter and key all zero."""
    p = params(1, seed=0, position=0)
    assert [hex(b) for b in noise_bits(p, 4)[0].tolist()] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(params(20), 50_000).double()
    assert bool(noise.isfinite().all())
    # Mean 0.5772 and variance pi^2 / 6 of a million numbers, standard errors 1.28e-3 and 3.5e-3; 4
    # of them allowed.
    assert abs(float(noise.mean()) - 0.577216) < 4 * 1.28e-3
    assert abs(float(noise.var()) - math.pi**2 / 6) < 4 * 3.5e-3


def test_compiled_noise_has_the_same_bits(is_compiled: bool) -> None:
    if not is_compiled:
        pytest.skip(native.reason())
    native.build()
    p = params(1, seed=-(2**62) + 12345, choice=3, position=2**31 + 5)
    bits = native.compiled().noise_bits(int(p.seed[0]), 3, 2**31 + 5, 1001)
    assert torch.equal(bits, noise_bits(p, 1001)[0])


FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, 64, 5000]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.01, 0.5, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
)


# The same examples every time: a border of top_p within a rounding of a sum belongs to either path.
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(options=FILTERS, vocab=st.integers(1, 700), scale=st.sampled_from([0.0, 1.0, 8.0]))
def test_both_paths_agree(path: str, options: dict[str, float], vocab: int, scale: float) -> None:
    g = torch.Generator().manual_seed(vocab)
    # Quarters, as bfloat16 logits are coarse: ties at every bound.
    logits = (torch.randn(4, vocab, generator=g) * scale * 4).round() / 4
    p = params(4, **options)  # type: ignore[arg-type]
    assert same_draws(logits, p, sample(logits, p)[0])


def test_rows_do_not_depend_on_the_batch(path: str, generator: torch.Generator) -> None:
    """Greedy, sampled and filtered rows in one call: the same alone, reordered, on one thread."""
    rows, vocab = 12, 3001
    logits = torch.randn(rows, vocab, generator=generator) * 2
    p = SamplingTensors(
        temperature=torch.tensor([0.0, 1.0, 0.7] * 4),
        top_k=torch.tensor([0, 0, 40, 5] * 3),
        top_p=torch.tensor([1.0, 0.9] * 6),
        min_p=torch.tensor([0.0, 0.0, 0.05] * 4),
        seed=torch.arange(rows),
        choice=torch.zeros(rows, dtype=torch.int64),
        position=torch.arange(rows) * 3,
    )
    together, _ = sample(logits, p)
    assert torch.equal(together[::3], logits[::3].argmax(-1))
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(sample(logits[order], p.rows(order))[0], together[order])
    torch.set_num_threads(1)
    for row in range(rows):
        index = torch.tensor([row])
        assert torch.equal(sample(logits[index], p.rows(index))[0], together[index])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 64, 1003])
def test_narrow_logits_are_as_if_widened(path: str, dtype: torch.dtype, vocab: int) -> None:
    rows, some = 48, torch.manual_seed(vocab)
    logits = (4.0 * torch.randn(rows, vocab, generator=some)).to(dtype)
    logits[5, -1], logits[6, 0], logits[7] = math.nan, math.inf, -math.inf
    of = torch.arange(rows)
    p = SamplingTensors(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.3])[of % 4],
        top_k=torch.tensor([0, 0, 5])[of % 3],
        top_p=torch.tensor([1.0, 0.9])[of % 2],
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0])[of % 5],
        seed=of,
        choice=of % 3,
        position=of + 9,
    )
    token_ids, ok = sample(logits, p)
    wide_ids, wide_ok = sample(logits.float(), p)
    assert torch.equal(token_ids, wide_ids)
    assert torch.equal(ok, wide_ok)
    assert (~ok).nonzero().squeeze(1).tolist() == [5, 6, 7]
    edited = EditedRows.of(rows, vocab, logits.device)
    edited.is_edited[::2] = 1
    edited.logits.copy_(2.0 * torch.randn(rows, vocab, generator=some))
    mixed = torch.where((of % 2 == 0).unsqueeze(1), edited.logits, logits.float())
    found = sample(logits, p, None, edited)
    assert all(map(torch.equal, found, sample(mixed, p)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_rows_are_reported_alone(
    path: str, generator: torch.Generator, temperature: float
) -> None:
    logits = torch.randn(5, 100, generator=generator)
    p = params(5, temperature=temperature, top_p=0.9)
    clean, _ = sample(logits, p)
    logits[1, 99] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    token_ids, ok = sample(logits, p)
    assert ok.tolist() == [True, False, False, False, True]
    assert token_ids.tolist() == [int(clean[0]), 0, 0, 0, int(clean[4])]


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 1000])
def test_greedy_ties_go_to_the_lowest_id(path: str, vocab: int) -> None:
    logits = torch.zeros(2, vocab)
    logits[1, vocab // 2 :] = 1.0
    assert sample(logits, params(2, temperature=0.0))[0].tolist() == [0, vocab // 2]


def test_forbidden_tokens_are_never_drawn(path: str) -> None:
    logits = torch.zeros(2000, 5)
    logits[:, [0, 1, 3, 4]] = -math.inf
    token_ids, ok = sample(logits, params(2000))
    assert bool(ok.all())
    assert bool((token_ids == 2).all())


def test_buffers_take_the_answer_and_padding_leaves_them_alone(path: str) -> None:
    cpu = torch.device("cpu")
    buffers = SamplingBuffers.of(3, 20, cpu)
    buffers.token_ids.fill_(-9)
    p = params(2, temperature=0.0)
    p.temperature[1] = -1.0
    logits = torch.arange(40.0).view(2, 20)
    token_ids, ok = sample(logits, p, buffers)
    assert token_ids.data_ptr() == buffers.token_ids.data_ptr()
    assert (token_ids.tolist(), ok.tolist()) == ([19, -9], [True, False])
    assert [part.tolist() for part in sample(logits, p)] == [[19, 0], [True, False]]
    ranked = LogprobBuffers.of(3, 20, 1, cpu)
    wanted = torch.tensor([-1, 0])
    logprob, top_ids, _ = token_logprobs(logits, torch.tensor([0, 19]), 1, wanted, ranked)
    assert logprob[0] == 0.0 > logprob[1]
    assert top_ids.tolist() == [[0], [19]]


def test_no_rows(path: str) -> None:
    token_ids, ok = sample(torch.zeros(0, 10), params(0))
    assert (token_ids.shape, ok.shape) == ((0,), (0,))


def test_bound_keeps_ties_together() -> None:
    tempered = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0]])
    assert float(top_k_top_p(tempered, params(1, top_k=1))) == 3.0
    assert float(top_k_top_p(tempered, params(1, top_p=0.1))) == 3.0
    assert float(top_k_top_p(tempered, params(1, top_k=3))) == 2.0


def test_logprobs(generator: torch.Generator) -> None:
    logits = torch.randn(3, 50, generator=generator)
    logits[1, 7] = logits[1, 3] = 9.0
    chosen, ids, top = token_logprobs(logits, torch.tensor([4, 7, 0]), 5)
    exact = logprobs_exact(logits)
    assert exact.at(torch.tensor([[4], [7], [0]])).excess(chosen[:, None]) <= 1.0
    assert exact.at(ids).excess(top) <= 1.0
    assert ids[1, :2].tolist() == [3, 7]
    assert bool((top.diff(dim=-1) <= 0).all())
    chosen_only, no_ids, no_top = token_logprobs(logits, torch.tensor([4, 7, 0]), 0)
    assert torch.equal(chosen_only, chosen)
    assert no_ids.shape == no_top.shape == (3, 0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 2.0, 2.5]), min_size=6, max_size=6),
        min_size=1,
        max_size=4,
    ),
    k=st.integers(1, 6),
)
def test_equal_logits_rank_by_id(rows: list[list[float]], k: int) -> None:
    _, ids, _ = token_logprobs(torch.tensor(rows), torch.zeros(len(rows)).long(), k)
    expected = [sorted(range(6), key=lambda at: (-row[at], at))[:k] for row in rows]
    assert ids.tolist() == expected


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("logits", lambda: sample(torch.zeros(2, 3).double(), params(2))),
        ("logits", lambda: sample(torch.zeros(3, 2).T, params(2))),
        ("logits", lambda: sample(torch.zeros(2, 0), params(2))),
        ("params", lambda: sample(torch.zeros(2, 3), params(1))),
        ("k", lambda: token_logprobs(torch.zeros(2, 3), torch.zeros(2).long(), 4)),
        ("token_ids", lambda: token_logprobs(torch.zeros(2, 3), torch.zeros(1).long(), 1)),
        (
            "buffers",
            lambda: sample(
                torch.zeros(2, 3), params(2), SamplingBuffers.of(1, 3, torch.device("cpu"))
            ),
        ),
    ],
)
def test_bad_arguments_are_named(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        call()


def test_bad_parameters_are_named() -> None:
    good = {name: getattr(params(2), name) for name in SamplingTensors.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"^seed: "):
        SamplingTensors(**{**good, "seed": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"^top_p: "):
        SamplingTensors(**{**good, "top_p": torch.zeros(3)})
