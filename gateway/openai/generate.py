"""The two endpoints that generate, /v1/chat/completions and /v1/completions, over the front."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Final

from starlette.types import Receive, Scope, Send

from gateway.http import sse
from gateway.http.bodies import Bodies
from gateway.http.exchange import Exchange, answer, now_s
from gateway.http.json_body import JsonBody
from gateway.openai import request_models
from gateway.openai.replies import Echo, Envelope, Gather, Namer, Shape, Stream, Usage
from gateway.openai.request_models import ChatBody, CompletionBody, spoken_as
from gateway.openai.streaming import prompt_at, send_stream
from gateway.openai.unknown_fields import UnknownFields
from gateway.requests.merge import merged
from gateway.requests.service import Front
from gateway.requests.stream import Accepted, Delta, Done, Event, Explained, Finished, Generation
from gateway.settings import GatewaySettings
from gateway.text.detokenizer import decode
from gateway.values.generation_request import Ask, TextPrompt, TokenPrompt
from service_kit.errors import InvalidRequest

Body = ChatBody | CompletionBody
TRACEPARENT_CHARS_MAX: Final = 64
# A header, as gRPC's deadline is of the call: what is repeated later is the same request.
TIMEOUT_HEADER: Final = "x-request-timeout-s"
TIMEOUT_S: Final = re.compile(r"[0-9]{1,7}(\.[0-9]{1,3})?", re.ASCII)


class Endpoint:
    """One of the two generating endpoints, as an ASGI application."""

    def __init__(
        self,
        front: Front,
        config: GatewaySettings,
        bodies: Bodies,
        unknown: UnknownFields,
        kind: type[Body],
        shape: Shape,
    ) -> None:
        self._front = front
        self._bodies = bodies
        self._unknown = unknown
        self._config = config
        self._kind = kind
        self._shape = shape
        self._namer = Namer(front.card.pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hashed = self._shape.id_prefix.encode()
        await answer(self._answer, scope, receive, send, self._bodies, hashed)

    async def _answer(self, exchange: Exchange, sent: JsonBody) -> None:
        ignored = self._unknown.of_a_body()
        body = request_models.parse(self._kind, sent, ignored)
        exchange.headers |= self._unknown.told(ignored)
        key = exchange.header("idempotency-key")
        traceparent = exchange.header("traceparent")[:TRACEPARENT_CHARS_MAX]
        timeout_s = _timeout_s(exchange.header(TIMEOUT_HEADER))
        asks = body.asks(sent.digest, key, self._front.limits, self._config.prompts_max)
        with ExitStack() as stack:
            generations = []
            for ask in asks:
                asked = replace(ask, traceparent=traceparent, timeout_s=timeout_s)
                with spoken_as(body):
                    generation = await self._front.generate(asked, exchange.tenant)
                stack.enter_context(
                    self._front.following(generation, keep_running=ask.keep_running)
                )
                generations.append(generation)
            envelope = Envelope(
                id=self._shape.id_prefix + generations[0].accepted.request_id,
                created=now_s(),
                model=self._front.card.name,
            )
            echoes = [self._echo(body, ask) for ask in asks]
            if body.is_streaming:
                await self._stream(exchange, body, envelope, generations, echoes)
            elif body.background:
                content = {"id": envelope.id, "object": "request", "status": "queued"}
                await exchange.send_json(202, content)
            else:
                await self._gather(exchange, body, envelope, generations, echoes)

    def _echo(self, body: Body, ask: Ask) -> Echo:
        """The prompt's text, for a completion that wants to see it again."""
        if not isinstance(body, CompletionBody) or not body.echo:
            return Echo()
        if isinstance(ask.prompt, TextPrompt):
            return Echo(ask.prompt.text, body.echoed_logprobs)
        assert isinstance(ask.prompt, TokenPrompt)
        text = decode(self._front.card.pieces, ask.prompt.token_ids)
        return Echo(text, body.echoed_logprobs)

    async def _stream(
        self,
        exchange: Exchange,
        body: Body,
        envelope: Envelope,
        generations: Sequence[Generation],
        echoes: Sequence[Echo],
    ) -> None:
        stream = Stream(
            self._shape,
            envelope,
            self._namer,
            with_token_ids=bool(body.return_token_ids),
            with_usage=body.includes_usage,
            with_positions=body.includes_position,
        )
        usage = await send_stream(exchange, stream, generations, echoes, self._config.sse_ping_s)
        tail = stream.usage(usage) if body.includes_usage else b""
        await exchange.end_events(tail + sse.DONE)

    async def _gather(
        self,
        exchange: Exchange,
        body: Body,
        envelope: Envelope,
        generations: Sequence[Generation],
        echoes: Sequence[Echo],
    ) -> None:
        gather = Gather(
            self._shape,
            envelope,
            self._namer,
            choices=sum(len(generation.choices) for generation in generations),
            with_logprobs=body.logprobs is not None and body.logprobs is not False,
            prompt_logprobs=body.prompt_logprobs,
        )
        usage = Usage()
        async with aclosing(merged(generations)) as batches:
            async for base, events in batches:
                for event in events:
                    if isinstance(event, Explained):
                        _, echo = prompt_at(base, generations, echoes)
                        # It takes as long as a thousand deltas.
                        await asyncio.to_thread(gather.explained, base, event, echo)
                    else:
                        _collect(gather, base, event, generations, echoes, usage)
        content = gather.to_json(usage, with_token_ids=bool(body.return_token_ids))
        await exchange.send_json(200, content)


def _timeout_s(given: str) -> float | None:
    """How long the client waits for the whole answer, as it says; None: it does not."""
    if not given:
        return None
    if not TIMEOUT_S.fullmatch(given) or not float(given):
        rule = f"must be seconds, more than 0, matching {TIMEOUT_S.pattern}; got {given[:64]!r}"
        raise InvalidRequest(TIMEOUT_HEADER, rule)
    return float(given)


def _collect(
    gather: Gather,
    base: int,
    event: Event,
    generations: Sequence[Generation],
    echoes: Sequence[Echo],
    usage: Usage,
) -> None:
    match event:
        case Delta():
            gather.delta(base + event.choice, event)
        case Finished():
            gather.finished(base + event.choice, event)
        case Done():
            usage.add(event.message)
        case Accepted():
            n, echo = prompt_at(base, generations, echoes)
            for index in range(n):
                gather.opening(base + index, echo.text)
