"""What a request's record says of how to read its output, and the grammar where it must call."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway.requests import tool_rules
from gateway.requests.reading import constrained, marks, reading
from gateway.requests.validation import Limits
from gateway.text import model_card
from gateway.text.detokenizer import Pieces
from gateway.text.model_card import ModelCard
from gateway.values.generation_request import (
    NO_PARAMETERS,
    ChatPrompt,
    GenerationRequest,
    Message,
    TextPrompt,
    Tool,
)
from kaiten.v1.common_pb2 import FEATURE_STRUCTURED_OUTPUTS
from service_kit.errors import InvalidRequest
from tests.support.tokenizers import byte_level_bpe, write_model_folder

TEMPLATE = "{{ tools }}<tool_call></think>"
CLOCK = Tool(name="clock", parameters=NO_PARAMETERS)
LIMITS = Limits(vocab_size=500, context_tokens_max=100)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """<tool_call> is a control token, <think> a token, and </think> none."""
    tokenizer = Tokenizer.from_str(byte_level_bpe().to_str())
    tokenizer.add_special_tokens(["<tool_call>", "<other>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    folder: Path = write_model_folder(
        tmp_path_factory.mktemp("card") / "m", tokenizer, chat_template=TEMPLATE
    )
    return model_card.load(folder)


def asked(*tools: Tool, **fields: Any) -> GenerationRequest:
    prompt = ChatPrompt(messages=(Message(role="user", content="x"),), tools=tools)
    return GenerationRequest(prompt=prompt, body_hash=b"", **fields)


def ids(card: ModelCard, text: str) -> list[int]:
    return list(card.tokenizer.encode(text, add_special_tokens=False).ids)


def test_marks_that_are_control_tokens_are_shown_and_no_others(card: ModelCard) -> None:
    render = marks(asked(CLOCK, is_read=True), card, ids(card, "x"))
    assert [*render.shown_token_ids] == ids(card, "<tool_call>")
    pieces = Pieces(card.tokenizer, shown=render.shown_token_ids)
    assert pieces.join(ids(card, "a<other><tool_call>b")) == b"a<tool_call>b"
    assert not marks(asked(is_read=True), card, []).shown_token_ids
    # Over gRPC whoever tells of tools reads for himself.
    assert marks(asked(CLOCK), card, []).shown_token_ids
    plain = GenerationRequest(prompt=TextPrompt(text="<think>"), body_hash=b"")
    assert not marks(plain, card, ids(card, "<think>")).begins_in_reasoning


@pytest.mark.parametrize(
    ("end", "is_inside"),
    [("<think>", True), ("<think>\n", True), ("<think>\n\n</think>\n", False), ("x", False)],
)
def test_a_prompt_that_ends_with_the_begin_of_reasoning(
    card: ModelCard, end: str, is_inside: bool
) -> None:
    render = marks(asked(is_read=True), card, ids(card, f"said {end}"))
    assert render.begins_in_reasoning == is_inside
    found = reading(card, render, "r")
    assert found is not None
    assert found.speech.begins_in_reasoning == is_inside
    assert found.speech.tools is None


def test_an_output_of_a_clients_grammar_has_no_reasoning(card: ModelCard) -> None:
    """Even where the prompt has begun it: all of it would be taken for that."""
    prompt = ids(card, "<think>")
    ask = asked(CLOCK, is_read=True)
    ask.sampling.structured_outputs.json_object = True
    assert not marks(ask, card, prompt).begins_in_reasoning
    must = constrained(asked(CLOCK, is_read=True, must_call=("clock",)), card, prompt)
    assert marks(must, card, prompt).begins_in_reasoning


def test_ids_of_calls_are_the_same_wherever_they_are_told(card: ModelCard) -> None:
    render = marks(asked(CLOCK, is_read=True), card, [])
    text = '<tool_call>{"name": "clock"}</tool_call>' * 2
    told = []
    for request_id, choice in (("a", 0), ("a", 0), ("a", 1), ("b", 0)):
        found = reading(card, render, request_id)
        assert found is not None
        pieces: list[Any] = found.parser(choice).feed(text)
        told.append([piece.id for piece in pieces if hasattr(piece, "id")])
    assert told[0] == told[1]
    assert len({id for each in told[1:] for id in each}) == 6


def test_nothing_is_read_where_a_model_says_nothing_but_text(card: ModelCard) -> None:
    plain = replace(card, reasoning_format=None)
    assert reading(plain, marks(asked(is_read=True), plain, []), "r") is None
    assert reading(plain, marks(asked(CLOCK, is_read=True), plain, []), "r") is not None
    # Nobody asked for it.
    assert reading(card, marks(asked(CLOCK), card, []), "r") is None


def test_a_call_that_must_be_made_is_a_grammar(card: ModelCard) -> None:
    assert not constrained(asked(CLOCK), card).sampling.HasField("structured_outputs")
    must = asked(CLOCK, replace(CLOCK, name="other"), must_call=("clock",), is_read=True)
    outside = constrained(must, card).sampling.structured_outputs.grammar
    inside = constrained(must, card, ids(card, "<think>")).sampling.structured_outputs.grammar
    assert r"\"clock\"" in outside
    assert "other" not in outside
    assert outside.startswith("start: (begin thought)? output")
    assert inside.startswith("start: thought output")
    assert not must.sampling.HasField("structured_outputs")
    long = Tool(name="clock", parameters='{"title": "' + "x" * (1 << 16) + '"}')
    with pytest.raises(InvalidRequest, match="as a grammar"):
        constrained(asked(long, must_call=("clock",), is_read=True), card)


def test_only_what_may_be_called_is_in_the_grammar(card: ModelCard) -> None:
    other = replace(CLOCK, name="other")
    may = asked(CLOCK, other, may_call=("clock",), is_read=True)
    grammar = constrained(may, card).sampling.structured_outputs.grammar
    assert r"\"clock\"" in grammar
    assert "other" not in grammar
    assert "TEXT" in grammar
    features = LIMITS.features - {FEATURE_STRUCTURED_OUTPUTS}
    with pytest.raises(InvalidRequest, match="tool_choice: no worker"):
        tool_rules.check_model(may, card, replace(LIMITS, features=features))
    may.sampling.structured_outputs.json_object = True
    tool_rules.check_model(may, card, LIMITS)
    both = constrained(may, card).sampling.structured_outputs.grammar
    assert "answer" in both
    assert "other" not in both


def test_a_call_is_forced_by_one_who_can(card: ModelCard) -> None:
    must = asked(CLOCK, must_call=("clock",), is_read=True)
    tool_rules.check_model(must, card, LIMITS)
    features = LIMITS.features - {FEATURE_STRUCTURED_OUTPUTS}
    with pytest.raises(InvalidRequest, match="tool_choice: no worker"):
        tool_rules.check_model(must, card, replace(LIMITS, features=features))
    must.sampling.structured_outputs.json_object = True
    tool_rules.check_model(must, card, LIMITS)
    # What it says is of an answer, and there is none.
    bare = asked(CLOCK, must_call=("clock",), is_read=True)
    assert constrained(must, card).sampling == constrained(bare, card).sampling
