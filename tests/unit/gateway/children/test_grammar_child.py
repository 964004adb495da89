"""What clients ask of structured outputs, as grammars: those that are wide go on to their end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.children.child import Refused
from gateway.children.grammar_child import Compiler
from gateway.requests.structured_outputs import CHOICES_MAX
from service_kit.grammars import GrammarTokenizer
from tests.support.tokenizers import byte_level_bpe

VOCAB = byte_level_bpe().get_vocab_size()


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def has(path: Path, form: str, value: Any, text: str) -> bool:
    compiled = Compiler({"tokenizer": str(path), "vocab_size": VOCAB})(
        {"form": form, "value": value, "is_tight": True}
    )
    tokenizer = GrammarTokenizer(path, VOCAB)
    matcher, tokens = tokenizer.compiled(compiled["grammar"]), tokenizer.tokens.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_the_last_of_as_many_choices_as_may_be(tokenizer_file: Path) -> None:
    texts = [f"choice {index}" for index in range(CHOICES_MAX)]
    assert has(tokenizer_file, "choice", texts, texts[-1])
    assert not has(tokenizer_file, "choice", texts, "choice")


def test_the_last_of_a_thousand_optional_properties(tokenizer_file: Path) -> None:
    properties = {f"k{index}": {"type": "null"} for index in range(1000)}
    assert has(tokenizer_file, "json", json.dumps({"properties": properties}), '{"k999":null}')


def test_what_has_too_many_ways_to_be_read_ends(
    tokenizer_file: Path,
) -> None:
    tokenizer = GrammarTokenizer(tokenizer_file, VOCAB)
    rules = [f'r{index}: "x"* r{index}? "x"' for index in range(90)]
    start = "start: " + " | ".join(f"r{index}" for index in range(90))
    matcher = tokenizer.compiled("\n".join([start, *rules]))
    (token,) = tokenizer.tokens.tokenize_str("x")
    read = 0
    while read < 100 and not matcher.is_error():
        matcher.consume_token(token)
        matcher.compute_bitmask()
        read += 1
    assert "max is 1000" in matcher.get_error()


@pytest.mark.parametrize(
    ("form", "of"),
    [
        ("json", lambda text: json.dumps({"enum": [text, "b"]})),
        ("choice", lambda text: [text, "b"]),
        ("regex", lambda text: text + "|b"),
        ("grammar", lambda text: f'start: "{text}"'),
    ],
)
def test_a_text_is_not_too_long(
    tokenizer_file: Path, form: str, of: Callable[[str], object]
) -> None:
    has(tokenizer_file, form, of("a" * 16_384), "a")
    with pytest.raises(Refused, match="a text in it may have at most 16384 characters: 16385"):
        has(tokenizer_file, form, of("a" * 16_385), "a")


@pytest.mark.parametrize(
    ("form", "of", "most"),
    [
        ("json", lambda schema: schema, 128),
        # As the schemas of tools are.
        ("grammar", lambda schema: f'start: call | "no"\ncall: %json {schema}\n', 80),
    ],
)
def test_open_objects_beside_each_other_are_counted(
    tokenizer_file: Path, form: str, of: Callable[[str], str], most: int
) -> None:
    each = [{"type": "object", "properties": {f"k{index}": {}}} for index in range(most + 1)]
    last = f'{{"k{most - 1}":1}}'
    assert has(tokenizer_file, form, of(json.dumps({"anyOf": each[:most]})), last)
    rule = rf"anyOf: at most {most} arrays, and objects .* got {most + 1}"
    with pytest.raises(Refused, match=rule):
        has(tokenizer_file, form, of(json.dumps({"anyOf": each})), "{}")
    closed = [one | {"additionalProperties": False} for one in each]
    assert has(tokenizer_file, form, of(json.dumps({"anyOf": closed})), last)


def test_a_grammar_that_no_output_ends_is_refused(tokenizer_file: Path) -> None:
    with pytest.raises(Refused, match="no output could ever be complete"):
        has(tokenizer_file, "grammar", "start: a\na: b\nb: a\n", "")


def test_true_is_a_schema_and_false_is_none_that_an_output_could_have(tokenizer_file: Path) -> None:
    assert has(tokenizer_file, "json", " true", '[1,{"a":null}]')
    with pytest.raises(Refused):
        has(tokenizer_file, "json", "false", "null")


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (
            {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
            {"[]": True, '["c","a"]': True, '["a","a"]': False},
        ),
        (
            {
                "type": "array",
                "items": {"type": "integer"},
                "contains": {"minimum": 10},
                "maxItems": 3,
            },
            {"[1,2,10]": True, "[10,20]": True, "[1,2,3]": False, "[1,2,3,10]": False},
        ),
        (
            {"type": "array", "contains": {"const": "x"}, "minContains": 2.0, "maxContains": 2},
            {'["x","x",7]': True, '["x"]': False, '["x","x","x"]': False},
        ),
        (
            {
                "allOf": [{"type": "object", "properties": {"a": {"type": "null"}}}],
                "properties": {"b": {"type": "null"}},
                "unevaluatedProperties": False,
            },
            {'{"a":null,"b":null}': True, '{"c":null}': False},
        ),
        # As draft 4 and OpenAPI 3.0 have them.
        (
            {"type": "integer", "not": {"maximum": 5, "exclusiveMaximum": True}},
            {"4": False, "5": True, "6": True},
        ),
        (
            {"type": "integer", "not": {"minimum": 5, "exclusiveMinimum": True}},
            {"4": True, "5": True, "6": False},
        ),
        (
            {"type": "integer", "oneOf": [{"maximum": 5, "exclusiveMaximum": False}, {"const": 5}]},
            {"4": True, "5": False, "6": False},
        ),
    ],
)
def test_keywords_that_are_said_by_others(
    tokenizer_file: Path, schema: Any, texts: dict[str, bool]
) -> None:
    told = {text: has(tokenizer_file, "json", json.dumps(schema), text) for text in texts}
    assert told == texts
