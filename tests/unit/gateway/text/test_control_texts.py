"""Control tokens' texts that clients write: found, hidden, found again, at a letter's price."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.control_texts import ControlTexts
from tests.support.cpu_cost import costs_at_most

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
    """Alternatives tried one after the other cost as many times as much as there are more."""
    text = part * (200_000 // len(part))
    many, few = ControlTexts(TEXTS), ControlTexts([*RESERVED[20:30], "</s>", "<s>"])
    costs_at_most(
        6, work=lambda: many.split(many.hide(text)), yardstick=lambda: few.split(few.hide(text))
    )
