"""Sampling through the whole stack: choices, seeds and penalties survive whatever the cell does."""

import asyncio
import itertools
from pathlib import Path
from typing import Any, Final

import pytest

from kaiten.client.errors import InvalidRequestError
from kaiten.client.results import Completion
from tests.parity.oracle import CROWD
from tests.parity.test_stack_parity import (
    LOGPROB_ERROR_MAX,
    ask,
    at_once,
    serving,
    standing,
)

MODEL: Final = "qwen2-gqa-tied"
EVERYTHING: Final[dict[str, Any]] = {
    "temperature": 1.0,
    "ignore_eos": True,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "logit_bias": {50: 3.0, 51: -100.0},
    "bad_words": [[52], [50, 50]],
    "logprobs": 1,
}


def outputs(completion: Completion) -> list[tuple[int, ...]]:
    return [tuple(choice.token_ids) for choice in completion.choices]


async def test_penalties_and_seeds_survive_preemption(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    """A pool in which two long rows never fit together says what a roomy one says."""
    options = {**EVERYTHING, "n": 2}
    said = []
    for name, flags in {"roomy": {}, "cramped": {"kv_blocks": 24}}.items():
        async with standing(tmp_path / name, folders[MODEL], flags) as (cluster, client):
            asked = [ask(client, p, seed=at, **options) for at, p in enumerate(CROWD[:16])]
            said.append(await at_once(cluster, asked))
    roomy, cramped = said
    assert sum(completion.timings.preemptions for completion in cramped) >= 5
    assert not any(completion.timings.preemptions for completion in roomy)
    for one, other in zip(roomy, cramped, strict=True):
        assert outputs(one) == outputs(other)
        for choice, again in zip(one.choices, other.choices, strict=True):
            logprobs = [each.logprob for each in again.logprobs]
            assert [each.logprob for each in choice.logprobs] == pytest.approx(
                logprobs, abs=LOGPROB_ERROR_MAX
            )
    for output in (output for each in roomy for output in outputs(each)):
        assert not {51, 52} & set(output)
        assert (50, 50) not in set(itertools.pairwise(output))


async def test_choices_differ_and_the_first_is_that_of_one(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    options = {"temperature": 1.0, "ignore_eos": True, "seed": 2**64 - 5}
    async with serving(tmp_path, folders[MODEL]) as client:
        for prompt in (CROWD[0], CROWD[1], CROWD[17]):
            four = outputs(await ask(client, prompt, n=4, **options))
            assert len(set(four)) == 4, "choices have noise of their own"
            assert outputs(await ask(client, prompt, n=4, **options)) == four
            assert outputs(await ask(client, prompt, **options)) == four[:1]
            other = {**options, "seed": 6}
            assert not set(outputs(await ask(client, prompt, n=4, **other))) & set(four)
            unseeded = {key: value for key, value in options.items() if key != "seed"}
            assert not set(outputs(await ask(client, prompt, n=4, **unseeded))) & set(four)


async def test_forced_allowed_and_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    async with serving(tmp_path, folders[MODEL]) as client:
        forced = [
            ask(
                client,
                CROWD[at % len(CROWD)],
                temperature=1.0,
                logit_bias={at + 6: 100.0},
                max_tokens=6,
            )
            for at in range(40)
        ]
        for at, completion in enumerate(await asyncio.gather(*forced)):
            assert outputs(completion) == [(at + 6,) * 6]
        drawn: dict[str, Any] = {"temperature": 2.0, "n": 4, "seed": 3}
        narrow = await ask(client, CROWD[3], allowed_token_ids=[70, 80], **drawn)
        assert {token_id for output in outputs(narrow) for token_id in output} == {70, 80}
        used_up = await ask(client, CROWD[3], allowed_token_ids=[70], bad_words=[[70, 70]])
        assert outputs(used_up) == [(70,)]
        assert "leave no token to sample" in used_up.choices[0].error
        assert used_up.choices[0].is_unsatisfiable
        with pytest.raises(InvalidRequestError, match="must hold a token that bad_words"):
            await ask(client, CROWD[3], allowed_token_ids=[70], bad_words=[[70]])
