"""What `kaiten explain` says below a waterfall."""

from kaiten.cli.explain import hints
from kaiten.v1.inference_service_pb2 import ExplainResponse
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval, TimelinePhase


def told(*phases: TimelinePhase) -> ExplainResponse:
    intervals = [TimelineInterval(phase=phase) for phase in phases]
    return ExplainResponse(choices=[ChoiceTimeline(), ChoiceTimeline(intervals=intervals)])


def test_who_waited_under_a_dead_leader_is_sent_to_the_archive() -> None:
    queue, unknown = TimelinePhase.TIMELINE_PHASE_QUEUE, TimelinePhase.TIMELINE_PHASE_UNKNOWN
    assert hints("cmpl-1", told(queue)) == []
    (line,) = hints("cmpl-1", told(queue, unknown))
    assert line.endswith("kaiten explain cmpl-1 --archive .kaiten")
