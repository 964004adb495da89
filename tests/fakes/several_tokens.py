"""A worker whose steps give a row several tokens, as one that verifies drafts would.

Everything else of the process is the real one: after a step's own token, a row that decodes is run
again until it has as many as `tokens_given` says, and all of it is reported as one step.
"""

from collections.abc import Collection
from functools import partial

import numpy as np

from gpu_worker.batch.plans import Description, Plan, StepOutcome, StepTimings
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import IntArray, ModelRunner
from gpu_worker.runner import engine
from gpu_worker.runner.stepping import InTurns
from gpu_worker.service import wire
from kaiten.v1 import common_pb2, worker_service_pb2
from tests.fakes.model_worker import tokens_given


def give_several(most: int) -> None:
    """From now on a step of this process gives a row up to `most` tokens, and it says so."""
    describe, read = wire.description_to_proto, wire.plan_from_proto

    def describe_several(description: Description) -> common_pb2.WorkerDescription:
        message = describe(description)
        message.capabilities.slot_tokens_max = most
        return message

    def read_several(message: worker_service_pb2.Plan) -> Plan:
        assert (message.slot_tokens_least, message.slot_tokens_most) == (1, most)
        message.ClearField("slot_tokens_least")
        message.ClearField("slot_tokens_most")
        return read(message)

    wire.description_to_proto = describe_several
    wire.plan_from_proto = read_several
    vars(engine)["InTurns"] = partial(SeveralTokens, most=most)


class SeveralTokens(InTurns):
    """Steps that go on, row by row, where a draft was right."""

    def __init__(self, rows: Rows, device: ModelRunner, *, most: int) -> None:
        super().__init__(rows, device)
        self._most = most

    def _step(
        self, counts: IntArray, chunked: Collection[int] = (), *, wait_us: int
    ) -> tuple[StepOutcome, StepTimings]:
        left = self._drafts(counts)
        outcome, timings = super()._step(counts, chunked, wait_us=wait_us)
        outcomes = [outcome]
        while True:
            again = self._rows.steady_counts()
            again[left == 0] = 0
            if not again.any():
                return _merged(outcomes), timings
            left -= again
            outcomes.append(super()._step(again, wait_us=0)[0])

    def _drafts(self, counts: IntArray) -> IntArray:
        """Tokens that each slot is given beside its first. Blocks are there for the most."""
        rows, columns = self._rows, self._rows._columns
        decodes = np.flatnonzero(self._rows.steady_counts() & (counts == 1))
        left = np.zeros_like(counts)
        for slot in decodes.tolist():
            known, limit = int(columns.num_tokens[slot]), int(columns.limit[slot])
            position = known - int(rows._prompt[slot])
            most = min(self._most, limit - known)
            places = len(rows.blocks(slot)) * rows.limits.block_size
            assert places >= known - 1 + most, f"slot {slot}: {places} places at {known} tokens"
            left[slot] = tokens_given(int(columns.sequence_id[slot]), position, most) - 1
        return left


def _merged(outcomes: list[StepOutcome]) -> StepOutcome:
    """One outcome, slot after slot; a slot stands there once per token."""
    first = outcomes[0]
    tokens = [pair for one in outcomes for pair in zip(one.slots, one.token_ids, strict=True)]
    order = {slot: index for index, slot in enumerate(first.slots)}
    tokens.sort(key=lambda pair: order[pair[0]])
    logprobs = [row for one in outcomes for row in one.logprobs]
    return StepOutcome(
        slots=tuple(slot for slot, _ in tokens),
        token_ids=tuple(token for _, token in tokens),
        logprobs=tuple(sorted(logprobs, key=lambda row: order[row.slot])),
        finished=tuple(end for one in outcomes for end in one.finished),
        errors=tuple(error for one in outcomes for error in one.errors),
        unsatisfiable=tuple(slot for one in outcomes for slot in one.unsatisfiable),
        prompt_logprobs=first.prompt_logprobs,
    )
