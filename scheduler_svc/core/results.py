"""A step result against its plan: first checked, then booked. What is not believed changes nothing.

A row of a result counts only while the residency that the plan was made for lasts: what was
computed for a sequence that has left meanwhile never happened.
"""

from itertools import compress

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.outcome import Event, StepTokens
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.types import Reason, ResultRejected, SequenceId, SlotIndex, StepResult
from scheduler_svc.core.workers import Flight, Worker

# Checks. Each raises ResultRejected.


def check_result(worker: Worker, result: StepResult) -> Flight:
    """The in-flight plan that the result belongs to, and is in all points an answer to."""
    flight = _expected_flight(worker, result)
    _check_slots(flight, result)
    _check_counts(worker, flight, result)
    _check_tokens(worker, result)
    _check_ends(worker, flight, result)
    _check_prompt_logprobs(flight, result)
    return flight


def _expected_flight(worker: Worker, result: StepResult) -> Flight:
    for flight in worker.flights:
        if flight.plan_id == result.plan_id and flight.answered == result.step:
            return flight
        if flight.plan_id == result.plan_id or flight.answered == 0:
            break
    raise ResultRejected(f"plan {result.plan_id} step {result.step} is out of sequence")


def _check_slots(flight: Flight, result: StepResult) -> None:
    """Every slot that is to sample has a token or an error, once, and no other has one."""
    answered = set(result.slots)
    if len(result.slots) != len(answered):
        raise ResultRejected(f"plan {result.plan_id}: slots repeated")
    if answered & result.errors.keys() or not result.finished.keys() <= answered:
        raise ResultRejected(
            f"plan {result.plan_id}: a slot both failed and sampled, or ended unsampled"
        )
    computing = flight.sampling if flight.answered else flight.sampling | flight.chunks.keys()
    extra = result.errors.keys() - computing
    if extra or answered | (result.errors.keys() & flight.sampling) != flight.sampling:
        raise ResultRejected(
            f"plan {result.plan_id} step {result.step}: slots {sorted(answered)} answered, "
            f"{sorted(flight.sampling)} expected"
        )


def _check_counts(worker: Worker, flight: Flight, result: StepResult) -> None:
    """A row that decodes is given one token or more, as many as the worker may; any other one."""
    counts = result.token_counts
    if sum(counts) != len(result.tokens) if counts else len(result.slots) != len(result.tokens):
        raise ResultRejected(f"plan {result.plan_id}: slots without a token, or tokens left over")
    if len(counts) not in (0, len(result.slots)):
        raise ResultRejected(f"plan {result.plan_id}: {len(counts)} token counts, not one per slot")
    for slot, count in zip(result.slots, counts, strict=False):
        most = 1 if result.step == 0 and slot in flight.chunks else worker.spec.slot_tokens_max
        if not 1 <= count <= most:
            raise ResultRejected(f"slot {slot} was given {count} tokens, not 1 to {most}")


def _check_tokens(worker: Worker, result: StepResult) -> None:
    if result.finished and not set(result.finished.values()) <= {Reason.STOP, Reason.LENGTH}:
        raise ResultRejected(f"plan {result.plan_id}: a row ends for stop or length only")
    vocab_size = worker.spec.vocab_size
    if result.tokens and not 0 <= min(result.tokens) <= max(result.tokens) < vocab_size:
        raise ResultRejected(f"plan {result.plan_id}: a token is not in [0, {vocab_size})")


def _check_ends(worker: Worker, flight: Flight, result: StepResult) -> None:
    """A sequence ends for length exactly at its last token."""
    counts = dict(zip(result.slots, result.token_counts, strict=False))
    for slot in dict.fromkeys([*_near_the_end(worker, flight, result), *result.finished]):
        if (sequence := _resident(flight, slot)) is None:
            continue
        count = sequence.num_output_tokens + counts.get(slot, 1)
        left = sequence.tokens_max - sequence.num_prompt_tokens - count
        reason = result.finished.get(slot)
        allowed = (None, Reason.STOP) if left > 0 else (Reason.LENGTH, Reason.STOP)
        if left < 0 or reason not in allowed:
            raise ResultRejected(
                f"sequence {sequence.sequence_id} has {count} output tokens and was reported "
                f"{reason.value if reason else 'running'}"
            )


def _near_the_end(worker: Worker, flight: Flight, result: StepResult) -> list[SlotIndex]:
    """Slots whose last token may be among those that came."""
    if not flight.may_end:
        return []
    members, most = flight.members, worker.spec.slot_tokens_max
    return [
        slot
        for slot in result.slots
        if len((one := members[slot].sequence).tokens) + most >= one.tokens_max
    ]


def _check_prompt_logprobs(flight: Flight, result: StepResult) -> None:
    """Of every chunk exactly the prompt positions whose log-probabilities it was to bring."""
    expected: dict[SlotIndex, range] = {}
    for slot, count in flight.chunks.items() if result.step == 0 else ():
        positions: range | None = None
        if (sequence := _resident(flight, slot)) is None:
            # It never happened, so nobody knows what it had done.
            positions = result.prompt_logprobs.get(slot)
        elif slot not in result.errors:
            positions = sequence.prompt_logprobs_of(count)
        if positions:
            expected[slot] = positions
    if expected != result.prompt_logprobs:
        raise ResultRejected(
            f"plan {result.plan_id}: log-probabilities of prompt positions by slot "
            f"{dict(result.prompt_logprobs)}, {expected} expected"
        )


# Books


def book_result(
    cell: CellState, worker: Worker, flight: Flight, result: StepResult, now_ns: int
) -> tuple[StepTokens, list[Event]]:
    """What a checked result means to the world."""
    prompt_logprobs = _book_chunks(worker, flight, result) if result.step == 0 else {}
    if result.step_us:
        decodes, prompt_tokens = flight.next_step
        worker.cost.observe(result.step_us, decodes=decodes, prompt_tokens=prompt_tokens)
    tokens = _book_tokens(cell, worker, flight, result, now_ns)
    tokens.prompt_logprobs.update(prompt_logprobs)
    worker.advance(flight, {*result.finished, *result.errors}, is_last=result.is_last)
    worker.end_step(result.step_us, now_ns)
    events: list[Event] = []
    finished = {slot: (reason, "") for slot, reason in result.finished.items()}
    for slot, (reason, error) in {**finished, **result.errors}.items():
        if (ended := _resident(flight, slot)) is not None:
            if reason is Reason.ERROR:
                # Only a row's last token shows that its KV, or what it had found, is no numbers:
                # nobody is to find it, or each with the same prefix would fail as well.
                worker.kv.forget(ended.kv)
            cell.finish(ended, reason, now_ns, events, error)
    cell.waiting.settle()
    return tokens, events


def _book_chunks(worker: Worker, flight: Flight, result: StepResult) -> dict[SlotIndex, SequenceId]:
    """Of a chunk that samples, the last token is booked with what it sampled."""
    prompt_logprobs: dict[SlotIndex, SequenceId] = {}
    for slot, count in flight.chunks.items():
        sequence = _resident(flight, slot)
        if sequence is None or slot in result.errors:
            continue
        if slot in result.prompt_logprobs:
            sequence.live.prompt_logprobs_done = result.prompt_logprobs[slot].stop
            prompt_logprobs[slot] = sequence.sequence_id
        sequence.num_uncomputed_tokens -= count - (slot in flight.sampling)
        worker.commit(sequence)
    return prompt_logprobs


def _book_tokens(
    cell: CellState, worker: Worker, flight: Flight, result: StepResult, now_ns: int
) -> StepTokens:
    """Whose they are, and where in the output each stands. All tokens before it are computed."""
    slots, tokens = tuple(result.token_slots), result.tokens
    if is_new := slots != flight.slots or bool(result.token_counts or flight.gone):
        there = [slot not in flight.gone for slot in slots]
        slots, tokens = tuple(compress(slots, there)), tuple(compress(tokens, there))
        flight.slots, flight.sequences = slots, [flight.members[slot].sequence for slot in slots]
        flight.sequence_ids = [sequence.sequence_id for sequence in flight.sequences]
        flight.tenants.clear()
    positions = []
    for sequence, token in zip(flight.sequences, tokens, strict=True):
        computed = len(sequence.tokens)
        sequence.tokens.append(token)
        sequence.num_uncomputed_tokens = 1
        positions.append(computed - sequence.num_prompt_tokens)
        if computed >= sequence.milestone:
            worker.commit(sequence)
        if is_new:
            flight.tenants[sequence.live.tenant] += 1
    for tenant, count in flight.tenants.items():
        tenant.served += count
    for live in [sequence.live for sequence in flight.sequences] if is_new else ():
        if live.first_token_ns is None:
            live.first_token_ns = now_ns
            cell.queue_siblings(live)
    # Of a step that was certain, a row's first token was.
    first = dict.fromkeys(flight.sequences) if result.token_counts else flight.sequences
    for sequence in () if result.step else first:
        sequence.num_tokens_ahead -= 1
    if result.step > 0 or result.token_counts:
        worker.note_finishing()
    return StepTokens(
        slots=slots, sequence_ids=flight.sequence_ids, positions=positions, tokens=tokens
    )


def _resident(flight: Flight, slot: SlotIndex) -> Sequence | None:
    """Who has the slot since the plan was made; None: it has left."""
    return None if slot in flight.gone else flight.members[slot].sequence
