"""The ways of deciding that are compared, each as an operator would write it."""

from collections.abc import Mapping
from typing import Any, Final

from scheduler_svc.core.commands import Configured
from scheduler_svc.core.policy.presets import PRESETS
from scheduler_svc.scheduling import SchedulingSettings

Knobs = Mapping[str, Any]

MIXES: Final[dict[str, Knobs]] = {
    "default": {},
    "mix merged_prefill": {"mix": "merged_prefill"},
    "mix prefill_first": {"mix": "prefill_first"},
    "itl target 60 ms": {"itl_target_ms": 60},
    "one long prefill": {"long_prefill_tokens": 1024, "long_prefills_max": 1},
}
CADENCES: Final[dict[str, Knobs]] = {
    "cadence every_step": {"cadence": "every_step"},
    "cadence interval 8": {"cadence": "interval", "schedule_interval_steps": 8},
    "cadence interval 32": {"cadence": "interval", "schedule_interval_steps": 32},
    "cadence ratio 0.3": {
        "cadence": "interval",
        "waiting_served_ratio": 0.3,
        "max_waiting_steps": 20,
    },
}
ADMISSIONS: Final[dict[str, Knobs]] = {
    "admission guaranteed_no_evict": {"admission": "guaranteed_no_evict"},
    "admission safety_margin:0.2": {"admission": "safety_margin:0.2"},
    "admission wait_for_batch_end:16": {"admission": "wait_for_batch_end:16"},
}
ORDERS: Final[dict[str, Knobs]] = {
    "order fcfs": {"order": "fcfs"},
    "order shortest": {"order": "shortest"},
    "order shortest, max wait 20 s": {"order": "shortest", "max_wait_ms": 20_000},
    "order prefix": {"order": "prefix"},
}
# Sets of rules that servers elsewhere are known by.
ELSEWHERE: Final[dict[str, Knobs]] = {
    "as Orca": {
        "policy": "fcfs",
        "mix": "merged_prefill",
        "cadence": "every_step",
        "admission": "guaranteed_no_evict",
    },
    "as TGI": {
        "policy": "fcfs",
        "mix": "prefill_first",
        "admission": "guaranteed_no_evict",
        **CADENCES["cadence ratio 0.3"],
    },
    "as vLLM 0.x": {"policy": "fcfs", "mix": "prefill_first"},
}
NAMED: Final[dict[str, Knobs]] = {f"preset {name}": {"preset": name} for name in PRESETS if name}
WAYS: Final[dict[str, Knobs]] = MIXES | CADENCES | ADMISSIONS | ORDERS | ELSEWHERE | NAMED


def configured(knobs: Knobs) -> Configured:
    """As the scheduler tells its core."""
    return SchedulingSettings.model_validate(dict(knobs)).configured


# By preset: the law it is made for, and by which figure it is better there. `static` is there to
# compare with.
PROMISES: Final[dict[str, tuple[str, str]]] = {
    "reading": ("prefix", "tokens_per_s"),
    "chat": ("chat", "ttft_p50"),
    "writing": ("writing", "ttft_p50"),
    "batch": ("batch", "plans_per_step"),
}
