"""step_rows, sample_rows, advance_rows: what the device does to its rows between two steps."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import dispatch
from kernels.rows.advance_rows import ABSENT, BROKEN, advance_rows, advance_rows_reference
from kernels.rows.edit_rows import RuleState
from kernels.rows.sample_rows import (
    NOBODY,
    PADDING,
    RowSamples,
    SamplingState,
    sample_rows,
    sample_rows_reference,
)  # fmt: skip
from kernels.rows.step_rows import Asked, RowState, step_rows, step_rows_reference

BLOCK_SIZE = 4
WIDTH = 40
SLOTS = 6
VOCAB = 9
VOCAB_OF_HAND = 60


def draw_state(draw: st.DrawFn) -> RowState:
    """Rows between two steps; some have ended."""
    known = [draw(st.integers(1, 150)) for _ in range(SLOTS)]
    done = [draw(st.integers(0, count - 1)) for count in known]
    groups = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    stops = torch.randint(
        -1, VOCAB, (SLOTS, draw(st.sampled_from([1, 3, 70]))), generator=generator
    )
    return RowState(
        is_live=torch.tensor([draw(st.integers(0, 1)) for _ in range(SLOTS)]),
        num_tokens=torch.tensor(known),
        num_computed_tokens=torch.tensor(done),
        limit=torch.tensor([count + draw(st.integers(1, 2)) for count in known]),
        masked_until=torch.tensor([count + draw(st.integers(-1, 1)) for count in known]),
        last_token=torch.tensor([draw(st.integers(0, VOCAB - 1)) for _ in range(SLOTS)]),
        blocks=torch.randint(0, 1000, (groups, SLOTS, WIDTH), generator=generator).int(),
        stops=stops.int(),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[RowState, Asked]:
    """Some rows in some order, padding among them, each with a part of its gap or all of it."""
    state = draw_state(draw)
    order = draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]
    slots = [slot if draw(st.integers(0, 4)) else -1 for slot in order]
    counts = []
    for slot in slots:
        gap = int(state.num_tokens[slot] - state.num_computed_tokens[slot]) if slot >= 0 else 1
        counts.append(draw(st.integers(1, gap)))
    starts = torch.tensor([0, *counts]).cumsum(0)
    asked = Asked(
        slots=torch.tensor(slots),
        starts=starts,
        token_ids=torch.arange(int(starts[-1]) + draw(st.integers(0, 3))) + 100,
    )
    return state, asked


def no_rules(slots: int) -> RuleState:
    columns = ("kinds", "logprobs", "prompt"), ("repetition", "presence", "frequency")

    def table(*width: int) -> Tensor:
        return torch.zeros((slots, *width), dtype=torch.int32)

    return RuleState(
        **{name: torch.zeros(slots, dtype=torch.int64) for name in columns[0]},
        **{name: torch.zeros(slots) for name in columns[1]},
        biases=torch.zeros(slots, 1),
        bias_ids=table(1),
        seen=table(VOCAB_OF_HAND),
        allowed=table(-(-VOCAB_OF_HAND // 32)),
        words=table(1, 32),
        recent=table(32),
    )


def copy(state: RowState) -> RowState:
    return RowState(**{field.name: getattr(state, field.name).clone() for field in fields(state)})


def test_the_interpreter_is_the_path() -> None:
    assert dispatch.path_for(torch.ones(1)) == "triton"


@given(step=steps())
@settings(max_examples=40, deadline=None)
def test_step_rows(step: tuple[RowState, Asked]) -> None:
    state, asked = step
    contexts = torch.empty(asked.slots.numel(), dtype=torch.int32)
    result = step_rows(state, asked, BLOCK_SIZE, contexts)
    expected = step_rows_reference(*step, BLOCK_SIZE)
    assert result.context_lengths is contexts
    # The slots of each layer group begin where kernels that take them need not be compiled anew.
    assert result.slot_mapping.stride(0) % 2 == 0
    for field in fields(expected):
        own, known = getattr(result, field.name), getattr(expected, field.name)
        assert own.dtype == known.dtype
        assert own.tolist() == known.tolist(), field.name


def wishes(slots: int) -> SamplingState:
    """Each slot's own."""
    own = torch.arange(slots)
    return SamplingState(
        temperature=own / 4,
        top_k=own + 1,
        top_p=1 - own / 8,
        min_p=own / 16,
        seed=own - (1 << 40),
        choice=own % 3,
    )


def columns_of(samples: RowSamples) -> dict[str, Tensor]:
    params = {field.name: getattr(samples.params, field.name) for field in fields(samples.params)}
    return {"slots": samples.slots, "logprobs": samples.logprobs, **params}


@given(step=steps())
@settings(max_examples=40, deadline=None)
def test_sample_rows(step: tuple[RowState, Asked]) -> None:
    state, asked = step
    rules, wanted = no_rules(SLOTS), wishes(SLOTS)
    rules.logprobs.copy_(torch.arange(SLOTS) - 1)
    rules.prompt.copy_(torch.arange(SLOTS) % 2)
    contexts = step_rows_reference(*step, BLOCK_SIZE).context_lengths
    found = columns_of(sample_rows(state, rules, wanted, asked.slots, contexts))
    known = columns_of(sample_rows_reference(state, rules, wanted, asked.slots, contexts))
    samples = known["slots"] >= 0
    for name, own in found.items():
        assert own.dtype == known[name].dtype, name
        assert torch.equal(own[samples], known[name][samples]), name
    for each in (found, known):
        assert (each["slots"][~samples] == NOBODY).all()
        assert (each["logprobs"][~samples] == NOBODY).all()
        assert (each["temperature"][~samples] == PADDING).all()


@given(step=steps(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_advance_rows(step: tuple[RowState, Asked], data: st.DataObject) -> None:
    state, asked = step
    count = asked.slots.numel()
    tokens = torch.tensor([data.draw(st.integers(0, VOCAB - 1)) for _ in range(count)]).long()
    ok = torch.tensor([data.draw(st.integers(0, 5)) > 0 for _ in range(count)]).bool()
    other = copy(state)
    rules, other_rules = no_rules(SLOTS), no_rules(SLOTS)
    for each in (rules, other_rules):
        # Of every second row tokens are counted.
        each.kinds.copy_(torch.arange(SLOTS) % 2)
        each.seen[:, ::3] = 1
    result, expected = (
        advance_rows(state, rules, asked, tokens, ok),
        advance_rows_reference(other, other_rules, asked, tokens, ok),
    )
    assert rules.seen.tolist() == other_rules.seen.tolist()
    assert rules.recent.tolist() == other_rules.recent.tolist()
    assert result.tolist() == expected.tolist()
    for field in fields(state):
        assert getattr(state, field.name).tolist() == getattr(other, field.name).tolist()


def by_hand() -> RowState:
    """Slot 0 is about to sample its last token, 1 has ended, 2 has a prompt of 6 to compute."""
    return RowState(
        is_live=torch.tensor([1, 0, 1]),
        num_tokens=torch.tensor([5, 7, 6]),
        num_computed_tokens=torch.tensor([4, 6, 0]),
        limit=torch.tensor([6, 20, 20]),
        masked_until=torch.tensor([0, 0, 0]),
        last_token=torch.tensor([55, 77, 66]),
        blocks=torch.tensor([[[3, 9], [8, 1], [7, 2]], [[0, 4], [5, 6], [2, 3]]]).int(),
        stops=torch.tensor([[-1], [-1], [44]]).int(),
    )


def asked_by_hand() -> Asked:
    return Asked(
        slots=torch.tensor([0, 1, 2, -1]),
        starts=torch.tensor([0, 1, 2, 8, 9]),
        token_ids=torch.tensor([-1, -1, 60, 61, 62, 63, 64, -1, -1]),
    )


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_by_hand(path: str) -> None:
    dispatch.force(path)
    state = by_hand()
    step = step_rows(state, asked_by_hand(), BLOCK_SIZE)
    # The row that ended writes nowhere, and neither does padding; the others close up.
    assert step.token_ids.tolist() == [55, 60, 61, 62, 63, 64, 66, 0, 0]
    assert step.positions.tolist() == [4, 0, 1, 2, 3, 4, 5, 0, 0]
    assert step.slot_mapping.tolist() == [
        [36, 28, 29, 30, 31, 8, 9, -1, -1],
        [16, 8, 9, 10, 11, 12, 13, -1, -1],
    ]
    assert step.query_starts.tolist() == [0, 1, 1, 7, 7]
    assert step.context_lengths.tolist() == [5, 0, 6, 0]
    assert step.last_tokens.tolist() == [0, 0, 6, 6]
    slots = asked_by_hand().slots
    samples = sample_rows(state, no_rules(3), wishes(3), slots, step.context_lengths)
    # Not the row that has ended, and not padding.
    assert samples.slots.tolist() == [0, -1, 2, -1]
    assert samples.params.temperature.tolist() == [0.0, -1.0, 0.5, -1.0]
    assert samples.params.position[::2].tolist() == [5, 6]
    ids, ok = torch.tensor([11, 12, 44, 13]), torch.tensor([True, True, True, True])
    told = advance_rows(state, no_rules(3), asked_by_hand(), ids, ok).tolist()
    assert told == [11, ABSENT, 44, ABSENT]
    # One by its limit, one by its stop token.
    assert state.is_live.tolist() == [0, 0, 0]
    assert state.num_tokens.tolist() == [6, 7, 7]
    assert state.num_computed_tokens.tolist() == [5, 6, 6]
    assert state.last_token.tolist() == [11, 77, 44]
    dispatch.force(None)


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_a_broken_row_ends_without_a_token(path: str) -> None:
    dispatch.force(path)
    state = by_hand()
    ok = torch.tensor([False, True, True, True])
    found = advance_rows(state, no_rules(3), asked_by_hand(), torch.tensor([0, 1, 2, 3]), ok)
    assert found.tolist() == [BROKEN, ABSENT, 2, ABSENT]
    assert state.is_live.tolist() == [0, 0, 1]
    assert state.num_tokens.tolist() == [5, 7, 7]
    assert state.last_token.tolist() == [55, 77, 2]
    dispatch.force(None)


def test_wrong_tensors_are_refused_by_name() -> None:
    state = by_hand()
    with pytest.raises(ValueError, match=r"^token_ids: "):
        advance_rows(state, no_rules(3), asked_by_hand(), torch.tensor([1]), torch.tensor([True]))
    with pytest.raises(ValueError, match=r"^slots: "):
        step_rows(state, empty(), BLOCK_SIZE)
    with pytest.raises(ValueError, match=r"^contexts: "):
        sample_rows(state, no_rules(3), wishes(3), asked_by_hand().slots, torch.zeros(4))
    with pytest.raises(ValueError, match=r"^blocks: "):
        RowState(**{**vars_of(state), "blocks": state.blocks.long()})


def vars_of(state: RowState) -> dict[str, Tensor]:
    return {field.name: getattr(state, field.name) for field in fields(state)}


def empty() -> Asked:
    none = torch.zeros(0, dtype=torch.int64)
    starts = torch.zeros(1, dtype=torch.int64)
    return Asked(slots=none, starts=starts, token_ids=none)
