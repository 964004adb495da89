"""What an operator sets, as the core is told; what is wrong with it is said in words."""

from dataclasses import fields

import pytest

from kaiten.local.scheduling import Scheduling
from kaiten.v1.ledger_pb2 import CoreInput, SubmitInput
from scheduler_svc.command_wire import command_from_proto, configured_to_proto
from scheduler_svc.core.types import Config, Request, Rules
from scheduler_svc.scheduling import SchedulingSettings
from scheduler_svc.settings import SchedulerSettings
from service_kit import settings
from service_kit.errors import ConfigError, InvalidRequest


def load(*argv: str) -> SchedulerSettings:
    return settings.load(SchedulerSettings, "scheduler", argv, environ={})


def test_nothing_given_is_the_default_of_the_core() -> None:
    configured = load().configured
    assert (configured.config, configured.policy, configured.rules) == (Config(), "fair", Rules())


def test_every_knob_reaches_the_core() -> None:
    """Each value of the core is set by some setting, in its own unit."""
    given = load(
        *("--order=fair:priority", "--victim=newest", "--admission=safety_margin:0.2"),
        *("--mix=chunked", "--cadence=interval", "--placement=even_share"),
        *("--schedule-interval-steps=4", "--waiting-served-ratio=1.2", "--max-waiting-steps=20"),
        *(
            "--itl-target-ms=2.5",
            "--batch-gap-ms=3.5",
            "--long-prefill-tokens=900",
            "--long-prefills-max=2",
            "--max-wait-ms=1500",
        ),
        *("--priority-worth-ms=7", "--token-worth-ms=3.5", "--tenant-weights=b=2,a=3"),
        *("--lease-steps-max=9", "--plans-in-flight-max=3", "--prefill-tokens-min=17"),
        *("--preemptions-max=5", "--deaths-max=4", "--misfit-wait-s=2", "--tenant-tokens-max=77"),
    ).configured
    assert given.config == Config(
        lease_steps_max=9,
        plans_in_flight_max=3,
        prefill_tokens_min=17,
        preemptions_max=5,
        deaths_max=4,
        misfit_wait_ns=2_000_000_000,
        tenant_tokens_max=77,
        priority_worth_ns=7_000_000,
        token_worth_ns=3_500_000,
        wait_ns_max=1_500_000_000,
        long_prefill_tokens=900,
        long_prefills_max=2,
        schedule_interval_steps=4,
        waiting_served_permille=1200,
        waiting_steps_max=20,
        itl_target_us=2500,
        batch_gap_us=3500,
        tenant_weights=(("a", 3), ("b", 2)),
    )
    default = Config()
    assert all(getattr(given.config, f.name) != getattr(default, f.name) for f in fields(Config))
    assert given.rules == Rules(
        placement="even_share",
        order="fair:priority",
        victim="newest",
        admission="safety_margin:0.2",
        mix="chunked",
        cadence="interval",
    )


def most_of(name: str) -> int | float:
    """The largest value of a setting; every number has one."""
    for rule in SchedulingSettings.model_fields[name].metadata:
        if (le := getattr(rule, "le", None)) is not None:
            return int(le)
        if (lt := getattr(rule, "lt", None)) is not None:
            return int(lt) - 1
    raise AssertionError(f"{name} has no bound")


def test_every_knob_at_its_most_fits_the_journal() -> None:
    """A leader that decides by what it cannot write down ends, and so does the next."""
    numbers = [
        n for n, f in SchedulingSettings.model_fields.items() if f.annotation in (int, float)
    ]
    texts = {name: str(most_of(name)) for name in numbers}
    configured = load().changed(texts | {"cadence": "interval"}).configured
    written = configured_to_proto(configured)
    assert command_from_proto(CoreInput(configured=written), _no_request) == configured
    for name in numbers:
        with pytest.raises(InvalidRequest, match=rf"{name}: Input should be less than"):
            load().changed({name: str(most_of(name) + 1)})


def _no_request(_: SubmitInput) -> Request:
    raise AssertionError("there is none")


def test_a_preset_gives_values_and_each_can_be_overridden() -> None:
    batch = load("--preset=batch").configured
    assert (batch.policy, batch.config.lease_steps_max) == ("fcfs", 32)
    assert batch.rules == Rules(mix="prefill_first", cadence="interval")
    other = load("--preset=batch", "--lease-steps-max=8", "--mix=chunked").configured
    assert (other.config.lease_steps_max, other.config.schedule_interval_steps) == (8, 8)
    assert other.rules == Rules(mix="chunked", cadence="interval")
    fair = load("--preset=chat", "--policy=fair").configured
    assert (fair.policy, fair.rules) == ("fair", Rules())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--mix=orca"], "--mix orca: choose one of chunked, merged_prefill, prefill_first"),
        (["--schedule-interval-steps=4"], "under --cadence interval: choose that, or leave them"),
        (["--preset=batch", "--cadence=on_change"], "under --cadence interval: choose that"),
        (["--tenant-weights=a"], "--tenant-weights a: write TENANT=WEIGHT, as in alice=3"),
        (["--tenant-weights=a=2", "--order=fcfs"], "choose --order fair"),
        (["--tenant-weights=a=0"], "'a' must weigh 1 to 1000, got 0"),
        (["--preset=talking"], "'reading', 'chat', 'writing', 'batch' or 'static'"),
    ],
)
def test_what_makes_no_sense_starts_nothing(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert said in str(caught.value)


def test_at_run_time_some_change_and_others_stay() -> None:
    before = load("--order=priority", "--cell=c", "--tenant-weights=", "--max-wait-ms=5")
    after = before.changed({"mix": "prefill_first", "max_wait_ms": "", "lease_steps_max": "4"})
    assert (after.cell, after.order, after.mix) == ("c", "priority", "prefill_first")
    assert (after.max_wait_ms, after.core.wait_ns_max, after.core.lease_steps_max) == (0, None, 4)
    weighed = after.changed({"order": "fair", "tenant_weights": "a=2,b=3"})
    assert weighed.core.tenant_weights == (("a", 2), ("b", 3))


@pytest.mark.parametrize(
    ("texts", "field", "said"),
    [
        ({"redis_url": "redis://elsewhere"}, "settings.redis_url", "none that changes at run time"),
        ({"lease_steps_max": "0"}, "lease_steps_max", "greater than or equal to 1"),
        ({"mix": "orca"}, "settings", "--mix orca: choose one of"),
    ],
)
def test_a_wrong_change_is_refused_in_words(texts: dict[str, str], field: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load().changed(texts)
    assert field in str(caught.value)
    assert said in str(caught.value)


def test_kaiten_serve_takes_knobs_of_the_scheduler_only() -> None:
    known = {"--" + name.replace("_", "-") for name in SchedulerSettings.model_fields}
    assert Scheduling().flags().keys() <= known
    given = Scheduling(order="fair", max_wait_ms=2.5).flags()
    flags = [f"{flag}={value}" for flag, value in given.items() if value is not None]
    assert (load(*flags).order, load(*flags).max_wait_ms) == ("fair", 2.5)
