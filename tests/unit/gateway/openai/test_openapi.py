"""The document and the validator say the same of every body."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.app import OPERATIONS
from gateway.http import errors
from gateway.http.json_body import JsonBody
from gateway.openai import openapi
from gateway.openai.chat import ChatBody
from gateway.openai.completions import CompletionBody
from gateway.openai.fields.structured_outputs import OTHER_NAMES
from gateway.openai.request_body import HARMLESS, NEUTRAL, parse
from gateway.openai.tokenize import DetokenizeBody, TokenizeBody
from gateway.requests import tool_rules
from gateway.requests.submit_record import Model, to_record
from gateway.requests.validation import (
    Limits,
    check,
)
from gateway.tenants import Tenant
from gateway.text.model_card import SamplingDefaults
from gateway.values.generation_request import TokenPrompt
from service_kit.errors import InvalidRequest, KaitenError
from tests.support.json_schema import Schema, has_type, is_valid, resolved

MODEL: Final = Model(name="tiny", eos_token_ids=(2,), defaults=SamplingDefaults())
# Small, so that the edges of lists are reached.
LIMITS: Final = Limits(
    vocab_size=30,
    context_tokens_max=12,
    choices_max=3,
    stops_max=2,
    stop_chars_max=4,
    stop_token_ids_max=3,
    logprobs_max=5,
    biases_max=2,
    allowed_token_ids_max=3,
    bad_words_max=2,
    bad_word_tokens_max=2,
    messages_max=2,
    template_options=frozenset({"date", "thinking"}),
)
PROMPTS_MAX: Final = 3
DOCUMENT: Final[Schema] = openapi.document(OPERATIONS, MODEL.name, LIMITS, PROMPTS_MAX)
SCHEMAS: Final[Schema] = DOCUMENT["components"]["schemas"]
BODIES: Final[dict[str, type[BaseModel]]] = {
    "ChatBody": ChatBody,
    "CompletionBody": CompletionBody,
    "TokenizeBody": TokenizeBody,
    "DetokenizeBody": DetokenizeBody,
}
# How many bodies are drawn of each: of few fields few are enough.
EXAMPLES: Final = {"ChatBody": 200, "CompletionBody": 200, "TokenizeBody": 80, "DetokenizeBody": 40}
# With which what is left of a body is right, if there is nothing else wrong with it.
GOOD: Final[dict[str, dict[str, Any]]] = {
    "ChatBody": {"messages": [{"role": "user", "content": "x"}]},
    "CompletionBody": {"prompt": "x"},
    "TokenizeBody": {"prompt": "x"},
    "DetokenizeBody": {"tokens": [1]},
}
# What the rules between two fields are about.
RELATED: Final = (
    (),
    ("prompt_logprobs", "stream"),
    ("stream", "stream_options"),
    ("logprobs", "top_logprobs"),
    ("max_tokens", "max_completion_tokens", "prompt_logprobs"),
    ("max_tokens", "echo", "logprobs"),
)
# Of what is looked up by name: token ids and template options.
EXTRA_NAMES: Final = ("0", "7", "29", "30", "007", "-1", "x", "date", "thinking")
JUNK: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    1.5,
    "",
    "x",
    [],
    [1],
    ["x"],
    [[1]],
    {},
    {"x": 1},
)


def judge(name: str, body: Any) -> KaitenError | None:
    """What the gateway has against a body before it asks a tokenizer or the ledger."""
    raw = json.dumps(body).encode()
    kind: Any = BODIES[name]
    try:
        read = parse(kind, JsonBody.of(raw))
        generates = hasattr(read, "requests")
        requests = read.requests(LIMITS, PROMPTS_MAX) if generates else [read.request()]
        for request in requests:
            with read.aliased():
                check(request, LIMITS, MODEL.name)
                tool_rules.check(request)
                if generates:
                    ids = (
                        request.prompt.token_ids
                        if isinstance(request.prompt, TokenPrompt)
                        else (1,)
                    )
                    named = replace(request, request_id="r")
                    tenant = Tenant(name="t")
                    to_record(named, ids, limits=LIMITS, model=MODEL, tenant=tenant, seed=0)
    except KaitenError as error:
        return error
    return None


def worded(name: str, body: dict[str, Any], error: KaitenError) -> bool:
    """Whether it is a rule that the document tells in words: of sums, or of other fields' values.

    Asked only of bodies in which every field by itself is right.
    """
    text = str(errors.body_of(error).error.message)
    described = {
        "min_tokens: must be at most max_tokens": body.get("min_tokens"),
        "best_of: ": body.get("best_of"),
        "allowed_token_ids: must hold a token": body.get("allowed_token_ids"),
        # With the prompt's own tokens.
        "max_tokens: must be at most": body.get("max_tokens"),
        "max_completion_tokens: must be at most": body.get("max_completion_tokens"),
        # Without anything else to tell.
        "max_tokens: must be in [1, ": body.get("max_tokens") == 0,
        "max_completion_tokens: must be in [1, ": body.get("max_completion_tokens") == 0,
        "prompt_logprobs: is not told in streams": body.get("stream"),
        "stream_options: must be left out": body.get("stream_options") is not None,
        "top_logprobs: needs logprobs": body.get("top_logprobs"),
        "prompt: give either prompt or messages": name == "TokenizeBody",
        "continue_final_message: ": body.get("continue_final_message"),
        "add_special_tokens: is for texts": body.get("messages"),
        # One of several, and not beside others.
        "structured_outputs: must have": body.get("structured_outputs") is not None,
        "structured_outputs: ends the output": body.get("ignore_eos") or body.get("min_tokens"),
        "response_format: ends the output": body.get("ignore_eos") or body.get("min_tokens"),
        "response_format.json_schema.schema: ": body.get("response_format") is not None,
        "response_format: must not be given": body.get("structured_outputs") is not None,
        # Any number is a token's id, to JSON schema.
        "logit_bias: token ids must be in": body.get("logit_bias"),
        "tool_choice: needs tools": body.get("tool_choice"),
        "tool_choice: must name one of tools": body.get("tool_choice"),
        "tool_choice.allowed_tools.tools: must name one of tools": body.get("tool_choice"),
    }
    # Names that differ, objects as JSON inside of texts, and schemas inside of objects.
    if re.match(
        r"(tools|messages)\.\d+.*(name: must differ|arguments: must|parameters: must)", text
    ):
        return True
    if re.match(r"[a-z_]+: needs messages$", text):
        return not body.get("messages")
    others = {name for name in OTHER_NAMES if body.get(name) not in (None, False)}
    if others and re.match(r"[a-z_.]+: (must not be given together|ends the output)", text):
        return True
    return any(text.startswith(start) and there for start, there in described.items())


def likely(schema: Schema) -> st.SearchStrategy[Any]:
    """Values that the schema allows, its edges among them; now and then one beyond an edge."""
    return _likely(json.dumps(schema))


# A strategy is dearer to make than to draw from.
@cache
def _likely(text: str) -> st.SearchStrategy[Any]:
    schema = resolved(DOCUMENT, json.loads(text))
    if "anyOf" in schema:
        return st.one_of(*map(likely, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from([*schema.get("enum", [schema.get("const")])])
    match schema.get("type"):
        case "integer" | "number":
            return numbers(schema)
        case "string":
            size = sizes(schema.get("minLength", 0), min(schema.get("maxLength", 8), 80))
            return size.flatmap(cache(lambda n: st.text("aé寿", min_size=n, max_size=n)))
        case "array":
            size = sizes(schema.get("minItems", 0), min(schema.get("maxItems", 2), 14))
            inner = likely(schema.get("items", {}))
            return size.flatmap(cache(lambda n: st.lists(inner, min_size=n, max_size=n)))
        case "object":
            return objects(schema)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return st.sampled_from(JUNK)


def sizes(least: int, most: int) -> st.SearchStrategy[int]:
    beyond = st.sampled_from([max(0, least - 1), most + 1])
    return rarely(beyond, st.integers(least, min(most, least + 2)) | st.just(most))


def numbers(schema: Schema) -> st.SearchStrategy[Any]:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -3))
    most = schema.get("maximum", 3)
    beyond = st.sampled_from([int(least) - 1, int(most) + 1])
    whole = st.integers(int(least), int(most)) | st.sampled_from([int(least), int(most)])
    return rarely(beyond, whole | st.floats(least, most) if schema["type"] == "number" else whole)


def rarely(one: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 15).flatmap(lambda drawn: other if drawn else one)


@st.composite
def objects(draw: st.DrawFn, schema: Schema) -> dict[str, Any]:
    properties = schema.get("properties", {})
    required = set(schema.get("required", ()))
    # The body's conditions want one of these.
    chosen = (
        required | draw(st.sets(st.sampled_from(sorted(properties)), max_size=4))
        if (properties)
        else set()
    )
    built = {name: draw(likely(properties[name])) for name in sorted(chosen)}
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        names = st.sampled_from(EXTRA_NAMES)
        built |= draw(st.dictionaries(names, likely(extra), max_size=3))
    return built


@st.composite
def bodies(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Mostly right, else wrong in some value, some type, or by a name that is not known."""
    body = draw(objects(SCHEMAS[name]))
    if "messages" not in body:
        body = GOOD[name] | body
    for field in draw(st.sampled_from(RELATED)):
        if field in SCHEMAS[name]["properties"]:
            body[field] = draw(likely(SCHEMAS[name]["properties"][field]))
    how = draw(st.integers(0, 5))
    if how == 0 and body:
        body[draw(st.sampled_from(sorted(body)))] = draw(st.sampled_from(JUNK))
    elif how == 1:
        names = ("max_token", "Model", *sorted(HARMLESS), *sorted(NEUTRAL))
        body[draw(st.sampled_from(names))] = draw(st.sampled_from(JUNK))
    elif how == 2 and body:
        del body[draw(st.sampled_from(sorted(body)))]
    return body


def wrong_fields(name: str, body: dict[str, Any]) -> set[str]:
    """What is wrong by itself, whatever the other fields are."""
    known = SCHEMAS[name]["properties"]
    return {
        field
        for field, value in body.items()
        if not is_valid(DOCUMENT, known.get(field, {"type": "null"}), value)
    }


def is_shadowed(name: str, body: dict[str, Any]) -> bool:
    """Whether all that is wrong is a max_tokens that is not looked at, as its description says."""
    is_given = has_type(body.get("max_completion_tokens"), "integer")
    return is_given and wrong_fields(name, body) == {"max_tokens"}


def check_naming(name: str, body: dict[str, Any]) -> None:
    """Each wrong field, put into a right body, is what the refusal is about."""
    for field in wrong_fields(name, body):
        beside = {} if field == "messages" else GOOD[name]
        error = judge(name, beside | {field: body[field]})
        assert error is not None, (field, body[field])
        param = errors.body_of(error).error.param
        assert param is not None, (field, body[field])
        assert param.split(".")[0] == field, (field, body[field], param)


@pytest.mark.parametrize("name", BODIES)
def test_the_validator_takes_exactly_what_the_document_allows(name: str) -> None:
    @settings(max_examples=EXAMPLES[name], deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(name))
    def agree(body: dict[str, Any]) -> None:
        error = judge(name, body)
        if is_valid(DOCUMENT, SCHEMAS[name], body):
            assert error is None or worded(name, body, error), (body, str(error))
            return
        if not is_shadowed(name, body):
            assert error is not None, body
            assert errors.row_of(error).status == (
                400 if isinstance(error, InvalidRequest) else 404
            )
        check_naming(name, body)

    agree()


@pytest.mark.parametrize("name", BODIES)
def test_the_bodies_are_some_right_and_some_wrong(name: str) -> None:
    allowed: list[bool] = []

    # The same ones each time: a share of free draws is below any bound some day.
    @settings(
        max_examples=50,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies(name))
    def look(body: dict[str, Any]) -> None:
        allowed.append(is_valid(DOCUMENT, SCHEMAS[name], body))

    look()
    assert 5 <= sum(allowed) <= 45


def edges(schema: Schema) -> Iterator[Any]:
    """Values at every bound of a schema and one beyond it."""
    schema = resolved(DOCUMENT, schema)
    for each in schema.get("anyOf", ()):
        yield from edges(each)
    yield from schema.get("enum", ())
    match schema.get("type"):
        case "integer" | "number":
            for bound in ("minimum", "exclusiveMinimum", "maximum"):
                if bound in schema:
                    yield from (int(schema[bound]) + step for step in (-1, 0, 1))
        case "string":
            for size in (schema.get("minLength", 0), schema.get("maxLength", 8)):
                yield from ("x" * max(0, size + step) for step in (-1, 0, 1))
        case "array":
            yield from ([value] for value in edges(schema["items"]))
            right = next(filter(right_item(schema), edges(schema["items"])), None)
            for size in (schema.get("minItems", 0), schema.get("maxItems", 2)):
                yield from ([right] * max(0, size + step) for step in (-1, 0, 1))
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            values = [*edges(schema["additionalProperties"])]
            yield from ({name: value} for name in EXTRA_NAMES for value in values)
            yield from (dict.fromkeys(EXTRA_NAMES[:count], 1) for count in range(4))


def right_item(schema: Schema) -> Callable[[Any], bool]:
    return lambda value: is_valid(DOCUMENT, schema["items"], value)


@pytest.mark.parametrize("name", BODIES)
def test_every_bound_of_every_field_is_where_the_document_has_it(name: str) -> None:
    seen = 0
    for field, schema in SCHEMAS[name]["properties"].items():
        beside = {} if field == "messages" else GOOD[name]
        for value in (*edges(schema), *JUNK):
            body = beside | {field: value}
            error = judge(name, body)
            if is_valid(DOCUMENT, SCHEMAS[name], body):
                assert error is None or worded(name, body, error), (body, str(error))
            else:
                assert error is not None, body
                check_naming(name, body)
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("name", BODIES)
def test_every_field_of_a_model_and_every_unused_one_is_told(name: str) -> None:
    schema = SCHEMAS[name]
    assert schema["additionalProperties"] == {"type": "null"}
    assert set(BODIES[name].model_fields) <= set(schema["properties"])
    assert schema["properties"]["user"] == {"description": "accepted and ignored"}
    assert schema["properties"]["functions"]["enum"] == [None, []]


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("ChatBody", {"top_logprobs": 6, "logprobs": True}, "top_logprobs"),
        ("ChatBody", {"max_completion_tokens": 99}, "max_completion_tokens"),
        ("ChatBody", {"max_tokens": 99}, "max_tokens"),
        ("ChatBody", {"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ("ChatBody", {"chat_template_kwargs": {"secret": 1}}, "chat_template_kwargs"),
        ("ChatBody", {"reasoning_effort": "low"}, "reasoning_effort"),
        (
            "CompletionBody",
            {"prompt": "x", "echo": True, "logprobs": 1, "prompt_logprobs": -1},
            "prompt_logprobs",
        ),
        ("DetokenizeBody", {"tokens": [30]}, "tokens"),
        ("TokenizeBody", {"prompt": "x", "chat_template_kwargs": {"date": 1}}, "chat_template_kw"),
    ],
)
def test_a_refusal_names_the_field_as_the_client_wrote_it(
    name: str, body: dict[str, Any], param: str
) -> None:
    error = judge(name, GOOD[name] | body)
    assert error is not None
    told = errors.body_of(error).error
    assert (told.param or "").startswith(param)
    assert told.message.startswith(told.param or "?")


def test_a_text_prompt_is_bounded_by_what_its_characters_must_take() -> None:
    """The document counts characters, which have at least a byte; the validator counts bytes."""
    most = SCHEMAS["CompletionBody"]["properties"]["prompt"]["anyOf"][0]["maxLength"]
    assert judge("CompletionBody", {"prompt": "x" * most}) is None
    assert judge("CompletionBody", {"prompt": "x" * (most + 1)}) is not None
