"""Why somebody waits, in words: of what a leader's planner says, and of whom it says nothing."""

from typing import Final

from kaiten.client.live_core import LiveCore, LiveSequence
from kaiten.v1.common_pb2 import WhyPassedOver
from kaiten.v1.watch_pb2 import PassedOver, SequenceState, WatchedWorker

# As `scheduler_svc/core/outcome.py: Why` has them; the dashboard has the same.
WORDS: Final = {
    "PLANS_IN_FLIGHT": "the worker has not answered the plans it has",
    "NOTHING_CHANGED": "the worker runs on by itself",
    "DRAINING": "the worker is draining",
    "LATE": "a step of the worker is overdue",
    "STORE_BEHIND": "the store has not acknowledged what was decided",
    "NO_SLOT": "every slot is taken",
    "NO_BUDGET": "another prefill could not be promised its minimum of every step",
    "PREEMPTED": "somebody was preempted by this very plan",
    "CADENCE": "the queue is not looked at yet",
    "TOO_LARGE": "it fits another worker only",
    "SUSPECT": "one suspect at a time",
    "VERDICT": "nobody knows yet whether the workers it lost died of it",
    "ANOTHER_WORKER": "another worker can start it now",
    "TENANT": "its tenant has as much running as it may",
    "LONG_PREFILL": "as many long prompts as may be are being computed",
    "BLOCKS": "too few blocks are free",
    "MARGIN": "too few blocks would stay free",
    "WORST_CASE": "at its longest it does not fit",
    "RESERVED": "at its longest it does not fit beside those that may not be preempted either",
    "BATCH": "the batch runs out first",
    "BATCH_GAP": "with it the gaps of others would be longer than flex requests may make them",
    "PLACE_NEEDED": "one that is not flex needs its place",
    "STEPS_TOO_LONG": "with it the gaps of others are longer than flex requests may make them",
    "END_IS_NEAR": "somebody waits, and a slot will be free soon",
    "PREFILL": "a prefill goes on",
}
BY_NUMBER: Final = {
    WhyPassedOver.Value(f"WHY_PASSED_OVER_{name}"): words for name, words in WORDS.items()
}
NOBODY: Final = "no worker is here"
# Stages that close a worker to whoever it might be; another says why its plans are short.
CLOSING: Final = ("plan", "place")
TOLD_OTHERWISE: Final = (
    WhyPassedOver.WHY_PASSED_OVER_DRAINING,
    WhyPassedOver.WHY_PASSED_OVER_LATE,
)


def reason(over: PassedOver) -> str:
    """Why a stage passed somebody over. A newer leader may know reasons that we do not."""
    words = BY_NUMBER.get(over.why, f"reason {over.why}")
    return f"short plans: {words}" if over.stage == "lease" else words


def states_of(worker: WatchedWorker) -> list[str]:
    """Why nobody joins it, and why its plans are short."""
    said = ["draining"] * worker.is_draining + ["late"] * worker.is_late
    overs = [over for over in worker.passed_over if over.why not in TOLD_OTHERWISE]
    return [*dict.fromkeys([*said, *map(reason, overs)])]


def takes_more(worker: WatchedWorker) -> bool:
    """Nothing keeps others from joining it."""
    is_open = not (worker.is_draining or worker.is_late)
    return is_open and all(over.stage not in CLOSING for over in worker.passed_over)


def trouble(core: LiveCore) -> str:
    """Why nobody who comes now is computed, be it that nobody has come; empty: nothing is known."""
    if not core.workers:
        return NOBODY
    said = [_why_stuck(worker) for worker in core.workers.values()]
    return ", ".join(dict.fromkeys(said)) if all(said) else ""


def _why_stuck(worker: WatchedWorker) -> str:
    if worker.is_draining:
        return WORDS["DRAINING"]
    return WORDS["LATE"] if worker.is_late else ""


def closed(core: LiveCore) -> str:
    """Why nobody can join any worker, as far as it is no one sequence's reason; empty: it is."""
    if not core.workers:
        return NOBODY
    if any(map(takes_more, core.workers.values())):
        return ""
    words = [each for worker in core.workers.values() for each in _closing(worker)]
    return ", ".join(dict.fromkeys(words))


def _closing(worker: WatchedWorker) -> list[str]:
    said = [WORDS["DRAINING"]] * worker.is_draining + [WORDS["LATE"]] * worker.is_late
    return said + [reason(over) for over in worker.passed_over if over.stage in CLOSING]


def why_behind(core: LiveCore, one: LiveSequence, position: int) -> str:
    """Of one that waits and of whom nothing is said by itself. `position`: in the queue, from 1."""
    if one.place.state == SequenceState.SEQUENCE_STATE_FORKING:
        return "forks from its first choice"
    behind = "behind those before it" if position > 1 else "its turn has not come"
    return closed(core) or behind
