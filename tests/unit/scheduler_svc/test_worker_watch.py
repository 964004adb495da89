"""What is concluded from silence, on a clock that the test turns."""

from types import SimpleNamespace
from typing import Any, cast

from kaiten.v1.common_pb2 import Leader, WorkerDescription
from kaiten.v1.worker_service_pb2 import StepTimings
from scheduler_svc.core.workers import Worker
from scheduler_svc.links import WorkerLink
from scheduler_svc.worker_watch import Finding, look_at

S = 1_000_000_000
LATE, HUNG, SILENT, APART = Finding


class Watched:
    """One worker with a plan in flight, and an operator who waits five seconds."""

    def __init__(self, *, step_us: int = 5_000) -> None:
        owner = cast("Any", None)
        worker = WorkerDescription(boot_id="w")
        self.link = WorkerLink(address="a", worker=worker, leader=Leader(), owner=owner)
        self.link.answered(StepTimings(forward_us=step_us, tokens_computed=9))
        self.worker = SimpleNamespace(flights=[1], is_late=False)
        self.is_known = True

    def after(self, seconds: float, *, heartbeat: bool = True) -> list[Finding]:
        """What is found when so much time has passed; what is late is late from then on."""
        passed_ns = int(seconds * S)
        if heartbeat:
            self.link.silent_ns = -passed_ns
        workers = {"w": cast("Worker", self.worker)} if self.is_known else {}
        looked = look_at([self.link], workers, passed_ns=passed_ns, timeout_ns=5 * S)
        found = [finding for _, finding in looked]
        self.worker.is_late = self.worker.is_late or LATE in found
        return found


def test_late_then_hung() -> None:
    """Steps of 5 ms: late after a second, hung when the operator would give a silent one up."""
    watched = Watched()
    assert [watched.after(1) for _ in range(6)] == [[], [LATE], [], [], [], [HUNG]]


def test_long_steps_are_waited_for_longer() -> None:
    """A step of a second: late after eight seconds, hung after 32."""
    watched = Watched(step_us=1_000_000)
    found = [watched.after(1) for _ in range(33)]
    assert [at for at, each in enumerate(found, 1) if each] == [9, 33]
    assert (found[8], found[32]) == ([LATE], [HUNG])


def test_never_hung_before_the_operator_would_give_a_silent_worker_up() -> None:
    watched = Watched()
    assert watched.link.hung_ns(60 * S) == 60 * S


def test_an_answer_begins_the_wait_anew() -> None:
    watched = Watched()
    watched.after(7)
    watched.link.answered(StepTimings(forward_us=5_000))
    watched.worker.is_late = False
    assert watched.after(1) == []
    assert watched.after(7.5) == [LATE, HUNG]


def test_a_worker_that_owes_nothing_is_neither() -> None:
    watched = Watched()
    watched.worker.flights = []
    assert watched.after(100) == []


def test_one_without_heartbeats_is_gone_and_not_hung() -> None:
    watched = Watched()
    assert watched.after(30, heartbeat=False) == [LATE, SILENT]


def test_one_that_was_given_up_is_apart_until_it_opens() -> None:
    watched = Watched()
    watched.link.give_up("a step has not ended for 9 s")
    watched.is_known = False
    assert watched.link.is_hung
    assert watched.after(9) == []
    assert watched.after(2) == [APART]


def test_what_a_step_is_expected_to_take() -> None:
    link = Watched(step_us=4_000).link
    assert link.expected_step_us(9) == 4_000
    assert link.expected_step_us(15) == 4_000, "about as many tokens"
    assert link.expected_step_us(16) == 0, "nothing is known of so many"
    link.answered(StepTimings(wait_us=9_999, forward_us=7_000, sample_us=1_000, tokens_computed=8))
    assert link.expected_step_us(9) == 5_000, "and waiting is no part of it"


def test_a_step_of_an_older_plan_may_be_as_large_as_was_said_then() -> None:
    link = Watched().link
    link.describe(WorkerDescription(boot_id="w", step_tokens_max=64))
    link.describe(WorkerDescription(boot_id="w", step_tokens_max=32))
    assert link.step_tokens_max == 64
    assert link.worker.step_tokens_max == 32
