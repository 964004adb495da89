"""The funnel without I/O: what a client is told depends on the tokens, never on their grouping."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.requests.replay import Replay
from gateway.requests.stream import (
    Choice,
    Delta,
    Event,
    Finished,
    Presentation,
    new_choices,
    told,
)
from gateway.text.choice_text import ChoiceText
from gateway.text.detokenizer import Pieces
from kaiten.v1.common_pb2 import FinishReason
from kaiten.v1.inference_service_pb2 import Done, Usage
from kaiten.v1.ledger_pb2 import (
    ChoiceResult,
    FoldedTokens,
    RenderOptions,
    RequestResult,
    SequenceFinished,
)
from ledger import Update
from tests.support.tokenizers import byte_level_bpe

STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
tokens = st.lists(st.integers(0, 480), min_size=1, max_size=30)
cuts = st.lists(st.integers(0, 30), max_size=6)


def pieces() -> Pieces:
    return Pieces(byte_level_bpe())


def updates(token_ids: Sequence[int], marks: Sequence[int], reason: "FinishReason") -> list[Update]:
    """The same output, cut at any marks; the end comes with the last token."""
    borders = sorted({0, len(token_ids), *(mark for mark in marks if mark <= len(token_ids))})
    cut = []
    for begin, end in pairwise(borders):
        finished = None
        if end == len(token_ids):
            finished = SequenceFinished(sequence_id=1, reason=reason, output_tokens=end)
        cut.append(
            Update(
                sequence_id=1,
                position=begin,
                token_ids=list(token_ids[begin:end]),
                logprobs=[],
                finished=finished,
            )
        )
    return cut


def run(choice: Choice, feed: Sequence[Update]) -> list[Event]:
    return [event for update in feed for event in choice.apply(update)]


def shown(events: Sequence[Event]) -> tuple[str, list[int], Finished]:
    """Text, token ids and end; positions must be without gap."""
    deltas = [event for event in events if isinstance(event, Delta)]
    position = deltas[0].position if deltas else 0
    for delta in deltas:
        assert delta.position == position
        position += len(delta.token_ids)
    [end] = [event for event in events if isinstance(event, Finished)]
    assert events[-1] == end
    text = "".join(delta.text for delta in deltas)
    return text, [token_id for delta in deltas for token_id in delta.token_ids], end


@given(token_ids=tokens, marks=cuts, stop=st.sampled_from(["", "e", "t h", "日", "�"]))
@pytest.mark.parametrize("reason", [STOP, LENGTH])
def test_grouping_changes_nothing(
    token_ids: list[int], marks: list[int], stop: str, reason: "FinishReason"
) -> None:
    stops = [stop] if stop else []
    at_once = run(
        new_choices(Presentation(pieces=pieces(), render=RenderOptions(stop=stops)), 1)[0],
        updates(token_ids, [], reason),
    )
    in_parts = run(
        new_choices(Presentation(pieces=pieces(), render=RenderOptions(stop=stops)), 1)[0],
        updates(token_ids, marks, reason),
    )
    assert shown(at_once) == shown(in_parts)


@given(token_ids=tokens, marks=cuts)
def test_a_stop_token_is_counted_and_hidden(token_ids: list[int], marks: list[int]) -> None:
    events = run(
        new_choices(Presentation(pieces=pieces(), render=RenderOptions()), 1)[0],
        updates(token_ids, marks, STOP),
    )
    text, ids, end = shown(events)
    before = ChoiceText(pieces(), ())
    assert text == before.feed(token_ids[:-1]).text + before.flush().text
    assert ids == token_ids
    assert (end.reason, end.output_tokens) == (STOP, len(token_ids))


def test_a_choice_cut_short_elsewhere_looks_the_same_to_whoever_attaches() -> None:
    """The gateway that matched the stop cancelled; the journal now ends with the matching token."""
    token_ids = byte_level_bpe().encode("one END").ids
    events = run(
        new_choices(Presentation(pieces=pieces(), render=RenderOptions(stop=["END"])), 1)[0],
        updates(token_ids, [], STOP),
    )
    text, ids, end = shown(events)
    assert (text, ids) == ("one ", token_ids)
    assert (end.reason, end.output_tokens) == (STOP, len(token_ids))


def test_usage_leaves_out_what_was_computed_past_a_stop_string() -> None:
    token_ids = byte_level_bpe().encode("one END two three").ids
    result = RequestResult(
        sequence_id=1,
        choices=[
            ChoiceResult(
                output=FoldedTokens(token_ids=token_ids),
                finished=SequenceFinished(
                    sequence_id=1, reason=LENGTH, output_tokens=len(token_ids)
                ),
            )
        ],
        done=Done(usage=Usage(prompt_tokens=3, output_tokens=len(token_ids))),
        render=RenderOptions(stop=["END"]),
    )
    presentation = Presentation(pieces=pieces(), render=result.render)
    [end], done = Replay("x", result, presentation).ends()
    assert end.reason == STOP
    assert end.output_tokens < len(token_ids)
    assert done.usage.output_tokens == end.output_tokens
    assert done.usage.prompt_tokens == 3


def test_usage_of_what_ended_by_itself_is_the_schedulers() -> None:
    choice = new_choices(Presentation(pieces=pieces(), render=RenderOptions()), 1)[0]
    run(choice, updates([7, 8, 9], [], LENGTH))
    assert told(Done(usage=Usage(output_tokens=3)), [choice]).usage.output_tokens == 3


def test_nothing_comes_after_the_end() -> None:
    choice = new_choices(Presentation(pieces=pieces(), render=RenderOptions(stop=["a"])), 1)[0]
    token_ids = byte_level_bpe().encode("a b c").ids
    feed = updates(token_ids, [1], LENGTH)
    assert [type(event) for event in choice.apply(feed[0])] == [Delta, Finished]
    assert choice.apply(feed[1]) == []
    assert choice.fed_end is not None
