"""The rules by name, one table per kind, and the combinations of knobs that are refused.

A rule is named `name` or `name:argument`, as an operator writes it. Another rule is one function in
the file of its kind, and a row here. The core never asks for a name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from scheduler_svc.core.policy import admission, cadence, mix, order, placement, victim
from scheduler_svc.core.policy.cadence import Cadence
from scheduler_svc.core.policy.order import Order
from scheduler_svc.core.types import Config, Rules

STEP_US_MIN = 1000
# How a rule is made of the knobs, and of the arguments after its name.
Maker = Callable[..., Any]


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _share(text: str) -> int:
    """Per mille."""
    try:
        permille = round(float(text) * 1000)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number") from None
    if not 0 < permille < 1000:
        raise ValueError(f"{text} is not a share between 0 and 1")
    return permille


def _always(rule: Any) -> Maker:
    return lambda config: rule


def _keyed(key: Callable[[Config], Any]) -> Maker:
    return lambda config: Order(key=key(config))


def _fair(config: Config, key: str = "fcfs") -> Order:
    if key not in _KEYS:
        raise ValueError(f"{key!r} is none of {', '.join(_KEYS)}")
    alike: Order = _KEYS[key](config)
    return replace(alike, is_fair=True)


def _prefix(config: Config) -> Order:
    return Order(key=order.by_arrival, prefix_worth_ns=config.token_worth_ns)


def _interval(config: Config) -> Cadence:
    looks = partial(
        cadence.interval,
        steps=config.schedule_interval_steps or 1,
        served_permille=config.waiting_served_permille,
        steps_max=config.waiting_steps_max,
    )
    return Cadence(lease_steps=cadence.until_an_end_is_near, looks=looks)


_KEYS: Final[Mapping[str, Maker]] = {
    "fcfs": _keyed(lambda config: order.by_arrival),
    "priority": _keyed(
        lambda config: partial(order.by_priority, worth_ns=config.priority_worth_ns)
    ),
    "shortest": _keyed(lambda config: partial(order.by_remaining, worth_ns=config.token_worth_ns)),
    "deadline": _keyed(lambda config: order.by_deadline),
    "prefix": _prefix,
}
TABLES: Final[Mapping[str, Mapping[str, Maker]]] = {
    "placement": {"even_share": _always(placement.even_share)},
    "order": {**_KEYS, "fair": _fair},
    "victim": {
        "newest": _always(victim.newest),
        "largest_tenant": _always(victim.newest_of_the_largest),
        "least_urgent": lambda config: partial(
            victim.least_urgent, worth_ns=config.priority_worth_ns
        ),
    },
    "admission": {
        "max_utilization": _always(admission.whenever_it_fits),
        "guaranteed_no_evict": _always(admission.guaranteed_no_evict),
        "safety_margin": lambda config, share: partial(
            admission.safety_margin, permille=_share(share)
        ),
        "when_empty": _always(admission.when_all_are_done),
        "wait_for_batch_end": lambda config, steps, priority="0": partial(
            admission.wait_for_batch_end, steps=_count(steps), priority=_count(priority)
        ),
    },
    "mix": {
        "chunked": _always(mix.chunked),
        "merged_prefill": _always(mix.merged_prefill),
        "prefill_first": _always(mix.prefill_first),
    },
    "cadence": {
        "on_change": _always(Cadence(lease_steps=cadence.until_an_end_is_near)),
        "every_step": _always(Cadence(lease_steps=cadence.one_step)),
        "interval": _interval,
    },
}
# Of rules whose name alone does not say all: what may stand behind it, for whoever got it wrong.
USAGE: Final = {
    "fair": "fair or fair:ORDER, as in fair:priority",
    "safety_margin": "safety_margin:SHARE, as in safety_margin:0.2",
    "wait_for_batch_end": "wait_for_batch_end:STEPS or wait_for_batch_end:STEPS:PRIORITY",
}


def rule_of(kind: str, text: str, config: Config) -> Any:
    """The rule that is named so. ValueError: which knob, what is wrong, what would do."""
    name, *arguments = text.split(":")
    if name not in (table := TABLES[kind]):
        raise ValueError(f"--{kind} {text}: choose one of {', '.join(table)}")
    try:
        return table[name](config, *arguments)
    except TypeError:
        wrong = "too many arguments" if arguments else "an argument is missing"
    except ValueError as error:
        wrong = str(error)
    raise ValueError(f"--{kind} {text}: {wrong}; write {USAGE.get(name, name)}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A combination that makes no sense, and the sentence that says what would."""

    applies: Callable[[Rules, Config], object]
    sentence: str


def _is(text: str, name: str) -> bool:
    return text.partition(":")[0] == name


REFUSED: Final = (
    Refusal(
        lambda rules, config: (
            not _is(rules.cadence, "interval")
            and (
                config.schedule_interval_steps
                or config.waiting_served_permille
                or config.waiting_steps_max
            )
        ),
        "--schedule-interval-steps, --waiting-served-ratio and --max-waiting-steps say when the "
        "queue is looked at under --cadence interval: choose that, or leave them out",
    ),
    Refusal(
        lambda rules, config: (
            _is(rules.cadence, "interval")
            and not config.schedule_interval_steps
            and not config.waiting_served_permille
        ),
        "--cadence interval needs --schedule-interval-steps or --waiting-served-ratio: give one, "
        "or choose --cadence on_change",
    ),
    Refusal(
        lambda rules, config: config.waiting_steps_max and not config.waiting_served_permille,
        "--max-waiting-steps bounds how long --waiting-served-ratio keeps the queue waiting: give "
        "a ratio too, or say --schedule-interval-steps",
    ),
    Refusal(
        lambda rules, config: (
            config.waiting_steps_max
            and config.schedule_interval_steps
            and config.waiting_steps_max < config.schedule_interval_steps
        ),
        "--max-waiting-steps is less than --schedule-interval-steps, before which nobody joins: "
        "raise the one or lower the other",
    ),
    Refusal(
        lambda rules, config: _is(rules.cadence, "interval") and _is(rules.admission, "when_empty"),
        "--cadence interval does nothing with --admission when_empty, under which somebody joins "
        "an empty batch only: choose --cadence on_change, or another admission",
    ),
    Refusal(
        lambda rules, config: config.wait_ns_max and _is(rules.admission, "when_empty"),
        "--max-wait-ms promises what --admission when_empty cannot keep, as a batch runs out "
        "first: leave it out, or choose --admission max_utilization",
    ),
    Refusal(
        lambda rules, config: bool(config.long_prefill_tokens) != bool(config.long_prefills_max),
        "--long-prefill-tokens says which prompts are long, --long-prefills-max how many of them "
        "are computed at once: give both, or neither",
    ),
    Refusal(
        lambda rules, config: config.itl_target_us and not _is(rules.mix, "chunked"),
        "--itl-target-ms says how large the chunks of --mix chunked are: choose that, or leave it "
        "out",
    ),
    Refusal(
        lambda rules, config: config.itl_target_us and config.itl_target_us < STEP_US_MIN,
        "--itl-target-ms is less than 1: no step is so short, and every prompt would be computed "
        "in the smallest chunks; give 20 or more on a GPU, 100 or more on a CPU, or leave it out",
    ),
    Refusal(
        lambda rules, config: config.batch_gap_us and config.batch_gap_us < STEP_US_MIN,
        "--batch-gap-ms is less than 1: no step is so short, and batches would stand still beside "
        "live requests; give what a reader may wait for the next token, or leave it out",
    ),
    Refusal(
        lambda rules, config: config.tenant_weights and not _is(rules.order, "fair"),
        "--tenant-weights count under fair orders only: choose --order fair, or fair:priority and "
        "the like, or leave them out",
    ),
)
