"""What is shown at the end of an output, for every way in which it can end."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.requests.stream import Delta, Event, Finished, Presentation, new_choices
from gateway.text.choice_text import ChoiceText
from gateway.text.detokenizer import Detokenizer, Pieces
from kaiten.v1.common_pb2 import FinishReason
from kaiten.v1.ledger_pb2 import RenderOptions, SequenceFinished
from ledger import Update
from tests.support import tokenizers as built
from tests.support.tokenizers import byte_level_bpe, token_id

STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
CANCELLED = FinishReason.FINISH_REASON_CANCELLED
LATE = FinishReason.FINISH_REASON_DEADLINE_EXCEEDED
ERROR = FinishReason.FINISH_REASON_ERROR
# The first two bytes of 😀, which no character begins with alone.
HALF = [token_id(byte_level_bpe(), "ð"), token_id(byte_level_bpe(), "Ł")]


def ids(text: str) -> list[int]:
    return list(byte_level_bpe().encode(text, add_special_tokens=False).ids)


def told(
    token_ids: Sequence[int], reason: "FinishReason", render: RenderOptions, *, singly: bool
) -> list[Event]:
    """The events of an output, token by token or at once; the end comes apart from STOP's token."""
    [choice] = new_choices(Presentation(pieces=Pieces(byte_level_bpe()), render=render), 1)
    finished = SequenceFinished(sequence_id=1, reason=reason, output_tokens=len(token_ids))
    cuts = range(len(token_ids)) if singly else ()
    updates = [Update(1, index, [token_ids[index]], [], None) for index in cuts]
    if not singly:
        updates = [Update(1, 0, list(token_ids), [], None)]
    if reason == STOP:
        last = updates.pop()
        updates.append(last._replace(finished=finished))
    else:
        updates.append(Update(1, len(token_ids), [], [], finished))
    return [event for update in updates for event in choice.apply(update)]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


@pytest.mark.parametrize("singly", [True, False])
@pytest.mark.parametrize("reason", [LENGTH, CANCELLED, LATE, ERROR])
@pytest.mark.parametrize(
    ("token_ids", "stops", "expected"),
    [
        ([*ids("ok"), *HALF], [], "ok�"),
        ([*HALF, *ids("ok")], [], "�ok"),
        (ids("wait ST"), ["STOP"], "wait ST"),
        ([*ids("wait ST"), *HALF], ["STOP"], "wait ST�"),
        (ids("   ."), [], "   ."),
        (ids("  two  spaces . "), ["x"], "  two  spaces . "),
        (ids("👩‍👩‍👧‍👦 🇯🇵 日本 naïve"), [], "👩‍👩‍👧‍👦 🇯🇵 日本 naïve"),
    ],
)
def test_every_end_flushes_what_was_held(
    token_ids: list[int], stops: list[str], expected: str, reason: "FinishReason", singly: bool
) -> None:
    events = told(token_ids, reason, RenderOptions(stop=stops), singly=singly)
    assert text_of(events) == expected
    ends = [event for event in events if isinstance(event, Finished)]
    assert ends == [events[-1]], "one end, and it is the last"
    assert ends[0].reason == reason


@pytest.mark.parametrize("singly", [True, False])
def test_a_stop_over_many_tokens_shows_nothing_of_itself(singly: bool) -> None:
    parts = [token for piece in ("ABC", "DEF", "G", "HI", "J", "KLM") for token in ids(piece)]
    render = RenderOptions(stop=["DEFGHIJ"])
    events = told(parts, LENGTH, render, singly=singly)
    assert text_of(events) == "ABC"
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.reason == STOP
    assert end.output_tokens == len(parts) - len(ids("KLM"))
    render.include_stop = True
    assert text_of(told(parts, LENGTH, render, singly=singly)) == "ABCDEFGHIJ"


@pytest.mark.parametrize("singly", [True, False])
@pytest.mark.parametrize(
    ("include", "special", "expected"),
    [(False, False, "hi"), (True, False, "hi"), (False, True, "hi"), (True, True, "hi</s>")],
)
def test_the_models_own_stop_token_is_text_only_if_both_are_asked_for(
    singly: bool, include: bool, special: bool, expected: str
) -> None:
    pieces = Pieces(byte_level_bpe(), show_special=special)
    render = RenderOptions(include_stop=include)
    [choice] = new_choices(Presentation(pieces=pieces, render=render), 1)
    token_ids = [*ids("hi"), token_id(byte_level_bpe(), "</s>")]
    finished = SequenceFinished(sequence_id=1, reason=STOP, output_tokens=len(token_ids))
    if singly:
        updates = [Update(1, i, [token], [], None) for i, token in enumerate(token_ids)]
        updates[-1] = updates[-1]._replace(finished=finished)
    else:
        updates = [Update(1, 0, token_ids, [], finished)]
    events = [event for update in updates for event in choice.apply(update)]
    assert text_of(events) == expected
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.output_tokens == len(token_ids)


def test_a_requests_stop_token_is_text_on_request() -> None:
    token_ids = ids("one two")
    for include, shown in ((False, token_ids[:-1]), (True, token_ids)):
        events = told(token_ids, STOP, RenderOptions(include_stop=include), singly=True)
        assert text_of(events) == byte_level_bpe().decode(shown)


@given(
    token_ids=st.lists(st.integers(0, 480), min_size=1, max_size=30),
    stop=st.sampled_from(["e", "t h", "日", "the"]),
    group=st.integers(1, 7),
)
def test_including_the_stop_adds_exactly_the_stop(
    token_ids: list[int], stop: str, group: int
) -> None:
    pieces = Pieces(byte_level_bpe())
    plain, including = ChoiceText(pieces, [stop]), ChoiceText(pieces, [stop], include_stop=True)
    texts = ["", ""]
    for begin in range(0, len(token_ids), group):
        part = token_ids[begin : begin + group]
        first, second = plain.feed(part), including.feed(part)
        texts[0] += first.text
        texts[1] += second.text
        assert first[1:] == second[1:]
        if first.is_stopped:
            assert texts[1] == texts[0] + stop
            return
    assert texts[0] + plain.flush().text == texts[1] + including.flush().text


KINDS = {
    "byte_level": built.byte_level_bpe,
    "gemma": built.gemma_like_bpe,
    "word_level": built.word_level,
    "word_piece": built.word_piece,
}


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=st.sampled_from(built.CORPUS),
    marks=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(built.SPECIALS)), max_size=4),
)
def test_special_tokens_show_as_the_tokenizer_writes_them(
    kind: str, text: str, marks: list[tuple[int, str]]
) -> None:
    tokenizer = KINDS[kind]()
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    for mark, special in marks:
        at = min(mark, len(token_ids))
        # A run of byte tokens is one text: broken in two, the oracle gives up on the whole of it.
        while at < len(token_ids) and str(tokenizer.id_to_token(token_ids[at])).startswith("<0x"):
            at += 1
        token_ids.insert(at, token_id(tokenizer, special))
    pieces = Pieces(tokenizer, show_special=True)
    detokenizer = Detokenizer(pieces)
    shown = "".join(detokenizer.feed((each,)) for each in token_ids) + detokenizer.flush()
    assert shown == tokenizer.decode(token_ids, skip_special_tokens=False)
