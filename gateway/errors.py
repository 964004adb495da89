"""The HTTP half of the error table; `service_kit.grpc_errors` is the gRPC half: the same causes.

The body is OpenAI's: {"error": {"message", "type", "param", "code"}}. Types and codes are those the
OpenAI SDK and its users switch on where OpenAI has one.
"""

from typing import Any, Final, NamedTuple

from gateway.validate import PromptTooLong
from service_kit import errors

# The words of the proto, and those of the OpenAI API where they differ.
PARAMS: Final = {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "conversation.messages": "messages",
    "conversation.template_options": "chat_template_kwargs",
    "sampling.logprobs": "logprobs",
    "sampling.bad_words": "bad_words_token_ids",
}


MAX_TOKENS: Final = ("max_tokens", "max_completion_tokens")


class Row(NamedTuple):
    """How one class of errors looks over HTTP."""

    status: int
    type: str
    code: str | None


TABLE: Final[dict[type[errors.KaitenError], Row]] = {
    errors.InvalidRequest: Row(400, "invalid_request_error", None),
    errors.TooLong: Row(400, "invalid_request_error", "too_long"),
    errors.NotFound: Row(404, "invalid_request_error", "not_found"),
    errors.AlreadyExists: Row(409, "invalid_request_error", "already_exists"),
    errors.Overloaded: Row(429, "rate_limit_error", "overloaded"),
    errors.DeadlineExceeded: Row(504, "server_error", "deadline_exceeded"),
    # 499 is what proxies write when the client itself went away or asked for the end.
    errors.Cancelled: Row(499, "server_error", "cancelled"),
    errors.Unavailable: Row(503, "server_error", "unavailable"),
    errors.OutOfOrder: Row(409, "server_error", "out_of_order"),
    errors.NotLeader: Row(503, "server_error", "not_leader"),
    errors.DataLoss: Row(409, "invalid_request_error", "data_loss"),
    errors.Unauthenticated: Row(401, "authentication_error", "invalid_api_key"),
    errors.ConfigError: Row(500, "server_error", "misconfigured"),
}


class Failed(errors.KaitenError):
    """The system could not compute a choice; the sentence is the worker's."""


TABLE[Failed] = Row(500, "server_error", "generation_failed")


class HttpError(errors.KaitenError):
    """Wrong as HTTP, before it is a request: path, method, size, JSON."""

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(message)
        self.row = Row(status, "invalid_request_error", code)


def row_of(error: errors.KaitenError) -> Row:
    """The row of an error: its own, or that of the nearest base class."""
    if isinstance(error, HttpError):
        return error.row
    for kind in type(error).__mro__:
        if kind in TABLE:
            row = TABLE[kind]
            return _exact(error, row)
    raise AssertionError(f"{type(error).__name__} has no row in the error table")


def body_of(error: errors.KaitenError) -> dict[str, Any]:
    """The OpenAI error object."""
    row = row_of(error)
    param = None
    if isinstance(error, errors.InvalidRequest):
        param = _param(error)
    elif isinstance(error, errors.NotFound) and row.code == "model_not_found":
        param = "model"
    return {
        "error": {
            "message": _message(error, param),
            "type": row.type,
            "param": param,
            "code": row.code,
        }
    }


def headers_of(error: errors.KaitenError) -> dict[str, str]:
    """`retry-after` in whole seconds, at least one, beside the SDK's millisecond form."""
    if not isinstance(error, errors.Overloaded | errors.Unavailable):
        return {}
    seconds = max(1, round(error.retry_after_s))
    return {
        "retry-after": str(seconds),
        "retry-after-ms": str(max(1, int(error.retry_after_s * 1000))),
    }


def internal(error_id: str) -> dict[str, Any]:
    """The body of a fault of ours: nothing of it leaks, the log has the rest."""
    message = f"internal error, id={error_id}"
    return {
        "error": {"message": message, "type": "server_error", "param": None, "code": "internal"}
    }


def _message(error: errors.KaitenError, param: str | None) -> str:
    """In the client's words: it wrote `prompt`, not `token_ids.ids`."""
    if isinstance(error, errors.InvalidRequest) and param:
        return "; ".join(_in_clients_words(each) for each in error.violations)
    return str(error)


def _in_clients_words(error: errors.InvalidRequest) -> str:
    return f"{_param(error)}: {error.rule}" if error.field else error.rule


def _param(error: errors.InvalidRequest) -> str | None:
    return PARAMS.get(error.field, error.field.removeprefix("sampling.")) or None


def _exact(error: errors.KaitenError, row: Row) -> Row:
    """Codes that OpenAI's clients know for two of our rows."""
    if isinstance(error, errors.NotFound) and error.what.startswith("model "):
        return row._replace(code="model_not_found")
    is_max_tokens = isinstance(error, errors.TooLong) and error.field.endswith(MAX_TOKENS)
    if isinstance(error, PromptTooLong) or is_max_tokens:
        return row._replace(code="context_length_exceeded")
    return row
