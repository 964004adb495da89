"""Accepted requests by their id: look, come back to the stream, cancel.

`starting_after` is the number of output tokens the client has, one per choice, separated by commas;
chunks say it as `position`. What follows is exactly what it does not have.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import UNSET
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from gateway.http import sse
from gateway.http.bodies import Bodies
from gateway.http.exchange import Exchange, answer, now_s
from gateway.http.json_body import JsonBody
from gateway.openai.logprobs import LogprobFormatter
from gateway.openai.replies import (
    ChatShape,
    Collected,
    Collector,
    CompletionShape,
    Echo,
    Envelope,
    Shape,
    Stream,
    Totals,
    formed,
)
from gateway.openai.reply_models import (
    CancelledRequest,
    EndWord,
    FinishedRequest,
    LiveRequest,
    QueuePosition,
    StoredChoice,
    StoredStatus,
)
from gateway.requests.service import Front, Seen
from gateway.requests.stream import Generation
from gateway.requests.validation import REQUEST_ID, UINT32_MAX
from gateway.settings import GatewaySettings
from kaiten.v1.common_pb2 import FinishReason
from service_kit.errors import InvalidRequest

SHAPES: Final[tuple[Shape, ...]] = (ChatShape(), CompletionShape())
WORDS: Final[dict[int, EndWord]] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_CANCELLED: "cancelled",
    FinishReason.FINISH_REASON_DEADLINE_EXCEEDED: "deadline_exceeded",
    FinishReason.FINISH_REASON_ERROR: "error",
}
# The worst end of a choice is the state of its request.
STATES: Final[dict[EndWord, StoredStatus]] = {
    "error": "failed",
    "deadline_exceeded": "expired",
    "cancelled": "cancelled",
}


class StoredRequests:
    """GET and DELETE of /v1/requests/ID and POST of its /cancel, as an ASGI application."""

    def __init__(self, front: Front, config: GatewaySettings, bodies: Bodies) -> None:
        self._front = front
        self._bodies = bodies
        self._config = config
        self._formatter = LogprobFormatter(front.card.pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._get if scope["method"] in ("GET", "HEAD") else self._cancel
        await answer(work, scope, receive, send, self._bodies)

    async def _cancel(self, exchange: Exchange, _body: JsonBody) -> None:
        public = exchange.scope["path_params"]["id"]
        was_live = await self._front.cancel(_name(public)[0], exchange.tenant)
        await exchange.send_json(200, CancelledRequest(id=public, was_live=was_live))

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
                await exchange.send_json(200, await self._finished(public, generation))

    async def _stream(
        self, exchange: Exchange, public: str, shape: Shape, generation: Generation
    ) -> None:
        envelope = Envelope(id=public, created=now_s(), model=self._front.card.name)
        stream = Stream(
            shape,
            envelope,
            self._formatter,
            with_token_ids=False,
            with_usage=True,
            with_positions=True,
        )
        totals = Totals()
        events = formed(stream, [generation], [Echo()], totals)
        await exchange.send_all(events, self._config.sse_ping_s)
        await exchange.end_events(stream.end(totals) + sse.DONE)

    async def _finished(self, public: str, generation: Generation) -> FinishedRequest:
        n = len(generation.choices)
        collector = Collector(self._formatter, choices=n, keeps_failures=True)
        totals = Totals()
        async for _ in formed(collector, [generation], [Echo()], totals):
            pass
        choices = [_choice(index, each) for index, each in enumerate(collector.choices)]
        reasons = {choice.finish_reason for choice in choices}
        states = (state for reason, state in STATES.items() if reason in reasons)
        return FinishedRequest(
            id=public,
            prompt_logprobs=collector.choices[0].prompt,
            status=next(states, "completed"),
            model=self._front.card.name,
            choices=choices,
            usage=totals.usage(),
            kaiten=totals.timing(),
        )


def _choice(index: int, collected: Collected) -> StoredChoice:
    end = collected.end
    assert end is not None
    return StoredChoice(
        index=index,
        text="".join(collected.texts),
        finish_reason=WORDS[end.reason],
        output_tokens=end.output_tokens,
        error=end.error or UNSET,
    )


def _live(public: str, seen: Seen) -> LiveRequest:
    if seen.place.position is None:
        return LiveRequest(id=public, status="in_progress")
    queue = QueuePosition(seen.place.position, seen.place.reason)
    return LiveRequest(id=public, status="queued", queue=queue)


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
