"""A burst that is only played: the core decides as ever, and steps take what they took."""

from collections import Counter

import pytest

from kaiten.v1.scheduler_service_pb2 import RehearsedRequest, RehearseRequest
from scheduler_svc.core.commands import Configured
from scheduler_svc.core.cost import StepCost
from scheduler_svc.core.types import Config, Rules
from scheduler_svc.live_steps import StepNote
from scheduler_svc.rehearsal import (
    REQUESTS_MAX,
    TOKENS_MAX,
    RehearsedAsk,
    asks_from_proto,
    configured_for,
    rehearse,
)
from service_kit.errors import InvalidRequest
from tests.support.cell import Cell, spec

LENGTHS = (10, 20, 50, 100, 40, 30, 60, 20)
SLOTS = 4
ONE_STEP_A_PLAN = Config(lease_steps_max=1)


def cost_of(decode_us: int, prefill_us: int) -> StepCost:
    """A step of any number of rows, and beyond that a prompt token, take so long."""
    cost = StepCost()
    for rows in (1, 2, 4, 8):
        cost.observe(decode_us, decodes=rows, prompt_tokens=0)
    cost.observe(100 * prefill_us, decodes=0, prompt_tokens=100)
    return cost


def burst(lengths: tuple[int, ...] = LENGTHS, prompt: int = 3) -> list[RehearsedAsk]:
    return [
        RehearsedAsk(arrived_us=0, num_prompt_tokens=prompt, num_output_tokens=length)
        for length in lengths
    ]


def played(policy: str, asks: list[RehearsedAsk]) -> list[StepNote]:
    configured = Configured(config=Config(), policy=policy)
    return rehearse(configured, spec(slots=SLOTS), cost_of(1000, 10), asks)


def outputs(notes: list[StepNote]) -> Counter[int]:
    """Tokens by sequence id."""
    return Counter(
        note.members[slot].sequence.sequence_id for note in notes for slot in note.result.slots
    )


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority", "static"])
def test_everybody_gets_all_of_their_tokens(policy: str) -> None:
    notes = played(policy, burst())
    assert outputs(notes) == dict(enumerate(LENGTHS, 1))
    ended = [slot for note in notes for slot in note.result.finished]
    assert len(ended) == len(LENGTHS)


def test_a_static_batch_takes_as_long_as_its_longest() -> None:
    """Four slots, twice; the longest have 100 and 60 tokens."""
    static, continuous = played("static", burst()), played("fcfs", burst())
    assert len(static) == 100 + 60
    # The seventh takes the slot of the third after 50 steps.
    assert 50 + 60 <= len(continuous) < 120
    assert static[-1].answered_ns > continuous[-1].answered_ns


def test_a_step_takes_what_such_steps_took() -> None:
    """Three requests of three tokens of prompt: one step of 9 tokens, then those that decode."""
    notes = played("fcfs", burst((2, 3, 3)))
    assert [note.result.step_us for note in notes] == [90, 1000, 1000]
    assert notes[-1].answered_ns == 2_090_000


def test_what_passes_between_steps_passes_between_all_of_them() -> None:
    configured = Configured(config=Config(), policy="fcfs")
    asks, cost = burst((2, 3, 3)), cost_of(1000, 10)
    notes = rehearse(configured, spec(slots=SLOTS), cost, asks, between_us=500)
    assert [note.answered_ns for note in notes] == [590_000, 2_090_000, 3_590_000]


def test_nobody_is_there_before_they_arrive() -> None:
    late = RehearsedAsk(arrived_us=500_000, num_prompt_tokens=3, num_output_tokens=2)
    notes = played("fcfs", [*burst((2,)), late])
    second = [
        note
        for note in notes
        if any(one.sequence.sequence_id == 2 for one in note.members.values()) and note.result.slots
    ]
    assert second[0].answered_ns >= 500_000_000


def test_it_decides_as_the_core_does_for_a_real_worker() -> None:
    """The same burst by the model worker of the core's own tests: who was where at every step."""
    cell = Cell(spec(slots=SLOTS))
    for number, length in enumerate(LENGTHS, 1):
        assert cell.submit((number,) * 3, length) == number
    there: list[dict[int, int]] = []
    while cell.scheduler.live_count:
        cell.now_ns += 1
        while cell.plan() is not None:
            pass
        result = cell.compute()
        (flight,) = [each for each in cell.worker().flights if each.plan_id == result.plan_id]
        there.append({s: flight.members[s].sequence.sequence_id for s in result.slots})
        cell.commit(result)
    notes = rehearse(cell.configured, spec(slots=SLOTS), cost_of(1000, 10), burst())
    assert [
        {slot: note.members[slot].sequence.sequence_id for slot in note.result.slots}
        for note in notes[: len(there)]
    ] == there


def test_what_cannot_be_played_is_refused() -> None:
    def refused(*requests: RehearsedRequest, between_us: int = 0) -> str:
        with pytest.raises(InvalidRequest) as told:
            asks_from_proto(RehearseRequest(requests=requests, between_us=between_us))
        return str(told.value)

    one = RehearsedRequest(num_prompt_tokens=1, num_output_tokens=1)
    later = RehearsedRequest(arrived_us=1, num_prompt_tokens=1, num_output_tokens=1)
    assert f"1 to {REQUESTS_MAX}" in refused()
    assert f"got {REQUESTS_MAX + 1}" in refused(*[one] * (REQUESTS_MAX + 1))
    assert "a token of prompt" in refused(RehearsedRequest(num_prompt_tokens=1))
    long = RehearsedRequest(num_prompt_tokens=1, num_output_tokens=TOKENS_MAX)
    assert f"at most {TOKENS_MAX}" in refused(long)
    assert "in the order" in refused(later, one)
    assert "at most 1000000" in refused(one, between_us=1_000_001)
    late = RehearsedRequest(arrived_us=1 << 63, num_prompt_tokens=1, num_output_tokens=1)
    assert "must arrive within 3600000000 us" in refused(one, late)
    assert len(asks_from_proto(RehearseRequest(requests=[one, later]))) == 2


def test_another_policy_has_its_own_rules() -> None:
    now = Configured(config=ONE_STEP_A_PLAN, policy="fair", rules=Rules(mix="chunked"))
    assert configured_for(now, "") is now
    static = configured_for(now, "static")
    assert (static.policy, static.rules, static.config) == ("static", Rules(), ONE_STEP_A_PLAN)
    with pytest.raises(InvalidRequest, match="must be one of"):
        configured_for(now, "fastest")
