"""What a leader makes of what workers say of themselves, and what gateways are told of it."""

from typing import Any

import pytest

from kaiten.v1.common_pb2 import (
    FEATURE_LOGPROBS,
    FEATURE_PROMPT_LOGPROBS,
    Capabilities,
    WorkerDescription,
)
from kaiten.v1.worker_service_pb2 import Plan, RowSampling, StepResult, StepTimings
from ledger import Ledger
from scheduler_svc.core.commands import Submit
from scheduler_svc.core.types import Request
from scheduler_svc.links import WorkerLink
from scheduler_svc.wire import spec_from_proto
from service_kit.errors import OutOfOrder
from tests.support.answers import until
from tests.support.leading import NOWHERE, JumpingClock, leading, worker

HOUR_MS = 3_600_000


async def test_a_worker_that_describes_itself_anew(ledger: Ledger) -> None:
    """What it can do in a step may change; what its blocks and slots are may not."""
    async with leading(ledger) as (session, _):
        first = worker("w")
        session.roster.register(NOWHERE, first)
        session.roster.link_opened(session.roster.links["w"])
        core_worker = session.core.workers["w"]
        before = session._journal._inputs[:]
        session.roster.register(NOWHERE, first)
        assert session._journal._inputs == before, "nothing new"
        for change in (
            {"step_tokens_max": 64},
            {"step_tokens_max": 64, "mixed_tokens_max": 9},
            {"capabilities": Capabilities(plan_version=1, features=[FEATURE_LOGPROBS])},
        ):
            told = WorkerDescription()
            told.CopyFrom(first)
            told.MergeFrom(WorkerDescription(**change))
            session.roster.register(NOWHERE, told)
            assert core_worker.spec == spec_from_proto(told)
            assert session.roster.links["w"].worker == told
            assert session.cell().model == told
            assert session._journal._inputs[-1].worker_changed.worker_id == "w"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots_max": 5}, r"worker\.slots_max was 4 and is 5: "),
        ({"block_count": 5}, r"worker\.block_count was 4 and is 5"),
        ({"block_size": 5}, r"worker\.block_size was 16 and is 5"),
        ({"fingerprint": "x"}, r"worker\.fingerprint was  and is x"),
        ({"vocab_size": 5}, r"worker\.vocab_size was 0 and is 5"),
        (
            {"capabilities": Capabilities(slot_tokens_max=2)},
            r"worker\.capabilities\.slot_tokens_max was 0 and is 2",
        ),
    ],
)
async def test_a_worker_that_becomes_another_is_refused_by_field(
    ledger: Ledger, change: dict[str, Any], says: str
) -> None:
    async with leading(ledger) as (session, _):
        first = worker("w")
        session.roster.register(NOWHERE, first)
        session.roster.link_opened(session.roster.links["w"])
        told = WorkerDescription()
        told.CopyFrom(first)
        told.MergeFrom(WorkerDescription(**change))
        with pytest.raises(OutOfOrder, match=says):
            session.roster.register(NOWHERE, told)
        assert session.roster.links["w"].worker == first


async def test_a_worker_that_drains_does_so_under_its_next_stream(ledger: Ledger) -> None:
    """Its next heartbeat would say so again; until then it would be given new work."""
    async with leading(ledger) as (session, _):
        session.roster.register(NOWHERE, worker("w"))
        link = session.roster.links["w"]
        session.roster.link_opened(link)
        session.roster.heartbeat("w", is_draining=True)
        session.roster.link_closed(link, "broken", is_crash=None)
        session.roster.link_opened(link)
        assert session.core.workers["w"].is_draining


async def test_gateways_are_told_what_some_worker_can_do(ledger: Ledger) -> None:
    async with leading(ledger) as (session, _):
        session.roster.register(NOWHERE, worker("v", features=[FEATURE_LOGPROBS]))
        session.roster.register("127.0.0.1:10", worker("w", features=[FEATURE_PROMPT_LOGPROBS]))
        assert list(session.cell().model.capabilities.features) == [
            FEATURE_LOGPROBS,
            FEATURE_PROMPT_LOGPROBS,
        ]
        assert not session.roster.links["v"].worker.capabilities.features[1:], (
            "the worker's own is as it was"
        )


async def test_a_long_prompt_is_no_stall(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks are nothing to commit, be it for hours; a step that does not come back is one."""
    sent: list[Plan] = []
    monkeypatch.setattr(WorkerLink, "is_open", True)
    monkeypatch.setattr(WorkerLink, "send", lambda link, plan: sent.append(plan))
    clock = JumpingClock()
    async with leading(ledger, clock, worker_timeout_ms=10**9) as (session, _):
        session.roster.register(NOWHERE, worker("w"))
        link = session.roster.links["w"]
        session.roster.link_opened(link)
        monkeypatch.setattr(session._requests, "sampling", lambda _: RowSampling(max_tokens=9))
        request = Request(id="r", sequence_id=1, prompt=(1,) * 40, max_tokens=9, arrived_ns=0)
        session.tell(Submit(request=request))
        for count in range(3):
            await until(lambda count=count: len(sent) > count, "the plan of a chunk")
            clock.ahead_ns += HOUR_MS * 1_000_000
            assert session.stalled_ms >= HOUR_MS
            timings = StepTimings(forward_us=1000, tokens_computed=8, rows=1)
            step = StepResult(boot_id="w", plan_id=sent[count].plan_id, timings=timings)
            session.roster.step_arrived(link, step)
            assert session.stalled_ms < HOUR_MS
        clock.ahead_ns += HOUR_MS * 1_000_000
        assert session.stalled_ms >= HOUR_MS


async def test_who_fits_no_worker_that_is_here_is_no_stall_for_those_who_do(ledger: Ledger) -> None:
    clock, wait_s = JumpingClock(), 10 * HOUR_MS / 1000
    small = worker("small")
    small.block_count = 2
    async with leading(ledger, clock, worker_timeout_ms=10**9, misfit_wait_s=wait_s) as (
        session,
        _,
    ):
        session.roster.register(NOWHERE, worker("large"))
        session.roster.register("unix:/nowhere", small)
        for boot_id in ("large", "small"):
            session.roster.link_opened(session.roster.links[boot_id])
        arrived_ns = session.now_ns()
        large, fitting = (
            Request(id=id, sequence_id=at, prompt=(1,) * at, max_tokens=9, arrived_ns=arrived_ns)
            for id, at in (("large", 40), ("fitting", 20))
        )
        session.tell(Submit(request=large))
        session.roster.forget("large", "gone")
        clock.ahead_ns += HOUR_MS * 1_000_000
        assert session.core.live_count == 1
        assert session.stalled_ms == 0
        session._turn()
        session.tell(Submit(request=fitting))
        assert session.stalled_ms < HOUR_MS
        clock.ahead_ns += HOUR_MS * 1_000_000
        assert session.stalled_ms >= HOUR_MS
