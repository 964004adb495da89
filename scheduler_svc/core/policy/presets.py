"""A policy is six rules, chosen one by one; these are the usual sets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from scheduler_svc.core.outcome import Why
from scheduler_svc.core.policy.admission import AdmissionView
from scheduler_svc.core.policy.cadence import Cadence
from scheduler_svc.core.policy.mix import MixView, StepShares
from scheduler_svc.core.policy.order import Order
from scheduler_svc.core.policy.placement import PlacementView
from scheduler_svc.core.policy.rules import REFUSED, rule_of
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.types import Config, Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is decided, and by which rule; each is explained in the file of its name."""

    placement: Callable[[PlacementView], int]
    order: Order
    victim: Callable[[Sequence], tuple[int, ...]]
    admission: Callable[[AdmissionView], Why | None]
    mix: Callable[[MixView], StepShares]
    cadence: Cadence


_FCFS: Final = Rules(
    placement="even_share",
    order="fcfs",
    victim="newest",
    admission="max_utilization",
    mix="chunked",
    cadence="on_change",
)
RULES: Final = {
    "fair": replace(_FCFS, order="fair", victim="largest_tenant"),
    "fcfs": _FCFS,
    "priority": replace(_FCFS, order="priority", victim="least_urgent"),
    "static": replace(_FCFS, admission="when_empty", mix="prefill_first"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Values for a workload: a policy, rules in place of its own, and values of `Config`."""

    why: str
    policy: str = "fair"
    rules: Rules = field(default_factory=Rules)
    values: Mapping[str, Any] = field(default_factory=dict)


PRESETS: Final = {
    "": Preset(why="nothing is known of the workload: nobody starves, nobody stalls"),
    "reading": Preset(
        why="long prompts, short answers: those cached first, one by one, so that they still are",
        rules=Rules(order="fair:prefix", mix="chunked"),
        values={"long_prefill_tokens": 1024, "long_prefills_max": 1, "token_worth_ns": 30_000_000},
    ),
    "chat": Preset(
        why="first tokens soon, whatever others ask: short ones first, one long prompt at a time",
        rules=Rules(order="fair:shortest", mix="chunked"),
        values={"long_prefill_tokens": 2048, "long_prefills_max": 1},
    ),
    "writing": Preset(
        why="short prompts, long answers, the first token soon: prompts before decodes",
        rules=Rules(mix="prefill_first"),
    ),
    "batch": Preset(
        why="nobody looks: half the decisions, by steps for prompts alone, rare looks, long leases",
        policy="fcfs",
        rules=Rules(mix="prefill_first", cadence="interval"),
        values={"schedule_interval_steps": 8, "lease_steps_max": 32},
    ),
    "static": Preset(
        why="to compare with: a batch is filled, prefilled, and run until all are done",
        policy="static",
    ),
}


def rules_of(policy: str, chosen: Rules) -> Rules:
    """Those of a policy, but for those that are named. ValueError: there is no such policy."""
    if policy not in RULES:
        raise ValueError(f"--policy {policy}: choose one of {', '.join(RULES)}")
    named = {kind.name: getattr(chosen, kind.name) for kind in fields(Rules)}
    return replace(RULES[policy], **{kind: text for kind, text in named.items() if text})


def policy_of(policy: str, chosen: Rules, config: Config) -> Policy:
    """ValueError: a sentence that names the knobs and what would do."""
    rules = rules_of(policy, chosen)
    made = {
        kind.name: rule_of(kind.name, getattr(rules, kind.name), config) for kind in fields(Rules)
    }
    for refusal in REFUSED:
        if refusal.applies(rules, config):
            raise ValueError(refusal.sentence)
    return Policy(**made)
