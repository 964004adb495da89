"""What a model may write where it must call: transcripts by llguidance, token by token."""

import json
from collections.abc import Callable
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from gateway.text.tools.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat
from gateway.text.tools.grammar import Function, forced_calls
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
    grammar = forced_calls(form, BOTH, tokenizer().token_to_id, is_single=False)
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
    grammar = forced_calls(FORMATS[family], BOTH, tokenizer().token_to_id, is_single=True)
    assert accepts(grammar, one)
    assert not accepts(grammar, two)


@pytest.mark.parametrize("marks", [THINK, ReasoningFormat(name="x", begin="<hm>", end="</hm>")])
def test_a_model_may_think_before(
    marks: ReasoningFormat, accepts: Callable[[str, str], bool]
) -> None:
    """If its prompt has begun that, it must. Marks are tokens or plain text."""
    outside, inside = (
        forced_calls(
            FORMATS["hermes"],
            BOTH,
            tokenizer().token_to_id,
            is_single=True,
            reasoning=marks,
            begins_in_reasoning=is_inside,
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
