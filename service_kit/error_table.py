"""One total table: what each domain error is over gRPC, over HTTP, and whether to send it again.

Types and codes are those that OpenAI's SDK and its users switch on, where OpenAI has one.
"""

from typing import Final, NamedTuple

from grpc import StatusCode

from service_kit import errors


class Row(NamedTuple):
    """How one class of errors looks. `is_retryable`: the same request may succeed later."""

    grpc: StatusCode
    status: int
    type: str
    code: str | None
    is_retryable: bool = False


CLIENT: Final = "invalid_request_error"
SERVER: Final = "server_error"
TABLE: Final[dict[type[errors.KaitenError], Row]] = {
    errors.InvalidRequest: Row(StatusCode.INVALID_ARGUMENT, 400, CLIENT, None),
    errors.TooLong: Row(StatusCode.INVALID_ARGUMENT, 400, CLIENT, "too_long"),
    errors.NotFound: Row(StatusCode.NOT_FOUND, 404, CLIENT, "not_found"),
    errors.AlreadyExists: Row(StatusCode.ALREADY_EXISTS, 409, CLIENT, "already_exists"),
    errors.Overloaded: Row(
        StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "overloaded", is_retryable=True
    ),
    errors.DeadlineExceeded: Row(StatusCode.DEADLINE_EXCEEDED, 504, SERVER, "deadline_exceeded"),
    # 499 is what proxies write when the client itself went away or asked for the end.
    errors.Cancelled: Row(StatusCode.CANCELLED, 499, SERVER, "cancelled"),
    errors.Unavailable: Row(StatusCode.UNAVAILABLE, 503, SERVER, "unavailable", is_retryable=True),
    errors.OutOfOrder: Row(StatusCode.FAILED_PRECONDITION, 409, SERVER, "out_of_order"),
    errors.StaleLeader: Row(StatusCode.FAILED_PRECONDITION, 409, SERVER, "stale_leader"),
    errors.NotLeader: Row(StatusCode.FAILED_PRECONDITION, 503, SERVER, "not_leader"),
    errors.DataLoss: Row(StatusCode.DATA_LOSS, 409, CLIENT, "data_loss"),
    errors.Unauthenticated: Row(
        StatusCode.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key"
    ),
    errors.Forbidden: Row(StatusCode.PERMISSION_DENIED, 403, CLIENT, "forbidden"),
    # It cost workers before it was given up: whoever sends it again kills more of them.
    errors.Failed: Row(StatusCode.INTERNAL, 500, SERVER, "generation_failed"),
    errors.Unsatisfiable: Row(StatusCode.INVALID_ARGUMENT, 400, CLIENT, "unsatisfiable"),
    errors.ConfigError: Row(StatusCode.FAILED_PRECONDITION, 500, SERVER, "misconfigured"),
}


def row_of(error: errors.KaitenError) -> Row:
    """The row of an error: its own, or that of the nearest base class that has one."""
    for kind in type(error).__mro__:
        if kind in TABLE:
            return TABLE[kind]
    raise AssertionError(f"{type(error).__name__} has no row in the error table")


def retry_after_s(error: errors.KaitenError) -> float | None:
    """When to send the same request again; None: never."""
    if not row_of(error).is_retryable:
        return None
    assert isinstance(error, errors.Overloaded | errors.Unavailable), "retryables say when"
    return error.retry_after_s
