"""What an output must be: OpenAI's response_format, and vLLM's structured_outputs."""

from typing import Any, Literal

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


class StructuredOutputsBody(RequestBody):
    """vLLM's names: exactly one of the first five."""

    json_: Schema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None

    def wanted(self) -> StructuredOutputs | None:
        schema = self.json_
        given: dict[str, Any] = {
            "json": json_of(schema, "structured_outputs.json")
            if isinstance(schema, dict)
            else schema,
            "json_object": self.json_object,
            "regex": self.regex,
            "choice": None if self.choice is None else Choices(texts=self.choice),
            "grammar": self.grammar,
        }
        named = {name: value for name, value in given.items() if value is not None}
        if len(named) != 1:
            rule = f"must have exactly one of {', '.join(given)}; got {', '.join(named) or 'none'}"
            raise InvalidRequest("structured_outputs", rule)
        return StructuredOutputs(**named, disable_any_whitespace=bool(self.disable_any_whitespace))
