"""Domain errors as gRPC statuses, whose codes `error_table` has, and the interceptor for them.

`context.abort` with a `grpc-status-details-bin` trailer is used rather than `abort_with_status`,
which loses the code that the tracing instrumentation reads.
"""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
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
from service_kit.error_table import retry_after_s, row_of
from service_kit.proto_bounds import records

log = structlog.get_logger()

DOMAIN: Final = "kaiten"
# Clients refuse trailers beyond 8 KiB, and percent-encoding triples what is not ASCII.
MESSAGE_CHARS_MAX: Final = 1024
RULE_CHARS_MAX: Final = 128
VIOLATIONS_MAX: Final = 16
# A client whose policy repeats this status waits so long, or gives up where it is negative.
PUSHBACK: Final = "grpc-retry-pushback-ms"
NEVER: Final = (PUSHBACK, "-1")

Metadata = tuple[tuple[str, str | bytes], ...]


def code_of(error: errors.KaitenError) -> grpc.StatusCode:
    """The status of an error."""
    return row_of(error).grpc


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
    if (wait_s := retry_after_s(error)) is not None:
        delay = Duration(nanos=0)
        delay.FromNanoseconds(int(wait_s * 1e9))
        details.append(RetryInfo(retry_delay=delay))
    if isinstance(error, errors.NotLeader):
        metadata = {"leader_address": error.leader_address}
    if isinstance(error, errors.StaleLeader):
        metadata = {"epoch": str(error.epoch)}
    details.append(ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=metadata))
    return details


def metadata_of(error: "grpc.aio.AioRpcError") -> dict[str, str]:
    """What `details_of` said beside the error's class, read from the answer; empty: nothing."""
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        with suppress(DecodeError):
            for detail in Status.FromString(value).details:
                info = ErrorInfo()
                if detail.Is(ErrorInfo.DESCRIPTOR) and detail.Unpack(info):
                    return dict(info.metadata)
    return {}


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
    status = Status(code=code_of(error).value[0], message=_cut(error.told))
    for detail in details_of(error):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    wait_s = retry_after_s(error)
    pushback = NEVER if wait_s is None else (PUSHBACK, str(int(wait_s * 1000)))
    return (("grpc-status-details-bin", status.SerializeToString()), pushback)


async def abort(
    context: "grpc.aio.ServicerContext[Any, Any]", error: errors.KaitenError
) -> NoReturn:
    """End the RPC with the error's status. Always raises."""
    await context.abort(code_of(error), _cut(error.told), trailers_of(error))
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
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error, id={error_id}", (NEVER,))


async def _is_sent(context: Any, item: Any, method: str) -> bool:
    """False: the call is over, by its client as a rule, and nobody is left to be told."""
    try:
        await context.write(item)
    except grpc.aio.InternalError as error:
        log.info("rpc.unsent", method=method, reason=str(error))
        return False
    return True


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """KaitenError becomes its status; anything else INTERNAL with an id that the log explains.

    A request of more than `records_max` fields, those of messages in it included, is refused
    unread.
    """

    def __init__(self, records_max: int | None = None) -> None:
        self._records_max = records_max

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], call: Any
    ) -> Any:
        handler = await continuation(call)
        if handler is None:
            return None
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        behaviour = getattr(handler, kind)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        # Requests that are streamed are between our own services.
        records_max = None if handler.request_streaming else self._records_max
        return make(
            _guarded(behaviour, call.method),
            _tolerant(handler.request_deserializer, records_max),
            handler.response_serializer,
        )


class _Unparsed:
    """Stands for a request that was not parsed, and says why."""

    def __init__(self, rule: str) -> None:
        self.rule = rule


def _tolerant(
    deserializer: Callable[[bytes], Any] | None, records_max: int | None
) -> Callable[[bytes], Any] | None:
    """Left to itself, grpc.aio answers UNKNOWN and logs a traceback: a client's mistake as ours."""
    if deserializer is None:
        return None
    kind = getattr(getattr(deserializer, "__self__", None), "DESCRIPTOR", None)

    def parse(raw: bytes) -> Any:
        if records_max is not None and _has_more(raw, kind, records_max):
            return _Unparsed(f"the message must have at most {records_max} fields in all")
        try:
            return deserializer(raw)
        except DecodeError:
            return _Unparsed("the request's bytes are not a message of this method")

    return parse


def _has_more(raw: bytes, kind: Any, records_max: int) -> bool:
    # A field takes two bytes at least.
    may_have = kind is not None and len(raw) > 2 * records_max
    return may_have and records(raw, kind, records_max) > records_max


def _check_parsed(request: Any) -> None:
    if isinstance(request, _Unparsed):
        raise errors.InvalidRequest("", request.rule)


async def _parsed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        _check_parsed(request)
        yield request


def _arity(is_streaming: bool) -> str:
    return "stream" if is_streaming else "unary"


def _guarded(behaviour: Callable[..., Any], method: str) -> Callable[..., Awaitable[Any]]:
    """The same behaviour with its errors translated.

    Generators are turned into writers: grpc.aio leaves a generator that is cancelled while writing
    to the garbage collector, and its `finally` blocks (a cancel upstream, say) must run at once.
    """

    async def stream(request: Any, context: Any) -> None:
        try:
            if hasattr(request, "__aiter__"):
                request = _parsed(request)
            else:
                _check_parsed(request)
            async with aclosing(
                cast(AsyncGenerator[Any, None], behaviour(request, context))
            ) as items:
                async for item in items:
                    if not await _is_sent(context, item, method):
                        return
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
