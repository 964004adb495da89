"""The OpenAPI document of every route: of what is declared, and of the models that read and write.

Request bodies are the models that read them, with the bounds of `validation`; what depends on two
fields, on the tokenizer or on sums is in descriptions. Replies are the Structs that write them.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

import msgspec

from gateway.http.errors import Error
from gateway.http.exchange import HttpExchange
from gateway.http.json_body import STRINGS_MAX
from gateway.http.json_reply import to_json
from gateway.http.middleware import OPEN_PATHS
from gateway.openai.fields.structured_outputs import OTHER_NAMES
from gateway.openai.operation import OPEN, Api, Operation
from gateway.openai.request_body import (
    ELSEWHERE,
    HARMLESS,
    METADATA_MAX,
    NEUTRAL,
    UNSUPPORTED,
    RequestBody,
)
from gateway.requests.structured_outputs import CHOICES_MAX
from gateway.requests.tool_rules import TOOL_NAME, TOOLS_MAX
from gateway.requests.validation import (
    BIAS_MAX,
    NAME,
    NUMBERS,
    POSITIVES,
    TOKEN_BYTES_MAX,
    Limits,
    id_lists,
    integers,
)
from gateway.tenants import PRIORITY_MAX

Schema = dict[str, Any]
REFERENCE: Final = "#/components/schemas/{name}"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
# What an operation may answer besides its success. The texts are for readers of the document.
FAILURES: Final = {
    400: "the request is wrong; the same one can never succeed. `param` names the field",
    401: "an API key is needed",
    403: "Host or Origin: another site's page, or a name that is not allowed; or no operator's key",
    404: "no such model, request or path",
    405: "another method is meant",
    408: "the body was not there in time",
    409: "the idempotency key was used for another body",
    413: "the body is too long",
    415: "the body must say that it is application/json",
    429: "too much is live; see retry-after",
    499: "the request was cancelled",
    500: "a fault of the server; its log explains the id in the message",
    503: "nothing can be served now; see retry-after",
    504: "the request's time ran out",
}
ABOUT: Final = (
    "Every answer carries x-request-id, the request's own if it is a name; every error"
    " x-should-retry, and retry-after and retry-after-ms if waiting helps. GET answers HEAD too."
    " Failures in mid-stream are an event whose data is an Error, before [DONE]."
)
# By field, then by the kind of its values: "integer", "array[integer]", …
Rules = Mapping[str, Mapping[str, Schema]]
# For every body. JSON schema cannot tell 1.0 from 1, nor half a character from a whole one.
WRITTEN: Final = (
    " Whole numbers are written without a fraction; texts are valid Unicode, without lone"
    " surrogates. At most {values} values and {strings} strings."
)


def document(
    operations: Sequence[Operation],
    model: str,
    limits: Limits,
    prompts_max: int,
    *,
    refuses_unknown: bool = True,
) -> Schema:
    """OpenAPI 3.1, with this gateway's own limits."""
    bodies = [each.body for each in operations if each.body is not None]
    schemas = _body_schemas(bodies, model, limits, prompts_max)
    for schema in schemas.values():
        schema["additionalProperties"] = {"type": "null"} if refuses_unknown else True
    written = [Error, *(each for operation in operations for each in _written(operation))]
    _, components = msgspec.json.schema_components(written, ref_template=REFERENCE)
    for schema in components.values():
        # A field that is always written is there even where it has a default.
        told = schema["properties"].items()
        always = [name for name, each in told if name in schema["required"] or "default" in each]
        schemas[schema["title"]] = schema | {"required": always}
    paths: Schema = {}
    for each in operations:
        path = each.path.replace(":path}", "}")
        paths.setdefault(path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kaiten", "version": version("kaiten"), "description": ABOUT},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _written(operation: Operation) -> list[type]:
    every = (*operation.replies, *operation.events, *operation.others.values())
    return [each for each in every if isinstance(each, type)]


def _operation(operation: Operation) -> Schema:
    events = {EVENTS: {"schema": _schema(operation.events)}} if operation.events else {}
    texts = [each for each in operation.replies if isinstance(each, str)]
    content: Schema = {each: {"schema": {"type": "string"}} for each in texts} | events
    if structs := [each for each in operation.replies if isinstance(each, type)]:
        content = _json(*structs) | content
    responses: Schema = {"200": {"description": "done", "content": content}}
    for status in operation.failures:
        responses[str(status)] = {"description": FAILURES[status], "content": _json(Error)}
    for status, kind in operation.others.items():
        responses[str(status)] = {"description": kind.__doc__, "content": _json(kind)}
    told: Schema = {"operationId": operation.name, "responses": responses}
    if operation.parameters:
        told["parameters"] = list(operation.parameters)
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": _json(operation.body)}
    if operation.upload is not None:
        form = {"multipart/form-data": {"schema": operation.upload}}
        told["requestBody"] = {"required": True, "content": form}
    # Nobody needs a key for these.
    return told | ({"security": []} if operation.path in OPEN_PATHS else {})


def _json(*kinds: type) -> Schema:
    return {JSON: {"schema": _schema(kinds)}}


def _schema(kinds: Sequence[type]) -> Schema:
    several = [
        {"type": "object"} if kind is dict else {"$ref": REFERENCE.format(name=kind.__name__)}
        for kind in kinds
    ]
    return several[0] if len(several) == 1 else {"anyOf": several}


def _body_schemas(
    bodies: Iterable[type[RequestBody]], model: str, limits: Limits, prompts_max: int
) -> Schema:
    """By name; those that only stand inside of others too."""
    found: Schema = {}
    for body in bodies:
        schema = body.model_json_schema(ref_template=REFERENCE.replace("name", "model"))
        found |= schema.pop("$defs", {})
        schema["description"] += WRITTEN.format(values=limits.body_values_max, strings=STRINGS_MAX)
        schema["properties"] = _unused() | schema["properties"]
        found[body.__name__] = schema
    rules = _rules(model, limits, prompts_max)
    for name, schema in found.items():
        for field, property_ in schema["properties"].items():
            own = f"{name}.{field}"
            _restrict(property_, rules[own] if own in rules else rules.get(field, {}))
    return found


def _unused() -> Schema:
    """OpenAI's fields that change nothing here."""
    ignored = {name: {"description": "accepted and ignored"} for name in sorted(HARMLESS)}
    neutral = {
        name: {
            "enum": list(values),
            "description": f"{ELSEWHERE.get(name, UNSUPPORTED)}: accepted where it asks nothing",
        }
        for name, values in NEUTRAL.items()
    }
    return ignored | neutral


def _restrict(schema: Schema, rules: Mapping[str, Schema]) -> None:
    """Add the rules of each kind, wherever in the alternatives it stands."""
    schema.update(rules.get(_kind(schema), {}))
    for inner in (*schema.get("anyOf", ()), _inner(schema)):
        if inner:
            _restrict(inner, rules)


def _kind(schema: Schema) -> str:
    kind, inner = str(schema.get("type", "")), _inner(schema)
    return f"{kind}[{_kind(inner)}]" if inner else kind


def _inner(schema: Schema) -> Schema | None:
    """Of what the values of a list or an object are."""
    inner = schema.get("items") or schema.get("additionalProperties")
    return inner if isinstance(inner, dict) else None


def _rules(model: str, limits: Limits, prompts_max: int) -> Rules:
    ids, names = {"integer": _between(0, limits.vocab_size - 1)}, limits.template_options
    prompt_ids = ids | {"array[integer]": _items(1, limits.context_tokens_max - 1)}
    # A character has at least one byte.
    bytes_max = min(limits.text_bytes_max, limits.context_tokens_max * TOKEN_BYTES_MAX)
    tool_name = {"string": {"pattern": f"^{TOOL_NAME.pattern}$"}}
    text, several = {"string": {"maxLength": bytes_max}}, _items(1, prompts_max)
    grammar = {
        "string": {"minLength": 1, "maxLength": limits.grammar_bytes_max},
        "array[string]": _items(1, CHOICES_MAX),
    }
    bad_words = {
        "array[integer]": _items(1, limits.bad_word_tokens_max),
        "array[array[integer]]": _items(0, limits.bad_words_max),
    }
    return {
        **_number_rules(limits),
        **{name: ids | {"array[integer]": _items(0, n)} for name, n in id_lists(limits).items()},
        **dict.fromkeys(OTHER_NAMES, grammar),
        "model": {"string": {"enum": [model, ""]}},
        "stop": {
            "string": {"minLength": 1, "maxLength": limits.stop_chars_max},
            "array[string]": _items(0, limits.stops_max),
        },
        # Type string and enum null: nothing.
        "reasoning_effort": {"string": {} if "reasoning_effort" in names else {"enum": [None]}},
        "chat_template_kwargs": {"object[]": {"propertyNames": {"enum": sorted(names)}}},
        "prompt": prompt_ids | text | {"array[string]": several, "array[array[integer]]": several},
        "tokens": prompt_ids,
        "messages": {"array[]": _items(1, limits.messages_max)},
        "input": text | {"array[]": _items(1, limits.messages_max)},
        "instructions": text,
        "metadata": {"object[string]": {"maxProperties": METADATA_MAX}},
        "name": {"string": {"pattern": f"^({NAME.pattern})?$"}},
        "tools": {"array[]": _items(0, TOOLS_MAX)},
        # Of functions; the choice of one is the name of one.
        **dict.fromkeys(("FunctionBody.name", "CalledFunction.name"), tool_name),
        "NamedFunction.name": {},
        "role": {"string": {"enum": _roles(limits.roles)}},
        "content": text,
        "bad_words_token_ids": ids | bad_words,
        "logit_bias": {
            "number": _between(-BIAS_MAX, BIAS_MAX),
            # Those of the vocabulary.
            "object[number]": {
                "maxProperties": limits.biases_max,
                "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            },
        },
    }


def _number_rules(limits: Limits) -> Rules:
    bounds = integers(limits)
    # A prompt has at least one token.
    output = (0, limits.context_tokens_max - 1)
    bounds |= dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), output)
    bounds |= {"max_output_tokens": (1, output[1])}
    bounds |= dict.fromkeys(("n", "best_of"), (1, limits.choices_max))
    # What it is before it becomes unsigned.
    bounds |= {"top_k": (-1, bounds["top_k"][1])}
    bounds |= {"top_logprobs": bounds["logprobs"], "priority": (-PRIORITY_MAX, PRIORITY_MAX)}
    above_0 = {"exclusiveMinimum": 0}
    return (
        {name: {"integer": _between(*each)} for name, each in bounds.items()}
        | {name: {"number": _between(*each)} for name, each in NUMBERS.items()}
        | {name: {"number": above_0 | {"maximum": most}} for name, most in POSITIVES.items()}
    )


def _between(least: float, most: float) -> Schema:
    return {"minimum": least, "maximum": most}


def _items(least: int, most: int) -> Schema:
    return {"minItems": least, "maxItems": most}


def _roles(roles: frozenset[str]) -> list[str]:
    """ "developer" is read as "system"."""
    read = {"developer"} if "system" in roles else set()
    return sorted(roles - {"developer"} | read)


async def openapi(api: Api, exchange: HttpExchange, _body: None) -> None:
    """Made when it is asked for, and again only when a worker has changed the limits."""
    limits, config = api.generation_service.limits, api.config
    if api.document is None or api.document[0] != limits:
        content = document(
            api.operations,
            api.generation_service.card.name,
            limits,
            config.prompts_max,
            refuses_unknown=config.unknown_fields == "refuse",
        )
        api.document = limits, to_json(content)
    await exchange.send(200, api.document[1])


OPERATIONS: Final = (Operation("GET", "/openapi.json", "openapi", openapi, OPEN, (dict,)),)
