"""A real model's greedy and seeded rows: the same bits in every company.

Rows and device are driven directly; `test_worker_execute.py` has the way through the wire.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest

from gpu_worker.batch.plans import RowSampling
from gpu_worker.service.loading import Loaded, load
from gpu_worker.settings import WorkerSettings
from kernels import native
from tests.support.markov_device import drive, run
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model

BATCHES: Final = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64)
EVERYTHING: Final[dict[str, Any]] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "logit_bias": ((5, 1.5), (6, -3.0)),
    "bad_words": ((7,), (8, 9)),
}
Asked = tuple[Sequence[int], RowSampling]


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    # Wide enough for the matrix kernels' tiles to matter.
    wide = {"hidden_size": 160, "intermediate_size": 416, "vocab_size": 997}
    folder = write_random_model(tmp_path_factory.mktemp("model") / "small", **wide)
    yield load(
        WorkerSettings(
            model=str(folder),
            dtype=request.param,
            slots=64,
            step_tokens=512,
            block_size=4,
            kv_blocks=1024,
            threads=1,
        )
    )
    native.disable("not chosen by this test")


def requests(seed: int, count: int, **wishes: Any) -> list[Asked]:
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(3, 97) for _ in range(rng.randint(1, 30))],
            sampling(max_tokens=rng.randint(8, 16), logprobs=2, **wishes),
        )
        for _ in range(count)
    ]


def said(scheduler: MiniScheduler, sequence_id: int) -> tuple[list[int], list[object]]:
    """Token ids, and log-probabilities bit for bit."""
    bits: list[object] = [
        (item.logprob, item.top_token_ids, item.top_logprobs)
        for item in scheduler.logprobs[sequence_id]
    ]
    return scheduler.outputs[sequence_id], bits


@pytest.mark.parametrize("wishes", [{}, EVERYTHING], ids=["plain", "everything"])
def test_greedy_is_the_same_in_batches_of_any_size(loaded: Loaded, wishes: dict[str, Any]) -> None:
    probes, crowd = requests(1, 4, **wishes), requests(2, 64)
    expected = [said(run(loaded.runner, loaded.limits, [probe]), 0) for probe in probes]
    rng = random.Random(3)
    for size in BATCHES:
        for probe, alone in zip(probes[: 4 if size < 16 else 1], expected, strict=False):
            neighbours = rng.sample(crowd, size - 1)
            place = rng.randrange(size)
            batch = [*neighbours[:place], probe, *neighbours[place:]]
            lease_steps = rng.choice([1, 3])
            together = run(loaded.runner, loaded.limits, batch, lease_steps=lease_steps)
            assert said(together, place) == alone, size


def test_a_seeded_row_is_the_same_whoever_comes_and_goes(loaded: Loaded) -> None:
    """Others of all lengths arrive and leave while it runs; their seeds are drawn at random."""
    wishes = {"temperature": 1.0, "top_p": 0.95, "seed": 99, **EVERYTHING}
    probe = ([5, 6, 7], sampling(max_tokens=40, logprobs=2, **wishes))
    alone = said(run(loaded.runner, loaded.limits, [probe]), 0)
    for attempt in range(2):
        rng = random.Random(attempt)
        others = [
            (prompt, sampling(temperature=1.0, seed=rng.getrandbits(64), max_tokens=1 + at % 9))
            for at, (prompt, _) in enumerate(requests(attempt, 150))
        ]
        place = rng.randrange(60)
        batch = [*others[:place], probe, *others[place:]]
        together = run(loaded.runner, loaded.limits, batch)
        assert said(together, place) == alone


def test_a_resumed_row_goes_on_as_if_undisturbed(loaded: Loaded) -> None:
    """Preempted after any token, it joins as prompt plus output: counters and noise included."""
    wishes = {"temperature": 1.0, "seed": 4, **EVERYTHING}
    prompt = list(range(20, 30))
    params = sampling(max_tokens=24, **wishes)
    whole = run(loaded.runner, loaded.limits, [(prompt, params)]).outputs[0]
    assert len(set(whole)) > 10
    for cut in (1, 5, 16, 23):
        resumed = MiniScheduler(loaded.limits)
        resumed.submit(prompt, params, committed=whole[:cut])
        assert drive(loaded.runner, resumed).outputs[0] == whole[cut:], cut


Explained = tuple[int, float, tuple[int, ...], tuple[float, ...]]


def explained(loaded: Loaded, prompt: Sequence[int], chunk_tokens: int, k: int) -> list[Explained]:
    """Position, log-probability and likeliest tokens of every prompt token, bit for bit."""
    scheduler = MiniScheduler(loaded.limits, chunk_tokens=chunk_tokens)
    # Somebody else, who wants fewer, and somebody who wants none.
    scheduler.submit([9, 8, 7, 6], sampling(prompt_logprobs=0, max_tokens=3))
    sequence_id = scheduler.submit(prompt, sampling(prompt_logprobs=k, max_tokens=3))
    scheduler.submit(prompt, sampling(max_tokens=3))
    pieces = drive(loaded.runner, scheduler).prompts
    assert pieces.keys() == {0, sequence_id} if len(prompt) > 1 else {0}
    assert sum(len(piece.logprobs) for piece in pieces[0]) == 3
    assert not any(piece.top_token_ids for piece in pieces[0])
    return [
        (
            piece.position + at,
            piece.logprobs[at],
            piece.top_token_ids[at * k : (at + 1) * k],
            piece.top_logprobs[at * k : (at + 1) * k],
        )
        for piece in pieces.get(sequence_id, [])
        for at in range(len(piece.logprobs))
    ]


@pytest.mark.parametrize("parts", [1 << 22, 2 * 997])
def test_a_prompt_is_explained_alike_in_chunks_and_parts_of_any_size(
    loaded: Loaded, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`parts`: all logits of a chunk at once, or two rows at a time."""
    prompt = [random.Random(5).randrange(3, 97) for _ in range(50)]
    expected = explained(loaded, prompt, 1000, 3)
    assert [position for position, *_ in expected] == list(range(1, 50))
    monkeypatch.setattr("gpu_worker.runner.eager_runner.RANKED_AT_ONCE", parts)
    for chunk_tokens in (1, 2, 7, 16, 49):
        found = explained(loaded, prompt, chunk_tokens, 3)
        if native.available():
            assert found == expected, chunk_tokens
        assert [item[0] for item in found] == list(range(1, 50))


def test_a_prompt_of_one_token_is_not_explained(loaded: Loaded) -> None:
    assert explained(loaded, [5], 1000, 3) == []


def test_the_prompt_is_as_likely_as_if_it_had_been_sampled(loaded: Loaded) -> None:
    """Explained as a prompt, an output has the log-probabilities that it was told with."""
    prompt, params = [5, 6, 7], sampling(max_tokens=20, logprobs=2)
    first = run(loaded.runner, loaded.limits, [(prompt, params)])
    whole = [*prompt, *first.outputs[0]]
    again = explained(loaded, whole, 1000, 2)
    told = [(item.logprob, item.top_token_ids) for item in first.logprobs[0]]
    if native.available():
        assert [(own, tops) for _, own, tops, _ in again[2:]] == told
