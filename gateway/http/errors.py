"""Domain errors as HTTP answers; `service_kit.error_table` has the codes.

The body is OpenAI's: {"error": {"message", "type", "param", "code"}}.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Final

from grpc import StatusCode
from msgspec import Meta, Struct

from gateway.requests.validation import PromptTooLong
from service_kit import error_table, errors
from service_kit.error_table import CLIENT, Row

# The words of the proto, and those of the OpenAI API where they differ.
PARAMS: Final = {
    "token_ids.ids": "prompt",
    "conversation.messages": "messages",
    "conversation.template_options": "chat_template_kwargs",
    "sampling.logprobs": "logprobs",
    "sampling.bad_words": "bad_words_token_ids",
}
PREFIXES: Final = re.compile(r"^(sampling|conversation)\.")
# Around what a tool and a call have, OpenAI puts an object.
IN_FUNCTION: Final = re.compile(
    r"^(conversation\.(?:tools\.\d+|messages\.\d+\.tool_calls\.\d+)\.)(name|parameters|strict|arguments)$"
)
MAX_TOKENS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Codes that are no row of the error table: HTTP's own, and two rows' more exact ones.
CODES: Final = {
    "context_length_exceeded",
    "gone",
    "host_not_allowed",
    "internal",
    "method_not_allowed",
    "model_not_found",
    "origin_not_allowed",
    "slow",
    "too_long",
    "unknown_url",
    "unsupported_media_type",
} | {row.code for row in error_table.TABLE.values() if row.code}
TYPES: Final = {row.type for row in error_table.TABLE.values()}


class ErrorDetail(Struct):
    """What OpenAI's SDK and its users switch on."""

    message: str
    type: Annotated[str, Meta(extra_json_schema={"enum": sorted(TYPES)})]
    # The field that is wrong.
    param: str | None
    code: Annotated[str | None, Meta(extra_json_schema={"enum": [*sorted(CODES), None]})]


class Error(Struct):
    error: ErrorDetail


class HttpError(errors.KaitenError):
    """Wrong as HTTP, before it is a request: path, method, size, JSON."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.headers = dict(headers or {})
        self.row = Row(StatusCode.INVALID_ARGUMENT, status, CLIENT, code)


def row_of(error: errors.KaitenError) -> Row:
    """The row of an error, with the codes that only HTTP has."""
    if isinstance(error, HttpError):
        return error.row
    return _exact(error, error_table.row_of(error))


def body_of(error: errors.KaitenError) -> Error:
    """The OpenAI error object."""
    row = row_of(error)
    param = None
    if isinstance(error, errors.InvalidRequest):
        param = _param(error)
    elif isinstance(error, errors.NotFound) and row.code == "model_not_found":
        param = "model"
    return Error(ErrorDetail(_message(error, param), row.type, param, row.code))


def headers_of(error: errors.KaitenError) -> dict[str, str]:
    """When to ask again: in whole seconds, at least one, beside the SDK's millisecond form.

    Of all others the gate says that they are not to be asked again.
    """
    if isinstance(error, HttpError):
        return error.headers
    wait_s = error_table.retry_after_s(error)
    if wait_s is None:
        return {}
    return {
        "x-should-retry": "true",
        "retry-after": str(max(1, round(wait_s))),
        "retry-after-ms": str(max(1, int(wait_s * 1000))),
    }


def internal(error_id: str) -> Error:
    """The body of a fault of ours: nothing of it leaks, the log has the rest."""
    return Error(ErrorDetail(f"internal error, id={error_id}", "server_error", None, "internal"))


def _message(error: errors.KaitenError, param: str | None) -> str:
    """In the client's words: it wrote `prompt`, not `token_ids.ids`."""
    if isinstance(error, errors.InvalidRequest) and param:
        return "; ".join(_in_clients_words(each) for each in error.violations)
    return error.told


def _in_clients_words(error: errors.InvalidRequest) -> str:
    return f"{_param(error)}: {error.rule}" if error.field else error.rule


def _param(error: errors.InvalidRequest) -> str | None:
    field = IN_FUNCTION.sub(r"\1function.\2", error.field)
    return PARAMS.get(field, PREFIXES.sub("", field)) or None


def _exact(error: errors.KaitenError, row: Row) -> Row:
    """Codes that OpenAI's clients know for two of our rows."""
    if isinstance(error, errors.NotFound) and error.what.startswith("model "):
        return row._replace(code="model_not_found")
    is_max_tokens = isinstance(error, errors.TooLong) and error.field.endswith(MAX_TOKENS)
    if isinstance(error, PromptTooLong) or is_max_tokens:
        return row._replace(code="context_length_exceeded")
    return row
