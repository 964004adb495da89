"""A row's rules: what it may sample, what it counts, and that no other row feels it."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.batch.plans import BlockTable, FinishReason, Join, RowSampling
from gpu_worker.batch.row_rules import RowRules, edits_of
from gpu_worker.batch.rows import Rows
from gpu_worker.runner import eager_runner
from kernels import native
from tests.support.markov_device import limits, run, table_device
from tests.support.mini_scheduler import checksum, plan, sampling

VOCAB = 50
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
LIMITS = limits(vocab_size=VOCAB, slots=8)
EVERYTHING: dict[str, Any] = {
    "temperature": 1.0,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.7,
    "frequency_penalty": -0.4,
    "logit_bias": ((3, 2.0), (4, -5.0)),
    "bad_words": ((9,), (3, 3), (3, 4, 3)),
    "max_tokens": 40,
}

ids = st.integers(0, 6)


def state(rules: RowRules) -> tuple[object, ...]:
    """What a device would get, whatever the order of the entries."""
    seen = dict(zip(rules.seen_ids.tolist(), rules.seen_counts.tolist(), strict=True))
    return seen, sorted(rules.forbidden_ids().tolist())


@given(
    prompt=st.lists(ids, min_size=1, max_size=6),
    output=st.lists(ids, max_size=100),
    words=st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
    repetition=st.sampled_from([1.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.5]),
    data=st.data(),
)
def test_a_resumed_row_knows_what_an_undisturbed_one_knows(
    prompt: list[int],
    output: list[int],
    words: tuple[tuple[int, ...], ...],
    repetition: float,
    frequency: float,
    data: st.DataObject,
) -> None:
    params = sampling(repetition_penalty=repetition, frequency_penalty=frequency, bad_words=words)
    whole = RowRules(params, prompt, len(prompt), VOCAB)
    for token_id in output:
        whole.see(token_id)
    cut = data.draw(st.integers(0, len(output)))
    resumed = RowRules(params, [*prompt, *output[:cut]], len(prompt), VOCAB)
    for token_id in output[cut:]:
        resumed.see(token_id)
    assert state(resumed) == state(whole)
    counts = {token_id: float(output.count(token_id)) for token_id in output}
    unseen = dict.fromkeys(prompt, 0.0) if repetition != 1 else {}
    is_counting = repetition != 1 or frequency != 0
    assert state(whole)[0] == (unseen | counts if is_counting else {})
    forbidden = {w[-1] for w in words if [*output, w[-1]][-len(w) :] == list(w)}
    assert set(whole.forbidden_ids().tolist()) == forbidden


def test_no_rules_are_no_edits() -> None:
    rows = Rows(LIMITS)
    _join(rows, 1, [(0, sampling())])
    assert rows.step_inputs(rows.steady_counts()).sampling.edits() is None


def test_edits_are_copies_of_the_counters() -> None:
    """A device may read a step's arrays while the next token is already counted."""
    rules = RowRules(sampling(frequency_penalty=1.0), [1, 2], 1, VOCAB)
    edits = edits_of([(0, rules)], [], 1)
    assert edits is not None
    rules.see(2)
    assert edits.seen_counts.tolist() == [1.0]


def test_rules_leave_with_their_row() -> None:
    rows = Rows(LIMITS)
    _join(rows, 1, [(0, sampling(allowed_token_ids=(7,))), (1, sampling(frequency_penalty=1.0))])
    edits = rows.step_inputs(rows.steady_counts()).sampling.edits()
    assert edits is not None
    assert (edits.allowed_rows.tolist(), edits.allowed_ids.tolist()) == ([0], [7])
    assert edits.frequency.tolist() == [0.0, 1.0]
    left = plan(2, leaves=(0,), membership_checksum=checksum([(1, 1)]))
    rows.apply(left)
    _join(rows, 3, [(0, sampling())], others=[(1, 1)])
    edits = rows.step_inputs(rows.steady_counts()).sampling.edits()
    assert edits is not None
    assert not len(edits.allowed_rows)
    rows.clear()
    _join(rows, 1, [(1, sampling())])
    assert rows.step_inputs(rows.steady_counts()).sampling.edits() is None


def _join(
    rows: Rows,
    plan_id: int,
    rows_of: list[tuple[int, RowSampling]],
    others: list[tuple[int, int]] | None = None,
) -> None:
    """A prompt of one token in each slot; the sequence id is the slot."""
    joins = tuple(
        Join(
            slot=slot,
            sequence_id=slot,
            token_ids=(1,),
            prompt_tokens=1,
            num_computed_tokens=0,
            block_tables=(BlockTable((slot,)),),
            sampling=params,
        )
        for slot, params in rows_of
    )
    members = [(join.slot, join.sequence_id) for join in joins] + (others or [])
    rows.apply(plan(plan_id, joins=joins, membership_checksum=checksum(members)))


def test_bad_words_are_in_no_output_and_would_be_otherwise() -> None:
    words = ((9,), (3, 3), (3, 4, 3), (5, 6))
    near = TABLE / 6
    near[:, [3, 4, 5, 6, 9]] += 4.0
    outputs = []
    for banned in (words, ()):
        params = [
            sampling(temperature=1.0, seed=seed, max_tokens=50, bad_words=banned)
            for seed in range(30)
        ]
        # The prompt ends with the start of a bad word: its rest alone is no bad word.
        asked = [([3, 5], each) for each in params]
        outputs.append(run(table_device(near), LIMITS, asked).outputs.values())
    banned_outputs, free_outputs = outputs
    assert not any(_contains(output, word) for output in banned_outputs for word in words)
    assert all(any(_contains(output, word) for output in free_outputs) for word in words)
    assert any(output[0] == 6 for output in banned_outputs)


def _contains(output: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(output[at : at + len(word)]) == word for at in range(len(output)))


def test_only_allowed_tokens_are_sampled_whatever_the_bias() -> None:
    params = [
        sampling(
            temperature=2.0,
            seed=seed,
            max_tokens=20,
            allowed_token_ids=(4, 8, 15),
            logit_bias=((16, 100.0),),
        )
        for seed in range(10)
    ]
    outputs = run(table_device(TABLE), LIMITS, [([1], each) for each in params]).outputs
    assert {token_id for output in outputs.values() for token_id in output} == {4, 8, 15}


@pytest.mark.parametrize(
    "requests", [{"temperature": 0.0}, {"temperature": 1.0}, EVERYTHING], ids=str
)
def test_the_neighbours_rules_change_no_bit(requests: dict[str, Any]) -> None:
    probe = ([1, 2, 3], sampling(**{**requests, "seed": 77, "max_tokens": 20, "logprobs": 3}))
    alone = run(table_device(TABLE), LIMITS, [probe])
    rng = random.Random(3)
    others = [
        (
            [rng.randrange(VOCAB)],
            sampling(
                **{**EVERYTHING, "seed": seed, "max_tokens": rng.randint(1, 9)},
                allowed_token_ids=tuple(range(seed % 40, VOCAB)),
                logprobs=seed % 4 - 1,
            ),
        )
        for seed in range(60)
    ]
    crowd = run(table_device(TABLE), LIMITS, [*others[:5], probe, *others[5:]], lease_steps=3)
    assert crowd.outputs[5] == alone.outputs[0]
    bits = [(item.logprob, item.top_logprobs) for item in crowd.logprobs[5]]
    assert bits == [(item.logprob, item.top_logprobs) for item in alone.logprobs[0]]


def test_a_forced_token_under_churn_of_200_rows() -> None:
    """Each row its own token, lengths differ, slots are reused: always the forced one."""
    rng = random.Random(11)
    asked = []
    for sequence_id in range(200):
        forced = sampling(
            temperature=rng.choice([0.0, 0.7, 2.0]),
            seed=sequence_id,
            max_tokens=rng.randint(1, 12),
            # 100 above logits of +-12 at temperature 2: the noise would need to exceed 38.
            logit_bias=((sequence_id % VOCAB, 100.0),) if sequence_id % 3 else (),
        )
        asked.append(([rng.randrange(VOCAB)], forced))
    outputs = run(table_device(TABLE), LIMITS, asked, lease_steps=2).outputs
    for sequence_id, output in outputs.items():
        assert len(output) == asked[sequence_id][1].max_tokens
        if sequence_id % 3:
            assert set(output) == {sequence_id % VOCAB}, sequence_id


def test_logprobs_are_of_the_models_own_distribution() -> None:
    """Greedy with everything on: the sampled token's log-probability is that of the raw logits."""
    requests = {**EVERYTHING, "temperature": 0.0, "logprobs": 2, "max_tokens": 15}
    scheduler = run(table_device(TABLE), LIMITS, [([1], sampling(**requests))])
    raw = TABLE.log_softmax(-1)
    output = scheduler.outputs[0]
    for before, token_id, item in zip([1, *output], output, scheduler.logprobs[0], strict=False):
        assert item.logprob == float(raw[before, token_id])
        top = raw[before].topk(2)
        assert item.top_token_ids == tuple(top.indices.tolist())
        assert item.top_logprobs == tuple(top.values.tolist())
    assert output != [int(TABLE[before].argmax()) for before in [1, *output[:-1]]]


def test_logprobs_of_many_rows_are_ranked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [([at], sampling(logprobs=at % 5 - 1, max_tokens=6)) for at in range(8)]
    whole = run(table_device(TABLE), LIMITS, asked)
    monkeypatch.setattr(eager_runner, "RANKED_AT_ONCE", 2 * VOCAB)
    parts = run(table_device(TABLE), LIMITS, asked)
    assert parts.logprobs == whole.logprobs
    assert [len(items) for items in parts.logprobs.values()] == [0, 6, 6, 6, 6, 0, 6, 6]
    assert {len(item.top_token_ids) for items in parts.logprobs.values() for item in items} == {
        *range(4)
    }


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_of_no_numbers_fails_alone(bad: float) -> None:
    broken = TABLE.clone()
    broken[7] = bad
    requests = [sampling(**{**EVERYTHING, "seed": seed, "bad_words": ((7,),)}) for seed in range(5)]
    asked = [([prompt], each) for prompt, each in zip([1, 2, 7, 3, 4], requests, strict=True)]
    scheduler = run(table_device(broken), LIMITS, asked)
    expected = run(table_device(TABLE), LIMITS, asked)
    assert scheduler.errors == {2: "the model's logits are not numbers"}
    for sequence_id in (0, 1, 3, 4):
        assert scheduler.outputs[sequence_id] == expected.outputs[sequence_id]
        assert scheduler.reasons[sequence_id] == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("requests", "sampled"),
    [
        ({"allowed_token_ids": (5,), "bad_words": ((5, 5),)}, 1),
        ({"allowed_token_ids": (2,), "stop_token_ids": (2,), "min_tokens": 3}, 0),
    ],
)
def test_a_row_that_forbids_itself_everything_is_told_so(
    requests: dict[str, Any], sampled: int
) -> None:
    asked = [([1], sampling(**requests)), ([1], sampling(max_tokens=4))]
    scheduler = run(table_device(TABLE), LIMITS, asked)
    said = (
        "allowed_token_ids, bad_words, min_tokens and structured_outputs leave no token to sample"
    )
    assert scheduler.errors == {0: said}
    assert len(scheduler.outputs[0]) == sampled
    assert len(scheduler.outputs[1]) == 4


@pytest.mark.parametrize("path", ["torch", "native"])
@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e-5])
def test_a_vanishing_temperature_is_greedy(path: str, temperature: float) -> None:
    if path == "native" and not native.build():
        pytest.skip(native.reason())
    if path == "torch":
        native.disable("torch path under test")
    try:
        greedy, cold = (
            run(table_device(TABLE), LIMITS, [([1], sampling(temperature=each, max_tokens=30))])
            for each in (0.0, temperature)
        )
    finally:
        native.build()
    assert greedy.outputs == cold.outputs


def test_flat_logits_are_defined() -> None:
    """Greedy takes the lowest id; noise decides among equals, which no filter tells apart."""
    flat = torch.zeros(VOCAB, VOCAB)
    filters: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {}]
    asked = [([1], sampling(temperature=1.0, seed=9, max_tokens=30, **each)) for each in filters]
    asked.append(([1], sampling(temperature=0.0, max_tokens=30)))
    outputs = run(table_device(flat), LIMITS, asked).outputs
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert len(set(outputs[0])) > 15
    assert set(outputs[4]) == {0}


def test_seeds_decide() -> None:
    def output(**key: int) -> list[int]:
        params = sampling(temperature=1.0, max_tokens=30, **key)
        return run(table_device(TABLE), LIMITS, [([1], params)]).outputs[0]

    assert output(seed=4) == output(seed=4) != output(seed=5)
    assert output(seed=4) != output(seed=4, choice=1)
    assert output(seed=4) != output(seed=4 + (1 << 63))


def test_counters_take_room_only_where_they_are_needed() -> None:
    plain = RowRules(sampling(bad_words=((1,),)), list(range(50)), 10, VOCAB)
    assert len(plain.seen_ids) == 0
    output_only = RowRules(sampling(presence_penalty=1.0), list(range(50)), 10, VOCAB)
    assert sorted(output_only.seen_ids.tolist()) == list(range(10, 50))
    everything = RowRules(sampling(repetition_penalty=1.1), list(range(50)) * 3, 10, VOCAB)
    assert len(everything.seen_ids) == 50
    assert everything.seen_counts.dtype == np.float32
