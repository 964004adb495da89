"""One line of the log per request: who, how it ended, how much, where the time went. No text."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

import structlog

from gateway.observe.metrics import Visit
from gateway.observe.tracing import refusal_code
from gateway.tenants import Tenant
from gateway.values.generation_request import GenerationRequest
from kaiten.v1.inference_service_pb2 import Done as DoneMessage

log = structlog.get_logger()


class RequestLog:
    """Of one gateway. Switched off it costs nothing."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    @contextmanager
    def opening(self, request: GenerationRequest, tenant: Tenant) -> Iterator[None]:
        """`request.refused` for what was never accepted, with the code that clients got."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            if self._is_on and not request.is_put_off(error):
                log.info(
                    "request.refused",
                    request_id=request.request_id,
                    tenant=tenant.name,
                    code=refusal_code(error),
                )
            raise

    def closed(
        self,
        ledger_id: str,
        visit: Visit,
        outcome: str,
        output_tokens: int,
        done: DoneMessage | None,
    ) -> None:
        """`request.finished`, as the client of this gateway saw it: outcomes are those of the
        metrics. Milliseconds; phases are the scheduler's, of requests that ended."""
        if not self._is_on:
            return
        tenant, _, request_id = ledger_id.partition(":")
        now_ns = perf_counter_ns()
        fields: dict[str, object] = {}
        if visit.trace is not None and visit.trace.context is not None:
            fields["trace_id"] = f"{visit.trace.context.trace_id:032x}"
        if visit.first_ns:
            fields["first_ms"] = _ms(visit.first_ns - visit.started_ns)
        if done is not None:
            timings = done.timings
            fields |= {
                "cached_tokens": done.usage.cached_tokens,
                "queue_ms": timings.queue_us / 1000,
                "prefill_ms": timings.prefill_us / 1000,
                "decode_ms": timings.decode_us / 1000,
                "preemptions": timings.preemptions,
            }
        log.info(
            "request.finished",
            request_id=request_id,
            tenant=tenant,
            outcome=outcome,
            prompt_tokens=visit.prompt_tokens,
            output_tokens=output_tokens,
            total_ms=_ms(now_ns - visit.started_ns),
            **fields,
        )


def _ms(span_ns: int) -> float:
    return round(span_ns / 1e6, 3)
