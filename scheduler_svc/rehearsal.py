"""What a policy would make of a burst: the core itself, beside a worker that only says so.

Every decision is the core's. What a step takes is what steps with as many rows and prompt tokens
took on a real worker (`core.cost`), so time is as good as that fit; what passes between two steps
is what the caller says.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from scheduler_svc.core.commands import Configured, MakePlan, StepDone, Submit, WorkerJoined
from scheduler_svc.core.cost import StepCost
from scheduler_svc.core.policy.presets import RULES
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Reason, Request, Rules, StepResult, WorkerSpec
from scheduler_svc.core.workers import Flight, Worker
from scheduler_svc.live_steps import PlanNote, StepNote, note_of, step_of
from service_kit.errors import InvalidRequest

REQUESTS_MAX: Final = 256
TOKENS_MAX: Final = 16_384
BETWEEN_US_MAX: Final = 1_000_000
ARRIVED_US_MAX: Final = 3_600_000_000
WORKER: Final = "rehearsal"
NS_PER_US: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedAsk:
    """One request of the burst; it arrives so long after the first."""

    arrived_us: int
    num_prompt_tokens: int
    num_output_tokens: int


def asks_from_proto(request: Any) -> list[RehearsedAsk]:
    """InvalidRequest names what is wrong."""
    asks = [
        RehearsedAsk(
            arrived_us=each.arrived_us,
            num_prompt_tokens=each.num_prompt_tokens,
            num_output_tokens=each.num_output_tokens,
        )
        for each in request.requests
    ]
    if not 1 <= len(asks) <= REQUESTS_MAX:
        raise InvalidRequest("requests", f"must be 1 to {REQUESTS_MAX}, got {len(asks)}")
    if any(min(ask.num_prompt_tokens, ask.num_output_tokens) < 1 for ask in asks):
        raise InvalidRequest("requests", "must have a token of prompt and of output each")
    if request.between_us > BETWEEN_US_MAX:
        rule = f"must be at most {BETWEEN_US_MAX}, got {request.between_us}"
        raise InvalidRequest("between_us", rule)
    tokens = sum(ask.num_prompt_tokens + ask.num_output_tokens for ask in asks)
    if tokens > TOKENS_MAX:
        raise InvalidRequest("requests", f"must have at most {TOKENS_MAX} tokens, got {tokens}")
    arrivals = [ask.arrived_us for ask in asks]
    if arrivals != sorted(arrivals):
        raise InvalidRequest("requests", "must be in the order in which they arrive")
    if arrivals[-1] > ARRIVED_US_MAX:
        rule = f"must arrive within {ARRIVED_US_MAX} us, got {arrivals[-1]}"
        raise InvalidRequest("requests", rule)
    return asks


def configured_for(now: Configured, policy: str) -> Configured:
    """Of another policy by its own rules, everything else as it is; empty: as it is."""
    if not policy:
        return now
    if policy not in RULES:
        raise InvalidRequest("policy", f"must be one of {', '.join(RULES)}, got {policy[:64]!r}")
    return replace(now, policy=policy, rules=Rules())


def rehearse(
    configured: Configured,
    spec: WorkerSpec,
    cost: StepCost,
    asks: Sequence[RehearsedAsk],
    between_us: int = 0,
) -> list[StepNote]:
    """All its steps, in order. Pure, and over when every request is."""
    core, notes = Scheduler(), list[StepNote]()
    # A row has one token a step: how many would be guessed right nobody knows.
    alone = WorkerJoined(worker_id=WORKER, spec=replace(spec, slot_tokens_max=1))
    for command in (configured, alone):
        core.apply(command, 0)
    worker, arriving, now_ns = core.workers[WORKER], deque(_requests(spec, asks)), 0
    plans: dict[int, PlanNote] = {}
    counts = worker.kv.counts
    while True:
        while arriving and arriving[0].arrived_ns <= now_ns:
            core.apply(Submit(request=arriving.popleft()), now_ns)
        while (made := core.apply(MakePlan(worker_id=WORKER), now_ns)).plan is not None:
            plans[made.plan.plan_id] = note_of(worker, made.plan, made.passed_over, counts)
            counts = worker.kv.counts
        if (flight := _next(worker)) is None:
            if not arriving:
                return notes
            now_ns = arriving[0].arrived_ns
            continue
        result = _step(flight, cost)
        now_ns += (result.step_us + between_us) * NS_PER_US
        note = step_of(flight, result, plans[flight.plan_id], now_ns)
        core.apply(StepDone(result=result), now_ns)
        # The last plan only says who leaves.
        if result.slots or note.chunks:
            notes.append(note)


def _requests(spec: WorkerSpec, asks: Sequence[RehearsedAsk]) -> list[Request]:
    """No two prompts have a beginning in common, as far as the vocabulary allows."""
    return [
        Request(
            id=str(number),
            sequence_id=number,
            prompt=(number % spec.vocab_size,) * ask.num_prompt_tokens,
            max_tokens=ask.num_output_tokens,
            arrived_ns=ask.arrived_us * NS_PER_US,
        )
        for number, ask in enumerate(asks, 1)
    ]


def _next(worker: Worker) -> Flight | None:
    """Whose step is next: a newer plan takes over behind a step of the older one."""
    flights = worker.flights
    if not flights:
        return None
    return flights[1] if len(flights) > 1 and flights[0].answered else flights[0]


def _step(flight: Flight, cost: StepCost) -> StepResult:
    """As a worker would answer it."""
    slots = tuple(sorted(flight.sampling))
    chunks = flight.chunks if not flight.answered else {}
    sequences = {slot: flight.members[slot].sequence for slot in slots}
    finished = {
        slot: Reason.LENGTH
        for slot, sequence in sequences.items()
        if len(sequence.tokens) + 1 >= sequence.tokens_max
    }
    decodes = len(flight.sampling - chunks.keys())
    step_us = cost.decode_us(decodes) + cost.prefill_us(sum(chunks.values()))
    step = flight.answered
    return StepResult(
        worker_id=WORKER,
        plan_id=flight.plan_id,
        step=step,
        slots=slots,
        tokens=(0,) * len(slots),
        finished=finished,
        is_last=step + 1 >= flight.lease_steps or not flight.sampling - finished.keys(),
        step_us=max(1, step_us),
    )
