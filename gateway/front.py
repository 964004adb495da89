"""What both protocols call: generate, attach, cancel, look. Owns what is going on here."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from gateway.asks import Ask
from gateway.generation import Accepted, Choice, Finished, Generation, new_choices, replay
from gateway.ledger_link import LedgerLink
from gateway.model_card import ModelCard
from gateway.prompts import Prompter
from gateway.readiness import Readiness
from gateway.releases import Release, Releases
from gateway.validate import Limits, Model, check, check_request_id, to_record
from ledger import RequestInfo, Submitted
from protos.kaiten.v1.inference_service_pb2 import Done as DoneMessage
from protos.kaiten.v1.ledger_pb2 import SubmitRecord
from service_kit.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidRequest,
    KaitenError,
    NotFound,
    Overloaded,
    Unavailable,
)

# Until keys exist there is one tenant.
TENANT: Final = "default"
# The scheduler ends a request at its deadline; this gateway only does when nothing is heard of it.
DEADLINE_GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A request as `look` finds it. `done` is None while it is live."""

    ends: Sequence[Finished]
    done: DoneMessage | None


class Front:
    """One per gateway. Everything that is followed here is in `_active`."""

    def __init__(
        self,
        *,
        link: LedgerLink,
        card: ModelCard,
        prompter: Prompter,
        readiness: Readiness,
        limits: Limits,
        streams_max: int,
        timeout_s: float | None = None,
    ) -> None:
        self.card = card
        self.readiness = readiness
        self.releases = Releases(lambda: link.ledger)
        self._link = link
        self._prompter = prompter
        self._limits = limits
        self._streams_max = streams_max
        self._timeout_s = timeout_s
        self._active: dict[Generation, None] = {}
        self._followers: Counter[str] = Counter()
        self._opening = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False

    @property
    def limits(self) -> Limits:
        """The gateway's own limits with what the cell's workers can take."""
        worker = self.readiness.watch.worker
        if worker is None or not worker.context_tokens_max:
            return self._limits
        context = min(self._limits.context_tokens_max, worker.context_tokens_max)
        return replace(self._limits, context_tokens_max=context)

    @property
    def model(self) -> Model:
        card = self.card
        return Model(name=card.name, eos_token_ids=card.eos_token_ids, defaults=card.defaults)

    @contextmanager
    def following(self, generation: Generation, *, keep_running: bool) -> Iterator[Generation]:
        """For the time a client reads. When it leaves early the request is cancelled, unless it is
        to keep running, somebody else here follows it too, or this gateway is going away."""
        try:
            yield generation
        finally:
            generation.close()
            self._active.pop(generation, None)
            self._followers[generation.id] -= 1
            is_last = self._followers[generation.id] <= 0
            if is_last:
                del self._followers[generation.id]
            if is_last and not (generation.is_done or keep_running or self._is_closed):
                self.releases.ask(Release(generation.id))
            self._note_idle()

    async def generate(self, ask: Ask) -> Generation:
        """Check, tokenize, submit, and follow from the beginning. Use with `following`."""
        with self._door():
            limits = self.limits
            check(ask, limits, self.card.name)
            if self.readiness.watch.worker is None:
                raise Unavailable(self.readiness.problem or "no worker has joined this cell yet")
            named = self._complete(ask)
            prompt_ids = await self._prompter.token_ids(ask.prompt)
            record = to_record(
                named,
                prompt_ids,
                limits=limits,
                model=self.model,
                tenant=TENANT,
                seed=secrets.randbits(64),
            )
            submitted = await self._submit(record, ask)
            accepted = Accepted(named.request_id, len(prompt_ids))
            generation = self._follow(
                accepted,
                record.id,
                submitted.serial,
                new_choices(self.card.pieces, tuple(record.render.stop), record.n),
                from_seq=submitted.journal_seq,
            )
            if named.timeout_s is not None:
                self._watch_deadline(generation, named.timeout_s)
            return generation

    async def attach(self, request_id: str, positions: Sequence[int] = ()) -> Generation:
        """Follow an accepted request from these positions, running or finished."""
        with self._door():
            found = await self._find(request_id)
            if len(positions) > found.n:
                rule = f"must name at most {found.n} choices, got {len(positions)}"
                raise InvalidRequest("positions", rule)
            stops = tuple(found.render.stop)
            return self._follow(
                Accepted(request_id, found.prompt_tokens),
                _ledger_id(request_id),
                found.serial,
                new_choices(self.card.pieces, stops, found.n, positions),
                from_seq=0,
            )

    async def cancel(self, request_id: str) -> bool:
        """Stop a request. False: it had ended."""
        await self._find(request_id)
        return await self._link.ledger.cancel(_ledger_id(request_id))

    async def look(self, request_id: str) -> Seen:
        """Live, or how it ended."""
        await self._find(request_id)
        result = await self._link.ledger.result(_ledger_id(request_id))
        if result is None:
            return Seen(ends=(), done=None)
        ends, done = replay(result, self.card.pieces)
        return Seen(ends=ends, done=done)

    async def drained(self) -> None:
        """Wait until nobody is followed here any more."""
        await self._idle.wait()

    def close(self) -> None:
        """End every stream so that clients resume elsewhere. Nothing is cancelled by it."""
        self._is_closed = True
        error = Unavailable("this gateway is shutting down; attach to the request at another one")
        self.interrupt(error)

    def interrupt(self, error: KaitenError) -> None:
        for generation in tuple(self._active):
            generation.interrupt(error)

    @contextmanager
    def _door(self) -> Iterator[None]:
        """Bounds what is being opened and followed; closed while draining."""
        if self.readiness.is_draining:
            raise Unavailable("this gateway is draining; use another one")
        if len(self._active) + self._opening >= self._streams_max:
            raise Overloaded("too many streams at this gateway", 1.0, self._streams_max)
        self._opening += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._opening -= 1
            self._note_idle()

    def _complete(self, ask: Ask) -> Ask:
        """An Ask with an id, and with this gateway's deadline if it brings none."""
        return replace(
            ask,
            request_id=ask.request_id or secrets.token_hex(12),
            timeout_s=self._timeout_s if ask.timeout_s is None else ask.timeout_s,
        )

    def _note_idle(self) -> None:
        if not self._active and not self._opening:
            self._idle.set()

    async def _submit(self, record: SubmitRecord, ask: Ask) -> Submitted:
        """Submit to the end even if the client leaves: what was accepted must be known."""
        task = asyncio.ensure_future(self._link.ledger.submit(record, ask.body_hash))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not ask.keep_running:
                self.releases.adopt(task, record.id)
            raise
        except AlreadyExists:
            raise AlreadyExists(f"request {ask.request_id!r}") from None
        except Unavailable:
            # It may have been accepted. Nobody could ever ask for an id we have just minted.
            if not ask.request_id:
                self.releases.ask(Release(record.id))
            raise

    def _follow(
        self,
        accepted: Accepted,
        id: str,
        serial: int,
        choices: Sequence[Choice],
        *,
        from_seq: int,
    ) -> Generation:
        """From the first token on: text and stop strings depend on all of it."""
        serials = range(serial, serial + len(choices))
        subscription = self._link.follower.subscribe(
            serials, from_seq=from_seq, positions=dict.fromkeys(serials, 0)
        )
        generation = Generation(
            accepted=accepted,
            id=id,
            serial=serial,
            choices=choices,
            subscription=subscription,
            ledger=self._link.ledger,
            release=self.releases.ask,
        )
        self._active[generation] = None
        self._followers[id] += 1
        return generation

    def _watch_deadline(self, generation: Generation, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        error = DeadlineExceeded("waiting for the scheduler")
        generation.on_close(
            loop.call_later(timeout_s + DEADLINE_GRACE_S, generation.interrupt, error).cancel
        )

    async def _find(self, request_id: str) -> RequestInfo:
        """The request under its public name: errors must not show the ledger's."""
        if not request_id:
            raise InvalidRequest("request_id", "must be given")
        check_request_id(request_id)
        try:
            return await self._link.ledger.find(_ledger_id(request_id))
        except NotFound:
            raise NotFound(f"request {request_id!r}") from None


def _ledger_id(request_id: str) -> str:
    return f"{TENANT}:{request_id}"
