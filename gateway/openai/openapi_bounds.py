"""JSON schemas of the request bodies: the models that read them, with the bounds of `validation`.

Types, fields and descriptions are the models'; numbers are those of `validation`. What depends on
two fields, on the tokenizer or on sums is said in descriptions.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from gateway.http.json_body import STRINGS_MAX
from gateway.openai.generation_body import SEED_MIN
from gateway.openai.request_body import HARMLESS, NEUTRAL, RequestBody
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
# By field, then by the kind of its values: "integer", "array[integer]", …
Rules = Mapping[str, Mapping[str, Schema]]
# For every body. JSON schema cannot tell 1.0 from 1, nor half a character from a whole one.
WRITTEN: Final = (
    " Whole numbers are written without a fraction; texts are valid Unicode, without lone"
    " surrogates. At most {values} values and {strings} strings."
)


def schemas(
    bodies: Iterable[type[RequestBody]],
    model: str,
    limits: Limits,
    prompts_max: int,
    *,
    refuses_unknown: bool,
) -> Schema:
    """By name; those that only stand inside of others too."""
    found: Schema = {}
    for body in bodies:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        found |= schema.pop("$defs", {})
        schema["description"] += WRITTEN.format(values=limits.body_values_max, strings=STRINGS_MAX)
        schema["properties"] |= _unused()
        found[body.__name__] = schema
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
    ids, names = {"integer": _between(0, limits.vocab_size - 1)}, limits.template_options
    prompt_ids = ids | {"array[integer]": _items(1, limits.context_tokens_max - 1)}
    # A character has at least one byte.
    bytes_max = min(limits.text_bytes_max, limits.context_tokens_max * TOKEN_BYTES_MAX)
    text, several = {"string": {"maxLength": bytes_max}}, _items(1, prompts_max)
    bad_words = {
        "array[integer]": _items(1, limits.bad_word_tokens_max),
        "array[array[integer]]": _items(0, limits.bad_words_max),
    }
    return {
        **_number_rules(limits),
        **{name: ids | {"array[integer]": _items(0, n)} for name, n in id_lists(limits).items()},
        "model": {"string": {"enum": [model, ""]}},
        "stop": {
            "string": {"minLength": 1, "maxLength": limits.stop_chars_max},
            "array[string]": _items(0, limits.stops_max),
        },
        # Type string and enum null: nothing.
        "reasoning_effort": {"string": {} if "reasoning_effort" in names else {"enum": [None]}},
        "chat_template_kwargs": {"object[]": {"propertyNames": {"enum": sorted(names)}}},
        "prompt": {
            **prompt_ids,
            **text,
            "array[string]": several,
            "array[array[integer]]": several,
        },
        "tokens": prompt_ids,
        "messages": {"array[]": _items(1, limits.messages_max)},
        "name": {"string": {"pattern": f"^({NAME.pattern})?$"}},
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
    bounds |= dict.fromkeys(("n", "best_of"), (1, limits.choices_max))
    # What these are before they become unsigned.
    bounds |= {"top_k": (-1, bounds["top_k"][1]), "seed": (SEED_MIN, bounds["seed"][1])}
    bounds |= {"top_logprobs": bounds["logprobs"], "priority": (-PRIORITY_MAX, PRIORITY_MAX)}
    positives = {
        name: {"number": {"exclusiveMinimum": 0, "maximum": most}}
        for name, most in POSITIVES.items()
    }
    return (
        {name: {"integer": _between(*each)} for name, each in bounds.items()}
        | {name: {"number": _between(*each)} for name, each in NUMBERS.items()}
        | positives
    )


def _between(least: float, most: float) -> Schema:
    return {"minimum": least, "maximum": most}


def _items(least: int, most: int) -> Schema:
    return {"minItems": least, "maxItems": most}


def _roles(roles: frozenset[str]) -> list[str]:
    """ "developer" is read as "system"."""
    read = {"developer"} if "system" in roles else set()
    return sorted(roles - {"developer"} | read)
