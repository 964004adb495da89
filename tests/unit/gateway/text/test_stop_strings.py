"""Stop strings: nothing of one is shown, nothing else is kept, the token count is exact."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.choice_text import ChoiceText
from gateway.text.detokenizer import Pieces, decode
from gateway.text.stop_strings import StopMatcher
from tests.support import tokenizers as built
from tests.support.cpu_cost import costs_at_most

letters = st.text(alphabet="ab", max_size=12)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "is_stopped"),
    [
        ("DEFGHIJ", ["ABC", "DEF", "G", "HI", "J", "K"], ["ABC", "", "", "", ""], True),
        ("DEFGHIJ", ["ABC", "DEF", "X"], ["ABC", "", "DEFX"], False),
        ("aab", ["a", "a", "a", "b"], ["", "", "a", ""], True),
        ("\n\n", ["one\n", "two\n", "\nthree"], ["one", "\ntwo", ""], True),
        ("x", ["x"], [""], True),
    ],
)
def test_only_a_proper_prefix_waits(
    stop: str, pieces: list[str], shown: list[str], is_stopped: bool
) -> None:
    matcher = StopMatcher([stop])
    matches = []
    for piece in pieces:
        matches.append(matcher.feed(piece))
        if matches[-1].is_stopped:
            break
    assert [match.shown for match in matches] == shown
    assert matches[-1].is_stopped is is_stopped


@given(text=letters, wanted=stops, group=st.integers(1, 4))
def test_the_shown_text_is_all_before_the_first_stop(
    text: str, wanted: list[str], group: int
) -> None:
    """Against the plain definition: the shortest prefix that contains a stop is cut before it."""
    matcher, shown, fed = StopMatcher(wanted), "", ""
    for begin in range(0, len(text), group):
        fed += text[begin : begin + group]
        match = matcher.feed(text[begin : begin + group])
        shown += match.shown
        begins = [fed.find(stop) for stop in wanted if stop in fed]
        assert match.is_stopped is bool(begins)
        if begins:
            assert shown == fed[: min(begins)]
            return
        held = fed[len(shown) :]
        assert fed.startswith(shown)
        assert not held or any(stop.startswith(held) and stop != held for stop in wanted)
    assert shown + matcher.flush() == text


@given(token_ids=st.lists(st.integers(0, 480), max_size=40), group=st.integers(1, 9))
def test_the_count_is_that_of_the_token_which_completed_the_stop(
    token_ids: list[int], group: int
) -> None:
    pieces = Pieces(built.byte_level_bpe())
    text = decode(pieces, token_ids)
    stop = text[3:6] or "never"
    choice, shown, is_stopped = ChoiceText(pieces, [stop]), "", False
    for begin in range(0, len(token_ids), group):
        fed = choice.feed(token_ids[begin : begin + group])
        shown, is_stopped = shown + fed.text, fed.is_stopped
        if is_stopped:
            break
    if not is_stopped:
        tail = choice.flush()
        shown, is_stopped = shown + tail.text, tail.is_stopped
        assert choice.output_tokens == len(token_ids)
    else:
        # One token fewer did not contain it, as far as its bytes were complete.
        before = ChoiceText(pieces, [stop])
        assert not before.feed(token_ids[: choice.output_tokens - 1]).is_stopped
    assert is_stopped is (stop in text)
    assert shown == text.split(stop)[0]


def test_text_with_stops_costs_little() -> None:
    """As much late in a text as early; how much that is, the guard keeps."""
    tokenizer = built.byte_level_bpe()
    pieces = Pieces(tokenizer)
    token_ids = tokenizer.encode("".join(built.CORPUS)).ids * 2

    def feed(token_ids: Sequence[int], times: int) -> None:
        for _ in range(times):
            choice = ChoiceText(pieces, ["\n\nUser:", "<|never|>", "</answer>", "lazy cat"])
            for token_id in token_ids:
                choice.feed((token_id,))

    costs_at_most(2, work=lambda: feed(token_ids * 32, 1), yardstick=lambda: feed(token_ids, 32))
