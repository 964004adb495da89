"""Tokens that a row's own text suggests: what is drafted, and that a batch with drafts does what
one without does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.batch.drafts import NGRAM_MAX, NGRAM_MIN, PAUSE_TOKENS, STEP_TOKENS_MAX, look_up
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import FinishReason, InvalidPlan, RowSampling, StepResult
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import BlockPairs, StepInputs, StepSamples
from gpu_worker.runner.stepping import InTurns
from tests.support.mini_scheduler import MiniScheduler, checksum, plan, sampling

LIMITS = RowLimits(
    slots=4, context_tokens=64, step_tokens=48, block_size=4, block_count=64, vocab_size=16
)
MOST = 4
VOCAB = 8


def drafted(tokens: list[int], count: int) -> list[int]:
    return list(map(int, look_up(np.array(tokens, np.int32), count)))


@pytest.mark.parametrize(
    ("tokens", "follows"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
        # The newest place of those that are alike.
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),
        # Older, and alike for longer.
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1]),
        # It goes on repeating itself.
        ([5, 9, 9, 9], [9, 9, 9]),
        ([1, 2, 1, 2, 1, 2], [1, 2, 1]),
        # One token says too little.
        ([1, 2, 3, 1], []),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_what_followed_before_is_drafted(tokens: list[int], follows: list[int]) -> None:
    assert drafted(tokens, 3) == follows


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_a_draft_is_what_stands_behind_the_best_place(tokens: list[int], count: int) -> None:
    def alike(place: int) -> int:
        """How many tokens up to this place are those up to the end."""
        length = 0
        while length < min(NGRAM_MAX, place + 1) and tokens[place - length] == tokens[-1 - length]:
            length += 1
        return length

    best = max(range(len(tokens) - 1), key=lambda place: (alike(place), place), default=-1)
    follows = drafted(tokens, count)
    if best < 0 or alike(best) < NGRAM_MIN:
        assert follows == []
        return
    period = tokens[best + 1 :]
    assert follows == [period[index % len(period)] for index in range(count)]


class Played:
    """A model whose next token is a function of the last few: it falls into loops and out of them.

    It computes what the host says, and checks it: each token in its place, behind those before it.
    """

    def __init__(self, seed: int, *, broken_after: int | None = None) -> None:
        self._seed = seed
        self._broken_after = broken_after
        self.kv: dict[int, int] = {}
        self.drafted = self.steps = 0

    def swap_blocks(self, pairs: BlockPairs) -> None:
        raise AssertionError("nobody swaps")

    def copy_blocks(self, pairs: BlockPairs) -> None:
        raise AssertionError("nobody copies")

    def execute(self, step: StepInputs) -> StepSamples:
        assert step.token_count <= max(STEP_TOKENS_MAX, int(step.counts.max()) * step.row_count)
        tables = step.tables()
        self.steps += 1
        for place, token in zip(tables.slot_mapping[0].tolist(), step.token_ids, strict=True):
            self.kv[place] = int(token)
        rows = step.sampled_rows.tolist()
        found = [
            self._next(self._text(step, row, int(step.positions[at])), position)
            for row, at, position in zip(
                rows, step.sampled_tokens.tolist(), step.sampling.position.tolist(), strict=True
            )
        ]
        if step.drafts is not None:
            self.drafted += int(step.drafts.sum())
        is_ok = [
            self._broken_after is None or position != self._broken_after
            for position in step.sampling.position.tolist()
        ]
        asked = np.flatnonzero(step.sampling.logprobs >= 0)
        return StepSamples(
            token_ids=np.array(found, np.int64),
            is_ok=np.array(is_ok, np.bool_),
            logprob_rows=asked,
            logprob=np.array(found, np.float32)[asked],
            top_token_ids=np.zeros((len(asked), 0), np.int64),
            top_logprobs=np.zeros((len(asked), 0), np.float32),
            forward_us=0,
            sample_us=0,
        )

    def _text(self, step: StepInputs, row: int, end: int) -> list[int]:
        """The tokens up to this place, as keys and values have them."""
        table = step.tables().block_tables[0, row]
        size = LIMITS.block_size
        return [self.kv[int(table[at // size]) * size + at % size] for at in range(end + 1)]

    def _next(self, text: list[int], position: int) -> int:
        if position % 11 == 10:
            return (sum(text) * 7 + self._seed) % VOCAB
        return (text[-1] * 3 + self._seed) % VOCAB if len(text) % 2 else (text[-1] + 2) % VOCAB


def served(
    prompts: list[tuple[list[int], RowSampling]],
    *,
    most: int,
    lease_steps: int,
    chunk_tokens: int = 5,
    seed: int = 1,
    broken_after: int | None = None,
) -> tuple[MiniScheduler, Played, list[StepResult]]:
    limits = replace(LIMITS, slot_tokens=most)
    rows, model = Rows(limits), Played(seed, broken_after=broken_after)
    scheduler = MiniScheduler(limits, chunk_tokens=chunk_tokens, lease_steps=lease_steps)
    for prompt, asked in prompts:
        scheduler.submit(prompt, asked)
    turns, results = InTurns(rows, model), []
    while (made := scheduler.next_plan()) is not None:
        told: list[StepResult] = []
        turns.run(made, 0, told.append, lambda: False)
        for result in told:
            scheduler.on_outcome(made, result.step, result.outcome)
        results += told
    return scheduler, model, results


asks = st.builds(
    sampling,
    max_tokens=st.integers(1, 50),
    min_tokens=st.integers(0, 20),
    stop_token_ids=st.sampled_from([(), (3,), (1, 6)]),
    logprobs=st.sampled_from([-1, 0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
)
prompts = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), asks),
    min_size=1,
    max_size=6,
)


@given(prompts, st.integers(2, 6), st.integers(1, 5), st.integers(1, 9), st.integers(0, 7))
def test_drafts_change_nothing_but_how_many_steps_it_takes(
    asked: list[tuple[list[int], RowSampling]], most: int, lease: int, chunk: int, seed: int
) -> None:
    plain, _, _ = served(asked, most=1, lease_steps=lease, chunk_tokens=chunk, seed=seed)
    drafts, _, _ = served(asked, most=most, lease_steps=lease, chunk_tokens=chunk, seed=seed)
    assert drafts.outputs == plain.outputs
    assert drafts.reasons == plain.reasons
    assert [len(drafts.logprobs[one]) for one in drafts.logprobs] == [
        len(plain.outputs[number]) if params.logprobs >= 0 else 0
        for number, (_, params) in enumerate(asked)
    ]


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    asked = [([1, 2, 3], sampling(max_tokens=50))]
    plain, _, alone = served(asked, most=1, lease_steps=1)
    drafts, model, results = served(asked, most=MOST, lease_steps=1)
    assert drafts.outputs == plain.outputs
    assert len(results) < 0.75 * len(alone)
    assert model.drafted == sum(result.timings.drafted for result in results) > 0
    assert max(len(result.outcome.slots) for result in results) == MOST


@pytest.mark.parametrize("stop", range(VOCAB))
def test_a_stop_among_the_drafted_ends_the_row_there(stop: int) -> None:
    asked = [([1, 2, 3], sampling(max_tokens=50, stop_token_ids=(stop,)))]
    plain, _, _ = served(asked, most=1, lease_steps=3)
    drafts, _, _ = served(asked, most=MOST, lease_steps=3)
    assert (drafts.outputs, drafts.reasons) == (plain.outputs, plain.reasons)


def test_logits_that_are_no_numbers_are_found_in_the_rows_own_step() -> None:
    """A slot either failed or was given tokens: the scheduler takes no step that has both."""
    asked = [([1, 2, 3], sampling(max_tokens=50))]
    drafts, _, results = served(asked, most=MOST, lease_steps=4, broken_after=30)
    assert len(drafts.outputs[0]) == 30
    assert list(drafts.errors) == [0]
    for result in results:
        assert not {slot for slot, _ in result.outcome.errors} & set(result.outcome.slots)


@pytest.mark.parametrize(
    "rule",
    [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": ((1, 1.0),)},
        {"bad_words": ((1, 2),)},
        {"allowed_token_ids": tuple(range(VOCAB))},
        {"prompt_logprobs": 0},
    ],
)
def test_rows_that_change_their_own_logits_are_left_alone(rule: dict[str, object]) -> None:
    rows = seated(sampling(max_tokens=50, **rule))
    assert rows.draft(rows.steady_counts()) is None
    assert seated(sampling(max_tokens=50)).draft(np.array([1, 0, 0, 0])) is not None


def seated(params: RowSampling, most: int = MOST, told: int | None = None) -> Rows:
    """One row, all but the last of whose tokens are computed."""
    limits = replace(LIMITS, slot_tokens=most)
    rows, scheduler = Rows(limits), MiniScheduler(limits)
    scheduler.submit([1, 2, 3, 1, 2], params)
    made = scheduler.next_plan()
    assert made is not None
    made = replace(made, slot_tokens_most=most if told is None else told)
    inputs = rows.step_inputs(rows.apply(made))
    # Prompt logprobs are not what this is about.
    rows.advance(replace(inputs, prompt_logprobs=None), samples(inputs, 3))
    appends = tuple((0, block, 0) for block in range(10))
    rows.apply(
        plan(
            2,
            appends=appends,
            slot_tokens_most=told or most,
            membership_checksum=checksum([(0, 0)]),
        )
    )
    return rows


def samples(inputs: StepInputs, *tokens: int) -> StepSamples:
    return StepSamples(
        token_ids=np.array(tokens, np.int64),
        is_ok=np.ones(len(inputs.sampled_rows), np.bool_),
        logprob_rows=np.zeros(0, np.int64),
        logprob=np.zeros(0, np.float32),
        top_token_ids=np.zeros((0, 0), np.int64),
        top_logprobs=np.zeros((0, 0), np.float32),
        forward_us=0,
        sample_us=0,
    )


def steps_of(rows: Rows, *given: list[int]) -> list[int]:
    """How many were drafted for each step that sampled these."""
    found = []
    for tokens in given:
        counts = rows.steady_counts()
        drafts = rows.draft(counts)
        inputs = rows.step_inputs(counts, drafts)
        found.append(0 if drafts is None else int(drafts[0]))
        rows.advance(inputs, samples(inputs, *tokens, *[15] * (found[-1] + 1 - len(tokens))))
    return found


def test_wrong_drafts_are_followed_by_fewer_and_right_ones_by_more() -> None:
    """Known: 1 2 3 1 2 3, so 1 2 3 is drafted."""
    rows = seated(sampling(max_tokens=50))
    # All three wrong; one, wrong too; then none for a while.
    assert steps_of(rows, [4], [3]) == [3, 0]
    # 1 2 3 1 2 3 4 3: nothing ended so before.
    assert rows.tokens(0) == (1, 2, 3, 1, 2, 3, 4, 3)
    assert steps_of(rows, [4], [5], [3], [4]) == [0, 1, 0, 0]
    assert PAUSE_TOKENS > 4
    assert rows.draft(rows.steady_counts()) is None


def test_a_leader_that_knows_of_one_token_per_step_gets_one() -> None:
    rows = seated(sampling(max_tokens=50), told=1)
    assert rows.draft(rows.steady_counts()) is None


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        (1, MOST),
        (3, 3 * MOST),
        (STEP_TOKENS_MAX - 1, STEP_TOKENS_MAX),
        (STEP_TOKENS_MAX, STEP_TOKENS_MAX),
        (STEP_TOKENS_MAX + 1, STEP_TOKENS_MAX + 1),
    ],
)
def test_drafts_fill_a_step_that_costs_what_its_weights_cost(rows: int, tokens: int) -> None:
    limits = replace(LIMITS, slots=rows, slot_tokens=MOST, block_count=400, step_tokens=400)
    batch, scheduler = Rows(limits), MiniScheduler(limits)
    for _ in range(rows):
        scheduler.submit([1, 2, 3, 1, 2, 3], sampling())
    for _ in range(2):
        made = scheduler.next_plan()
        assert made is not None
        counts = batch.apply(made)
        inputs = batch.step_inputs(counts, batch.draft(counts, {slot for slot, _ in made.chunks}))
        outcome = batch.advance(inputs, samples(inputs, *[1] * len(inputs.sampled_rows)))
        scheduler.on_outcome(made, 0, outcome)
    assert inputs.token_count == tokens


def test_a_row_that_computes_its_prompt_is_given_one_token() -> None:
    limits = replace(LIMITS, slot_tokens=MOST)
    rows, scheduler = Rows(limits), MiniScheduler(limits)
    scheduler.submit([1, 2, 1, 2], sampling())
    made = scheduler.next_plan()
    assert made is not None
    counts = rows.apply(made)
    assert rows.draft(counts, {0}) is None


def test_a_plan_with_more_than_was_offered_is_refused() -> None:
    rows = Rows(replace(LIMITS, slot_tokens=MOST))
    rule = f"slot_tokens_most: a step gives a row 1 to {MOST} tokens, not {MOST + 1}"
    with pytest.raises(InvalidPlan, match=rule):
        rows.apply(plan(1, slot_tokens_most=MOST + 1))


def test_a_lease_has_places_for_all_that_may_be_drafted() -> None:
    """Six tokens known, the last of them to be computed: 3 + 4 behind it in two steps."""
    rows = seated(sampling(max_tokens=50))
    held = len(rows.blocks(0)) * LIMITS.block_size
    members = {"membership_checksum": checksum([(0, 0)]), "slot_tokens_most": MOST}
    most = (held - 5) // MOST
    with pytest.raises(InvalidPlan, match="the lease can compute up to token"):
        rows.apply(plan(3, lease_steps=most + 1, **members))
    rows.apply(plan(3, lease_steps=most, **members))


def test_finished_for_length_at_the_last_token_even_if_drafted() -> None:
    drafts, _, results = served([([1, 2, 3], sampling(max_tokens=21))], most=6, lease_steps=2)
    assert len(drafts.outputs[0]) == 21
    assert drafts.reasons[0] is FinishReason.LENGTH
    assert sum(len(result.outcome.finished) for result in results) == 1
