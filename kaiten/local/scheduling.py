"""How iterations are decided, and what is kept of it: flags of `kaiten serve` for its scheduler."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """None leaves the scheduler its default; numbers have its bounds, and of what else is wrong it
    says so itself.

    What there is to choose from, and what it costs, is in docs/scheduling.md.
    """

    policy: Annotated[
        Literal["fair", "fcfs", "priority", "static"] | None,
        Parameter(
            name=("--policy", "--scheduling-policy"),
            help="who runs next, and who gives way; default: fair",
        ),
    ] = None
    preset: Annotated[
        Literal["reading", "chat", "writing", "batch", "static"] | None,
        Parameter(help="values for a workload, see docs/scheduling.md"),
    ] = None
    order: Annotated[
        str | None,
        Parameter(help="who goes first: fair, fcfs, priority, shortest, deadline or prefix"),
    ] = None
    victim: Annotated[str | None, Parameter(help="who is preempted: newest, largest_tenant, …")] = (
        None
    )
    admission: Annotated[
        str | None, Parameter(help="who may start: max_utilization, guaranteed_no_evict, …")
    ] = None
    mix: Annotated[
        str | None,
        Parameter(help="prompts beside decodes: chunked, merged_prefill or prefill_first"),
    ] = None
    cadence: Annotated[
        str | None,
        Parameter(help="when the batch is re-decided: on_change, every_step or interval"),
    ] = None
    schedule_interval_steps: Annotated[
        int | None,
        Parameter(help="steps between two admissions", validator=Number(gte=0, lte=1_073_741_824)),
    ] = None
    waiting_served_ratio: Annotated[
        float | None,
        Parameter(
            help="look at the queue above so many waiting per running",
            validator=Number(gte=0, lte=1_000_000),
        ),
    ] = None
    max_waiting_steps: Annotated[
        int | None,
        Parameter(
            help="or after so many steps without an admission",
            validator=Number(gte=0, lte=1_073_741_824),
        ),
    ] = None
    max_wait_ms: Annotated[
        float | None,
        Parameter(help="who has waited longer goes first", validator=Number(gte=0, lte=86_400_000)),
    ] = None
    itl_target_ms: Annotated[
        float | None,
        Parameter(
            help="how long a step of prompts beside decodes may take",
            validator=Number(gte=0, lte=86_400_000),
        ),
    ] = None
    batch_gap_ms: Annotated[
        float | None,
        Parameter(
            help="how long a step of batches beside live requests may take",
            validator=Number(gte=0, lte=86_400_000),
        ),
    ] = None
    long_prefill_tokens: Annotated[
        int | None,
        Parameter(
            name=("--long-prefill-tokens", "--long-prefill-token-threshold"),
            help="prompts of more tokens are long",
            validator=Number(gte=0, lte=1_073_741_824),
        ),
    ] = None
    long_prefills_max: Annotated[
        int | None,
        Parameter(
            name=("--long-prefills-max", "--max-long-partial-prefills"),
            help="long prompts computed at once on a worker",
            validator=Number(gte=0, lte=1_073_741_824),
        ),
    ] = None
    prefill_tokens_min: Annotated[
        int | None,
        Parameter(
            help="tokens of every step a waiting prompt gets at least",
            validator=Number(gte=1, lte=1_073_741_824),
        ),
    ] = None
    lease_steps_max: Annotated[
        int | None,
        Parameter(help="steps a worker may run on by itself", validator=Number(gte=1, lte=64)),
    ] = None
    priority_worth_ms: Annotated[
        float | None,
        Parameter(
            help="waiting that a step of priority is worth",
            validator=Number(gte=0.001, lte=86_400_000),
        ),
    ] = None
    token_worth_ms: Annotated[
        float | None,
        Parameter(
            help="waiting that a token is worth, with shortest and prefix",
            validator=Number(gte=0.001, lte=86_400_000),
        ),
    ] = None
    tenant_weights: Annotated[
        str | None, Parameter(help="shares under fair orders, TENANT=WEIGHT,…")
    ] = None

    result_ttl_s: Annotated[
        int | None,
        Parameter(help="how long to keep finished results; default: 600", validator=Number(gte=1)),
    ] = None
    response_ttl_s: Annotated[
        int | None,
        Parameter(
            help="and stored responses, while they leave room; default: 86400, a day",
            validator=Number(gte=1),
        ),
    ] = None
    archive_mb: Annotated[
        int, Parameter(help="MiB of past decisions to keep for `kaiten archive`; 0 keeps none")
    ] = 256
    archive_prompts: Annotated[
        bool,
        Parameter(
            negative="--no-archive-prompts",
            help="with the tokens of prompts and outputs, or with their lengths alone; default:"
            " with the tokens",
        ),
    ] = True

    def flags(self) -> dict[str, object]:
        """As the scheduler takes them; None: not given."""
        return {
            f"--{f.name.replace('_', '-')}": getattr(self, f.name)
            for f in fields(self)
            if not f.name.startswith("archive_")
        }

    def archive_flags(self, folder: Path) -> tuple[str, ...]:
        """Of the archive, to be kept in this folder."""
        if not self.archive_mb:
            return ()
        kept = ("--archive-dir", str(folder), "--archive-mb", str(self.archive_mb))
        return kept if self.archive_prompts else (*kept, "--no-archive-prompts")
