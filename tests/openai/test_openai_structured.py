"""Structured outputs by the OpenAI package: its helpers parse what they asked for."""

import json
from typing import Any, Literal

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel, Field

from tests.support.whole_stack import MODEL

# Without an end the tiny model would sometimes not come to one.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "dish": {"enum": ["crab", "eel", "octopus"]},
        "plates": {"type": "integer", "minimum": 1, "maximum": 99},
        "notes": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-zé ]{0,9}$"},
            "maxItems": 2,
        },
    },
    "required": ["dish", "plates", "notes"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
MESSAGES: Any = [{"role": "user", "content": "One crab, please."}]


class Order(BaseModel):
    dish: Literal["crab", "eel"]
    is_hot: bool
    sides: list[Literal["rice", "soup"]] = Field(max_length=3)


def said(client: OpenAI, **asked: Any) -> list[str | None]:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}
    return [choice.message.content for choice in reply.choices]


def test_every_choice_is_valid(client: OpenAI) -> None:
    texts = said(client, response_format=FORMAT, n=8, temperature=1.5, seed=1)
    assert len(set(texts)) > 4
    for text in texts:
        jsonschema.validate(json.loads(text or ""), SCHEMA)


def test_the_same_seed_is_the_same_object(client: OpenAI) -> None:
    one, other = (said(client, response_format=FORMAT, temperature=1, seed=7) for _ in range(2))
    assert one == other


def test_models_are_parsed_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "response_format": Order}
    asked |= {"temperature": 0, "max_tokens": 400}
    message = client.chat.completions.parse(**asked).choices[0].message
    parsed = message.parsed
    assert isinstance(parsed, Order)
    # And what the SDK made of it goes on.
    said: Any = [*MESSAGES, message.to_dict(warnings=False), *MESSAGES]
    client.chat.completions.create(model=MODEL, messages=said, max_tokens=1)
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed


async def test_responses_are_parsed(async_client: AsyncOpenAI) -> None:
    response = await async_client.responses.parse(
        model=MODEL, input="One crab.", text_format=Order, temperature=0
    )
    assert isinstance(response.output_parsed, Order)
    # Sent back as the package's types have it, with what it has parsed.
    turns: Any = [item.model_dump() for item in response.output]
    assert turns[0]["content"][0]["parsed"]
    said: Any = {"role": "user", "content": "And?"}
    await async_client.responses.create(model=MODEL, input=[*turns, said], max_output_tokens=1)
    # What it was asked is told again, of every kind, streamed and whenever somebody looks.
    assert response.text is not None
    told = response.text.format
    assert told is not None
    assert told.type == "json_schema"
    assert (told.name, told.strict) == ("Order", True)
    assert told.schema_["required"] == ["dish", "is_hot", "sides"]
    again = await async_client.responses.retrieve(response.id)
    assert again.text == response.text.model_copy()
    asked: Any = {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}
    stream = await async_client.responses.create(
        model=MODEL, input="One crab.", max_output_tokens=3, stream=True, **asked
    )
    texts = [event.response.text async for event in stream if hasattr(event, "response")]
    assert len(texts) == 3
    for text in texts:
        assert text is not None
        assert text.to_dict() == asked["text"]


def test_a_schema_without_a_name_is_told_with_one(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "schema": {"enum": [7]}}
    response = client.responses.create(model=MODEL, input="One crab.", text={"format": form})
    assert response.output_text == "7"
    told: Any = response.text and response.text.format
    assert (told.name, told.schema_) == ("schema", {"enum": [7]})


def test_any_object(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=300,
    )
    text = reply.choices[0].message.content or ""
    assert text.startswith("{")
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"choice": ["crab", "no, thanks"]}, "crab|no, thanks"),
        ({"regex": "[A-Z][a-z]{2,9} [0-9]{2}"}, "[A-Z][a-z]{2,9} [0-9]{2}"),
        ({"grammar": 'start: "a" ("b" | "c"){1,5}'}, "a[bc]{1,5}"),
        ({"json": {"enum": ["a", 3]}, "disable_any_whitespace": True}, '"a"|3'),
    ],
)
def test_vllms_names(client: OpenAI, wanted: dict[str, Any], pattern: str) -> None:
    for text in said(client, extra_body={"structured_outputs": wanted}, n=4, temperature=1):
        jsonschema.validate(text, {"type": "string", "pattern": f"^(?:{pattern})$"})


def test_a_completion_too(client: OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="Once", extra_body={"structured_outputs": {"regex": "[0-9]{5}"}}
    )
    assert reply.choices[0].text.isdigit()
    assert len(reply.choices[0].text) == 5


def schema(schema: Any) -> Any:
    json_schema = {"name": "x", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def constrained(**wanted: Any) -> Any:
    return {"extra_body": {"structured_outputs": wanted}}


@pytest.mark.parametrize(
    ("asked", "field", "rule"),
    [
        (schema({"type": "thing"}), "response_format", "Invalid type: thing"),
        (
            schema({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"uniqueItems": True}}}),
            "response_format",
            "cannot be compiled: items: Unimplemented keys: [",
        ),
        (
            {"extra_body": {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5]}},
            "allowed_token_ids",
            "no token with which an output of the grammar could begin",
        ),
        (constrained(), "structured_outputs", "exactly one of json, json_object, regex"),
        (constrained(regex="a", choice=["b"]), "structured_outputs", "got regex, choice"),
        (constrained(choice=[]), "structured_outputs", "no empty choice"),
        (constrained(choice=["a", ""]), "structured_outputs", "no empty choice"),
        (constrained(choice=["a"] * 4097), "structured_outputs", "at most 4096 choices, got 4097"),
        (constrained(json_object=False), "structured_outputs", "must have one of json"),
        (constrained(regex="a" * 65_537), "structured_outputs", "at most 65536 bytes, got 65537"),
        (constrained(regex="(?=a)"), "structured_outputs", "look-around"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}},
            "response_format",
            "ignore_eos must not be set",
        ),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 3}},
            "response_format",
            "min_tokens must not be set",
        ),
        (
            {"response_format": {"type": "json_object"}, **constrained(regex="a")},
            "response_format",
            "together with structured_outputs",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is required with type json_schema",
        ),
    ],
)
def test_what_is_wrong_is_named(client: OpenAI, asked: Any, field: str, rule: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)
    assert caught.value.param == field
    assert rule in str(caught.value)
