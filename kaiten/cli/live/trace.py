"""`kaiten trace`: the spans of a request, and under which id a tracing backend has them."""

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Final, NamedTuple

from google.protobuf.json_format import MessageToDict

from kaiten.cli.complaint import complain
from kaiten.cli.live.explain import BAR, MARKS, asked, phase_of
from kaiten.client.errors import ApiError
from kaiten.tls import TLS
from kaiten.v1.inference_service_pb2 import ExplainResponse
from kaiten.v1.timeline_pb2 import ChoiceTimeline

NO_SPANS: Final = "no spans were made of it: set OTEL_EXPORTER_OTLP_ENDPOINT for gateways"


class Span(NamedTuple):
    """A part of a choice's time, as its trace has it."""

    name: str
    start_ns: int
    end_ns: int
    # Chunks of a prompt, steps that brought tokens, or reasons of waiting.
    said: str


def trace(
    address: str,
    tls: TLS | None,
    request_id: str,
    *,
    tenant: str,
    api_key: str | None,
    ui: str,
    as_json: bool,
) -> int:
    """Print it; the exit code."""
    try:
        response = asked(address, tls, request_id, tenant, api_key)
    except ApiError as error:
        return complain(error, address)
    lines = _json(response, ui) if as_json else lines_of(request_id, response, ui)
    sys.stdout.writelines(line + "\n" for line in lines)
    return 0


def link(trace_id: str, ui: str) -> str:
    """Where Jaeger, and whoever speaks like it, shows a trace."""
    return f"{ui.rstrip('/')}/trace/{trace_id}"


def lines_of(request_id: str, response: ExplainResponse, ui: str) -> Iterator[str]:
    """The trace's id, and a line for each span."""
    if response.trace_id:
        yield f"trace {response.trace_id}  {link(response.trace_id, ui)}"
    else:
        yield NO_SPANS
    for choice in response.choices:
        yield from _choice(request_id, choice)


def _choice(request_id: str, choice: ChoiceTimeline) -> Iterator[str]:
    some = list(spans(choice))
    if not some:
        yield f"{request_id}  nothing is known of it yet"
        return
    start_ns, end_ns = some[0].start_ns, some[-1].end_ns
    name = f"{request_id}/{choice.choice}" if choice.choice else request_id
    yield f"{name}  {(end_ns - start_ns) / 1e6:,.1f} ms  {choice.ended or 'not ended'}"
    for one in some:
        took_ms = (one.end_ns - one.start_ns) / 1e6
        bar = _bar(one, start_ns, max(1, end_ns - start_ns))
        yield f"  {one.name:16} {took_ms:>10,.1f} ms  {bar}  {one.said}".rstrip()


def spans(choice: ChoiceTimeline) -> Iterator[Span]:
    """Intervals of one phase that follow each other are one."""
    for phase, group in groupby(choice.intervals, phase_of):
        some = list(group)
        chunks, steps = sum(len(i.chunk_tokens) for i in some), sum(i.num_steps for i in some)
        reasons = "; ".join(dict.fromkeys(i.why for i in some if i.why))
        counts = [_counted(chunks, "chunk")] * bool(chunks) + [_counted(steps, "step")] * bool(
            steps
        )
        said = "  ".join([*counts, *[reasons] * bool(reasons)])
        yield Span(f"kaiten.{phase}", some[0].start_unix_ns, some[-1].end_unix_ns, said)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _bar(one: Span, start_ns: int, total_ns: int) -> str:
    first = (one.start_ns - start_ns) * BAR // total_ns
    last = -(-(one.end_ns - start_ns) * BAR // total_ns)
    mark = MARKS[one.name.removeprefix("kaiten.")]
    return (" " * first + mark * (last - first)).ljust(BAR)


def _json(response: ExplainResponse, ui: str) -> Iterator[str]:
    told = MessageToDict(response, preserving_proto_field_name=True)
    told["url"] = link(response.trace_id, ui) if response.trace_id else None
    told["spans"] = [
        {**one._asdict(), "choice": choice.choice}
        for choice in response.choices
        for one in spans(choice)
    ]
    yield json.dumps(told)
