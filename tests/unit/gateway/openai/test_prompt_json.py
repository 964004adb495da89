"""A prompt's log-probabilities as JSON: OpenAI's columns and vLLM's entries."""

import math
from typing import Final

import pytest

from gateway.openai.completions import columns
from gateway.openai.logprobs import LogprobFormatter
from gateway.requests.stream import Explained
from gateway.text.detokenizer import Pieces
from kaiten.v1.common_pb2 import PromptLogprobs
from tests.support.tokenizers import byte_level_bpe

# Log-probabilities per token.
ALL: Final = 100


@pytest.fixture(scope="module")
def formatter() -> LogprobFormatter:
    return LogprobFormatter(Pieces(byte_level_bpe(300)))


def explained(ids: list[int], own: list[float], tops: list[list[tuple[int, float]]]) -> Explained:
    told = PromptLogprobs(
        position=1,
        token_count=len(own),
        logprobs=own,
        top_token_ids=[token_id for position in tops for token_id, _ in position],
        top_logprobs=[logprob for position in tops for _, logprob in position],
    )
    return Explained(1, ids, told)


def test_the_own_token_comes_first_and_is_ranked_among_the_likeliest(
    formatter: LogprobFormatter,
) -> None:
    event = explained([70, 71, 72], [-1.5, -4.0], [[(9, -0.5), (71, -1.5)], [(8, -0.25), (7, -2)]])
    first, second, third = formatter.prompt_by_id(event, ALL)
    assert first is None
    assert second is not None
    assert third is not None
    assert [(key, entry.logprob, entry.rank) for key, entry in second.items()] == [
        ("71", -1.5, 2),
        ("9", -0.5, 1),
    ]
    # Its rank beyond the likeliest is not known.
    assert [(key, entry.rank) for key, entry in third.items()] == [
        ("72", None),
        ("8", 1),
        ("7", 2),
    ]


def test_fewer_than_were_computed_may_be_columns(formatter: LogprobFormatter) -> None:
    event = explained([70, 71], [-1.5], [[(9, -0.5), (71, -1.5)]])
    (_, entry) = formatter.prompt_by_id(event, 0)
    assert list(entry or ()) == ["71"]
    told = columns(formatter.prompt(event, 1))
    assert told.token_logprobs == [None, -1.5]
    assert [len(top or ()) for top in told.top_logprobs[1:]] == [1]


@pytest.mark.parametrize(
    ("logprob", "shown"), [(math.nan, None), (-math.inf, -9999.0), (-0.5, -0.5)]
)
def test_json_has_only_numbers(
    formatter: LogprobFormatter, logprob: float, shown: float | None
) -> None:
    event = explained([70, 71], [logprob], [[(9, logprob)]])
    told = columns(formatter.prompt(event, 1))
    assert told.token_logprobs == [None, shown]
    assert list((told.top_logprobs[1] or {}).values()) == [shown]
    entry = formatter.prompt_by_id(event, ALL)[1]
    assert entry is not None
    assert entry["71"].logprob == shown


def test_of_tokens_that_look_the_same_the_likeliest_counts(formatter: LogprobFormatter) -> None:
    """Bytes that are no character by themselves all look like U+FFFD."""
    pieces = Pieces(byte_level_bpe(300))
    halves = [token_id for token_id in range(300) if pieces.token_text(token_id) == "\ufffd"][:2]
    event = explained([70, halves[0]], [-0.5], [[(halves[0], -0.5), (halves[1], -3.0)]])
    told = columns(formatter.prompt(event, 2))
    assert told.top_logprobs[1] == {"\ufffd": -0.5}


def test_offsets_are_those_of_the_text(formatter: LogprobFormatter) -> None:
    tokenizer = byte_level_bpe(300)
    text = "寿司 sushi 🍣!"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    event = explained(ids, [-1.0] * (len(ids) - 1), [[]] * (len(ids) - 1))
    told = columns(formatter.prompt(event, 0))
    offsets = told.text_offset
    assert offsets == sorted(offsets)
    assert max(offsets) <= len(text)
    for token, offset in zip(told.tokens, offsets, strict=True):
        if "\ufffd" not in token:
            assert text[offset:].startswith(token)
