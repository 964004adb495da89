"""JSON schemas of the request bodies: the models that read them, with the bounds of `validation`.

Types, fields and descriptions are the models'; numbers are those of `validation`. What depends on
two fields is in `CONDITIONS`, and what depends on the tokenizer or on sums is said in descriptions.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from gateway.http.json_body import STRINGS_MAX
from gateway.openai.request_models import (
    HARMLESS,
    NEUTRAL,
    SEED_MIN,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from gateway.requests.validation import (
    BIAS_MAX,
    NAME,
    NUMBERS,
    POSITIVES,
    TOKEN_BYTES_MAX,
    Limits,
    integers,
)
from gateway.tenants import PRIORITY_MAX

Schema = dict[str, Any]
REFERENCE: Final = "#/components/schemas/{name}"
# By field, then by the kind of its values: "integer", "array[integer]", …
Rules = Mapping[str, Mapping[str, Schema]]
BODIES: Final[tuple[type[BaseModel], ...]] = (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    DetokenizeBody,
)
# For every body. JSON schema cannot tell 1.0 from 1, nor half a character from a whole one.
WRITTEN: Final = (
    " Whole numbers are written without a fraction; texts are valid Unicode, without lone"
    " surrogates. At most {values} values and {strings} strings."
)
INTEGER: Final = {"type": "integer"}
TRUE: Final = {"const": True}
ZERO: Final = {"const": 0}
NOTHING: Final = {"type": "null"}


def _has(**values: Schema) -> Schema:
    """These fields are there, and are so."""
    return {"required": list(values), "properties": values}


UNSTREAMED: Final = {
    "if": _has(prompt_logprobs=INTEGER),
    "then": {"properties": {"stream": {"enum": [False, None]}}},
}
NO_OUTPUT: Final = {
    "anyOf": [
        _has(max_completion_tokens=ZERO),
        _has(max_tokens=ZERO) | {"not": _has(max_completion_tokens=INTEGER)},
    ]
}
EXPLAINED: Final = _has(prompt_logprobs=INTEGER)
ECHOED: Final = _has(echo=TRUE, logprobs=INTEGER)
UNOPTIONED: Final = {"properties": {"chat_template_kwargs": {"maxProperties": 0}}}
CONDITIONS: Final[Mapping[str, Schema]] = {
    "ChatBody": {
        "allOf": [
            UNSTREAMED,
            {"if": NO_OUTPUT, "then": EXPLAINED},
            {"if": _has(top_logprobs=INTEGER | {"minimum": 1}), "then": _has(logprobs=TRUE)},
        ]
    },
    "CompletionBody": {
        "allOf": [
            UNSTREAMED,
            {"if": _has(max_tokens=ZERO), "then": {"anyOf": [EXPLAINED, ECHOED]}},
        ]
    },
    "TokenizeBody": {
        "oneOf": [
            _has(prompt={"type": "string"}) | {"allOf": [UNOPTIONED]},
            _has(messages={"type": "array"}),
        ]
    },
}


def schemas(
    model: str, limits: Limits, prompts_max: int, *, refuses_unknown: bool = True
) -> Schema:
    """By name; those that only stand inside of others too."""
    found: Schema = {}
    for body in BODIES:
        schema = body.model_json_schema(ref_template=REFERENCE.replace("{name}", "{model}"))
        found |= schema.pop("$defs", {})
        name = body.__name__
        written = WRITTEN.format(values=limits.body_values_max, strings=STRINGS_MAX)
        schema["description"] += written
        schema["properties"] |= _unused()
        found[name] = schema | CONDITIONS.get(name, {})
    rules = _rules(model, limits, prompts_max)
    for schema in found.values():
        schema["additionalProperties"] = not refuses_unknown
        for field, property_ in schema["properties"].items():
            _restrict(property_, rules.get(field, {}))
    return found


def _unused() -> Schema:
    """OpenAI's fields that change nothing here."""
    ignored = {name: {"description": "accepted and ignored"} for name in sorted(HARMLESS)}
    neutral = {
        name: {"enum": list(values), "description": "not supported: accepted where it asks nothing"}
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
    names = limits.template_options
    return {
        "model": {"string": {"enum": [model, ""]}},
        "n": {"integer": _between(1, limits.choices_max)},
        "best_of": {"integer": _between(1, limits.choices_max)},
        "priority": {"integer": _between(-PRIORITY_MAX, PRIORITY_MAX)},
        "stop": {
            "string": {"minLength": 1, "maxLength": limits.stop_chars_max},
            "array[string]": {"maxItems": limits.stops_max},
        },
        # Type string and enum null: nothing.
        "reasoning_effort": {"string": {} if "reasoning_effort" in names else {"enum": [None]}},
        "chat_template_kwargs": {"object[]": _names(names)},
        **_number_rules(limits),
        **_prompt_rules(limits, prompts_max),
        **_token_rules(limits),
    }


def _number_rules(limits: Limits) -> Rules:
    bounds = integers(limits)
    # A prompt has at least one token.
    output = (0, limits.context_tokens_max - 1)
    bounds |= {"max_tokens": output, "max_completion_tokens": output, "min_tokens": output}
    # What these are before they become unsigned.
    bounds |= {"top_k": (-1, bounds["top_k"][1]), "seed": (SEED_MIN, bounds["seed"][1])}
    bounds["top_logprobs"] = bounds["logprobs"]
    return (
        {name: {"integer": _between(*each)} for name, each in bounds.items()}
        | {name: {"number": _between(*each)} for name, each in NUMBERS.items()}
        | {
            name: {"number": {"exclusiveMinimum": 0, "maximum": most}}
            for name, most in POSITIVES.items()
        }
    )


def _prompt_rules(limits: Limits, prompts_max: int) -> Rules:
    ids = {
        "integer": _between(0, limits.vocab_size - 1),
        "array[integer]": {"minItems": 1, "maxItems": limits.context_tokens_max - 1},
    }
    # A character has at least one byte.
    bytes_max = min(limits.text_bytes_max, limits.context_tokens_max * TOKEN_BYTES_MAX)
    text = {"string": {"maxLength": bytes_max}}
    several = {"minItems": 1, "maxItems": prompts_max}
    return {
        "prompt": {**ids, **text, "array[string]": several, "array[array[integer]]": several},
        "tokens": ids,
        "messages": {"array[]": {"minItems": 1, "maxItems": limits.messages_max}},
        "name": {"string": {"pattern": f"^({NAME.pattern})?$"}},
        "role": {"string": {"enum": _roles(limits.roles)}},
        "content": text,
    }


def _token_rules(limits: Limits) -> Rules:
    ids = {"integer": _between(0, limits.vocab_size - 1)}
    word = {"minItems": 1, "maxItems": limits.bad_word_tokens_max}
    return {
        "stop_token_ids": ids | {"array[integer]": {"maxItems": limits.stop_token_ids_max}},
        "allowed_token_ids": ids | {"array[integer]": {"maxItems": limits.allowed_token_ids_max}},
        "bad_words_token_ids": {
            **ids,
            "array[integer]": word,
            "array[array[integer]]": {"maxItems": limits.bad_words_max},
        },
        "logit_bias": {
            "number": _between(-BIAS_MAX, BIAS_MAX),
            "object[number]": {
                "maxProperties": limits.biases_max,
                "propertyNames": {"pattern": f"^({decimals_below(limits.vocab_size)})$"},
            },
        },
    }


def _between(least: float, most: float) -> Schema:
    return {"minimum": least, "maximum": most}


def _roles(roles: frozenset[str]) -> list[str]:
    """ "developer" is read as "system"."""
    read = {"developer"} if "system" in roles else set()
    return sorted(roles - {"developer"} | read)


def _names(names: frozenset[str]) -> Schema:
    return {"propertyNames": {"enum": sorted(names)}} if names else {"maxProperties": 0}


def decimals_below(end: int) -> str:
    """A pattern of the numbers from 0 to `end`, which is not among them, as JSON writes them."""
    most = str(end - 1)
    if len(most) == 1:
        return f"[0-{most}]"
    patterns = ["0", f"[1-9][0-9]{{0,{len(most) - 2}}}", most]
    for at, digit in enumerate(most):
        # As long as the largest, and smaller from this digit on.
        least, below = 0 if at else 1, int(digit) - 1
        if least <= below:
            patterns.append(f"{most[:at]}[{least}-{below}][0-9]{{{len(most) - at - 1}}}")
    return "|".join(patterns)
