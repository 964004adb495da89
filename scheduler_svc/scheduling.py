"""The knobs of how iterations are decided: what an operator sets, as the core has it."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError

from scheduler_svc.core.commands import Configured
from scheduler_svc.core.policy.presets import PRESETS, policy_of
from scheduler_svc.core.types import Config, Rules
from service_kit.errors import InvalidRequest
from service_kit.settings import Settings, grouped

# Settings that the core has under another name and in another unit, and what one is in that.
UNITS: Final[Mapping[str, tuple[str, int]]] = {
    "misfit_wait_s": ("misfit_wait_ns", 1_000_000_000),
    "priority_worth_ms": ("priority_worth_ns", 1_000_000),
    "token_worth_ms": ("token_worth_ns", 1_000_000),
    "max_wait_ms": ("wait_ns_max", 1_000_000),
    "waiting_served_ratio": ("waiting_served_permille", 1000),
    "itl_target_ms": ("itl_target_us", 1000),
    "batch_gap_ms": ("batch_gap_us", 1000),
    "max_waiting_steps": ("waiting_steps_max", 1),
}

# A day (in seconds years), and more than anybody counts: the journal has room for them.
MS_MAX = 86_400_000
COUNT_MAX = 1 << 30


@grouped("Scheduling")
class SchedulingSettings(Settings):
    """Which rules decide, and what they are made with; docs/scheduling.md has what each is for."""

    preset: Literal["", "reading", "chat", "writing", "batch", "static"] = Field(
        default="", description="values for a workload; whatever else is given overrides its own"
    )
    policy: Literal["fair", "fcfs", "priority", "static"] = Field(
        default="fair", description="who runs first"
    )
    placement: str = Field(default="", description="which worker; default: the policy's")
    order: str = Field(
        default="",
        description="who goes first: fcfs, priority, shortest, deadline, prefix, fair, fair:ORDER",
    )
    victim: str = Field(
        default="", description="who is preempted: newest, largest_tenant, least_urgent"
    )
    admission: str = Field(
        default="",
        description="who may start: max_utilization, guaranteed_no_evict, safety_margin:SHARE,"
        " when_empty, wait_for_batch_end:STEPS",
    )
    mix: str = Field(
        default="",
        description="how prompts and decodes share a step: chunked, merged_prefill, prefill_first",
    )
    cadence: str = Field(
        default="", description="when the batch is re-decided: on_change, every_step, interval"
    )
    priority_worth_ms: float = Field(
        default=5000.0, ge=0.001, le=MS_MAX, description="waiting that a step of priority is worth"
    )
    token_worth_ms: float = Field(
        default=10.0,
        ge=0.001,
        le=MS_MAX,
        description="waiting that a token is worth: to compute (shortest) or cached (prefix)",
    )
    max_wait_ms: float = Field(
        default=0.0, ge=0, le=MS_MAX, description="who has waited longer goes first; 0: nobody"
    )
    tenant_weights: tuple[str, ...] = Field(
        default=(), description="shares under fair orders, TENANT=WEIGHT; all others weigh 1"
    )
    long_prefill_tokens: int = Field(
        default=0, ge=0, le=COUNT_MAX, description="prompts of more tokens are long; 0: none is"
    )
    long_prefills_max: int = Field(
        default=0,
        ge=0,
        le=COUNT_MAX,
        description="long prompts computed at once on a worker; 0: no bound",
    )
    schedule_interval_steps: int = Field(
        default=0,
        ge=0,
        le=COUNT_MAX,
        description="steps between two admissions, with --cadence interval",
    )
    waiting_served_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="with --cadence interval, look at the queue when waiting exceeds so many times"
        " running",
    )
    max_waiting_steps: int = Field(
        default=0, ge=0, le=COUNT_MAX, description="or after so many steps without an admission"
    )
    itl_target_ms: float = Field(
        default=0.0,
        ge=0,
        le=MS_MAX,
        description="how long a step may take in which some decode while prompts are computed;"
        " 0: as long as the worker's --mixed-step-ms allows",
    )
    batch_gap_ms: float = Field(
        default=0.0,
        ge=0,
        le=MS_MAX,
        description="how long a step may take in which lines of batches, or other flex requests,"
        " run beside others; 0: no bound",
    )
    tenant_tokens_max: int = Field(
        default=0,
        ge=0,
        # As a keys file's.
        lt=1 << 53,
        description="running tokens of a tenant whose keys file entry names no bound; 0: no bound",
    )
    lease_steps_max: int = Field(
        default=8, ge=1, le=64, description="steps a worker may run on by itself"
    )
    plans_in_flight_max: int = Field(
        default=2, ge=1, le=4, description="plans sent ahead of the first answer"
    )
    prefill_tokens_min: int = Field(
        default=16,
        ge=1,
        le=COUNT_MAX,
        description="tokens of every step a waiting prefill gets at least",
    )
    preemptions_max: int = Field(
        default=3,
        ge=1,
        le=COUNT_MAX,
        description="preemptions of a sequence; then others give way to it",
    )
    deaths_max: int = Field(
        default=2,
        ge=1,
        le=COUNT_MAX,
        description="worker deaths without progress of a request: then it is tried alone",
    )
    misfit_wait_s: float = Field(
        default=30.0,
        ge=0.001,
        le=MS_MAX,
        description=(
            "a request that only fits a lost worker, or came before all workers, waits this long "
            "for one that it fits"
        ),
    )

    def model_post_init(self, _context: object) -> None:
        configured = self.configured
        policy_of(configured.policy, configured.rules, configured.config)

    @property
    def core(self) -> Config:
        """What of it the core decides by."""
        return self.configured.config

    @property
    def configured(self) -> Configured:
        """All of it, as the core is told: a preset's values, but for those that are given."""
        preset, given = PRESETS[self.preset], self.model_fields_set
        values: dict[str, Any] = {}
        for name in _VALUES:
            core_name, unit = UNITS.get(name, (name, 1))
            value = round(getattr(self, name) * unit)
            if name in given or core_name not in preset.values:
                values[core_name] = value or None
            else:
                values[core_name] = preset.values[core_name]
        has_policy = "policy" in given
        rules = Rules() if has_policy else preset.rules
        named = {rule.name: getattr(self, rule.name) for rule in fields(Rules)}
        return Configured(
            config=Config(
                **values, tenant_weights=tuple(sorted(map(_weight, self.tenant_weights)))
            ),
            policy=self.policy if has_policy else preset.policy,
            rules=replace(rules, **{kind: text for kind, text in named.items() if text}),
        )

    def changed(self, texts: Mapping[str, str]) -> Self:
        """With some settings written as their flags are; an empty text: as by default.

        InvalidRequest: which one, and what would do.
        """
        values = {name: getattr(self, name) for name in self.model_fields_set}
        for name, text in texts.items():
            if name not in SchedulingSettings.model_fields:
                known = ", ".join(SchedulingSettings.model_fields)
                raise InvalidRequest(
                    f"settings.{name}", f"is none that changes at run time: {known}"
                )
            values.pop(name, None)
            if text:
                values[name] = text.split(",") if name == "tenant_weights" else text
        try:
            return type(self).model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            name = str(first["loc"][0]) if first["loc"] else "settings"
            raise InvalidRequest(name, first["msg"].removeprefix("Value error, ")) from None


# Numbers that the core has too.
_VALUES: Final = [
    name
    for name in SchedulingSettings.model_fields
    if UNITS.get(name, (name, 1))[0] in {item.name for item in fields(Config)}
    and name != "tenant_weights"
]


def _weight(text: str) -> tuple[str, int]:
    tenant, _, weight = text.rpartition("=")
    if not tenant or not weight.isascii() or not weight.isdigit():
        raise ValueError(f"--tenant-weights {text}: write TENANT=WEIGHT, as in alice=3")
    return tenant, int(weight)
