"""Is this gateway of use? The truth for health checks, and the limits that the cell's leader tells.

Ready means: the store keeps the rules, the leader's renewals move by this process's own clock, a
worker is there that serves our model or requests may wait for one, and runnable work is not
standing still.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from gateway.cell.ledger_session import LedgerLink
from gateway.cell.queue_position import because
from gateway.text.model_card import ModelCard
from kaiten.v1.common_pb2 import WorkerDescription
from kaiten.v1.ledger_pb2 import CellRecord
from ledger import CellView
from service_kit.clock import Clock
from service_kit.errors import ConfigError, Unavailable

log = structlog.get_logger()

# Store rules (eviction, durability) can be changed at run time; looking costs a few round trips.
POLLS_PER_CHECK: Final = 10
UNKNOWN: Final = "it has not looked at the store yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessLimits:
    """When a quiet cell counts as gone."""

    poll_s: float = 0.5
    # Until ready: a start should not wait for the next look.
    poll_s_unready: float = 0.05
    leader_quiet_s_max: float = 10.0
    stalled_ms_max: int = 10_000
    # Requests wait for a worker: whoever makes one when they do may have none until then.
    accepts_without_workers: bool = False


class CellWatch:
    """What the leader last said, and when it last moved. Pure but for the clock."""

    def __init__(self, clock: Clock, limits: ReadinessLimits) -> None:
        self._clock = clock
        self._limits = limits
        self._renew_seq = -1
        self._moved_ns = 0
        self.record: CellRecord | None = None

    def saw(self, view: CellView) -> None:
        """One successful poll."""
        renew_seq = view.lease.renew_seq if view.lease is not None else 0
        if renew_seq != self._renew_seq:
            self._renew_seq, self._moved_ns = renew_seq, self._clock.monotonic_ns()
        if view.record is not None:
            self.record = view.record

    @property
    def worker(self) -> WorkerDescription | None:
        """What the cell's workers serve, once one has joined. Outlives the leader that said it."""
        record = self.record
        return record.model if record is not None and record.HasField("model") else None

    def refusal(self, card: ModelCard) -> str:
        """Why no request can be accepted: nobody here could ever compute it. Empty: it can."""
        worker = self.worker
        if worker is None:
            # Somebody must be there who ends what waited too long.
            is_led = self.record is not None
            if self._limits.accepts_without_workers and is_led:
                return ""
            return "no worker has joined this cell yet"
        if worker.vocab_size and worker.vocab_size != card.vocab_size:
            return (
                f"the workers serve another model: its vocabulary has {worker.vocab_size} tokens, "
                f"that of {card.name} {card.vocab_size}"
            )
        if worker.tokenizer_digest and worker.tokenizer_digest != card.tokenizer_digest:
            return (
                "the workers serve another model: the tokenizer.json beside their weights is not "
                f"that of {card.name}; give both the same --model folder"
            )
        return ""

    @property
    def silence(self) -> str:
        """Why nothing is known of the cell as it is now; empty: it is."""
        if self.record is None:
            return "no scheduler has led this cell yet"
        quiet_s = (self._clock.monotonic_ns() - self._moved_ns) / 1e9
        if quiet_s > self._limits.leader_quiet_s_max:
            return f"no scheduler leads: its lease has not been renewed for {quiet_s:.0f} s"
        return ""

    def problem(self, card: ModelCard) -> str:
        """Why requests would not be served now; empty when they would."""
        if (silence := self.silence) or self.record is None:
            return silence
        # A new leader reaches the workers of the one before in a moment; requests wait so long.
        is_served = self.record.workers_ready > 0 or self.record.workers_expected > 0
        has_worker = self.worker is not None and is_served
        if not (has_worker or self._limits.accepts_without_workers):
            return because("no worker is ready", self.record.problem)
        if refusal := self.refusal(card):
            return refusal
        if self.record.stalled_ms > self._limits.stalled_ms_max:
            stalled = f"nothing was committed for {self.record.stalled_ms} ms"
            return because(f"work is runnable but {stalled}", self.record.problem)
        return ""


class Readiness:
    """Keeps the watch up to date and tells listeners when the answer changes."""

    def __init__(
        self, link: LedgerLink, card: ModelCard, *, clock: Clock, limits: ReadinessLimits
    ) -> None:
        self.watch = CellWatch(clock, limits)
        self._link = link
        self._card = card
        self._clock = clock
        self._limits = limits
        self._listeners: list[Callable[[str], None]] = []
        self._last: str | None = None
        self.is_draining = False

    @property
    def problem(self) -> str:
        """The first reason not to send requests here; empty: send them."""
        if self.is_draining:
            return "this gateway is draining"
        if self._link.problem:
            return self._link.problem
        if not self._link.follower.is_connected:
            return "the journal cannot be followed"
        return self.watch.problem(self._card)

    def check(self) -> None:
        """Unavailable, with the problem, unless a request sent now would be served at once."""
        if problem := self.problem:
            raise Unavailable(problem)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call with the problem whenever it changes, and once with what it is; empty: ready."""
        self._listeners.append(listener)
        listener(UNKNOWN if self._last is None else self._last)

    def drain(self) -> None:
        """Not ready from now on, whatever else is true."""
        self.is_draining = True
        self._tell()

    async def run(self) -> None:
        """Poll for as long as the gateway lives."""
        polls = 0
        while True:
            await self._poll(is_check_due=polls % POLLS_PER_CHECK == 0)
            polls += 1
            self._tell()
            limits = self._limits
            await self._clock.sleep(limits.poll_s_unready if self.problem else limits.poll_s)

    async def _poll(self, *, is_check_due: bool) -> None:
        try:
            async with asyncio.timeout(max(1.0, self._limits.poll_s)):
                if is_check_due or self._link.problem:
                    await self._link.check()
                self.watch.saw(await self._link.look())
        except (ConfigError, Unavailable) as error:
            self._link.fails(error)
        except TimeoutError:
            self._link.problem = "the store does not answer"

    def _tell(self) -> None:
        problem = self.problem
        if problem == self._last:
            return
        # How long it has lasted by now is no news, and would be a line at each look.
        if self._last is None or _wording(problem) != _wording(self._last):
            if problem:
                log.warning("gateway.not_ready", reason=problem)
            else:
                log.info("gateway.ready")
        self._last = problem
        for listener in self._listeners:
            listener(problem)


def _wording(problem: str) -> str:
    """Without its numbers."""
    return re.sub(r"\d+", "", problem)
