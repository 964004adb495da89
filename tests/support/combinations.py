"""Combinations of rules that are allowed, such that any two values stand together in some."""

from collections.abc import Mapping
from functools import cache
from heapq import heapify, heapreplace
from itertools import combinations, product
from pathlib import Path
from typing import Any

from scheduler_svc.core.policy.presets import policy_of
from scheduler_svc.core.types import Config, Rules

# By what differs, what may be chosen of it: each choice as knobs of `tests.support.cell.Cell`.
CHOICES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "order": (
        {"order": "fcfs"},
        {"order": "priority", "priority_worth_ns": 20},
        {"order": "shortest", "token_worth_ns": 3},
        {"order": "deadline"},
        {"order": "prefix", "token_worth_ns": 5},
        {"order": "fair", "tenant_weights": (("a", 3), ("b", 1))},
        {"order": "fair:priority"},
        {"order": "fair:prefix"},
    ),
    "victim": ({"victim": "newest"}, {"victim": "largest_tenant"}, {"victim": "least_urgent"}),
    "admission": (
        {"admission": "max_utilization"},
        {"admission": "guaranteed_no_evict"},
        {"admission": "safety_margin:0.2"},
        {"admission": "when_empty"},
        {"admission": "wait_for_batch_end:4"},
    ),
    "mix": (
        {"mix": "chunked"},
        {"mix": "chunked", "itl_target_us": 1000},
        {"mix": "merged_prefill"},
        {"mix": "prefill_first"},
        {"mix": "chunked", "long_prefill_tokens": 8, "long_prefills_max": 1},
        {"mix": "prefill_first", "long_prefill_tokens": 4, "long_prefills_max": 2},
    ),
    "cadence": (
        {"cadence": "on_change"},
        {"cadence": "every_step"},
        {"cadence": "interval", "schedule_interval_steps": 3},
        {"cadence": "interval", "waiting_served_permille": 1500, "waiting_steps_max": 5},
    ),
    "promise": ({}, {"wait_ns_max": 40}),
    "batches": ({}, {"batch_gap_us": 1200}),
}


def split(knobs: Mapping[str, Any]) -> tuple[Rules, dict[str, Any]]:
    """Rules, and values of the config."""
    kinds = set(Rules.__slots__)
    rules = Rules(**{name: value for name, value in knobs.items() if name in kinds})
    return rules, {name: value for name, value in knobs.items() if name not in kinds}


def is_allowed(knobs: Mapping[str, Any]) -> bool:
    rules, values = split(knobs)
    try:
        policy_of("fcfs", rules, Config(**values))
    except ValueError:
        return False
    return True


def merged(chosen: Mapping[str, int]) -> dict[str, Any]:
    """The knobs of one choice of each."""
    knobs: dict[str, Any] = {}
    for name, index in chosen.items():
        knobs |= CHOICES[name][index]
    return knobs


Pair = tuple[tuple[str, int], tuple[str, int]]


def pairs_of(chosen: Mapping[str, int]) -> set[Pair]:
    return {(one, other) for one, other in combinations(chosen.items(), 2)}


@cache
def allowed() -> tuple[dict[str, int], ...]:
    """Every combination that is not refused, as the index of what is chosen of each."""
    counts = [range(len(choices)) for choices in CHOICES.values()]
    every = (dict(zip(CHOICES, indices, strict=True)) for indices in product(*counts))
    return tuple(chosen for chosen in every if is_allowed(merged(chosen)))


# A line for each combination of `covering`: the indices of what is chosen.
WRITTEN = Path(__file__).with_name("combinations.txt")


@cache
def covering() -> tuple[dict[str, Any], ...]:
    """Few combinations in which every two values that may stand together do, as `found` has found
    them: every process of tests asks, and it takes a second.
    """
    lines = (map(int, line.split()) for line in WRITTEN.read_text().splitlines())
    return tuple(merged(dict(zip(CHOICES, line, strict=True))) for line in lines)


def found() -> list[dict[str, int]]:
    """Them, each as the index of what is chosen. Always the same."""
    every = [pairs_of(chosen) for chosen in allowed()]
    missing = set().union(*every)
    # The first of those with most that is missing. What one adds only shrinks, so that one whose
    # number still holds is better than all behind it.
    best = [(-len(pairs), index) for index, pairs in enumerate(every)]
    heapify(best)
    chosen = []
    while missing:
        counted, index = best[0]
        adds = len(every[index] & missing)
        if adds < -counted:
            heapreplace(best, (-adds, index))
            continue
        missing -= every[index]
        chosen.append(allowed()[index])
    return chosen
