"""Spans that are over, as they were handed on."""

from service_kit.telemetry import Span, Spans


class KeptSpans:
    """In place of the SDK's processor."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def on_end(self, span: Span) -> None:
        self.spans.append(span)

    def shutdown(self) -> None:
        """Nothing waits to be sent."""

    def sink(self) -> Spans:
        """Where spans are put that are to be kept here."""
        return Spans(self)

    def get_finished_spans(self) -> tuple[Span, ...]:
        return tuple(self.spans)
