"""What an output must be: OpenAI's response_format, vLLM's structured_outputs, and older names."""

from typing import Any, Final, Literal

from pydantic import Field

from gateway.openai.request_body import RequestBody, Texts, json_of
from kaiten.v1.common_pb2 import Choices, StructuredOutputs
from service_kit.errors import InvalidRequest

Schema = dict[str, Any]


class JsonSchema(RequestBody):
    """`strict` or not, the output is what the schema says."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """Of chat and completions. A json_schema needs its schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def wanted(self, field: str) -> StructuredOutputs | None:
        schema = None if self.json_schema is None else self.json_schema.schema_
        return _wanted(self.type, schema, f"{field}.json_schema.schema")


class ResponseTextFormat(JsonSchema):
    """Of responses. A json_schema needs its schema."""

    type: Literal["text", "json_object", "json_schema"]

    def wanted(self, field: str) -> StructuredOutputs | None:
        return _wanted(self.type, self.schema_, f"{field}.schema")


def _wanted(type_: str, schema: Schema | None, field: str) -> StructuredOutputs | None:
    if type_ == "json_schema" and schema is None:
        raise InvalidRequest(field, "is required with type json_schema")
    if type_ != "json_schema" and schema is not None:
        raise InvalidRequest(field, f"must not be given with type {type_}")
    if schema is not None:
        return StructuredOutputs(json=json_of(schema, field))
    return StructuredOutputs(json_object=True) if type_ == "json_object" else None


# How newer vLLMs' forms are called by older ones (the first five) and by SGLang.
OTHER_NAMES: Final = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}


class StructuredOutputsBody(RequestBody):
    """vLLM's names: exactly one of the first five."""

    json_: Schema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    """A schema says by itself which there may be."""
    disable_fallback: bool | None = None
    """There is nothing to fall back to."""

    def wanted(self) -> StructuredOutputs:
        given = {
            "json": self.json_,
            "json_object": self.json_object,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        named = {form: value for form, value in given.items() if value is not None}
        if len(named) != 1:
            rule = f"must have exactly one of {', '.join(given)}; got {', '.join(named) or 'none'}"
            raise InvalidRequest("structured_outputs", rule)
        [(form, value)] = named.items()
        wanted = of_form(form, value, f"structured_outputs.{form}")
        wanted.disable_any_whitespace = bool(self.disable_any_whitespace)
        return wanted


class OtherNames(RequestBody):
    """The same, under the names that they have elsewhere: one way to say it."""

    guided_json: Schema | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    json_schema: Schema | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def said_elsewhere(self) -> dict[str, Any]:
        """Values by name. With false an object is not asked for."""
        given = {name: getattr(self, name) for name in OTHER_NAMES}
        return {name: value for name, value in given.items() if value not in (None, False)}


def of_form(form: str, value: Any, field: str) -> StructuredOutputs:
    """`field`: where the value stood."""
    if isinstance(value, dict):
        value = json_of(value, field)
    elif isinstance(value, list):
        value = Choices(texts=value)
    return StructuredOutputs(**{form: value})
