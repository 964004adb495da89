"""Everything the core knows, and the moves of a sequence between queue, batch and end.

The planner decides, results tell, commands ask: whatever the reason, a sequence moves by a method
of `CellState`, so that queue, slots, blocks and state change together.

    waiting ─► admit ─► running ─► retire ─► finish
       ▲                   │
       └───── preempt ◄────┘
"""

from scheduler_svc.core.outcome import Event, Finished, RequestOver
from scheduler_svc.core.policy.presets import policy_of
from scheduler_svc.core.requests import LiveRequest, Sequence, State
from scheduler_svc.core.types import Config, Reason, Rules, SequenceId, SlotIndex
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.workers import Worker


class CellState:
    """One cell: who waits, who runs where, by which rules."""

    def __init__(self) -> None:
        self.config = Config()
        self.policy = policy_of("fair", Rules(), self.config)
        self.waiting = WaitingQueue(self.policy.order)
        self.workers: dict[str, Worker] = {}
        self.live: dict[SequenceId, LiveRequest] = {}
        # Of those, whom none of the workers can hold, each until when it waits for one that can;
        # and until when for any.
        self.misfits: dict[SequenceId, int] = {}
        self.workerless: dict[SequenceId, int] = {}
        # A core that took over may not have met all workers of the one before until then.
        self.grace_until_ns = 0
        self.is_store_behind = False
        # Of those who live, sequences that ever lost their slot before their end.
        self.preempted: dict[SequenceId, Sequence] = {}
        # Workers of which something changed since `concerned` was last asked.
        self._touched: dict[str, None] = {}

    def touch(self, *worker_ids: str) -> None:
        """Something of these workers has changed."""
        self._touched |= dict.fromkeys(worker_ids)

    def concerned(self) -> tuple[str, ...]:
        """Workers that may need a plan for what has changed; of all others it is known that they
        need none. Asked once per command, it costs nothing per sequence.
        """
        touched, self._touched = self._touched, {}
        if self.waiting.num_admissible:
            has_non_flex, workers = self.waiting.has_non_flex, self.workers.values()
            touched |= {w.id: None for w in workers if w.is_open or (w.flex and has_non_flex)}
        return tuple(worker_id for worker_id in touched if worker_id in self.workers)

    def configure(self, config: Config, policy: str, rules: Rules) -> None:
        """Decide by this from now on; nobody is thrown out."""
        self.policy, self.config = policy_of(policy, rules, config), config
        self.waiting.configure(self.policy.order, config)
        self.touch(*self.workers)

    # A sequence moves

    def admit(
        self, worker: Worker, sequence: Sequence, num_computed_tokens: int, now_ns: int
    ) -> SlotIndex:
        """From the queue into a slot; its blocks are allocated."""
        self.waiting.admit(sequence, num_computed_tokens)
        sequence.move(State.RUNNING)
        live = sequence.live
        if live.admitted_ns is None:
            live.admitted_ns = now_ns
            # Output of before this core may be cached too.
            live.num_cached_tokens = min(num_computed_tokens, sequence.num_prompt_tokens)
        return worker.admit(sequence, num_computed_tokens)

    def retire(self, worker: Worker, sequence: Sequence) -> None:
        """Free the slot of a sequence whose last token is certain to come with steps in flight.

        Its blocks are anybody's for the asking (`Worker.reclaim`).
        """
        self._vacate(worker, sequence)
        worker.kv.close(sequence.kv)
        worker.retiring[sequence.sequence_id] = sequence

    def preempt(self, worker: Worker, sequence: Sequence) -> None:
        """From its slot back into the queue; committed tokens stay, KV does not."""
        if sequence.milestone:
            sequence.furthest = max(sequence.furthest, sequence.num_computed_tokens)
        self._release(worker, sequence)
        sequence.move(State.PREEMPTED)
        self.preempted[sequence.sequence_id] = sequence
        self.waiting.add(sequence)

    def queue_siblings(self, live: LiveRequest) -> None:
        """The other choices need not wait for the first one any more."""
        siblings, live.siblings = live.siblings, []
        for sequence in siblings:
            self.waiting.add(sequence)

    def end(
        self, live: LiveRequest, reason: Reason, now_ns: int, events: list[Event], error: str
    ) -> None:
        """End every choice that has not ended."""
        for sequence in live.sequences:
            if sequence.state is not State.FINISHED:
                self.finish(sequence, reason, now_ns, events, error=error)

    def finish(
        self, sequence: Sequence, reason: Reason, now_ns: int, events: list[Event], error: str = ""
    ) -> None:
        """The one way a sequence ends: slot and blocks are free, and its event is out."""
        live = sequence.live
        if sequence.residency is not None:
            self._release(self.workers[sequence.residency.worker_id], sequence)
        elif not self.waiting.remove(sequence) and sequence in live.siblings:
            live.siblings.remove(sequence)
        sequence.move(State.FINISHED)
        self.preempted.pop(sequence.sequence_id, None)
        live.endings[sequence.choice] = ending = Finished(
            sequence_id=sequence.sequence_id,
            reason=reason,
            num_output_tokens=sequence.num_output_tokens,
            error=error,
        )
        events.append(ending)
        if all(s.state is State.FINISHED for s in live.sequences):
            del self.live[live.request.sequence_id]
            for waits in (self.misfits, self.workerless):
                waits.pop(live.request.sequence_id, None)
            num_output_tokens = sum(s.num_output_tokens for s in live.sequences)
            self.waiting.remove_request(live.tenant, num_output_tokens)
            events.append(_over(live, now_ns))
            # Each knows the other: nothing that is over waits for a garbage collector, and no step
            # for it.
            live.sequences = []
        elif sequence.choice == 0 and not live.has_prompt_logprobs:
            # The others would have nobody to bring the prompt's, and it is what failed.
            self.end(live, reason, now_ns, events, error)
        elif sequence.choice == 0:
            self.queue_siblings(live)

    def _release(self, worker: Worker, sequence: Sequence) -> None:
        """The sequence is no longer this worker's: finished, preempted or cancelled."""
        if sequence.sequence_id not in worker.retiring:
            self._vacate(worker, sequence)
        worker.release(sequence)

    def _vacate(self, worker: Worker, sequence: Sequence) -> None:
        self.touch(worker.id)
        worker.vacate(sequence)
        self.waiting.has_left(sequence)

    # Invariants

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken; but for those of a worker alone."""
        self.waiting.check([s for w in self.workers.values() for s in w.running.values()])
        lives, workers = self.live.values(), self.workers.values()
        for live in [one for one in lives if not one.has_prompt_logprobs]:
            assert not any(s.num_output_tokens for s in live.sequences)
        # Each that has not ended is at one place.
        waiting = [s.sequence_id for t in self.waiting.tenants.values() for _, s in t.queue]
        placed = [s.sequence_id for w in workers for s in w.members]
        siblings = [s.sequence_id for live in lives for s in live.siblings]
        sequences = [s for live in lives for s in live.sequences]
        there = [s.sequence_id for s in sequences if s.state is not State.FINISHED]
        assert sorted([*waiting, *placed, *siblings]) == sorted(there)
        assert self.misfits.keys() | self.workerless.keys() <= self.live.keys()
        if not self.live:
            assert not any([self.preempted, waiting, placed])
            assert all(w.kv.free_count == w.kv.block_count for w in self.workers.values())


def _over(live: LiveRequest, now_ns: int) -> RequestOver:
    admitted_ns = live.admitted_ns if live.admitted_ns is not None else now_ns
    first_token_ns = live.first_token_ns if live.first_token_ns is not None else now_ns
    return RequestOver(
        id=live.request.id,
        sequence_id=live.request.sequence_id,
        num_prompt_tokens=len(live.request.prompt),
        num_cached_tokens=live.num_cached_tokens,
        outputs=tuple(tuple(s.tokens[s.num_prompt_tokens :]) for s in live.sequences),
        endings=tuple(live.endings[choice] for choice in sorted(live.endings)),
        queue_ns=max(0, admitted_ns - live.request.arrived_ns),
        prefill_ns=max(0, first_token_ns - admitted_ns),
        decode_ns=max(0, now_ns - first_token_ns),
        num_preemptions=sum(s.num_preemptions for s in live.sequences),
    )
