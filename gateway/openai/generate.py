"""The handler of the two endpoints that generate, `chat` and `completions`."""

import re
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from gateway.http.exchange import KEY_HEADER, HttpExchange
from gateway.openai.generation_body import GenerationBody, StreamOptions
from gateway.openai.operation import GENERATES, Api, Operation, parameter
from gateway.openai.parts import Parts, Shown, head_of, send_stream
from gateway.requests.validation import REQUEST_ID
from gateway.values.generation_request import GenerationRequest
from service_kit.errors import InvalidRequest

TRACEPARENT_CHARS_MAX: Final = 64
# A header, as gRPC's deadline is of the call: what is repeated later is the same request.
TIMEOUT_HEADER: Final = "x-request-timeout-s"
TIMEOUT_S: Final = re.compile(r"[0-9]{1,7}(\.[0-9]{1,3})?", re.ASCII)


async def generate(api: Api, exchange: HttpExchange, body: GenerationBody) -> None:
    """Submit one request per prompt, and tell what becomes of them as one answer."""
    requests, form, generations = _requests(api, exchange, body), body.FORMAT, []
    with ExitStack() as stack:
        for request in requests:
            with body.aliased():
                generation = await api.generation_service.generate(request, exchange.tenant)
            stack.enter_context(api.generation_service.following(generation))
            generations.append(generation)
        exchange.accepted()
        head = head_of(
            form.id_prefix + generations[0].accepted.request_id, api.generation_service.card.name
        )
        echoes = [
            body.echoed(request.prompt, api.generation_service.card.pieces) for request in requests
        ]
        options = body.stream_options or StreamOptions()
        shown = Shown(
            logprobs=requests[0].sampling.HasField("logprobs"),
            token_ids=requests[0].return_token_ids,
            prompt_logprobs=body.prompt_logprobs,
            calls_as_end=not body.names_call,
        )
        formatter = api.formatter.by_id if body.return_tokens_as_token_ids else api.formatter
        parts = Parts(generations, formatter, shown, echoes)
        if body.stream:
            usage = bool(options.include_usage)
            await send_stream(
                exchange,
                form,
                head,
                parts,
                with_usage=usage,
                is_continuous=usage and bool(options.continuous_usage_stats),
                ping_s=api.config.sse_ping_s,
            )
        else:
            wholes = await parts.collect()
            await exchange.send_json(200, form.reply(head, wholes, parts.ends()))


def _requests(api: Api, exchange: HttpExchange, body: GenerationBody) -> list[GenerationRequest]:
    """The body's, with what the headers say."""
    requests = body.requests(api.generation_service.limits, api.config.prompts_max)
    if len(requests) > 1 and exchange.header(KEY_HEADER):
        rule = (
            "must be a single one where the request has a name (Idempotency-Key, line of a batch)"
        )
        raise InvalidRequest("prompt", rule)
    is_stream = bool(body.stream)
    return [with_headers(request, exchange, is_stream=is_stream) for request in requests]


def with_headers(
    request: GenerationRequest, exchange: HttpExchange, *, is_stream: bool
) -> GenerationRequest:
    """A request that was made of a body, with what the headers say."""
    return replace(
        request,
        is_stream=is_stream,
        request_id=exchange.header(KEY_HEADER),
        body_hash=exchange.body_digest,
        timeout_s=_timeout_s(exchange.header(TIMEOUT_HEADER)),
        arrived_ns=exchange.arrived_ns,
        traceparent=exchange.header("traceparent")[:TRACEPARENT_CHARS_MAX],
        keep_running=exchange.keeps_running,
        awaits_workers=exchange.awaits_workers,
    )


def _timeout_s(given: str) -> float | None:
    """How long the client waits for the whole answer, as it says; None: it does not."""
    if not given:
        return None
    if not TIMEOUT_S.fullmatch(given) or not float(given):
        rule = f"must be seconds, more than 0, matching {TIMEOUT_S.pattern}; got {given[:64]!r}"
        raise InvalidRequest(TIMEOUT_HEADER, rule)
    return float(given)


HEADERS: Final = (
    parameter(
        "header",
        KEY_HEADER,
        f"({REQUEST_ID.pattern})?",
        "names the request: the same key and body again is the same request",
    ),
    parameter("header", "traceparent", "", "W3C trace context; one that is none is ignored"),
    parameter(
        "header",
        TIMEOUT_HEADER,
        f"({TIMEOUT_S.pattern})?",
        "seconds, more than 0, for the whole answer; then 504, or an event that says so",
    ),
)


def generating(
    path: str, name: str, reply: type, body: type[GenerationBody], chunk: type
) -> Operation:
    """What the two endpoints have in common."""
    return Operation("POST", path, name, generate, GENERATES, (reply,), HEADERS, body, (chunk,))
