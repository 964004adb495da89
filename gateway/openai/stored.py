"""Accepted requests by their id: look, come back to the stream, cancel.

`starting_after` is the number of output tokens the client has, one per choice, separated by commas;
chunks say it as `position`. What follows is exactly what it does not have.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.http import sse
from gateway.http.bodies import Bodies
from gateway.http.exchange import Exchange, answer, now_s
from gateway.http.json_body import JsonBody
from gateway.openai.replies import (
    ChatShape,
    CompletionShape,
    Echo,
    Envelope,
    Namer,
    Shape,
    Stream,
    Usage,
)
from gateway.openai.streaming import send_stream
from gateway.requests.service import Front, Seen
from gateway.requests.stream import Delta, Done, Explained, Finished, Generation
from gateway.requests.validation import REQUEST_ID, UINT32_MAX
from gateway.settings import GatewaySettings
from kaiten.v1.common_pb2 import FinishReason
from service_kit.errors import InvalidRequest

SHAPES: Final[tuple[Shape, ...]] = (ChatShape(), CompletionShape())
WORDS: Final = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_CANCELLED: "cancelled",
    FinishReason.FINISH_REASON_DEADLINE_EXCEEDED: "deadline_exceeded",
    FinishReason.FINISH_REASON_ERROR: "error",
}
# The worst end of a choice is the state of its request.
STATES: Final = (("error", "failed"), ("deadline_exceeded", "expired"), ("cancelled", "cancelled"))


class StoredRequests:
    """GET and DELETE of /v1/requests/ID, as an ASGI application."""

    def __init__(self, front: Front, config: GatewaySettings, bodies: Bodies) -> None:
        self._front = front
        self._bodies = bodies
        self._config = config
        self._namer = Namer(front.card.pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._delete if scope["method"] == "DELETE" else self._get
        await answer(work, scope, receive, send, self._bodies)

    async def cancel(self, request: Request) -> Response:
        """POST /v1/requests/ID/cancel."""
        public = request.path_params["id"]
        request_id, _ = _name(public)
        was_live = await self._front.cancel(request_id, request.state.tenant)
        return JSONResponse(_cancelled(public, was_live))

    async def _delete(self, exchange: Exchange, _body: JsonBody) -> None:
        public = exchange.scope["path_params"]["id"]
        was_live = await self._front.cancel(_name(public)[0], exchange.tenant)
        await exchange.send_json(200, _cancelled(public, was_live))

    async def _get(self, exchange: Exchange, _body: JsonBody) -> None:
        public = exchange.scope["path_params"]["id"]
        request_id, shape = _name(public)
        query = QueryParams(exchange.scope["query_string"])
        positions = _positions(query.get("starting_after", ""))
        is_streaming = "text/event-stream" in exchange.header("accept")
        if not is_streaming and query.get("stream", "") not in ("true", "1"):
            seen = await self._front.look(request_id, exchange.tenant)
            if seen.done is None:
                await exchange.send_json(200, _live(public, seen))
                return
        generation = await self._front.attach(request_id, exchange.tenant, positions)
        # Somebody who only looks does not end what others wait for: DELETE does.
        with self._front.following(generation, keep_running=True):
            if is_streaming or query.get("stream", "") in ("true", "1"):
                await self._stream(exchange, public, shape, generation)
            else:
                await exchange.send_json(200, await self._gather(public, generation))

    async def _stream(
        self, exchange: Exchange, public: str, shape: Shape, generation: Generation
    ) -> None:
        envelope = Envelope(id=public, created=now_s(), model=self._front.card.name)
        stream = Stream(
            shape,
            envelope,
            self._namer,
            with_token_ids=False,
            with_usage=True,
            with_positions=True,
        )
        usage = await send_stream(exchange, stream, [generation], [Echo()], self._config.sse_ping_s)
        await exchange.end_events(stream.usage(usage) + sse.DONE)

    async def _gather(self, public: str, generation: Generation) -> dict[str, Any]:
        """A finished request as one object."""
        body: dict[str, Any] = {"id": public, "object": "request"}
        texts: list[list[str]] = [[] for _ in generation.choices]
        ends: dict[int, Finished] = {}
        usage = Usage()
        async for events in generation:
            for event in events:
                match event:
                    case Delta():
                        texts[event.choice].append(event.text)
                    case Explained():
                        told = await asyncio.to_thread(self._namer.prompt_to_json, event)
                        body["prompt_logprobs"] = told
                    case Finished():
                        ends[event.choice] = event
                    case Done():
                        usage.add(event.message)
        choices = [_choice(index, "".join(text), ends[index]) for index, text in enumerate(texts)]
        reasons = {choice["finish_reason"] for choice in choices}
        state = next((word for reason, word in STATES if reason in reasons), "completed")
        end = {"status": state, "model": self._front.card.name, "choices": choices}
        return body | end | usage.fields()


def _choice(index: int, text: str, end: Finished) -> dict[str, Any]:
    choice = {
        "index": index,
        "text": text,
        "finish_reason": WORDS[end.reason],
        "output_tokens": end.output_tokens,
    }
    return choice | ({"error": end.error} if end.error else {})


def _live(public: str, seen: Seen) -> dict[str, Any]:
    body: dict[str, Any] = {"id": public, "object": "request", "status": "in_progress"}
    if seen.place.position is not None:
        queue = {"position": seen.place.position, "reason": seen.place.reason}
        body |= {"status": "queued", "queue": queue}
    return body


def _cancelled(public: str, was_live: bool) -> dict[str, Any]:
    return {"id": public, "object": "request", "was_live": was_live}


def _name(public: str) -> tuple[str, Shape]:
    """The request's own id, and how its chunks look: both are in the id its client was given."""
    shape = next((each for each in SHAPES if public.startswith(each.id_prefix)), SHAPES[-1])
    request_id = public.removeprefix(shape.id_prefix)
    if not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("id", f"must match {REQUEST_ID.pattern}")
    return request_id, shape


def _positions(text: str) -> Sequence[int]:
    parts = text.split(",") if text else []
    for part in parts:
        if not (
            part.isascii() and part.isdecimal() and len(part) <= 10 and int(part) <= UINT32_MAX
        ):
            rule = "must be token counts, one per choice, separated by commas"
            raise InvalidRequest("starting_after", rule)
    return [int(part) for part in parts]
