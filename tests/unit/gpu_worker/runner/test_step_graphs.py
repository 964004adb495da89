"""Steps are recorded once and launched at once: one launch and its uploads, whatever rows want.

But for grammars (`test_grammars`).
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.rows import Rows
from gpu_worker.runner.compile_ahead import ends_of
from gpu_worker.runner.step_graphs import Bucket, buckets_of
from gpu_worker.runner.stepping import OneAhead
from kernels import dispatch
from kernels.attention.decode_attention import FEW_ROWS, decode_tiling
from kernels.attention.triton_launch import Tiling
from tests.support.ahead import Counting, Model, play
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model

LIMITS = RowLimits(
    slots=5, context_tokens=60, step_tokens=40, block_size=4, block_count=75, vocab_size=97
)
RULES: dict[str, Any] = {
    "logprobs": 3,
    "temperature": 0.8,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "logit_bias": ((7, 4.0),),
    "bad_words": ((3,), (7, 7)),
    "allowed_token_ids": (*tuple(range(0, 97, 2)), 7),
    "stop_token_ids": (8,),
    "min_tokens": 3,
}


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What the host asks torch for: views of memory are no more than names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    dispatch.force("torch")
    yield Model(write_random_model(tmp_path_factory.mktemp("model") / "tiny", seed=3), LIMITS)
    dispatch.force(None)


def outputs(stepper: Any, lengths: tuple[int, ...], **wanted: Any) -> dict[int, list[int]]:
    scheduler = MiniScheduler(LIMITS, chunk_tokens=16, lease_steps=3)
    for index, length in enumerate(lengths):
        params = sampling(max_tokens=8, seed=index, **wanted)
        scheduler.submit([(7 * index + at) % 97 for at in range(length)], params)
    play(stepper, scheduler, lambda: 1 << 30)
    assert not scheduler.errors
    return {key: list(value) for key, value in scheduler.outputs.items()}


@pytest.mark.parametrize("wanted", [{}, RULES], ids=["plain", "rules"])
@pytest.mark.parametrize("lengths", [(3,), (1, 30, 9, 4, 50)], ids=["one", "many"])
def test_every_step_is_one_launch_and_one_upload_at_most(
    model: Model, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], wanted: Any
) -> None:
    streams = Counting()
    runner = model.resident(streams)
    counts: list[tuple[int, int]] = []
    launch = runner.launch

    def counted(step: Any) -> Any:
        before = streams.launches, streams.uploads
        # Who looks at what the device has itself gathers for nothing.
        flight = launch(replace(step, tables=None, sampling=replace(step.sampling, edits=None)))
        counts.append((streams.launches - before[0], streams.uploads - before[1]))
        return flight

    monkeypatch.setattr(runner, "launch", counted)
    found = outputs(OneAhead(Rows(LIMITS), runner), lengths, **wanted)
    assert {launches for launches, _ in counts} == {1}
    # Each size once: nobody has a grammar here.
    assert streams.recorded == len(buckets_of(LIMITS))
    assert {uploads for _, uploads in counts} <= {0, 1}
    assert len(counts) >= 8
    assert found == outputs(model.in_turns(), lengths, **wanted)


def operators_of(
    model: Model, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], wanted: Any
) -> set[tuple[str, ...]]:
    """Of each launch, sorted."""
    runner = model.resident(Counting())
    launch, found = runner.launch, set[tuple[str, ...]]()

    def counted(step: Any) -> Any:
        with Operators() as asked:
            flight = launch(step)
        found.add(tuple(sorted(asked.names.elements())))
        return flight

    monkeypatch.setattr(runner, "launch", counted)
    outputs(OneAhead(Rows(LIMITS), runner), lengths, **wanted)
    return found


def test_what_a_launch_asks_of_torch_is_the_same_of_any_rows_and_contexts(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To send its slots or tokens if they are others, and to put its results aside and fetch them:
    a token of each row, or with log-probabilities four columns.
    """
    sent, fetched = ["copy_"] * 3, ["copy_"] * 2
    for wanted, columns in (({}, 1), (RULES, 4)):
        few, many = (
            operators_of(model, monkeypatch, lengths, wanted)
            for lengths in ((3,), (1, 30, 9, 4, 50))
        )
        assert few == many == {tuple(fetched * columns), tuple(sent + fetched * columns)}


def test_rules_stop_nobody_from_running_ahead(model: Model) -> None:
    runner = model.resident()
    stepper = OneAhead(Rows(LIMITS), runner)
    unread: list[bool] = []
    launch = runner.launch

    def noted(step: Any) -> Any:
        unread.append(stepper.is_in_air)
        return launch(step)

    runner.launch = noted  # type: ignore[method-assign]
    scheduler = MiniScheduler(LIMITS, lease_steps=6)
    scheduler.submit([5, 6, 7], sampling(max_tokens=6, **RULES))
    play(stepper, scheduler, lambda: 1 << 30)
    # All but those that no step of their lease goes before.
    assert unread.count(True) >= 4


def test_what_cannot_be_recorded_is_launched_one_by_one(model: Model) -> None:
    streams = Counting(recorded_max=len(buckets_of(LIMITS)) - 1)
    with capture_logs() as logs:
        runner = model.resident(streams)
    (told,) = (entry for entry in logs if entry["event"] == "worker.unrecorded")
    assert "stream is capturing" in told["reason"]
    lengths = (1, 30, 9)
    found = outputs(OneAhead(Rows(LIMITS), runner), lengths, **RULES)
    assert found == outputs(model.in_turns(), lengths, **RULES)


def test_buckets_hold_every_step() -> None:
    wide = replace(LIMITS, slots=256, step_tokens=8192)
    mixed = [bucket.tokens for bucket in buckets_of(wide) if not bucket.is_decode]
    assert mixed[-1] == 2048
    assert len(buckets_of(wide)) <= 64
    assert all(larger <= 2 * size for size, larger in itertools.pairwise(mixed[1:]))


@pytest.mark.parametrize("slots", [1, 7, 8, 9, 16, 17, 100, 256])
def test_every_kind_of_step_is_compiled_ahead(slots: int) -> None:
    """Few rows decode in a tiling of their own: those of the smallest size and of the largest are
    all there are.
    """
    limits = replace(LIMITS, slots=slots, step_tokens=2 * slots)

    def tilings(buckets: Sequence[Bucket]) -> set[Tiling]:
        rows = {each.rows for each in buckets if each.is_decode}
        heads = torch.empty(max(rows), 4, 128, dtype=torch.bfloat16, device="meta")
        return {decode_tiling(heads[:each], is_fp8=False) for each in rows}

    assert tilings(ends_of(limits)) == tilings(buckets_of(limits))
    assert len(tilings(buckets_of(limits))) == 1 + (slots > FEW_ROWS)
