"""`kaiten serve` refuses the numbers that its parts refuse, before it starts any."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, get_args, get_type_hints

import pytest
from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from kaiten.local.part_options import GatewayOptions, WorkerOptions
from kaiten.local.scheduling import Scheduling
from scheduler_svc.settings import SchedulerSettings

# As the two libraries name them.
BOUNDS: Final[Mapping[str, str]] = {"gte": "ge", "gt": "gt", "lte": "le", "lt": "lt"}
# 0 keeps no archive, and says nothing to the scheduler.
OURS: Final = {"archive_mb"}


def bounds_of(said: Iterable[object], names: Iterable[str]) -> list[float | None]:
    """Each by its name, as the one that has it says."""
    return [
        next((bound for one in said if (bound := getattr(one, name, None)) is not None), None)
        for name in names
    ]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (WorkerOptions, WorkerSettings),
        (GatewayOptions, GatewaySettings),
        (Scheduling, SchedulerSettings),
    ],
)
def test_a_number_has_the_bounds_of_its_part(options: type, settings: type[BaseModel]) -> None:
    hints, told, theirs = get_type_hints(options, include_extras=True), {}, {}
    for name in {field.name for field in fields(options)} & settings.model_fields.keys() - OURS:
        parameters: list[Any] = [one for one in get_args(hints[name]) if isinstance(one, Parameter)]
        numbers = [one for each in parameters for one in each.validator if isinstance(one, Number)]
        told[name] = bounds_of(numbers, BOUNDS)
        theirs[name] = bounds_of(settings.model_fields[name].metadata, BOUNDS.values())
    assert told == theirs
    assert sum(any(bounds) for bounds in told.values()) >= 5
