"""Rows with grammars: what they sample belongs to their language, on both kinds of runner.

The oracle is llguidance itself, asked anew from the beginning for each output, and jsonschema.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from structlog.testing import capture_logs

from gpu_worker.batch import grammar_masks
from gpu_worker.batch.grammar_masks import GrammarMasks
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import FinishReason, InvalidPlan, Plan, StepOutcome, StepResult
from gpu_worker.batch.rows import Rows
from gpu_worker.runner import device_rows
from gpu_worker.runner.step_graphs import buckets_of
from gpu_worker.runner.stepping import InTurns, OneAhead, Stepper
from kernels import dispatch
from service_kit.grammars import GrammarTokenizer
from tests.support.ahead import Counting, LateScheduler, Model, play, replay
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model
from tests.support.tokenizers import byte_level_bpe, token_id

# More than the tokenizer has, as models do.
VOCAB: Final = 500
LIMITS = RowLimits(
    slots=4,
    context_tokens=120,
    step_tokens=40,
    block_size=4,
    block_count=120,
    vocab_size=VOCAB,
    reads_grammars=True,
)
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "dog", "café"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}
NEVER_CUT = 1 << 30
ABC: Final = tuple(token_id(byte_level_bpe(), letter) for letter in "abc")


def of_schema(schema: Any) -> str:
    """Without white space."""
    told = json.dumps(schema)
    return LLMatcher.grammar_from_json_schema(told, overrides={"whitespace_flexible": False})


def of_regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


@dataclass
class Stack:
    """A random model, and the tokenizer that it has none of its training from."""

    model: Model
    path: Path
    stop: int

    def rows(self) -> Rows:
        tokenizer = GrammarTokenizer(self.path, VOCAB)
        return Rows(LIMITS, GrammarMasks(tokenizer, VOCAB))

    def in_turns(self) -> InTurns:
        return InTurns(self.rows(), self.model.turn_device())

    def one_ahead(self) -> OneAhead:
        return OneAhead(self.rows(), self.model.resident())

    def text(self, token_ids: list[int]) -> str:
        ended = token_ids[:-1] if token_ids[-1:] == [self.stop] else token_ids
        return str(byte_level_bpe().decode(ended, skip_special_tokens=False))

    def wish(self, **changes: Any) -> Any:
        base = {"max_tokens": 90, "temperature": 1.0, "stop_token_ids": (self.stop,)}
        return sampling(**(base | changes))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("grammars")
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    model = write_random_model(folder, seed=5, vocab_size=VOCAB)
    dispatch.force("torch")
    stop = token_id(byte_level_bpe(), "<|end|>")
    yield Stack(Model(model, LIMITS), folder / "tokenizer.json", stop)
    dispatch.force(None)


def run(stepper: Any, *wishes: Any, scheduler: MiniScheduler | None = None) -> MiniScheduler:
    scheduler = scheduler or MiniScheduler(LIMITS, lease_steps=5)
    for index, wish in enumerate(wishes):
        scheduler.submit([5 + index, 6, 7], wish)
    play(stepper, scheduler, lambda: NEVER_CUT)
    return scheduler


@pytest.mark.parametrize("kind", ["in_turns", "one_ahead"])
def test_what_ends_by_itself_is_valid(stack: Stack, kind: str) -> None:
    wishes = [stack.wish(seed=seed, grammar=of_schema(SCHEMA)) for seed in range(12)]
    done = run(getattr(stack, kind)(), *wishes)
    assert not done.errors
    assert set(done.reasons.values()) == {FinishReason.STOP}
    told = [stack.text(tokens) for tokens in done.outputs.values()]
    assert len(set(told)) > 6
    for text in told:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_one_cut_off_is_a_beginning_of_the_language(stack: Stack) -> None:
    grammar = of_regex("(fox|dog){40}")
    done = run(stack.in_turns(), stack.wish(max_tokens=9, grammar=grammar))
    assert done.reasons == {0: FinishReason.LENGTH}
    matcher = GrammarTokenizer(stack.path, VOCAB).compiled(grammar)
    assert matcher.consume_tokens(done.outputs[0])


def test_who_has_no_grammar_samples_what_it_would_have(stack: Stack) -> None:
    plain = [stack.wish(seed=seed, max_tokens=20, stop_token_ids=()) for seed in (1, 2)]
    alone = run(stack.in_turns(), *plain).outputs
    mixed = (plain[0], stack.wish(seed=9, grammar=of_schema(SCHEMA)), plain[1])
    for stepper in (stack.in_turns(), stack.one_ahead()):
        scheduler = MiniScheduler(LIMITS, lease_steps=3)
        for prompt, wish in zip(([5, 6, 7], [8, 6, 7], [6, 6, 7]), mixed, strict=True):
            scheduler.submit(prompt, wish)
        play(stepper, scheduler, lambda: NEVER_CUT)
        assert [scheduler.outputs[0], scheduler.outputs[2]] == [alone[0], alone[1]]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_device_one_step_ahead_does_the_same(stack: Stack, data: st.DataObject) -> None:
    """Also preempted and resumed, and with rows that end or break in the step before."""
    patterns = ["(fox|dog|, ){1,9}", "[0-9]{1,4}", "(ab?c)*"]
    # One that hears at once has rows leave, and their slots taken, behind the step that ended them.
    kinds: list[type[MiniScheduler]] = [LateScheduler, MiniScheduler]
    kind = data.draw(st.sampled_from(kinds))
    scheduler = kind(LIMITS, lease_steps=data.draw(st.integers(1, 5)))
    for index in range(data.draw(st.integers(1, 6))):
        grammar = data.draw(st.sampled_from(["", *map(of_regex, patterns), of_schema(SCHEMA)]))
        # Without the other: somewhere no token is left.
        allowed = data.draw(st.sampled_from([(), (), ABC]))
        wish = stack.wish(
            seed=index, max_tokens=24, grammar=grammar, temperature=0.8, allowed_token_ids=allowed
        )
        scheduler.submit([index + 3, 4, 5], wish)

    left = [2]

    def preempt_somebody() -> None:
        wants: bool = data.draw(st.booleans())
        if isinstance(scheduler, LateScheduler) and scheduler.running and wants and left[0]:
            left[0] -= 1
            scheduler.preempt(data.draw(st.sampled_from(sorted(scheduler.running))))

    draw_cut = partial(data.draw, st.integers(1, 6))
    played = play(stack.in_turns(), scheduler, draw_cut, preempt_somebody)
    replay(stack.one_ahead(), played, lambda: data.draw(st.booleans()))


def test_a_crowd_of_masks_leaves_the_step_what_was_sent_before(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More uploads than buffers, between the forward pass and the sampling of one step."""
    monkeypatch.setattr(device_rows, "_RULES_AT_ONCE", 1)
    limits = replace(LIMITS, slots=20, block_count=600)
    model = Model(stack.path.parent, limits)
    said = []
    steppers: list[Callable[[Rows], Stepper]] = [
        lambda rows: InTurns(rows, model.turn_device()),
        lambda rows: OneAhead(rows, model.resident()),
    ]
    for stepper in steppers:
        rows = Rows(limits, GrammarMasks(GrammarTokenizer(stack.path, VOCAB), VOCAB))
        scheduler = MiniScheduler(limits, lease_steps=2)
        for seed in range(20):
            # So many that its steps are not recorded.
            wish = stack.wish(seed=seed, grammar=of_schema(SCHEMA), max_tokens=9, logprobs=40)
            scheduler.submit([5 + seed, 6], wish)
        with capture_logs() as logs:
            play(stepper(rows), scheduler, lambda: NEVER_CUT)
        assert not logs
        said.append(scheduler.outputs)
    assert said[0] == said[1]


def test_a_step_is_two_launches_where_somebody_has_a_grammar_and_else_one(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one upload, beside the masks'. Samplings are recorded by rows: of mixed steps one."""
    streams = Counting()
    runner = stack.model.resident(streams)
    buckets = buckets_of(LIMITS)
    assert streams.recorded == len(buckets) + len({(each.rows, each.is_decode) for each in buckets})
    counts: set[tuple[bool, int, int]] = set()
    launch = runner.launch

    def counted(step: Any) -> Any:
        before = streams.launches, streams.uploads
        flight = launch(step)
        has_grammar = step.sampling.masks is not None
        uploads = streams.uploads - before[1] - has_grammar
        counts.add((has_grammar, streams.launches - before[0], uploads))
        return flight

    monkeypatch.setattr(runner, "launch", counted)
    # Who would sample in the first launch too would have its rules twice.
    rules = {"logit_bias": ((7, 4.0), (9, -4.0)), "repetition_penalty": 1.5}
    wishes = [
        stack.wish(grammar=of_regex("[0-9]{9}"), max_tokens=12, **rules),
        # Goes on alone.
        stack.wish(max_tokens=20, stop_token_ids=(), **rules),
    ]
    done = run(OneAhead(stack.rows(), runner), *wishes)
    assert done.outputs == run(stack.in_turns(), *wishes).outputs
    assert {each[:2] for each in counts} == {(True, 2), (False, 1)}
    assert {uploads for *_, uploads in counts} <= {0, 1}


@pytest.mark.parametrize("first", [1, 5])
def test_who_has_a_grammar_is_served_where_recording_broke_off(stack: Stack, first: int) -> None:
    """Also where a step was recorded, and the sampling alone was not."""
    wishes = [stack.wish(seed=seed, grammar=of_schema(SCHEMA)) for seed in range(3)]
    with capture_logs():
        runner = stack.model.resident(Counting(recorded_max=first))
    done = run(OneAhead(stack.rows(), runner), *wishes)
    assert done.outputs == run(stack.in_turns(), *wishes).outputs


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_one_that_is_resumed_goes_on_as_undisturbed(stack: Stack, cut: int) -> None:
    wish = stack.wish(seed=4, grammar=of_schema(SCHEMA))
    whole = run(stack.in_turns(), wish).outputs[0]
    assert len(whole) > cut
    scheduler = MiniScheduler(LIMITS)
    scheduler.submit([5, 6, 7], wish, committed=whole[:cut])
    play(stack.in_turns(), scheduler, lambda: NEVER_CUT)
    assert scheduler.outputs[0] == whole[cut:]


def test_a_stop_token_comes_where_the_output_is_complete_and_nowhere_else(stack: Stack) -> None:
    grammars = GrammarMasks(GrammarTokenizer(stack.path, VOCAB), VOCAB)
    tokenizer = byte_level_bpe()
    ordinary = token_id(tokenizer, "b")
    stops = (stack.stop, ordinary, VOCAB - 1)
    grammars.join(2, stack.wish(grammar=of_regex("a{2}b{0,2}"), stop_token_ids=stops), ())

    def allowed() -> set[int]:
        bits = np.unpackbits(grammars.masks([2]).view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    a = token_id(tokenizer, "a")
    assert a in allowed()
    assert not allowed() & set(stops)
    grammars.see([2], [a])
    assert not allowed() & set(stops)
    grammars.see([2], [a])
    assert set(stops) <= allowed()
    assert a not in allowed()


def test_allowed_token_ids_are_kept_to_as_well(stack: Stack) -> None:
    digits = [token_id(byte_level_bpe(), digit) for digit in "13"]
    allowed = (*digits, stack.stop)
    for stepper in (stack.in_turns(), stack.one_ahead()):
        wish = stack.wish(grammar=of_regex("[0-9]{6}"), allowed_token_ids=allowed)
        done = run(stepper, wish)
        assert set(stack.text(done.outputs[0])) <= set("13")
        assert done.reasons == {0: FinishReason.STOP}


def test_the_text_of_a_control_token_is_written_as_text(stack: Stack) -> None:
    for stepper in (stack.in_turns(), stack.one_ahead()):
        done = run(stepper, stack.wish(grammar='start: "a<|user|>b"'))
        assert not done.errors
        assert stack.text(done.outputs[0]) == "a<|user|>b"
        assert token_id(byte_level_bpe(), "<|user|>") not in done.outputs[0]


def test_log_probabilities_are_of_the_models_own_logits(stack: Stack) -> None:
    wish = stack.wish(grammar=of_regex("[0-9]{6}"), logprobs=2, temperature=0.0)
    for stepper in (stack.in_turns(), stack.one_ahead()):
        told = run(stepper, wish).logprobs[0]
        # The likeliest tokens of a random model are hardly ever digits.
        assert any(token.logprob < min(token.top_logprobs) for token in told)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"grammar": "start: /[/"}, 'structured_outputs: at 1(8): invalid regex "["'),
        ({"grammar": of_regex("[0-9]{3}"), "stop_token_ids": ()}, "leave no token to sample"),
        ({"grammar": of_regex("x{3}"), "allowed_token_ids": (1,)}, "leave no token to sample"),
        ({"grammar": "start: start"}, "structured_outputs: NoExtension"),
    ],
)
def test_a_row_that_cannot_go_on_ends_alone_and_says_why(
    stack: Stack, changes: dict[str, Any], reason: str
) -> None:
    for stepper in (stack.in_turns(), stack.one_ahead()):
        done = run(stepper, stack.wish(**changes), stack.wish(grammar=of_regex("[0-9]{3}")))
        assert reason in done.errors[0]
        assert list(done.errors) == [0]
        assert done.reasons[1] == FinishReason.STOP


NO_TOKEN: Final = "allowed_token_ids, bad_words, min_tokens and structured_outputs leave no token"


@pytest.mark.parametrize("is_slot_taken", [False, True])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"grammar": of_regex("x{3}"), "allowed_token_ids": (1,)}, NO_TOKEN),
        ({"grammar": "start: /[/"}, 'structured_outputs: at 1(8): invalid regex "["'),
        ({"allowed_token_ids": (1,), "bad_words": ((1,),)}, NO_TOKEN),
    ],
)
def test_who_breaks_in_a_step_that_was_to_be_its_last_says_why(
    stack: Stack, changes: dict[str, Any], reason: str, is_slot_taken: bool
) -> None:
    """It has left, and its slot may be another's, when that step is read."""
    scheduler = MiniScheduler(replace(LIMITS, slots=2))
    scheduler.submit([5, 6], stack.wish(max_tokens=1, **changes))
    scheduler.submit([5, 6], stack.wish(stop_token_ids=()))
    stepper, told = stack.one_ahead(), list[StepResult]()

    def run_next() -> Plan:
        plan = scheduler.next_plan()
        assert plan is not None
        stepper.run(plan, 0, told.append, lambda: False)
        return plan

    first = run_next()
    # That each has sampled something is all it needs to know.
    scheduler.on_outcome(first, 0, StepOutcome(slots=(0, 1), token_ids=(9, 9)))
    scheduler.running[0].is_finished = True
    if is_slot_taken:
        scheduler.submit([5, 6], stack.wish(grammar=of_regex("[0-9]{3}")))
    run_next()
    stepper.land()
    ((slot, text),) = told[0].outcome.errors
    assert slot == 0
    assert text.startswith(reason)
    assert told[0].outcome.unsatisfiable == (0,)
    assert told[0].outcome.slots == (1,)
    assert not told[1].outcome.errors
    assert told[1].outcome.slots == ((0, 1) if is_slot_taken else (1,))


class Clock:
    """Of these masks' thread: slow for all rows together once, then as each row's seconds say.

    A thread of a test before may still have a mask to compute: its time is its own.
    """

    def __init__(self, masks: GrammarMasks, *row_s: float) -> None:
        self._thread = masks._steps.submit(threading.get_ident).result()
        self._together = itertools.chain([0.0, 1.0], itertools.repeat(0.0))
        self.steps_together = 0.0
        self._each = (now for took_s in itertools.cycle(row_s) for now in (0.0, took_s))

    def perf_counter(self) -> float:
        if threading.get_ident() != self._thread:
            return time.perf_counter()
        self.steps_together += 0.5
        return next(self._together)

    def thread_time(self) -> float:
        if threading.get_ident() != self._thread:
            return time.thread_time()
        return next(self._each)


def test_a_row_whose_masks_are_slow_in_the_mean_ends_and_no_other(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is ambiguous without end: every token makes it slower."""
    grammars = GrammarMasks(GrammarTokenizer(stack.path, VOCAB), VOCAB)
    for slot in (0, 1, 2):
        grammars.join(slot, stack.wish(grammar=of_regex("a{90}")), ())
    grammars.masks([0, 1, 2])
    # The last is slow once in three tokens, and within the mean of all.
    clock = Clock(grammars, 0.2, 0.01, 0.05, 0.2, 0.01, 0, 0.2, 0, 0)
    monkeypatch.setattr(grammar_masks, "time", clock)
    a = token_id(byte_level_bpe(), "a")
    left = []
    for _ in range(10):
        grammars.see([0, 1, 2], [a, a, a])
        left.append(grammars.masks([0, 1, 2]).any(axis=1).tolist())
    # 0.18 s more than the mean, from the first step that was timed on: the third is too much.
    assert left == 3 * [[True, True, True]] + 7 * [[False, True, True]]
    assert grammars.row(0).problem == "its tokens take 20 ms each and longer to check"
    assert not grammars.row(1).problem
    assert not grammars.row(2).problem


def test_a_row_that_comes_back_has_what_it_had_left(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarMasks(GrammarTokenizer(stack.path, VOCAB), VOCAB)
    wish, a = stack.wish(seed=3, grammar=of_regex("a{90}")), token_id(byte_level_bpe(), "a")
    monkeypatch.setattr(grammar_masks, "time", Clock(grammars, 0.2))
    grammars.join(0, wish, ())
    grammars.masks([0])
    for _ in range(3):
        grammars.see([0], [a])
        assert grammars.masks([0]).any()
    # Preempted, and given another slot: one of its seconds more is too much.
    grammars.leave(0)
    grammars.join(1, wish, [a] * 3)
    assert grammars.masks([1]).any()
    grammars.see([1], [a])
    assert not grammars.masks([1]).any()
    assert grammars.row(1).problem == "its tokens take 20 ms each and longer to check"
    # Another request with the same words begins with all of it.
    grammars.leave(1)
    grammars.join(0, wish, ())
    grammars.masks([0])
    grammars.see([0], [a])
    assert grammars.masks([0]).any()


def test_when_nobody_is_slow_any_more_the_masks_are_computed_together(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarMasks(GrammarTokenizer(stack.path, VOCAB), VOCAB)
    for slot in (0, 1):
        grammars.join(slot, stack.wish(grammar=of_regex("a{90}")), ())
    grammars.masks([0, 1])
    clock = Clock(grammars, 0.001)
    monkeypatch.setattr(grammar_masks, "time", clock)
    a = token_id(byte_level_bpe(), "a")
    together = []
    for _ in range(20):
        grammars.see([0, 1], [a, a])
        grammars.masks([0, 1])
        together.append(clock.steps_together)
    assert together == [1] * 17 + [2, 3, 4]


def test_who_reads_no_grammars_refuses_a_plan_with_one(stack: Stack) -> None:
    model = Model(stack.path.parent, replace(LIMITS, reads_grammars=False))
    scheduler = MiniScheduler(LIMITS)
    scheduler.submit([5], stack.wish(grammar=of_regex("a")))
    plan = scheduler.next_plan()
    assert plan is not None
    with pytest.raises(InvalidPlan, match="reads no grammars"):
        model.in_turns().run(plan, 0, lambda result: None, lambda: False)
