"""Traces to which the exemplars of a meter's values lead."""

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider, TraceBasedExemplarFilter
from opentelemetry.sdk.metrics.export import InMemoryMetricReader


class Exemplars:
    """A meter of a process that sends metrics by OTLP."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], exemplar_filter=TraceBasedExemplarFilter())
        self.meter = self._provider.get_meter("kaiten")

    def traces(self) -> dict[str, set[int]]:
        """By the name of a histogram that has values, be it that none leads anywhere."""
        return {
            name: {each.trace_id for point in points for each in point.exemplars}
            for name, points in self.points().items()
        }

    def points(self) -> dict[str, Any]:
        """By the name of a histogram that has values."""
        data: Any = self._reader.get_metrics_data()
        return {
            metric.name: points
            for metric in data.resource_metrics[0].scope_metrics[0].metrics
            if hasattr((points := metric.data.data_points)[0], "bucket_counts")
        }
