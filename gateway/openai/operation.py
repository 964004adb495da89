"""An operation: one method of one path, declared once beside its handler.

Routes and the OpenAPI document are made of the same declarations.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from gateway.cell.ledger_session import LedgerLink
from gateway.cell.operators import Operators
from gateway.http.bodies import Bodies, BodyLimits
from gateway.http.exchange import KEY_HEADER, HttpExchange, answer, now_s, telling
from gateway.http.json_body import JsonBody
from gateway.openai.logprobs import LogprobFormatter
from gateway.openai.request_body import BodyParser, RequestBody
from gateway.requests.generation_service import GenerationService
from gateway.requests.validation import REQUEST_ID, Limits
from gateway.settings import GatewaySettings
from service_kit.metrics import Metrics

# What an operation may answer besides its success.
OPEN: Final = (403, 405, 500)
LOOKS: Final = (400, 401, 404, 415, 429, 503, *OPEN)
READS: Final = (408, 413, *LOOKS)
GENERATES: Final = (409, 499, 504, *READS)


class Api:
    """What handlers work with. One per gateway."""

    def __init__(
        self,
        service: GenerationService,
        link: LedgerLink,
        operators: Operators,
        config: GatewaySettings,
        metrics: Metrics,
        operations: Sequence["Operation"],
        share: Callable[[int], int],
    ) -> None:
        self.operations = operations
        self.generation_service = service
        self.link = link
        self.operators = operators
        # Bytes of files that are coming in, by tenant.
        self.uploading: Counter[str] = Counter()
        # Told when there is a new batch.
        self.on_batch: Callable[[], None] = lambda: None
        self.config = config
        self.metrics = metrics
        self.bodies = Bodies(
            BodyLimits(
                bytes_max=config.body_bytes_max,
                values_max=config.body_values_max,
                read_s_max=config.body_s_max,
                reading_bytes_max=config.bodies_bytes_max,
            ),
            share,
        )
        self.parser = BodyParser(refuses_unknown=config.unknown_fields == "refuse")
        self.formatter = LogprobFormatter(service.card.pieces)
        self.started_s = now_s()
        # The OpenAPI document, and what it was made for.
        self.document: tuple[Limits, bytes] | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """`replies` and `events` (a stream's) are Structs, or the media types of what is no JSON.

    The handler gets the body as its model, or None, and answers by the exchange.
    """

    method: str
    path: str
    name: str
    handler: Callable[[Api, HttpExchange, Any], Awaitable[None]]
    failures: Sequence[int]
    replies: Sequence[type | str]
    parameters: Sequence[Mapping[str, Any]] = ()
    body: type[RequestBody] | None = None
    events: Sequence[type] = ()
    # By status, besides 200.
    others: Mapping[int, type] = field(default_factory=dict)
    # The form of one that takes a file; its handler reads it as it comes in.
    upload: Mapping[str, Any] | None = None
    # Raises for who may not, before anything is said of their body.
    guard: Callable[[HttpExchange], None] | None = None


class PathApp:
    """All operations of a path, as an ASGI application."""

    def __init__(self, api: Api, operations: Sequence[Operation]) -> None:
        self._api = api
        self._operations = {each.method: each for each in operations}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        operation, api = self._operations[method], self._api

        async def work(exchange: HttpExchange, sent: JsonBody) -> None:
            body = None
            if operation.guard is not None:
                operation.guard(exchange)
            if operation.body is not None:
                body, exchange.headers = api.parser.parse(operation.body, sent)
            await operation.handler(api, exchange, body)

        async def take(exchange: HttpExchange) -> None:
            await operation.handler(api, exchange, receive)

        if operation.upload is not None:
            await telling(HttpExchange(scope, send), take)
        elif operation.body is None:
            await answer(work, scope, receive, send)
        else:
            await answer(work, scope, receive, send, api.bodies, operation.body.identity)


class PathRoute(Route):
    """A wrong method of a path without parts leads to no other path with an id in that place."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found, rest = super().matches(scope)
        is_named = found is Match.PARTIAL and not self.param_convertors
        return (Match.FULL, rest) if is_named else (found, rest)


def routes_of(api: Api) -> list[Route]:
    """Starlette's. One per path: a wrong method is told which are right."""
    paths: dict[str, list[Operation]] = {}
    for each in api.operations:
        paths.setdefault(each.path, []).append(each)
    return [
        PathRoute(path, PathApp(api, several), methods=[each.method for each in several])
        for path, several in paths.items()
    ]


def parameter(where: str, name: str, pattern: str, description: str) -> Mapping[str, Any]:
    """A string. `pattern` is of all of it; empty: any."""
    schema = {"type": "string"} | ({"pattern": f"^({pattern})$"} if pattern else {})
    told = {"name": name, "in": where, "schema": schema, "description": description}
    return told | ({"required": True} if where == "path" else {})


def named(what: str) -> Mapping[str, Any]:
    """The parameter that `HttpExchange.new_id` reads."""
    told = f"the same key and body again is the same {what}"
    return parameter("header", KEY_HEADER, f"({REQUEST_ID.pattern})?", told)
