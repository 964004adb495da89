"""Outputs that must be calls: what the grammar takes, the parser tells, and nothing else is."""

import json
from typing import Any, Final

import pytest
from tokenizers import AddedToken

from gateway.text.tools.formats import TOOL_FORMATS
from gateway.text.tools.grammar import Function, calls_grammar
from gateway.text.tools.parser import AnswerParser
from service_kit.grammars import GrammarTokenizer
from tests.support.tokenizers import byte_level_bpe

CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", 'Sao "P"']}},
}
FUNCTIONS: Final = (Function("weather", CITY), Function("now", None))
# Markers that are control tokens, as they are to the families that have them.
CONTROL: Final = ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>")
ROME: Final = {"city": "Rome"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> GrammarTokenizer:
    path = tmp_path_factory.mktemp("tools") / "tokenizer.json"
    made = byte_level_bpe().from_str(byte_level_bpe().to_str())
    made.add_special_tokens([AddedToken(each, special=True) for each in CONTROL])
    made.save(str(path))
    return GrammarTokenizer(path, made.get_vocab_size())


def takes(tokenizer: GrammarTokenizer, grammar: str, text: str) -> bool:
    matcher = tokenizer.compiled(grammar)
    token_ids = tokenizer.tokens.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def marker_ids(tokenizer: GrammarTokenizer) -> dict[str, int]:
    found = {}
    for each in CONTROL:
        (found[each],) = tokenizer.tokens.tokenize_str(each, parse_special=True)
    return found


def call(name: str, arguments: Any, key: str) -> str:
    return f'{{"name": "{name}", "{key}": {json.dumps(arguments)}}}'


def written(name: str, calls: list[tuple[str, Any]]) -> str:
    """As the family's template writes them."""
    tools = TOOL_FORMATS[name]
    if tools.name_ends:
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)
    texts = [call(n, a, tools.arguments) for n, a in calls]
    if tools.is_list:
        return f"{tools.begin}[{', '.join(texts)}]{tools.end}"
    if tools.begins_bare:
        return "; ".join(texts)
    return "\n".join(f"{tools.begin}\n{text}\n{tools.end}" for text in texts)


ONE: Final[list[tuple[str, Any]]] = [("weather", ROME)]
TWO: Final[list[tuple[str, Any]]] = [*ONE, ("now", {"x": [1, {}]})]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_the_family_writes_is_taken_and_told(tokenizer: GrammarTokenizer, name: str) -> None:
    ids = marker_ids(tokenizer)
    grammar = calls_grammar(TOOL_FORMATS[name], FUNCTIONS, ids, is_one=False)
    single = calls_grammar(TOOL_FORMATS[name], FUNCTIONS, ids, is_one=True)
    for calls in (ONE, TWO):
        text = written(name, calls)
        assert takes(tokenizer, grammar, text), text
        assert takes(tokenizer, single, text) == (calls is ONE)
        parser = AnswerParser(TOOL_FORMATS[name], None, str)
        said = [parser.feed(text), parser.flush()]
        assert not any(each.content for each in said)
        told = [(each.name, json.loads(each.arguments)) for one in said for each in one.calls]
        assert told == calls


@pytest.mark.parametrize(
    "calls",
    [
        [("weather", {})],
        [("weather", {"city": "Oslo"})],
        [("weather", {**ROME, "days": 1})],
        [("else", {})],
        [("now", [])],
        [],
    ],
)
@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral-v11", "llama3"])
def test_what_the_schemas_exclude_is_not(
    tokenizer: GrammarTokenizer, name: str, calls: list[tuple[str, Any]]
) -> None:
    grammar = calls_grammar(TOOL_FORMATS[name], FUNCTIONS, marker_ids(tokenizer), is_one=False)
    assert takes(tokenizer, grammar, written(name, ONE))
    assert not takes(tokenizer, grammar, written(name, calls))
    assert not takes(tokenizer, grammar, "Hello")
