"""Every rule by itself, and every combination that is refused."""

from typing import Any

import pytest

from scheduler_svc.core.outcome import Why
from scheduler_svc.core.policy import admission, cadence, mix
from scheduler_svc.core.policy.cadence import LeaseView, QueueView
from scheduler_svc.core.policy.mix import MixView, StepShares
from scheduler_svc.core.policy.presets import PRESETS, RULES, policy_of
from scheduler_svc.core.policy.rules import REFUSED, TABLES
from scheduler_svc.core.types import Config, Rules
from tests.support.combinations import (
    CHOICES,
    WRITTEN,
    allowed,
    covering,
    found,
    is_allowed,
    merged,
    pairs_of,
)
from tests.unit.scheduler_svc.test_core_values import view


def sharing(
    *gaps: int, decodes: int = 2, budget: int = 10, alone: int = 16, minimum: int = 2
) -> MixView:
    return MixView(gaps=gaps, decodes=decodes, budget=budget, budget_alone=alone, minimum=minimum)


@pytest.mark.parametrize(
    ("step", "counts"),
    [
        (sharing(30), [10]),
        (sharing(30, 30), [5, 5]),
        (sharing(30, 3), [5, 3]),
        (sharing(30, 30, 30, 30), [4, 2, 2, 2]),
        (sharing(30, 30, budget=1, minimum=0), [1, 0]),
        (sharing(30, 30, 30, budget=2, minimum=0), [1, 1, 0]),
    ],
)
def test_chunks_leave_half_to_those_behind(step: MixView, counts: list[int]) -> None:
    assert mix.chunked(step) == StepShares(counts)


@pytest.mark.parametrize(
    ("step", "shares"),
    [
        (sharing(4, 5, 1), StepShares([4, 5, 1])),
        (sharing(4, 7, 5), StepShares([4, 0, 5])),
        (sharing(12, 3, 2), StepShares([12, 3, 0], decodes_wait=True)),
        (sharing(12, decodes=0, budget=16), StepShares([12])),
        (sharing(17, 3), StepShares([10, 0])),
    ],
)
def test_whole_prompts_are_cut_only_beyond_a_whole_step(step: MixView, shares: StepShares) -> None:
    assert mix.merged_prefill(step) == shares


@pytest.mark.parametrize(
    ("step", "shares"),
    [
        (sharing(4), StepShares([4], decodes_wait=True)),
        (sharing(4, 20, 3), StepShares([4, 12, 0], decodes_wait=True)),
        (sharing(4, decodes=0, budget=16), StepShares([4])),
    ],
)
def test_prefill_first_has_the_whole_step(step: MixView, shares: StepShares) -> None:
    assert mix.prefill_first(step) == shares


def queue(waiting: int = 1, running: int = 4, since: int = 0) -> QueueView:
    return QueueView(waiting=waiting, running=running, steps_since_join=since)


@pytest.mark.parametrize(
    ("seen", "knobs", "looks"),
    [
        (queue(since=2), (3, None, None), False),
        (queue(since=3), (3, None, None), True),
        (queue(waiting=6, since=9), (1, 1500, None), False),
        (queue(waiting=7, since=1), (1, 1500, None), True),
        (queue(waiting=7, since=1), (2, 1500, None), False),
        (queue(waiting=1, since=4), (1, 1500, 5), False),
        (queue(waiting=1, since=5), (1, 1500, 5), True),
    ],
)
def test_an_interval_ends_by_steps_or_by_a_long_queue(
    seen: QueueView, knobs: tuple[int, int | None, int | None], looks: bool
) -> None:
    steps, permille, most = knobs
    found = cadence.interval(seen, steps=steps, served_permille=permille, steps_max=most)
    assert found is looks


@pytest.mark.parametrize(
    ("waiting", "steps_to_end", "in_flight", "steps"),
    [(1, 6, 2, 5), (1, 6, 1, 6), (1, 6, 3, 4), (1, 1, 3, 1), (1, 20, 2, 8), (0, 1, 2, 8)],
)
def test_leases(waiting: int, steps_to_end: int, in_flight: int, steps: int) -> None:
    lease = LeaseView(
        waiting=waiting,
        steps_to_end=steps_to_end,
        plans_in_flight_max=in_flight,
        lease_steps_max=8,
    )
    assert cadence.until_an_end_is_near(lease) == steps
    assert cadence.one_step(lease) == 1


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (view(blocks_worst=6, worst_case_need=1), None),
        (view(blocks_worst=6, worst_case_need=2), Why.WORST_CASE),
        (view(blocks_worst=7, worst_case_need=1), Why.WORST_CASE),
    ],
)
def test_nobody_is_evicted_where_the_worst_case_is_reserved(candidate: Any, why: Why) -> None:
    assert admission.guaranteed_no_evict(candidate) is why


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (view(blocks_free=8), None),
        (view(blocks_free=7), Why.MARGIN),
        (view(blocks_free=4), Why.BLOCKS),
        (view(blocks_free=4, running=0, joining=0), None),
    ],
)
def test_a_margin_stays_free(candidate: Any, why: Why) -> None:
    assert admission.safety_margin(candidate, permille=200) is why


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (view(steps_to_batch_end=5), None),
        (view(steps_to_batch_end=4), Why.BATCH),
        (view(steps_to_batch_end=4, priority=2), Why.BATCH),
        (view(steps_to_batch_end=4, priority=3), None),
        (view(steps_to_batch_end=4, running=0), None),
        (view(steps_to_batch_end=5, blocks_free=6), Why.BLOCKS),
    ],
)
def test_a_batch_that_is_about_to_end_is_waited_for(candidate: Any, why: Why) -> None:
    assert admission.wait_for_batch_end(candidate, steps=4, priority=2) is why


# By sentence, knobs of which only that is wrong.
WRONG: dict[str, dict[str, Any]] = {
    "under --cadence interval: choose that": {"schedule_interval_steps": 3},
    "--cadence interval needs": {"cadence": "interval"},
    "keeps the queue waiting: give a ratio too": {
        "cadence": "interval",
        "schedule_interval_steps": 2,
        "waiting_steps_max": 9,
    },
    "before which nobody joins": {
        "cadence": "interval",
        "schedule_interval_steps": 9,
        "waiting_served_permille": 1200,
        "waiting_steps_max": 8,
    },
    "an empty batch only": {
        "cadence": "interval",
        "schedule_interval_steps": 2,
        "admission": "when_empty",
    },
    "a batch runs out first": {"admission": "when_empty", "wait_ns_max": 1},
    "give both, or neither": {"long_prefill_tokens": 100},
    "how large the chunks of --mix chunked are": {"mix": "merged_prefill", "itl_target_us": 5000},
    "is less than 1: no step is so short": {"itl_target_us": 999},
    "batches would stand still": {"batch_gap_us": 999},
    "count under fair orders only": {"order": "priority", "tenant_weights": (("a", 2),)},
}


def test_the_table_of_refusals_is_tested_whole() -> None:
    assert len(WRONG) == len(REFUSED)


@pytest.mark.parametrize("said", WRONG)
def test_a_combination_that_makes_no_sense_is_refused(said: str) -> None:
    rules = {name: value for name, value in WRONG[said].items() if name in TABLES}
    values = {name: value for name, value in WRONG[said].items() if name not in TABLES}
    chosen = policy_of("fcfs", Rules(), Config())
    assert chosen.mix is mix.chunked
    with pytest.raises(ValueError, match=said):
        policy_of("fcfs", Rules(**rules), Config(**values))
    full = policy_rules(rules)
    fitting = [refusal for refusal in REFUSED if refusal.applies(full, Config(**values))]
    assert len(fitting) == 1


def policy_rules(rules: dict[str, str]) -> Rules:
    return Rules(**({kind: getattr(RULES["fcfs"], kind) for kind in TABLES} | rules))


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("mix", "merged", "--mix merged: choose one of chunked, merged_prefill, prefill_first"),
        ("mix", "chunked:3", "--mix chunked:3: too many arguments; write chunked"),
        ("admission", "safety_margin", "an argument is missing; write safety_margin:SHARE"),
        ("admission", "safety_margin:2", "2 is not a share between 0 and 1"),
        ("admission", "safety_margin:x", "'x' is not a number"),
        ("admission", "safety_margin:nan", "nan"),
        ("admission", "wait_for_batch_end:-1", "'-1' is not a whole number"),
        ("order", "fair:oldest", "'oldest' is none of fcfs, priority, shortest"),
        ("order", "fcfs:a:b", "too many arguments"),
    ],
)
def test_a_rule_that_there_is_not_is_refused(kind: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"--{kind} {text}") as caught:
        policy_of("fair", Rules(**{kind: text}), Config())
    assert said in str(caught.value)


def test_every_rule_is_among_the_combinations() -> None:
    chosen = {kind: set[str]() for kind in TABLES}
    for knobs in covering():
        for kind in TABLES:
            if kind in knobs:
                chosen[kind].add(knobs[kind].partition(":")[0])
    chosen["placement"].add("even_share")
    assert chosen == {kind: set(table) for kind, table in TABLES.items()}


def test_the_combinations_are_those_written_down(request: pytest.FixtureRequest) -> None:
    """Whoever adds a rule: `pytest tests/unit/scheduler_svc/test_core_rules.py --rewrite`."""
    lines = "".join(" ".join(map(str, chosen.values())) + "\n" for chosen in found())
    if request.config.getoption("--rewrite"):
        WRITTEN.write_text(lines)
    assert WRITTEN.read_text() == lines


def test_the_combinations_have_every_pair_that_is_allowed() -> None:
    every = allowed()
    possible = set().union(*map(pairs_of, every))
    few = list(covering())
    assert len(few) < 60 < len(every)
    kept = [chosen for chosen in every if merged(chosen) in few]
    assert set().union(*map(pairs_of, kept)) == possible
    refused = sum(len(a) * len(b) for a, b in _pairs_of_lists()) - len(possible)
    # when_empty with two intervals, and with a promise.
    assert refused == 3


def _pairs_of_lists() -> list[tuple[Any, Any]]:
    lists = list(CHOICES.values())
    return [(a, b) for index, a in enumerate(lists) for b in lists[index + 1 :]]


def test_presets_are_allowed() -> None:
    for preset in PRESETS.values():
        policy_of(preset.policy, preset.rules, Config(**preset.values))
        assert preset.why
    assert is_allowed({})
