"""What a gateway counts, by tenant."""

from typing import Any

from gateway.observe.metrics import OTHERS, TENANTS_TOLD_MAX, Meters, _outcome
from gateway.observe.tracing import _name
from gateway.tenants import TENANT_NAME, Tenant
from gateway.values.generation_request import GenerationRequest, TextPrompt
from kaiten.v1.common_pb2 import FinishReason
from service_kit.metrics import NO_METER


def test_so_many_tenants_are_told_apart_and_the_rest_together() -> None:
    meters = Meters(NO_METER, model="m", with_tenants=True)
    ask = GenerationRequest(prompt=TextPrompt(text="x"), body_hash=b"")
    names = [f"t{number}" for number in range(TENANTS_TOLD_MAX + 3)]
    for name in [*names, names[0]]:
        with meters.opening(ask, Tenant(name=name)):
            pass
    told = {name: count for (_, name), count in meters._accepted.items()}
    assert told == {"t0": 2, **dict.fromkeys(names[1:TENANTS_TOLD_MAX], 1), OTHERS: 3}
    assert not TENANT_NAME.fullmatch(OTHERS)


def test_an_end_that_only_a_later_version_knows_is_counted_as_an_error() -> None:
    later: Any = 99
    assert _outcome([later], None, goes_on=False) == "error"
    assert _outcome([later, FinishReason.FINISH_REASON_STOP], None, goes_on=False) == "stop"
    assert (_name(later), _name(FinishReason.FINISH_REASON_STOP)) == ("unknown", "stop")
