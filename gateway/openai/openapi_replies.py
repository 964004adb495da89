"""JSON schemas of what the HTTP routes answer. Chunks of a stream are `…Chunk`.

What a reply repeats from its request may be left out of it; a field that is always there is
required.
"""

from typing import Any, Final

from gateway.openai.stored import STATES, WORDS
from service_kit.error_table import TABLE

Schema = dict[str, Any]
REFERENCE: Final = "#/components/schemas/{model}"
TEXT: Final = {"type": "string"}
COUNT: Final = {"type": "integer", "minimum": 0}
NUMBER: Final = {"type": "number"}
YES_NO: Final = {"type": "boolean"}
IDS: Final = {"type": "array", "items": COUNT}
# Codes that are no row of the error table: HTTP's own, and two rows' more exact ones.
CODES: Final = {
    "context_length_exceeded",
    "gone",
    "host_not_allowed",
    "internal",
    "method_not_allowed",
    "model_not_found",
    "origin_not_allowed",
    "too_long",
    "unknown_url",
    "unsupported_media_type",
}


def ref(model: str) -> Schema:
    return {"$ref": REFERENCE.format(model=model)}


def _object(optional: Schema | None = None, /, **required: Schema) -> Schema:
    properties = required | (optional or {})
    return {"type": "object", "required": list(required), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: str | None) -> Schema:
    return {"enum": list(values)}


def _error() -> Schema:
    """Types and codes of the error table, which OpenAI's SDK and its users switch on."""
    types = sorted({row.type for row in TABLE.values()})
    codes = sorted(CODES | {row.code for row in TABLE.values() if row.code})
    error = _object(
        message=TEXT, type=_one_of(*types), param=_or_null(TEXT), code=_one_of(*codes, None)
    )
    return _object(error=error)


USAGE: Final = _object(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=_object(cached_tokens=COUNT),
)
TIMING: Final = _object(
    queue_ms=NUMBER,
    prefill_ms=NUMBER,
    decode_ms=NUMBER,
    tokens_per_s=_or_null(NUMBER),
    preemptions=COUNT,
)
ENDS: Final = {"usage": ref("Usage"), "kaiten": ref("Timing")}
PROMPT_LOGPROBS: Final = _list(
    _or_null(
        {
            "type": "object",
            "additionalProperties": _object(
                logprob=_or_null(NUMBER), rank=_or_null(COUNT), decoded_token=TEXT
            ),
        }
    )
)
CHAT_LOGPROBS: Final = _object(
    content=_list(
        _object(
            token=TEXT,
            logprob=_or_null(NUMBER),
            bytes=IDS,
            top_logprobs=_list(_object(token=TEXT, logprob=_or_null(NUMBER), bytes=IDS)),
        )
    ),
    refusal={"type": "null"},
)
TEXT_LOGPROBS: Final = _object(
    tokens=_list(TEXT),
    token_logprobs=_list(_or_null(NUMBER)),
    top_logprobs=_list(_or_null({"type": "object", "additionalProperties": _or_null(NUMBER)})),
    text_offset=IDS,
)
REASON: Final = _one_of("stop", "length")
REASON_OR_NULL: Final = _one_of("stop", "length", None)


def _envelope(kind: str, choice: Schema, optional: Schema, **required: Schema) -> Schema:
    return _object(
        optional,
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        choices=_list(choice),
        **required,
    )


def _generated() -> Schema:
    """What the two generating endpoints answer, whole and in chunks."""
    # `position` with stream_options.include_position, `token_ids` with return_token_ids.
    whole, part = {"token_ids": IDS}, {"token_ids": IDS, "position": COUNT}
    # In chunks it is null until the last one, and only there at all with include_usage.
    ends = {"usage": _or_null(ref("Usage")), "kaiten": ref("Timing")}
    chat, text = _or_null(ref("ChatLogprobs")), _or_null(ref("TextLogprobs"))
    explained = {"prompt_logprobs": ref("PromptLogprobs")}
    message = _object(role={"const": "assistant"}, content=TEXT, refusal={"type": "null"})
    delta = _object({"role": {"const": "assistant"}, "content": TEXT})
    told = {"index": COUNT, "finish_reason": REASON}
    chunk = {"index": COUNT, "finish_reason": REASON_OR_NULL}
    return {
        "Chat": _envelope(
            "chat.completion",
            _object(whole, message=message, logprobs=chat, **told),
            explained,
            **ENDS,
        ),
        "ChatChunk": _envelope(
            "chat.completion.chunk", _object(part, delta=delta, logprobs=chat, **chunk), ends
        ),
        "Completion": _envelope(
            "text_completion",
            _object(whole | explained, text=TEXT, logprobs=text, **told),
            {},
            **ENDS,
        ),
        "CompletionChunk": _envelope(
            "text_completion", _object(part, text=TEXT, logprobs=text, **chunk), ends
        ),
    }


def _stored() -> Schema:
    """What GET, DELETE and cancel of /v1/requests/{id} answer."""
    kind = {"const": "request"}
    choice = _object(
        {"error": TEXT},
        index=COUNT,
        text=TEXT,
        finish_reason=_one_of(*WORDS.values()),
        output_tokens=COUNT,
    )
    queue = _object(position=COUNT, reason=TEXT)
    states = [state for _, state in STATES]
    return {
        "Accepted": _object(id=TEXT, object=kind, status={"const": "queued"}),
        "LiveRequest": _object(
            {"queue": queue}, id=TEXT, object=kind, status=_one_of("queued", "in_progress")
        ),
        "FinishedRequest": _object(
            {"prompt_logprobs": ref("PromptLogprobs")},
            id=TEXT,
            object=kind,
            status=_one_of("completed", *states),
            model=TEXT,
            choices=_list(choice),
            **ENDS,
        ),
        "StoredRequest": {"anyOf": [ref("LiveRequest"), ref("FinishedRequest")]},
        "StoredChunk": {"anyOf": [ref("ChatChunk"), ref("CompletionChunk")]},
        "CancelledRequest": _object(id=TEXT, object=kind, was_live=YES_NO),
    }


def _pages() -> Schema:
    model = _object(
        id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, max_model_len=COUNT
    )
    return {
        "Model": model,
        "Models": _object(object={"const": "list"}, data=_list(ref("Model"))),
        "Tokens": _object(count=COUNT, max_model_len=COUNT, tokens=IDS),
        "Text": _object(prompt=TEXT),
        "Health": _object(status={"const": "ok"}),
        "Serving": _object(status={"const": "serving"}),
        "NotServing": _object(status={"const": "not_serving"}, reason=TEXT),
        "Version": _object(version=TEXT),
        "Document": _object(openapi=TEXT, info={"type": "object"}, paths={"type": "object"}),
    }


SCHEMAS: Final[Schema] = {
    "Error": _error(),
    "Usage": USAGE,
    "Timing": TIMING,
    "PromptLogprobs": PROMPT_LOGPROBS,
    "ChatLogprobs": CHAT_LOGPROBS,
    "TextLogprobs": TEXT_LOGPROBS,
    **_generated(),
    **_stored(),
    **_pages(),
}
