"""One total table from domain errors to gRPC statuses, and the interceptor that applies it.

`context.abort` with a `grpc-status-details-bin` trailer is used rather than `abort_with_status`,
which loses the code that the tracing instrumentation reads.
"""

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any, Final, NoReturn, cast

import grpc
import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from service_kit import errors

log = structlog.get_logger()

DOMAIN: Final = "kaiten"
# Clients refuse trailers beyond 8 KiB, and percent-encoding triples what is not ASCII.
MESSAGE_CHARS_MAX: Final = 1024
RULE_CHARS_MAX: Final = 128
VIOLATIONS_MAX: Final = 16

CODES: Final[dict[type[errors.KaitenError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.OutOfOrder: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotLeader: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
}

Metadata = tuple[tuple[str, str | bytes], ...]


def code_of(error: errors.KaitenError) -> grpc.StatusCode:
    """The status of an error: its own row, or that of the nearest base class that has one."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return CODES[kind]
    raise AssertionError(f"{type(error).__name__} has no row in the error table")


def details_of(error: errors.KaitenError) -> list[Message]:
    """google.rpc details: which field, when to retry, and the error's class for programs."""
    metadata: dict[str, str] = {}
    details: list[Message] = []
    if isinstance(error, errors.InvalidRequest):
        details.append(_bad_request(error))
    if isinstance(error, errors.TooLong):
        metadata = {"limit": str(error.limit), "got": str(error.got)}
    if isinstance(error, errors.Overloaded):
        metadata = _numbers(limit=error.limit, live=error.live) | {"subject": error.subject}
        metadata |= {k: v for k, v in (("rule", error.rule), ("tenant", error.tenant)) if v}
        subject = f"{error.subject}:{error.tenant}" if error.tenant else error.subject
        violation = QuotaFailure.Violation(subject=subject, description=_cut(str(error)))
        details.append(QuotaFailure(violations=[violation]))
    if isinstance(error, errors.DeadlineExceeded):
        metadata = {"phase": error.phase}
    if isinstance(error, errors.Overloaded | errors.Unavailable):
        delay = Duration(nanos=0)
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(RetryInfo(retry_delay=delay))
    if isinstance(error, errors.NotLeader):
        metadata = {"leader_address": error.leader_address}
    details.append(ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=metadata))
    return details


def _bad_request(error: errors.InvalidRequest) -> BadRequest:
    violations = error.violations[:VIOLATIONS_MAX]
    # One long rule is worth reading; many share the trailer's room.
    chars_max = MESSAGE_CHARS_MAX if len(violations) == 1 else RULE_CHARS_MAX
    return BadRequest(
        field_violations=[
            BadRequest.FieldViolation(field=each.field, description=_cut(each.rule, chars_max))
            for each in violations
        ]
    )


def _numbers(**named: int | None) -> dict[str, str]:
    return {name: str(value) for name, value in named.items() if value is not None}


def trailers_of(error: errors.KaitenError) -> Metadata:
    """The trailing metadata that carries `details_of`, plus gRPC's own retry pushback."""
    status = Status(code=code_of(error).value[0], message=_cut(str(error)))
    for detail in details_of(error):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    trailers: Metadata = (("grpc-status-details-bin", status.SerializeToString()),)
    if isinstance(error, errors.Overloaded | errors.Unavailable):
        trailers += (("grpc-retry-pushback-ms", str(int(error.retry_after_s * 1000))),)
    return trailers


async def abort(
    context: "grpc.aio.ServicerContext[Any, Any]", error: errors.KaitenError
) -> NoReturn:
    """End the RPC with the error's status. Always raises."""
    await context.abort(code_of(error), _cut(str(error)), trailers_of(error))
    raise AssertionError("abort returned")


def _cut(text: str, chars_max: int = MESSAGE_CHARS_MAX) -> str:
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


async def _fail(context: Any, error: Exception, method: str) -> None:
    """Translate what a handler raised. Cancellation never comes here: it is no Exception.

    Returns when the client left just before the status was sent: gRPC then ends the RPC itself.
    """
    if isinstance(error, grpc.aio.AbortError):
        raise error
    with suppress(grpc.aio.InternalError):
        if isinstance(error, errors.KaitenError):
            await abort(context, error)
        error_id = secrets.token_hex(6)
        log.error("rpc.crashed", method=method, error_id=error_id, exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error, id={error_id}")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """KaitenError becomes its status; anything else INTERNAL with an id that the log explains."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], call: Any
    ) -> Any:
        handler = await continuation(call)
        if handler is None:
            return None
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        behaviour = getattr(handler, kind)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        deserializer = handler.request_deserializer
        return make(
            _guarded(behaviour, call.method),
            deserializer if handler.request_streaming else _tolerant(deserializer),
            handler.response_serializer,
        )


class _Unparsed:
    """Stands for a request whose bytes are no message of its type."""


def _tolerant(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Left to itself, grpc.aio answers UNKNOWN and logs a traceback: a client's mistake as ours."""
    if deserializer is None:
        return None

    def parse(raw: bytes) -> Any:
        try:
            return deserializer(raw)
        except DecodeError:
            return _Unparsed()

    return parse


def _check_parsed(request: Any) -> None:
    if isinstance(request, _Unparsed):
        raise errors.InvalidRequest("", "the request's bytes are not a message of this method")


def _arity(is_streaming: bool) -> str:
    return "stream" if is_streaming else "unary"


def _guarded(behaviour: Callable[..., Any], method: str) -> Callable[..., Awaitable[Any]]:
    """The same behaviour with its errors translated.

    Generators are turned into writers: grpc.aio leaves a generator that is cancelled while writing
    to the garbage collector, and its `finally` blocks (a cancel upstream, say) must run at once.
    """

    async def stream(request: Any, context: Any) -> None:
        try:
            _check_parsed(request)
            async with aclosing(
                cast(AsyncGenerator[Any, None], behaviour(request, context))
            ) as items:
                async for item in items:
                    await context.write(item)
        except Exception as error:
            await _fail(context, error, method)

    async def call(request: Any, context: Any) -> Any:
        try:
            _check_parsed(request)
            return await behaviour(request, context)
        except Exception as error:
            await _fail(context, error, method)

    if isasyncgenfunction(behaviour):
        return stream
    assert iscoroutinefunction(behaviour), f"{method} must be async"
    return call
