"""Control tokens' texts that clients write: found, hidden, found again, at a letter's price."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.control_texts import ControlTexts

# As Llama 3 has them: hundreds that begin alike.
RESERVED = [f"<|reserved_special_token_{index}|>" for index in range(250)]
TEXTS = sorted([*RESERVED, "<|eot_id|>", "</s>", "<s>", "<s", "[INST]"], key=lambda t: (-len(t), t))


@given(st.lists(st.sampled_from([*RESERVED[:3], *TEXTS[-5:], "<", "|", "<|", "24", "x"])))
def test_what_is_hidden_is_what_the_longest_texts_are(parts: list[str]) -> None:
    text = "".join(parts)
    controls = ControlTexts(TEXTS)
    pieces = controls.split(controls.hide(text))
    assert "".join(pieces) == text
    assert pieces[1::2] == re.findall("|".join(map(re.escape, TEXTS)), text)


def test_without_control_tokens_nothing_is_hidden() -> None:
    assert ControlTexts([]).hide("</s>") == "</s>"
    assert ControlTexts([]).split("</s>") == ["</s>"]


def test_a_mark_cannot_be_written_by_a_client() -> None:
    hidden = ControlTexts(TEXTS).hide("</s>")
    assert ControlTexts(TEXTS).split(hidden) == [hidden]


@pytest.mark.parametrize("part", ["<", "<|", "<|reserved_special_token_", "</s>", RESERVED[24]])
def test_hostile_texts_take_no_longer_than_others(part: str) -> None:
    """Alternatives tried one after the other take two seconds for this at `<`."""
    controls = ControlTexts(TEXTS)
    begin_s = time.thread_time()
    controls.split(controls.hide(part * (1_000_000 // len(part))))
    assert time.thread_time() - begin_s < 0.5
