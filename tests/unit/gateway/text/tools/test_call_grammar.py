"""What a model may write where it must call: transcripts by llguidance, token by token."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from gateway.text.tools.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat
from gateway.text.tools.grammar import (
    ANY_OBJECT,
    Calls,
    Function,
    forced_calls,
    free_calls,
    schema,
)
from gateway.text.tools.parser import CallBegins, Content, OutputParser, Reasoning, Speech
from tests.support.tokenizers import byte_level_bpe

FORMATS = {each.name: each for each in TOOL_FORMATS}
THINK = REASONING_FORMATS[0]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Function("get_weather", json.dumps(CITY | {"additionalProperties": False}))
CLOCK = Function("clock", '{"properties": {}}')
BOTH = [WEATHER, CLOCK]
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
TIME = '{"name": "clock", "arguments": {}}'
HERMES = f"<tool_call>\n{PARIS}\n</tool_call>"
# By format: one call, and two.
RIGHT = {
    "hermes": (HERMES, f"{HERMES}\n<tool_call>\n{TIME}\n</tool_call>"),
    "mistral": (f"[TOOL_CALLS][{PARIS}]", f"[TOOL_CALLS][{PARIS}, {TIME}]"),
    "mistral-v11": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[ARGS]{}',
    ),
    "phi4": (
        f"<|tool_call|>[{PARIS}]<|/tool_call|>",
        f"<|tool_call|>[{PARIS}, {TIME}]<|/tool_call|>",
    ),
    "llama3": (PARIS.replace("arguments", "parameters"), ""),
    "json": (PARIS.replace("arguments", "parameters"), ""),
}


@cache
def tokenizer() -> Tokenizer:
    """Some marks are control tokens, some tokens, and some neither."""
    built: Tokenizer = Tokenizer.from_str(byte_level_bpe().to_str())
    built.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    plain = ("<tool_call>", "</tool_call>", "</think>")
    built.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain])
    return built


def calls(form: ToolFormat, *, is_single: bool = False, **more: Any) -> Calls:
    return Calls(
        form=form,
        functions=BOTH,
        token_of=tokenizer().token_to_id,
        is_single=is_single,
        **more,
    )


@pytest.fixture(scope="module")
def of_llguidance(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer().save(str(path))
    return LLTokenizer(str(path), eos_token=tokenizer().token_to_id("</s>"))


@pytest.fixture
def accepts(of_llguidance: LLTokenizer) -> Callable[[str, str], bool]:
    def judged(grammar: str, text: str) -> bool:
        assert not LLMatcher.validate_grammar(grammar, of_llguidance), grammar
        matcher = LLMatcher(of_llguidance, grammar)
        ids = tokenizer().encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    return judged


@pytest.mark.parametrize("family", RIGHT)
def test_calls_are_what_the_parser_reads(family: str, accepts: Callable[[str, str], bool]) -> None:
    form, (one, two) = FORMATS[family], RIGHT[family]
    grammar = forced_calls(calls(form))
    for text, count in ((one, 1), (two, 2)) if two else ((one, 1),):
        assert accepts(grammar, text), text
        parser = OutputParser(Speech(tools=form, names=frozenset({"get_weather", "clock"})), str)
        pieces = parser.feed(text) + parser.flush()
        assert sum(isinstance(piece, CallBegins) for piece in pieces) == count
        assert not any(isinstance(piece, Content | Reasoning) for piece in pieces)
    assert not accepts(grammar, "Hello")
    assert not accepts(grammar, f"So {one}")
    assert not accepts(grammar, f"{one} Hello")
    assert not accepts(grammar, one.replace("get_weather", "rm"))
    assert not accepts(grammar, one.replace("city", "town"))
    assert not accepts(grammar, one.replace('"Paris"', "7"))
    assert not accepts(grammar, one[:-1])


@pytest.mark.parametrize("family", RIGHT)
def test_calls_that_had_to_be_made_are_no_answer_wherever_they_are_cut_off(family: str) -> None:
    form, names = FORMATS[family], frozenset({"get_weather", "clock"})
    for text in filter(None, RIGHT[family]):
        for end in range(len(text)):
            parser = OutputParser(Speech(tools=form, names=names, must_call=True), str)
            pieces = parser.feed(text[:end]) + parser.flush()
            assert not any(isinstance(piece, Content) for piece in pieces), text[:end]


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral-v11", "phi4"])
def test_one_alone(family: str, accepts: Callable[[str, str], bool]) -> None:
    one, two = RIGHT[family]
    grammar = forced_calls(calls(FORMATS[family], is_single=True))
    assert accepts(grammar, one)
    assert not accepts(grammar, two)


@pytest.mark.parametrize("marks", [THINK, ReasoningFormat(name="x", begin="<hm>", end="</hm>")])
def test_a_model_may_think_before(
    marks: ReasoningFormat, accepts: Callable[[str, str], bool]
) -> None:
    """If its prompt has begun that, it must. Marks are tokens or plain text."""
    outside, inside = (
        forced_calls(
            calls(FORMATS["hermes"], is_single=True, reasoning=marks, begins_in_reasoning=is_inside)
        )
        for is_inside in (False, True)
    )
    thought = f"\nHm, <b> or {{x}}?\n{marks.end}\n\n"
    assert accepts(outside, f"{marks.begin}{thought}{HERMES}")
    assert accepts(outside, HERMES)
    assert not accepts(outside, f"{thought}{HERMES}")
    assert accepts(inside, f"{thought}{HERMES}")
    assert not accepts(inside, HERMES)
    assert not accepts(inside, thought)


def strict(*, answer: str = "", is_single: bool = False, family: str = "hermes") -> str:
    return free_calls(calls(FORMATS[family], is_single=is_single), answer)


@pytest.mark.parametrize("family", RIGHT)
def test_calls_that_may_be_made_keep_to_their_schema_whatever_is_said_before(
    family: str, accepts: Callable[[str, str], bool]
) -> None:
    form, (one, two) = FORMATS[family], RIGHT[family]
    grammar = strict(family=family)
    marked = one if one.startswith(form.begin) else f"{form.begin}{form.space}{one}{form.space}"
    marked += "" if marked.startswith(one) else form.end
    for text in filter(None, (one, two, f"Let me see.\n{marked}", "", "Hello <b> {} [\n")):
        assert accepts(grammar, text), text
    # The parser finds a call wherever a mark is written, so no text has one.
    for wrong in (one.replace("Paris", "Paris", 1).replace("city", "town"), one[:-1]):
        assert not accepts(grammar, wrong)
        assert not accepts(grammar, f"So: {marked.replace(one, wrong)}") or form.is_bare
    assert not accepts(grammar, f"So: {marked.replace('get_weather', 'rm')}")
    assert not accepts(grammar, f"{marked} and more")
    assert accepts(strict(family=family, is_single=True), one)
    assert not (two and accepts(strict(family=family, is_single=True), two))


def test_marks_that_are_tokens_are_not_spelled_in_text(
    accepts: Callable[[str, str], bool], of_llguidance: LLTokenizer
) -> None:
    matcher = LLMatcher(of_llguidance, strict())
    letters = [id for part in ("<", "tool_call", ">") for id in tokenizer().encode(part).ids]
    assert matcher.try_consume_tokens(letters) < len(letters)


def test_calls_beside_an_answer_of_its_own_language(accepts: Callable[[str, str], bool]) -> None:
    grammar = strict(answer=schema('{"enum": ["a", 7]}'))
    for right in ('"a"', "7", HERMES):
        assert accepts(grammar, right)
    for wrong in ("Hello", '"b"', f"7{HERMES}", HERMES.replace("city", "town")):
        assert not accepts(grammar, wrong)
    either = strict(answer=schema(ANY_OBJECT), family="mistral")
    assert accepts(either, '{"x": 1}')
    assert accepts(either, RIGHT["mistral"][1])


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_model_may_think_before_it_answers(
    is_inside: bool, accepts: Callable[[str, str], bool]
) -> None:
    grammar = free_calls(calls(FORMATS["hermes"], reasoning=THINK, begins_in_reasoning=is_inside))
    thought = f"\nHm, <b> or {{x}}?\n{THINK.end}\n\n"
    for text in (HERMES, "Yes.", f"Yes.\n{HERMES}", ""):
        assert accepts(grammar, f"{'' if is_inside else THINK.begin}{thought}{text}")
        assert accepts(grammar, text) != is_inside
