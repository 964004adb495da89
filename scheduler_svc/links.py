"""One worker's Execute stream, from the dial to the last result."""

import asyncio
import time
from dataclasses import dataclass
from typing import Final, Protocol

import grpc
import structlog

from kaiten.v1.common_pb2 import Leader, WorkerDescription
from kaiten.v1.worker_service_pb2 import (
    ExecuteRequest,
    ExecuteResponse,
    Open,
    Plan,
    StepResult,
    StepTimings,
)
from kaiten.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_svc.membership import refuse_change
from service_kit.errors import OutOfOrder
from service_kit.grpc_errors import metadata_of
from service_kit.peers import Peers

log = structlog.get_logger()

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A worker whose host vanished is noticed within keepalive time + timeout.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # Without this one gRPC gives an unanswered ping a minute, whatever the line above says.
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    # One channel per attempt: a broken connection must not be shared with the next one.
    ("grpc.use_local_subchannel_pool", 1),
]
OPEN_TIMEOUT_S = 10.0
# The worker's own no to what is in its batch. With any other status it may be dead, or only the
# connection is (gRPC itself says UNAVAILABLE, CANCELLED or INTERNAL then).
REFUSAL: Final = grpc.StatusCode.FAILED_PRECONDITION
REDIAL_S_FIRST, REDIAL_S_MAX = 0.05, 2.0
# A step is overdue when it takes as long as so many of the longest of late, or this long at least;
# before the first has come back nobody knows how long one takes.
STEPS_LATE = 8
STEP_NS_LEAST, STEP_NS_FIRST = 1_000_000_000, 30_000_000_000
# And after so many times that, or the operator's patience with a silent worker, whichever is
# longer, it is not waited for any more.
TIMES_HUNG = 4
# Epochs are microseconds: a worker that speaks of later years is not to end them for everybody.
EPOCHS_AHEAD_MAX: Final = 10 * 366 * 86_400 * 1_000_000
EPOCH_DIGITS_MAX: Final = 20
# A worker that contradicts its plans this often is not dialled again until it restarts.
REJECTIONS_MAX = 3


class LinkOwner(Protocol):
    """Who a link reports to. All are called on the event loop and must not block."""

    def link_opened(self, link: "WorkerLink") -> None: ...

    def link_closed(self, link: "WorkerLink", reason: str, *, is_crash: bool | None) -> None:
        """`is_crash` None: nobody knows yet whether the worker's process died."""

    def link_refused(self, link: "WorkerLink", epoch: int) -> None:
        """The worker has seen a leader of this epoch, newer than ours."""

    def step_arrived(self, link: "WorkerLink", result: StepResult) -> None: ...

    def plan_written(self, link: "WorkerLink", after_ns: int) -> None:
        """gRPC has a plan, so long after it was sent."""


class _Nonsense(Exception):
    """What came is no answer of this protocol: another version, or no worker at all."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Stream:
    # With the time when each was sent.
    plans: "asyncio.Queue[tuple[Plan, int]]"
    fault: str = ""


class WorkerLink:
    """Keeps one Execute stream to a worker open; each stream starts from an empty batch."""

    def __init__(
        self,
        *,
        address: str,
        worker: WorkerDescription,
        leader: Leader,
        owner: LinkOwner,
        cell: str = "",
        peers: Peers | None = None,
    ) -> None:
        self.address = address
        self.worker = worker
        # Since the worker was last heard of, as far as we were listening.
        self.silent_ns = 0
        # Why the stream broke, until it is open again; and since when, counted as silence is.
        self.broke = ""
        self.broken_ns = 0
        # A step did not end, and it has not been open since.
        self.is_hung = False
        self.is_draining = False
        # What any of its descriptions said: a step of an older plan may be that large.
        self.step_tokens_max = worker.step_tokens_max
        # For the answer to a step, counted as silence is; and how long a step may take.
        self.waited_ns = 0
        self.step_ns_max = STEP_NS_FIRST
        self._longest_us = 0
        # By the magnitude (bit length) of what they computed: how long steps took of late.
        self._took_us: dict[int, int] = {}
        self._leader, self._cell = leader, cell
        self._owner = owner
        self._peers = peers or Peers()
        self._stream: _Stream | None = None
        self._rejections = 0

    @property
    def worker_id(self) -> str:
        return self.worker.boot_id

    @property
    def is_open(self) -> bool:
        """Plans can be sent."""
        return self._stream is not None

    @property
    def is_ready(self) -> bool:
        """Whoever comes now may be computed here: one that drains ends what it has."""
        return self.is_open and not self.is_draining

    @property
    def is_quarantined(self) -> bool:
        """It gave wrong results too often."""
        return self._rejections >= REJECTIONS_MAX

    @property
    def problem(self) -> str:
        """Why nobody new is computed here, in words that anybody may read; empty: one can be."""
        if self.is_ready:
            return ""
        if self.is_draining:
            return "it is draining"
        if self.is_quarantined:
            return "its results were wrong too often"
        return "a step of it does not end" if self.is_hung else "it does not answer"

    @property
    def is_overdue(self) -> bool:
        """A step takes far longer than any of late."""
        return self.waited_ns > self.step_ns_max

    def hung_ns(self, timeout_ns: int) -> int:
        """How long to wait for a step before it is thought never to end."""
        return max(timeout_ns, TIMES_HUNG * self.step_ns_max)

    def describe(self, worker: WorkerDescription) -> None:
        """It said anew what it can do in a step."""
        self.worker = worker
        self.step_tokens_max = max(self.step_tokens_max, worker.step_tokens_max)

    def expected_step_us(self, tokens: int) -> int:
        """What a step took of late that computed about as many tokens: as many binary digits. 0
        when there was none. A smoothed guess, for readers; nothing is decided by it.
        """
        return self._took_us.get(tokens.bit_length(), 0)

    def give_up(self, reason: str) -> None:
        """Its step does not end. Whoever calls this ends the stream, and dials again."""
        self.broke, self.broken_ns, self.waited_ns = reason, 0, 0
        self.is_hung = True

    def pass_time(self, passed_ns: int, *, owes_a_step: bool) -> None:
        """So long we were listening, and nothing came."""
        self.silent_ns += passed_ns
        self.broken_ns += passed_ns if self.broke else 0
        self.waited_ns = self.waited_ns + passed_ns if owes_a_step else 0

    def answered(self, timings: StepTimings) -> None:
        """A step came back, and was booked: what it says of times has been looked at. The next is
        overdue after many times the longest of late.
        """
        self.waited_ns = 0
        took_us = timings.wait_us + timings.forward_us + timings.sample_us
        self._longest_us = max(took_us, self._longest_us * 63 // 64)
        self.step_ns_max = max(STEP_NS_LEAST, STEPS_LATE * 1000 * self._longest_us)
        step_us, of = timings.forward_us + timings.sample_us, timings.tokens_computed.bit_length()
        self._took_us[of] = (3 * self._took_us.get(of, step_us) + step_us) // 4

    def send(self, plan: Plan) -> None:
        """Queue a plan for the open stream; the number of plans in flight bounds the queue."""
        assert self._stream is not None
        self._stream.plans.put_nowait((plan, time.monotonic_ns()))

    def reject(self, reason: str) -> None:
        """The stream's results are not to be trusted: close it and start from an empty batch."""
        self._rejections += 1
        if self._stream is not None:
            self._stream.fault = reason

    async def run(self) -> None:
        """Dial, follow, dial again; ends only by cancellation or quarantine."""
        wait_s = REDIAL_S_FIRST
        now_s = asyncio.get_running_loop().time
        while not self.is_quarantined:
            dialled_s = now_s()
            is_refusal = False
            try:
                async with self._peers.channel(self.address, CHANNEL_OPTIONS) as channel:
                    await self._follow(channel)
                reason = "the worker ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                is_refusal = error.code() is REFUSAL
                self._look_for_epoch(error)
            except TimeoutError:
                reason = f"no answer to Open within {OPEN_TIMEOUT_S:g} s"
            except _Nonsense as error:
                reason = str(error)
                self.reject(reason)
            finally:
                stream, self._stream = self._stream, None
            if stream is not None:
                self._closed(
                    stream.fault or reason, is_excused=bool(stream.fault), is_refusal=is_refusal
                )
            if now_s() - dialled_s > REDIAL_S_MAX:
                # It was a stream for a while, not one that is ended as soon as it is open.
                wait_s = REDIAL_S_FIRST
            log.info("worker.disconnected", worker_id=self.worker_id, reason=reason)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, REDIAL_S_MAX)
        log.error("worker.quarantined", worker_id=self.worker_id, rejections=self._rejections)

    def _look_for_epoch(self, error: grpc.aio.AioRpcError) -> None:
        """Dialling again and again would not make this leader a newer one."""
        epoch = metadata_of(error).get("epoch", "")
        if not epoch.isdecimal() or len(epoch) > EPOCH_DIGITS_MAX:
            return
        if 0 <= int(epoch) - self._leader.epoch < EPOCHS_AHEAD_MAX:
            self._owner.link_refused(self, int(epoch))

    def _closed(self, reason: str, *, is_excused: bool, is_refusal: bool) -> None:
        """Tell the owner whom to blame, as far as it is known."""
        is_crash: bool | None = True if is_refusal else None
        if is_excused or self.is_draining:
            is_crash = False
        self.broke = reason if is_crash is None else ""
        self._owner.link_closed(self, reason, is_crash=is_crash)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        proof = self._peers.proof()
        call = WorkerServiceStub(channel).Execute(metadata=proof.metadata)
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            opening = Open(leader=self._leader, boot_id=self.worker_id, cell=self._cell)
            await call.write(ExecuteRequest(open=opening))
            if (answer := await _next(call, "opened")) is None:
                return
            # No plan, and no prompt in it, before this is the worker that was let in.
            proof.check(await call.initial_metadata())
            self._check_opened(answer.opened.worker)
        self._stream = _Stream(plans=asyncio.Queue())
        self.broke, self.broken_ns, self.is_hung = "", 0, False
        self._owner.link_opened(self)
        writing = asyncio.create_task(self._write(call, self._stream.plans))
        try:
            await self._read(call, self._stream)
        finally:
            writing.cancel()
            call.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _check_opened(self, told: WorkerDescription) -> None:
        """Raises _Nonsense for one that says of itself something else than when it registered."""
        try:
            refuse_change(self.worker, told)
        except OutOfOrder as error:
            raise _Nonsense(str(error)) from None

    async def _write(
        self, call: "grpc.aio.StreamStreamCall", plans: "asyncio.Queue[tuple[Plan, int]]"
    ) -> None:
        while True:
            plan, sent_ns = await plans.get()
            await call.write(ExecuteRequest(plan=plan))
            self._owner.plan_written(self, time.monotonic_ns() - sent_ns)

    async def _read(self, call: "grpc.aio.StreamStreamCall", stream: _Stream) -> None:
        while not stream.fault:
            response = await _next(call, "results")
            if response is None:
                return
            for step in response.results.steps:
                # A rejected step takes those behind it along: they were computed from its state.
                if not stream.fault:
                    self._owner.step_arrived(self, step)


async def _next(call: "grpc.aio.StreamStreamCall", kind: str) -> ExecuteResponse | None:
    """The next answer, of the kind that is due; None at the stream's end. Raises _Nonsense."""
    response = await call.read()
    if response is grpc.aio.EOF:
        return None
    # gRPC gives None for bytes that are no message.
    found = None if response is None else response.WhichOneof("message")
    if found != kind:
        raise _Nonsense(f"the worker answered with {found or 'no message'} where {kind} was due")
    answer: ExecuteResponse = response
    return answer
