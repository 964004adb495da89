"""Metrics of a process: names of others, exemplars, and spans that nobody will see."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from structlog.testing import capture_logs

from service_kit import telemetry
from service_kit.errors import ConfigError
from service_kit.metrics import Metrics, close_all, count_spans, exemplar, seen, tell_expiries
from service_kit.metrics_server import CONNECTIONS_MAX, MetricsServer, Page
from service_kit.peers import Peers
from service_kit.telemetry import minted
from service_kit.tls import ServerTls
from tests.support.exemplars import Exemplars
from tests.support.tls_files import EARLY, EXPIRED, RECENT, Authority

pytest.importorskip("prometheus_client", reason="kaiten[metrics] is not installed")
from prometheus_client.parser import text_string_to_metric_families

from service_kit.metric_aliases import ALIASES


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    some = Metrics("test", is_scraped=True, environ={})
    yield some
    some.close()


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """By name and the label that matters here."""
    page = metrics.page().body.decode()
    return {
        (one.name, ",".join(f"{k}={v}" for k, v in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
    }


def test_values_have_the_names_of_vllm_too(metrics: Metrics) -> None:
    metrics.model_name = lambda: "mini"
    meter = metrics.meter
    meter.create_observable_gauge("kaiten.num_requests_running", seen(lambda: 3), "", "x")
    meter.create_observable_counter(
        "kaiten.request_success", seen(lambda: {"stop": 2}, "finished_reason"), "", "x"
    )
    meter.create_histogram("kaiten.e2e_request_latency", "s", "x").record(0.5)
    told = samples(metrics)
    assert told["kaiten_num_requests_running", ""] == 3
    assert told["vllm:num_requests_running", "model_name=mini"] == 3
    assert told["vllm:request_success_total", "finished_reason=stop,model_name=mini"] == 2
    assert told["vllm:e2e_request_latency_seconds_sum", "model_name=mini"] == 0.5
    assert told["vllm:e2e_request_latency_seconds_bucket", "le=+Inf,model_name=mini"] == 1


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", "text/plain; version=0.0.4"),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "text/plain; version=0.0.4"),
        # As Prometheus 2 asks, and as Prometheus 3 does.
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "openmetrics"),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8", "openmetrics"),
    ],
)
def test_names_are_the_same_in_every_form(metrics: Metrics, accept: str, form: str) -> None:
    running = seen(lambda: 3)
    metrics.meter.create_observable_gauge("kaiten.num_requests_running", running, "", "x")
    page = metrics.page(accept)
    assert form in page.content_type
    lines = page.body.decode().splitlines()
    assert "kaiten_num_requests_running 3.0" in lines
    assert "vllm:num_requests_running 3.0" in lines
    assert (lines[-1] == "# EOF") == (form == "openmetrics")


def test_a_page_is_served_on_a_port_that_was_free(metrics: Metrics) -> None:
    metrics.meter.create_observable_gauge("kaiten.x", seen(lambda: 3), "", "x")
    url = metrics.serve("127.0.0.1", 0)
    with urlopen(url, timeout=30) as reply:
        assert b"kaiten_x 3.0" in reply.read()
    taken = int(url.split(":")[2].partition("/")[0])
    other = Metrics("other", is_scraped=True, environ={})
    with pytest.raises(ConfigError, match=f"cannot serve metrics on 127.0.0.1:{taken}: "):
        other.serve("127.0.0.1", taken)
    other.close()


def test_who_holds_connections_has_so_many_and_frees_them_by_leaving(metrics: Metrics) -> None:
    server = MetricsServer("127.0.0.1", 0, metrics.page)
    address = ("127.0.0.1", server.port)
    with ExitStack() as held:
        for _ in range(CONNECTIONS_MAX):
            held.enter_context(socket.create_connection(address)).sendall(b"GET / HTT")
        # They are taken in turn, so all of those were before.
        with socket.create_connection(address) as one_more:
            assert one_more.recv(1) == b""
    answer = b""
    while not answer:
        with suppress(ConnectionError), socket.create_connection(address) as one:
            one.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answer = one.recv(12)
    assert answer == b"HTTP/1.0 200"
    server.close()


def test_a_page_that_fails_is_logged_and_who_left_is_not() -> None:
    pages = iter([ConnectionResetError(), ValueError("why")])

    def page(_accept: str) -> Page:
        raise next(pages)

    server = MetricsServer("127.0.0.1", 0, page)
    with capture_logs() as logs:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", server.port)) as one:
                one.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert one.recv(1) == b""
        server.close()
    (entry,) = logs
    assert (entry["event"], str(entry["exc_info"])) == ("metrics.failed", "why")


def test_a_collector_that_takes_connections_and_says_nothing_holds_up_no_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Left to itself the SDK waits for as long as an export may take: here an hour."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(telemetry.ENDPOINT, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
        metrics = Metrics("test", is_scraped=False)
        metrics.meter.create_observable_gauge("kaiten.num_requests_running", seen(lambda: 3))
        metrics.close()
    for thread in threading.enumerate():
        if thread.name == "OtelPeriodicExportingMetricReader":
            thread.join()


def test_labels_that_tell_series_apart_stay(metrics: Metrics) -> None:
    metrics.model_name = lambda: "mini"
    first = metrics.meter.create_histogram("gen_ai.server.time_to_first_token", "s", "x")
    for operation in ("chat", "text_completion"):
        of = {"gen_ai.operation.name": operation, "gen_ai.request.model": "mini"}
        first.record(0.1, of)
    told = samples(metrics)
    name = "vllm:time_to_first_token_seconds_count"
    assert told[name, "gen_ai_operation_name=chat,model_name=mini"] == 1
    assert told[name, "gen_ai_operation_name=text_completion,model_name=mini"] == 1


def test_no_two_values_have_one_name() -> None:
    names = [name for names in ALIASES.values() for name in names]
    assert len(names) == len(set(names))


def test_exemplars_lead_to_traces_that_were_kept() -> None:
    heard = Exemplars()
    histogram = heard.meter.create_histogram("h", "s", "x")
    kept, unkept, asked_about = (minted(is_sampled=one) for one in (True, False, False))
    histogram.record(0.1, context=exemplar(unkept, is_kept=False))
    histogram.record(0.2, context=exemplar(kept, is_kept=False))
    histogram.record(0.3, context=exemplar(None, is_kept=True))
    histogram.record(7, context=exemplar(asked_about, is_kept=True))
    assert heard.traces() == {"h": {kept.trace_id, asked_about.trace_id}}


class Sink:
    """An exporter that answers as it is told, once it is let."""

    def __init__(self) -> None:
        self.has_begun, self.is_open = threading.Event(), threading.Event()
        self.result: SpanExportResult | None = SpanExportResult.SUCCESS

    def export(self, _spans: Sequence[object]) -> SpanExportResult:
        self.has_begun.set()
        assert self.is_open.wait(30)
        if self.result is None:
            raise ValueError("a span that is no message")
        return self.result

    def shutdown(self) -> None: ...

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def sending(sink: Sink, queue_max: int) -> tuple[telemetry.Spans, Any]:
    counting: Any = telemetry._Counting(sink)
    # Nothing is sent by itself within a test.
    processor = BatchSpanProcessor(
        counting, max_queue_size=queue_max, schedule_delay_millis=3_600_000
    )
    return telemetry.Spans(processor, counting, queue_max), processor


def test_spans_for_which_there_is_no_room_are_not_made_and_counted(metrics: Metrics) -> None:
    sink = Sink()
    sink.is_open.set()
    spans, processor = sending(sink, 600)
    count_spans(metrics.meter, spans)
    for _ in range(2000):
        spans.put("s", start_ns=1, end_ns=2)
    processor.force_flush()
    # Batches leave as soon as they are full, so more than the queue holds may have been put.
    told = samples(metrics)
    dropped = told["kaiten_spans_dropped_total", "by=sender"]
    assert told["kaiten_spans_exported_total", ""] + dropped == 2000
    spans.drop()
    for result in (SpanExportResult.FAILURE, None):
        sink.result = result
        spans.put("s", start_ns=1, end_ns=2)
        processor.force_flush()
    told = samples(metrics)
    assert told["kaiten_spans_dropped_total", "by=maker"] == 1
    assert told["kaiten_spans_dropped_total", "by=refused"] == 2
    assert told["kaiten_spans_exported_total", ""] + dropped == 2000
    spans.close()


def test_it_is_told_when_certificates_end(metrics: Metrics, tmp_path: Path) -> None:
    """Of those in use: a renewal that is of no use changes nothing, also here."""
    authority = Authority(tmp_path)
    ends = RECENT["not_after"].replace(microsecond=0)
    files = authority.issue(client_ca=authority.pem)
    part = authority.issue_to_part("part")
    tell_expiries(metrics.meter, ServerTls(files).expiries, Peers(certificates=part).expiries)

    def told() -> dict[str, float]:
        name = "kaiten_certificate_expiry_timestamp_seconds"
        return {key: at for (found, key), at in samples(metrics).items() if found == name}

    first = told()
    assert first.keys() == {
        f"flag=--{name}" for name in ("tls-cert", "tls-client-ca", "peer-tls-cert", "peer-tls-ca")
    }
    assert first["flag=--tls-cert"] == first["flag=--peer-tls-cert"] == ends.timestamp()
    assert first["flag=--tls-client-ca"] == first["flag=--peer-tls-ca"] > ends.timestamp()
    authority.issue_to_part("part", **EXPIRED)
    assert told() == first
    authority.issue_to_part("part", not_after=EARLY["not_after"])
    assert told()["flag=--peer-tls-cert"] < ends.timestamp()


def test_a_queue_that_stands_still_drops_all_the_rest() -> None:
    sink = Sink()
    spans, _ = sending(sink, 600)
    for _ in range(512):
        spans.put("s", start_ns=1, end_ns=2)
    assert sink.has_begun.wait(30)
    for _ in range(615):
        spans.put("s", start_ns=1, end_ns=2)
    assert spans.dropped == {"maker": 0, "sender": 15, "refused": 0}
    # What is on its way is not there yet.
    assert spans.exported == 0
    sink.is_open.set()
    spans.close()


@pytest.mark.parametrize(
    ("queue", "batch", "rule"),
    [
        ("many", "", "OTEL_BSP_MAX_QUEUE_SIZE must be 512 or more, got 'many'"),
        ("511", "", "OTEL_BSP_MAX_QUEUE_SIZE must be 512 or more, got '511'"),
        ("63", "64", "OTEL_BSP_MAX_QUEUE_SIZE must be 64 or more, got '63'"),
        ("", "0", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE must be 1 or more, got '0'"),
    ],
)
def test_a_queue_of_no_size_is_refused(queue: str, batch: str, rule: str) -> None:
    environ = {telemetry.ENDPOINT: "http://127.0.0.1:1", telemetry.QUEUE_VARIABLE: queue}
    with pytest.raises(ConfigError, match=rule):
        telemetry.configure("test", {**environ, telemetry.BATCH_VARIABLE: batch})


@pytest.mark.parametrize(
    ("queue", "batch", "sizes"),
    [("", "", (2048, 512)), ("64", "64", (64, 64)), ("", "4096", (4096, 4096))],
)
def test_as_many_wait_and_are_sent_at_once_as_is_said(
    queue: str, batch: str, sizes: tuple[int, int]
) -> None:
    environ = {telemetry.ENDPOINT: "http://127.0.0.1:1", telemetry.QUEUE_VARIABLE: queue}
    spans = telemetry.configure("test", {**environ, telemetry.BATCH_VARIABLE: batch})
    assert spans is not None
    of = spans._processor._batch_processor
    assert (of._max_queue_size, of._max_export_batch_size) == sizes
    assert spans._queue_max == sizes[0]
    spans.close()


async def test_who_wait_for_a_collector_at_the_end_wait_together() -> None:
    meeting = threading.Barrier(2, timeout=60)
    both: Any = SimpleNamespace(close=meeting.wait)
    await close_all(both, both)
