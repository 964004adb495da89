"""An OpenTelemetry collector that keeps what it is sent."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


class Collector(pb_grpc.TraceServiceServicer):
    """Every span by its id; as a servicer it answers on threads of its own, after so long."""

    def __init__(self, answers_after_s: float = 0.0) -> None:
        self._answers_after_s = answers_after_s
        self.spans: dict[bytes, Any] = {}
        self.services: dict[bytes, str] = {}
        self.address = ""

    def Export(self, request: Any, _context: Any) -> Any:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.services[span.span_id] = names["service.name"]
                    self.spans[span.span_id] = span
        time.sleep(self._answers_after_s)
        return pb.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Any]:
        return [span for span in list(self.spans.values()) if span.name == name]

    def of_trace(self, trace_id: str) -> list[Any]:
        return [s for s in list(self.spans.values()) if s.trace_id.hex() == trace_id]


@contextmanager
def collecting(place: str = "127.0.0.1:0", *, answers_after_s: float = 0.0) -> Iterator[Collector]:
    """A collector; port 0 is any free one."""
    collector = Collector(answers_after_s)
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port(place)}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
