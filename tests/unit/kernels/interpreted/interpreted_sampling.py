"""Sampling and log-probabilities, token for token as their references.

The interpreter's logarithms are numpy's, an ulp from torch's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.sampling.edited_rows import EditedRows
from kernels.sampling.logprobs import LogprobBuffers, token_logprobs, token_logprobs_reference
from kernels.sampling.sample import SamplingBuffers, SamplingTensors, sample, sample_reference
from kernels.sampling.sortable_keys import CHUNK
from kernels.sampling.top_k_top_p import KEPT
from tests.support.tolerances import logprobs_exact
from tests.unit.kernels.draws import same_draws

# No filter, each alone, all; greedy; padding.
ROWS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 2.0, "top_k": 5000, "top_p": 0.999, "min_p": 0.001},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.0},
]
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def params(rows: Sequence[Mapping[str, float]], seed: int = 1) -> SamplingTensors:
    columns: dict[str, Any] = {
        name: torch.tensor([float(row.get(name, NEUTRAL[name])) for row in rows])
        for name in NEUTRAL
    }
    at = torch.arange(len(rows))
    columns["top_k"] = columns["top_k"].long()
    return SamplingTensors(**columns, seed=at * 7919 - seed, choice=at % 3, position=at * 1000)


def agree(logits: Tensor, p: SamplingTensors) -> Tensor:
    token_ids, ok = sample(logits, p)
    assert torch.equal(ok, sample_reference(logits, p)[1])
    assert same_draws(logits, p, token_ids)
    return token_ids


@pytest.mark.parametrize(
    ("vocab", "kind"),
    [(1, "flat"), (CHUNK - 1, "flat"), (CHUNK + 1, "coarse"), (KEPT + 9, "peaked")],
)
def test_every_filter_at_every_size(vocab: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(ROWS), vocab, generator=generator)
    if kind == "peaked":
        logits = logits * 3
    elif kind == "coarse":
        logits = (logits * 8).round() / 4
    agree(logits, params(ROWS))


def test_equal_logits_share_their_fate() -> None:
    """Of more equal ones than a program holds, every one may be drawn."""
    rows: list[dict[str, float]]
    rows = [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 3, "top_p": 0.5}]
    token_ids = agree(torch.full((len(rows), KEPT + 5), -3.5), params(rows))
    assert len(set(token_ids.tolist())) == len(rows)


def test_few_logits_are_gathered_and_many_are_not() -> None:
    """So that both ways to a bound are under test: a peaked row's, and a flat one's."""
    logits = torch.randn(2, 5 * KEPT, generator=torch.Generator().manual_seed(4))
    logits[1] = logits[1] * 0.01
    buffers = SamplingBuffers.of(2, 5 * KEPT, logits.device)
    p = params([{"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}])
    assert same_draws(logits, p, sample(logits, p, buffers)[0])
    found = buffers.filters.found.tolist()
    assert 50 <= found[0] <= 500
    assert found[1] == -1


def test_tokens_without_a_chance_do_not_mislead_the_levels() -> None:
    """Whole chunks of -inf, both zeros at a bound, and a bound far below the others' largest."""
    logits = torch.full((4, 3 * CHUNK), -math.inf)
    logits[:, CHUNK + 5 : CHUNK + 60] = torch.linspace(-80.0, 9.0, 55)
    logits[:, 7] = 0.0
    logits[:, 2 * CHUNK] = -0.0
    agree(logits, params(ROWS[2:6]))


# Differences of infinities, of which only numpy says so.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_bad_rows_are_reported_alone() -> None:
    logits = torch.randn(5, CHUNK + 9, generator=torch.Generator().manual_seed(3))
    logits[1, CHUNK + 3] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    for row in ROWS[:1] + ROWS[5:6]:
        token_ids = agree(logits, params([row] * 5))
        assert token_ids[1:4].tolist() == [0, 0, 0]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    vocab=st.integers(1, 700),
    scale=st.sampled_from([0.0, 1.0, 8.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 64, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_any_parameters(vocab: int, scale: float, **options: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    # Quarters, as bfloat16 logits are coarse: ties at every bound.
    logits = (torch.randn(4, vocab, generator=generator) * scale * 4).round() / 4
    agree(logits, params([options] * 4, seed=vocab))


def test_buffers_are_reused_and_padding_leaves_them_alone() -> None:
    """A row of negative temperature, as a padded batch has."""
    generator = torch.Generator().manual_seed(5)
    buffers = SamplingBuffers.of(6, 3 * CHUNK, torch.empty(0).device)
    buffers.token_ids.fill_(-9)
    for count in (6, 2):
        logits = torch.randn(count, 3 * CHUNK, generator=generator)
        padding = {"temperature": -1.0, "top_k": 3.0}
        p = params([padding if at % 2 else ROWS[5] for at in range(count)])
        token_ids, ok = sample(logits, p, buffers)
        assert token_ids.data_ptr() == buffers.token_ids.data_ptr()
        drawn = torch.arange(0, count, 2)
        assert same_draws(logits[drawn], p.rows(drawn), token_ids[drawn])
        assert token_ids[1::2].tolist() == [-9] * (count // 2)
        assert ok.tolist() == [True, False] * (count // 2)
    with pytest.raises(ValueError, match=r"^buffers: "):
        sample(torch.zeros(7, 3 * CHUNK), params([NEUTRAL] * 7), buffers)


def test_what_the_host_knows_spares_launches_and_changes_nothing() -> None:
    logits = torch.randn(2, 99, generator=torch.Generator().manual_seed(6))
    plain = params([{"min_p": 0.1}, {}])
    assert torch.equal(sample(logits, plain, sorts=False)[0], sample(logits, plain)[0])
    greedy = params([{"temperature": 0.0}] * 2)
    assert torch.equal(sample(logits, greedy, draws=False)[0], logits.argmax(-1))


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, 3.0), (torch.float16, 0.01)], ids=["peaked", "flat"]
)
def test_narrow_logits_are_as_if_widened(dtype: torch.dtype, scale: float) -> None:
    """To the last bit, also where rows that rules have changed lie apart."""
    vocab = KEPT + 9
    generator = torch.Generator().manual_seed(8)
    logits = (torch.randn(len(ROWS), vocab, generator=generator) * scale).to(dtype)
    edited = EditedRows.of(len(ROWS), vocab, logits.device)
    edited.is_edited[1::2] = 1
    edited.logits.copy_(torch.randn(len(ROWS), vocab, generator=generator) * scale)
    edited.logits[1::2, ::3] = -math.inf
    whole, p = logits.float(), params(ROWS)
    mixed = whole.clone()
    mixed[1::2] = edited.logits[1::2]
    # What filters a row and what it left out has no bound.
    drawn = p.temperature > 0
    for known, others in (
        (whole, ((logits, None),)),
        (mixed, ((logits, edited), (whole, edited))),
    ):
        expected = SamplingBuffers.of(len(ROWS), vocab, logits.device)
        tokens = sample(known, p, expected)
        for at, apart in others:
            own = SamplingBuffers.of(len(ROWS), vocab, logits.device)
            found = sample(at, p, own, apart)
            assert all(map(torch.equal, found, tokens))
            assert torch.equal(own.best, expected.best)
            assert torch.equal(own.filters.bounds[drawn], expected.filters.bounds[drawn])
    told = token_logprobs(logits, found[0], 7), token_logprobs(whole, found[0], 7)
    assert all(map(torch.equal, *told))


def test_rows_edited_for_others_are_refused() -> None:
    logits = torch.zeros(2, 10)
    with pytest.raises(ValueError, match=r"^edited: "):
        sample(logits, params([NEUTRAL] * 2), None, EditedRows.of(2, 11, logits.device))


def test_no_rows() -> None:
    token_ids, ok = sample(torch.zeros(0, 10), params([]))
    assert (token_ids.shape, ok.shape) == ((0,), (0,))
    assert [part.shape[0] for part in token_logprobs(torch.zeros(0, 10), token_ids, 3)] == [0] * 3


@pytest.mark.parametrize(("vocab", "k"), [(20, 20), (CHUNK + 3, 0), (5 * CHUNK, 7)])
def test_logprobs(vocab: int, k: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(k))
    # Ties across and within chunks, and tokens that cannot be.
    logits[1] = (logits[1] * 2).round()
    logits[2, 5:] = -math.inf
    token_ids = torch.tensor([4, vocab - 1, 0])
    found = token_logprobs(logits, token_ids, k)
    expected = token_logprobs_reference(logits, token_ids, k)
    assert torch.equal(found[1], expected[1])
    exact = logprobs_exact(logits)
    assert exact.at(token_ids[:, None]).excess(found[0][:, None]) <= 1.0
    assert exact.at(found[1]).excess(found[2]) <= 1.0


def test_logprobs_only_where_wanted() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    buffers = LogprobBuffers.of(4, 50, 3, logits.device)
    buffers.top_ids.fill_(-1)
    wanted, token_ids = torch.tensor([0, -1, 3, -1]), torch.tensor([1, 2, 3, 4])
    logprob, top_ids, _ = token_logprobs(logits, token_ids, 3, wanted, buffers)
    expected = token_logprobs_reference(logits, token_ids, 3)
    exact = logprobs_exact(logits[::2]).at(token_ids[::2, None])
    assert exact.excess(logprob[::2, None]) <= 1.0
    assert torch.equal(top_ids[::2], expected[1][::2])
    assert top_ids[1::2].tolist() == [[-1] * 3] * 2
    assert logprob[1::2].tolist() == [0.0, 0.0]
