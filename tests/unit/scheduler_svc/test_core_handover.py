"""What a core has learned by deciding goes on with the core after it."""

from scheduler_svc.core.commands import HandedOver
from scheduler_svc.core.handover import SEQUENCES_MAX, TENANTS_MAX
from scheduler_svc.core.types import Handover, Reason, SequencePast
from tests.support.cell import Cell, spec

TURNS_MAX = 200


def die_with(cell: Cell, poison: int, *, deaths_max: int, is_told: bool) -> int:
    """Workers die at the first step with the poison in the batch, leaders after each; how many."""
    for death in range(deaths_max):
        cell.join(f"w{death}", spec())
        for _ in range(TURNS_MAX):
            cell.plan(f"w{death}")
            if poison in cell.running(f"w{death}"):
                break
            cell.turn()
        cell.kill(f"w{death}")
        if poison in cell.endings:
            return death + 1
        cell.lead_anew(is_told=is_told)
    return deaths_max


def test_a_request_that_kills_has_no_new_workers_with_a_new_leader() -> None:
    cell = Cell()
    innocents = [cell.submit(3, 6) for _ in range(3)]
    poison = cell.submit(3, 6)
    assert die_with(cell, poison, deaths_max=6, is_told=True) == 3
    assert cell.reason(poison) is Reason.ERROR
    cell.join("last", spec())
    cell.finish()
    assert all(cell.reason(one) is Reason.LENGTH for one in innocents)


def test_who_lost_more_workers_than_the_next_leader_allows_is_tried_once_more() -> None:
    """Seen: it waited for a verdict on workers of which nobody knew."""
    cell = Cell(spec(), deaths_max=1)
    one = cell.submit(3, 6)
    past = SequencePast(sequence_id=one, num_preemptions=0, deaths=3, furthest=2)
    cell.apply(HandedOver(handover=Handover(sequences=(past,))))
    cell.finish()
    assert cell.reason(one) is Reason.LENGTH


def test_untold_it_would_have_them_all() -> None:
    cell = Cell()
    poison = cell.submit(3, 6)
    assert die_with(cell, poison, deaths_max=6, is_told=False) == 6


def test_only_further_than_ever_clears_a_record_of_the_leader_before() -> None:
    cell = Cell(spec(step_tokens=12, slots=2))
    sequence_id = cell.submit(40, 5)
    cell.turns(4)
    computed = cell.sequence(sequence_id).num_computed_tokens
    assert computed >= 20, "some way into its prompt"
    cell.kill("w1")
    cell.lead_anew()
    cell.join("w2", spec(step_tokens=12, slots=2))
    while cell.scheduler.handover().sequences:
        assert cell.scheduler.handover().sequences[0].deaths == 1
        reached = cell.sequence(sequence_id, "w2").num_computed_tokens if cell.running("w2") else 0
        assert reached <= computed
        cell.turn()
    assert cell.sequence(sequence_id, "w2").num_computed_tokens > computed
    cell.finish()


def test_who_was_preempted_too_often_is_given_way_to_by_the_next_leader_too() -> None:
    cell = Cell(spec(blocks=7, slots=2))
    cell.submit(8, 12)
    cell.submit(8, 12)
    while not (pasts := cell.scheduler.handover().sequences):
        cell.turn()
    assert [past.num_preemptions for past in pasts] == [1]
    cell.lead_anew()
    assert cell.scheduler.handover().sequences == pasts
    cell.finish()
    assert sum(over.num_preemptions for over in cell.overs.values()) >= pasts[0].num_preemptions


def test_a_tenant_that_was_served_more_waits_for_the_others_after_a_leader_too() -> None:
    cell = Cell(spec(slots=1), policy="fair")
    cell.submit(30, 20, tenant="greedy")
    cell.turns(8)
    greedy = cell.submit(30, 20, tenant="greedy")
    modest = [cell.submit(3, 2, tenant="modest") for _ in range(2)]
    order = cell.waiting()
    assert order.index(greedy) == 2
    cell.lead_anew()
    # The one that ran waits again, as one of its tenant's.
    assert cell.waiting()[:2] == modest
    cell.finish()


def test_a_tenant_without_requests_is_remembered_until_it_comes_back() -> None:
    cell = Cell(spec(slots=1), policy="fair")
    cell.apply(HandedOver(handover=Handover(tenants=(("away", 100), ("here", 1)))))
    assert cell.scheduler.handover().tenants == (("away", 100), ("here", 1))
    away, here = cell.submit(3, 2, tenant="away"), cell.submit(3, 2, tenant="here")
    assert cell.waiting() == [here, away]
    cell.finish()


def test_what_is_over_is_forgotten_and_strangers_are_passed_over() -> None:
    cell = Cell(spec())
    over, live = cell.submit(3, 1), cell.submit(3, 8)
    while over not in cell.endings:
        cell.turn()
    pasts = tuple(
        SequencePast(sequence_id=one, num_preemptions=1, deaths=1, furthest=9)
        for one in (over, live, 99)
    )
    cell.apply(HandedOver(handover=Handover(sequences=pasts)))
    assert cell.scheduler.handover().sequences == (pasts[1],)
    cell.finish()
    assert cell.scheduler.handover().sequences == ()


def test_what_is_told_is_bounded_and_the_dangerous_come_first() -> None:
    cell = Cell()
    first = cell.submit(1, 1, n=SEQUENCES_MAX + 5)
    last = first + SEQUENCES_MAX + 4
    pasts = tuple(
        SequencePast(sequence_id=one, num_preemptions=1, deaths=int(one == last), furthest=0)
        for one in range(first, last + 1)
    )
    tenants = tuple((f"t{i}", i + 1) for i in range(TENANTS_MAX + 5))
    cell.apply(HandedOver(handover=Handover(sequences=pasts, tenants=tenants)))
    told = cell.scheduler.handover()
    assert len(told.sequences) == SEQUENCES_MAX
    assert [past.sequence_id for past in told.sequences[:2]] == [last, first]
    assert len(told.tenants) == TENANTS_MAX
    assert told.tenants[0] == (f"t{TENANTS_MAX + 4}", TENANTS_MAX + 5)


def test_output_of_the_leader_before_is_no_cached_prompt() -> None:
    """Two that say the same go on: what the first computes of it anew is cached for the second."""
    cell = Cell(spec(slots=1))
    outputs = (tuple(range(1, 21)),)
    cell.submit((5,) * 6, 22, outputs=outputs)
    second = cell.submit((5,) * 6, 22, outputs=outputs)
    while second not in cell.overs:
        cell.turn()
    assert cell.overs[second].num_cached_tokens == 6
