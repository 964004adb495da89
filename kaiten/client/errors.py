"""What goes wrong when talking to a gateway.

It mirrors the services' taxonomy: one class per gRPC code, `retry_after_s` where waiting helps.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

from kaiten.tls import certificate_problem, explained


class ApiError(Exception):
    """An answer that is not a result. `retry_after_s` is None when waiting is no use.

    `is_of_service`: the service itself said so; otherwise somebody on the way, or nobody, answered.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        fields: tuple[str, ...] = (),
        is_of_service: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_of_service = is_of_service
        self.retry_after_s = retry_after_s
        self.fields = fields


class InvalidRequestError(ApiError):
    """The request breaks a rule; `fields` names where."""


class NotFoundError(ApiError):
    """No such model or request, or its result is no longer kept."""


class AlreadyExistsError(ApiError):
    """The request id was used for another request."""


class OverloadedError(ApiError):
    """Too much is queued; nothing was started. Retry after `retry_after_s`."""


class DeadlineExceededError(ApiError):
    """`timeout_s` passed before the request ended."""


class RequestCancelledError(ApiError):
    """The request was cancelled by somebody."""


class UnavailableError(ApiError):
    """The service is away, and stayed away for as long as the client was allowed to resume."""


class CertificateError(ApiError):
    """Nobody was talked to: who answered could not prove to be the gateway."""


class PreconditionError(ApiError):
    """The service is not in a state to do this; its operator must act."""


class DataLossError(ApiError):
    """The cursor is not of this output: what the client has cannot be continued."""


class UnauthenticatedError(ApiError):
    """The service wants to know who is calling."""


class InternalServerError(ApiError):
    """A fault of the service; its log explains the id in the message."""


KINDS: Final[dict[grpc.StatusCode, type[ApiError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
    grpc.StatusCode.UNIMPLEMENTED: PreconditionError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: UnauthenticatedError,
}

# gRPC's words, with the code of an overload: nobody has room for it later.
TOO_LARGE: Final = ("Received message larger than max", "received metadata size exceeds")
# Its words for a stream that broke, with codes of many kinds: what a proxy does whose gateway died.
BROKEN: Final = ("Stream removed", "RST_STREAM")
NOT_BROKEN: Final = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def from_rpc_error(error: grpc.RpcError) -> ApiError:
    """The typed error of a failed RPC, with what its google.rpc details say."""
    retry_after_s, fields, is_of_service = None, list[str](), False
    # Somebody between may have put other words there: the status is an answer without them.
    with suppress(DecodeError):
        for packed in _details(error):
            is_of_service = True
            retry, bad = RetryInfo(), BadRequest()
            if packed.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
            elif packed.Unpack(bad):
                fields += [violation.field for violation in bad.field_violations]
    message = error.details() or error.code().name.lower()
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        if problem := certificate_problem(message):
            return CertificateError(problem)
        message = explained(message)
    elif error.code() == grpc.StatusCode.UNIMPLEMENTED:
        message = f"who answers at this address is no gateway, or an older one: {message}"
    kind = KINDS.get(error.code(), InternalServerError)
    if any(words in message for words in TOO_LARGE):
        kind, message = InvalidRequestError, f"too large for one call: {message}"
    elif error.code() not in NOT_BROKEN and any(words in message for words in BROKEN):
        kind = UnavailableError
    return kind(
        message,
        retry_after_s=retry_after_s,
        fields=tuple(fields),
        is_of_service=is_of_service,
    )


def _details(error: grpc.RpcError) -> Iterator[Any]:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            yield from Status.FromString(value).details
