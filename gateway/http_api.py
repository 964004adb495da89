"""The HTTP door: OpenAI's endpoints for text models over the front, and the operator's three."""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import errors, openai_models
from gateway.front import Front
from gateway.generation import Accepted, Delta, Done, Event, Finished, Generation
from gateway.http_io import Exchange, read_body, until_gone
from gateway.merge import merged
from gateway.openai_format import (
    SSE_DONE,
    ChatShape,
    CompletionShape,
    Envelope,
    Gather,
    Namer,
    Shape,
    Stream,
    Usage,
)
from gateway.openai_models import ChatBody, CompletionBody
from gateway.settings import GatewaySettings
from service_kit.errors import KaitenError, NotFound

log = structlog.get_logger()

Body = ChatBody | CompletionBody
TRACEPARENT_CHARS_MAX: Final = 64
# What a misbehaving path or method is called in the error body.
HTTP_CODES: Final = {404: "unknown_url", 405: "method_not_allowed"}


class Endpoint:
    """One of the two generating endpoints, as an ASGI application."""

    def __init__(
        self, front: Front, config: GatewaySettings, kind: type[Body], shape: Shape
    ) -> None:
        self._front = front
        self._config = config
        self._kind = kind
        self._shape = shape
        self._namer = Namer(front.card.pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, send)
        try:
            raw = await read_body(exchange, receive, self._config.body_bytes_max)
            await until_gone(receive, self._answer(exchange, raw))
        except KaitenError as error:
            await exchange.fail(error)
        # The one place where a fault of ours becomes an answer.
        except Exception as error:
            error_id = secrets.token_hex(6)
            log.error("http.crashed", path=scope["path"], error_id=error_id, exc_info=error)
            await exchange.fail_internal(error_id)

    async def _answer(self, exchange: Exchange, raw: bytes) -> None:
        body = openai_models.parse(self._kind, raw)
        body_hash = openai_models.hash_of(self._shape.id_prefix.encode() + raw)
        key = exchange.header("idempotency-key")
        traceparent = exchange.header("traceparent")[:TRACEPARENT_CHARS_MAX]
        asks = body.asks(body_hash, key, self._config.prompts_max)
        with ExitStack() as stack:
            generations = []
            for ask in asks:
                generation = await self._front.generate(replace(ask, traceparent=traceparent))
                stack.enter_context(self._front.following(generation, keep_running=False))
                generations.append(generation)
            envelope = Envelope(
                id=self._shape.id_prefix + generations[0].accepted.request_id,
                created=_now_s(),
                model=self._front.card.name,
            )
            if body.is_streaming:
                await self._stream(exchange, body, envelope, generations)
            else:
                await self._gather(exchange, body, envelope, generations)

    async def _stream(
        self, exchange: Exchange, body: Body, envelope: Envelope, generations: Sequence[Generation]
    ) -> None:
        stream = Stream(
            self._shape,
            envelope,
            self._namer,
            with_token_ids=bool(body.return_token_ids),
            with_usage=body.includes_usage,
        )
        usage = Usage()
        await exchange.start_events()
        async with aclosing(merged(generations)) as batches:
            async for base, events in batches:
                chunks = [_chunk(stream, base, event, generations, usage) for event in events]
                if any(chunks):
                    await exchange.send_events(b"".join(chunks))
        tail = stream.usage(usage) if body.includes_usage else b""
        await exchange.end_events(tail + SSE_DONE)

    async def _gather(
        self, exchange: Exchange, body: Body, envelope: Envelope, generations: Sequence[Generation]
    ) -> None:
        gather = Gather(
            self._shape,
            envelope,
            self._namer,
            choices=sum(len(generation.choices) for generation in generations),
            with_logprobs=body.logprobs is not None and body.logprobs is not False,
        )
        usage = Usage()
        async with aclosing(merged(generations)) as batches:
            async for base, events in batches:
                for event in events:
                    _collect(gather, base, event, usage)
        content = gather.to_json(usage, with_token_ids=bool(body.return_token_ids))
        await exchange.send_json(200, content)


def _chunk(
    stream: Stream, base: int, event: Event, generations: Sequence[Generation], usage: Usage
) -> bytes:
    match event:
        case Delta():
            return stream.delta(base + event.choice, event)
        case Finished():
            return stream.finished(base + event.choice, event)
        case Done():
            usage.add(event.message)
            return b""
        case Accepted():
            n = next(len(g.choices) for g in generations if g.accepted is event)
            return b"".join(stream.opening(base + index) for index in range(n))


def _collect(gather: Gather, base: int, event: Event, usage: Usage) -> None:
    match event:
        case Delta():
            gather.delta(base + event.choice, event)
        case Finished():
            gather.finished(base + event.choice, event)
        case Done():
            usage.add(event.message)


class Pages:
    """The small endpoints: models, health, version."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._started_s = _now_s()

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._front.card.name:
            raise NotFound(f"model {name[:128]!r}")
        return JSONResponse(self._model())

    async def health(self, _request: Request) -> Response:
        """Alive: this loop turns. Whether requests can be served, /ready tells."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        problem = self._front.readiness.problem
        if problem:
            content = {"status": "not_serving", "reason": problem}
            return JSONResponse(content, status_code=503, headers={"retry-after": "1"})
        return JSONResponse({"status": "serving"})

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": version("kaiten")})

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._front.card.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "kaiten",
            "max_model_len": self._front.limits.context_tokens_max,
        }


def create_app(front: Front, config: GatewaySettings) -> Starlette:
    """Every route, with errors in OpenAI's form."""
    pages = Pages(front)
    chat = Endpoint(front, config, ChatBody, ChatShape())
    completions = Endpoint(front, config, CompletionBody, CompletionShape())
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{name:path}", pages.model),
            Route("/health", pages.health),
            Route("/ready", pages.ready),
            Route("/version", pages.version),
        ],
        exception_handlers={KaitenError: _on_error, HTTPException: _on_http_error},
    )


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, KaitenError)
    status = errors.row_of(error).status
    return JSONResponse(errors.body_of(error), status, headers=errors.headers_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:128]}: {error.detail}"
    code = HTTP_CODES.get(error.status_code, "invalid_request")
    refused = errors.HttpError(error.status_code, message, code)
    return JSONResponse(errors.body_of(refused), error.status_code, headers=error.headers)


def _now_s() -> int:
    return int(datetime.now(UTC).timestamp())
