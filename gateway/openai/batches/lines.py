"""A line of a batch: a request as it would be posted, and its answer."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec
import structlog
from msgspec import Struct
from starlette.types import Message

from gateway.http import errors
from gateway.http.exchange import HttpExchange
from gateway.http.json_body import JsonBody, cut
from gateway.openai import chat, completions
from gateway.openai.generate import TIMEOUT_HEADER
from gateway.openai.generation_body import SamplingBody
from gateway.openai.operation import GENERATES, Api, Operation
from gateway.openai.responses import operations as responses
from gateway.tenants import Tenant
from service_kit.errors import InvalidRequest, KaitenError, Unserved

log = structlog.get_logger()

CUSTOM_ID_CHARS_MAX: Final = 512
ENDPOINTS: Final[Mapping[str, Operation]] = {
    each.path: each
    for each in (*chat.OPERATIONS, *completions.OPERATIONS, *responses.OPERATIONS)
    if each.failures is GENERATES
}


class Line(Struct):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class Named(Struct):
    """A line of which nothing else is looked at."""

    custom_id: str


FIELDS: Final = frozenset(Line.__struct_fields__)
# What is not UTF-8, and what is nested too deep, too.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Ended(Struct):
    """What only a response says of itself, which is told with 200 however it ended."""

    status: str = ""


class LineResponse(Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw

    @property
    def is_answer(self) -> bool:
        if self.status_code >= 400:
            return False
        return msgspec.json.decode(self.body, type=Ended).status not in ("cancelled", "failed")


class LineProblem(Struct):
    code: str
    message: str


class LineAnswer(Struct, kw_only=True):
    id: str
    custom_id: str | None
    response: LineResponse | None = None
    error: LineProblem | None = None


def line_of(raw: bytes, *, endpoint: str, bytes_max: int) -> Line:
    """InvalidRequest says what is wrong with it."""
    if len(raw) > bytes_max:
        raise InvalidRequest("", f"must have at most {bytes_max} bytes")
    try:
        _check_known(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
        line = msgspec.json.decode(raw, type=Line)
    except UNREADABLE as error:
        raise InvalidRequest("", f"is no request: {str(error)[:200]}") from None
    if not 0 < len(line.custom_id) <= CUSTOM_ID_CHARS_MAX:
        rule = f"must have 1 to {CUSTOM_ID_CHARS_MAX} characters"
        raise InvalidRequest("custom_id", rule)
    if line.url != endpoint:
        raise InvalidRequest("url", f"must be the batch's endpoint, {endpoint}")
    return line


def custom_id_of(raw: bytes) -> str | None:
    """Of a line that may be wrong otherwise; None: it cannot be read."""
    try:
        custom_id = msgspec.json.decode(raw, type=Named).custom_id
    except UNREADABLE:
        return None
    return custom_id if len(custom_id) <= CUSTOM_ID_CHARS_MAX else None


def _check_known(fields: Mapping[str, msgspec.Raw]) -> None:
    """With null a field says nothing and is taken, as in bodies: SDKs write all that they know."""
    for name, value in fields.items():
        if name not in FIELDS and bytes(value) != b"null":
            raise InvalidRequest(cut(name), "is not a known field")


class LineExchange(HttpExchange):
    """The exchange of a line: what it is answered is kept, and nobody is there to go away.

    `left_s`: what it has, however long the gateway gives who is live.
    """

    def __init__(
        self, tenant: Tenant, request_id: str, left_s: float, on_accepted: Callable[[], None]
    ) -> None:
        headers = [
            (b"idempotency-key", request_id.encode()),
            (TIMEOUT_HEADER.encode(), b"%.3f" % left_s),
        ]
        scope: dict[str, Any] = {"headers": headers, "state": {"tenant": tenant}, "path_params": {}}
        super().__init__(scope, self._keep)
        self.keeps_running = True
        self.awaits_workers = True
        self.status = 0
        self.raw = b""
        self._on_accepted = on_accepted

    def accepted(self) -> None:
        self._on_accepted()

    async def _keep(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.raw += message.get("body", b"")


async def answer_of(
    api: Api,
    tenant: Tenant,
    request_id: str,
    line: Line,
    endpoint: str,
    left_s: float,
    on_accepted: Callable[[], None],
) -> LineResponse:
    """As the endpoint answers. Overloaded, Unavailable: it may be asked again."""
    operation = ENDPOINTS[endpoint]
    exchange = LineExchange(tenant, request_id, left_s, on_accepted)
    assert operation.body is not None
    try:
        sent = JsonBody(api.config.body_values_max, operation.body.identity)
        sent.feed(bytes(line.body))
        exchange.body_digest = sent.digest
        body, _ = api.parser.parse(operation.body, sent)
        assert isinstance(body, SamplingBody)
        await operation.handler(api, exchange, _in_batch(body))
    except KaitenError as error:
        row = errors.row_of(error)
        # What has ended is told again and again under the line's id: it is the answer.
        if row.is_retryable and not isinstance(error, Unserved):
            raise
        raw = msgspec.json.encode(errors.body_of(error))
        return LineResponse(row.status, request_id, msgspec.Raw(raw))
    # A fault of ours; the other lines go on.
    except Exception as error:
        error_id = secrets.token_hex(6)
        log.error("batch.line_crashed", request=request_id, error_id=error_id, exc_info=error)
        raw = msgspec.json.encode(errors.internal(error_id))
        return LineResponse(500, request_id, msgspec.Raw(raw))
    return LineResponse(exchange.status, request_id, msgspec.Raw(exchange.raw))


def _in_batch(body: SamplingBody) -> SamplingBody:
    """Behind all that is live, whatever it says: so many at once would be before everybody."""
    for field in ("stream", "background", "conversation"):
        if getattr(body, field, None):
            raise InvalidRequest(field, "is not for lines of a batch")
    return body.model_copy(update={"service_tier": "flex", "priority": None})
