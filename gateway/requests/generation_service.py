"""What both protocols call: generate, attach, cancel, look. Owns what is going on here."""

import asyncio
import secrets
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gateway.cell.explaining import Explainer
from gateway.cell.ledger_session import LedgerLink
from gateway.cell.queue_position import NOWHERE, QueuePosition, queue_position_of
from gateway.cell.readiness import Readiness
from gateway.cell.replays import Caller
from gateway.children.grammar_process import GrammarProcess
from gateway.observe.metrics import ANSWERED, Meters, outcome_of
from gateway.observe.request_log import RequestLog
from gateway.observe.tracing import Trace, Tracing
from gateway.requests import tool_rules, validation
from gateway.requests.cancellation import Release, Releases
from gateway.requests.delivery import Deliveries, Delivery
from gateway.requests.door import Door
from gateway.requests.output_grammars import OutputGrammars
from gateway.requests.presentation import Presenter
from gateway.requests.prompts import COUNTED_CONTEXTS, Prompter, is_long
from gateway.requests.reading import constrained, is_held, marks
from gateway.requests.replay import Replay
from gateway.requests.stream import Accepted, Choice, Generation
from gateway.requests.submit_record import Model, to_record
from gateway.requests.validation import (
    REQUEST_ID,
    Limits,
    check,
    check_model,
    check_request_id,
)
from gateway.tenants import TENANT_NAME, Tenant
from gateway.text.detokenizer import decode_in_turns
from gateway.text.model_card import ModelCard
from gateway.values.generation_request import ChatPrompt, GenerationRequest, TokenPrompt
from gateway.values.request_ids import own_ids
from kaiten.v1.ledger_pb2 import RenderOptions, SubmitRecord
from kaiten.v1.timeline_pb2 import ChoiceTimeline
from ledger import RequestInfo, Submitted
from service_kit.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    KaitenError,
    NotFound,
    Unavailable,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """A request as `status` tells it. `replay` is None while it is live."""

    replay: Replay | None = None
    queue: QueuePosition = NOWHERE


class GenerationService:
    """One per gateway."""

    def __init__(
        self,
        *,
        link: LedgerLink,
        card: ModelCard,
        prompter: Prompter,
        readiness: Readiness,
        limits: Limits,
        meters: Meters,
        tracing: Tracing,
        request_log: RequestLog,
        explainer: Explainer,
        grammars: GrammarProcess,
        door: Door,
        timeout_s: float | None = None,
    ) -> None:
        self.card = card
        self.readiness = readiness
        self.releases = Releases(lambda: link.ledger)
        self._link = link
        self._prompter = prompter
        self._limits = limits
        self._meters = meters
        self._tracing = tracing
        self._request_log = request_log
        self._explainer = explainer
        self._grammars = OutputGrammars(grammars, card)
        self._timeout_s = timeout_s
        self._presenter = Presenter(card)
        self.door = door
        self._deliveries = Deliveries()
        self._is_closed = False

    @property
    def limits(self) -> Limits:
        """The gateway's own limits with what the cell's workers can take."""
        worker = self.readiness.watch.worker
        if worker is None:
            return self._limits
        context = self._limits.context_tokens_max
        return replace(
            self._limits,
            context_tokens_max=min(context, worker.context_tokens_max or context),
            features=frozenset(worker.capabilities.features),
        )

    @property
    def model(self) -> Model:
        card = self.card
        return Model(name=card.name, eos_token_ids=card.eos_token_ids, defaults=card.defaults)

    @contextmanager
    def following(self, generation: Generation) -> Iterator[Generation]:
        """For the time a client reads. When it leaves early the request is cancelled, unless it is
        to keep running, somebody else waits for it here or anywhere, or this gateway is going away.
        """
        error: BaseException | None = None
        try:
            yield generation
        except BaseException as raised:
            error = raised
            raise
        finally:
            generation.close()
            # What is no answer is told as an error.
            is_told = isinstance(error, KaitenError) and generation.done_message is not None
            is_done = generation.is_done or is_told
            self._deliveries.closed(generation.id, generation.delivery, is_done=is_done)
            self.door.left(generation)
            goes_on = generation.keep_running or self._is_closed
            if not generation.is_done:
                self.releases.ask(Release(generation.id, waiter=generation.waiter, goes_on=goes_on))
            self._count(generation, error, goes_on=goes_on)

    def _count(self, generation: Generation, error: BaseException | None, *, goes_on: bool) -> None:
        """An end for the metrics and the trace. Of those who attach, nothing is counted."""
        visit = generation.visit
        if visit is None or (trace := visit.trace) is None:
            return
        counts = [choice.text.output_tokens for choice in generation.choices]
        reasons = [choice.end.reason for choice in generation.choices if choice.end is not None]
        # What is no answer may be told as an error as soon as a choice ends so.
        is_failure = isinstance(error, KaitenError) and not ANSWERED.issuperset(reasons)
        is_over = generation.is_done or is_failure
        done, ended = (generation.done_message, reasons) if is_over else (None, [])
        outcome, total = outcome_of(ended, error, goes_on=goes_on), sum(counts)
        is_kept = self._tracing.keeps(trace, outcome, reasons, done)
        self._meters.closed(visit, counts, outcome, is_kept=is_kept)
        self._tracing.closed(
            trace,
            outcome,
            reasons,
            input_tokens=visit.prompt_tokens,
            output_tokens=total,
            first_s=max(0, visit.first_ns - visit.started_ns) / 1e9,
            done=done,
        )
        self._request_log.closed(generation.id, visit, outcome, total, generation.done_message)

    async def generate(self, request: GenerationRequest, tenant: Tenant) -> Generation:
        """Check, tokenize, submit, and follow from the beginning. Use with `following`."""
        with (
            self._meters.opening(request, tenant) as visit,
            self._tracing.opening(request) as trace,
            self._request_log.opening(request, tenant),
            self.door.opening(tenant.name),
        ):
            delivery = Delivery(request.arrived_ns)
            self._check(request, tenant)
            await self._refuse_if_full(request, tenant)
            named = self._complete(request, trace, tenant)
            record = await delivery.in_time(self._record(named, tenant), named.timeout_s)
            trace.submitting()
            waiter = _waiter()
            submitted = await self._submit(record, request, tenant, delivery, waiter)
            prompt_tokens = len(record.prompt_token_ids)
            generation = self._follow(
                Accepted(named.request_id, prompt_tokens),
                record.id,
                submitted.sequence_id,
                self._presenter.choices(
                    self._presenter.presentation(record.render, named.request_id),
                    submitted.sequence_id,
                    record.n,
                    with_cursors=request.with_cursors,
                ),
                from_seq=submitted.journal_seq,
                render=record.render,
            )
            generation.waiter, generation.keep_running = waiter, request.keep_running
            visit.is_repeat = trace.is_repeat = not submitted.is_new
            generation.visit, visit.trace, visit.prompt_tokens = visit, trace, prompt_tokens
            if submitted.is_new:
                generation.delivery = self._deliveries.opened(generation.id, delivery)
            if record.timeout_ms:
                self._watch_deadline(generation, record.timeout_ms / 1000 + named.grace_s)
            return generation

    async def attach(
        self,
        request_id: str,
        tenant: Tenant,
        positions: Sequence[int] = (),
        *,
        cursors: Sequence[bytes] = (),
        with_cursors: bool = False,
        keep_running: bool,
    ) -> Generation:
        """Follow an accepted request, running or finished, from these positions or cursors."""
        with self.door.opening(tenant.name):
            if positions and cursors:
                raise InvalidRequest("cursors", "must not be given together with positions")
            found = await self._find(request_id, tenant)
            count, field = (len(cursors), "cursors") if cursors else (len(positions), "positions")
            if count > found.n:
                rule = f"must name at most {found.n} choices, got {count}"
                raise InvalidRequest(field, rule)
            id, waiter = _ledger_id(request_id, tenant), _waiter()
            # A cursor that is none is refused before anybody waits.
            choices = self._presenter.choices(
                self._presenter.presentation(found.render, request_id),
                found.sequence_id,
                found.n,
                positions,
                cursors=cursors,
                with_cursors=with_cursors,
            )
            if not found.is_finished:
                await self._wait(id, waiter, goes_on=keep_running)
            generation = self._follow(
                Accepted(request_id, found.prompt_tokens),
                id,
                found.sequence_id,
                choices,
                from_seq=0,
                render=found.render,
            )
            generation.waiter, generation.keep_running = waiter, keep_running
            return generation

    async def cancel(self, request_id: str, tenant: Tenant) -> bool:
        """Stop a request. False: it had ended."""
        await self._find(request_id, tenant)
        return await self._link.ledger.cancel(_ledger_id(request_id, tenant))

    async def note(self, request_id: str, tenant: Tenant) -> bytes:
        """What it brought to be kept. NotFound: nothing, or it is there no more."""
        check_request_id(request_id)
        try:
            return await self._link.ledger.note(_ledger_id(request_id, tenant))
        except NotFound as error:
            raise NotFound(f"request {request_id!r}", error.why) from None

    async def forget(self, request_id: str, tenant: Tenant) -> None:
        """Nobody finds it any more. What is live is cancelled."""
        # Somebody else was as fast, or the store not heard.
        with suppress(NotFound):
            await self.cancel(request_id, tenant)
            await self._link.ledger.forget(_ledger_id(request_id, tenant))

    async def status(self, request_id: str, tenant: Tenant) -> RequestStatus:
        """Live and where, or what it told. Unlike a stream it is never refused."""
        found = await self._find(request_id, tenant)
        result = await self._link.ledger.result(_ledger_id(request_id, tenant))
        if result is None:
            return RequestStatus(queue=self._place(found.sequence_id, tenant.name))
        presentation = self._presenter.presentation(result.render, request_id)
        return RequestStatus(replay=Replay(request_id, result, presentation))

    async def explain(
        self, request_id: str, tenant: Tenant, of: str = ""
    ) -> tuple[Sequence[ChoiceTimeline], str]:
        """Where its time went, by its id as it is or as answers carry it, and the trace of its
        spans; empty: it has none. `of`: the tenant whose it is, which only operators may name.
        """
        if of and of != tenant.name and not tenant.is_operator:
            raise Forbidden("tenant: only an operator's key may name another tenant")
        if of and not TENANT_NAME.fullmatch(of):
            raise InvalidRequest("tenant", f"must match {TENANT_NAME.pattern}")
        if not request_id:
            raise InvalidRequest("request_id", "must be given")
        *_, bare = ids = own_ids(request_id)
        check_request_id(bare)
        ledger_ids = [f"{of or tenant.name}:{id}" for id in ids if REQUEST_ID.fullmatch(id)]
        caller = Caller(tenant.name, tenant.is_operator)
        found = await self._explainer.timelines(ledger_ids, caller)
        self._deliveries.add_to(found.id, found.choices)
        return found.choices, self._tracing.trace_id(found.id, found.traceparent)

    def check_turns(self, prompt: ChatPrompt) -> None:
        """InvalidRequest: nobody could go on with them, whatever else is asked."""
        validation.check_chat(prompt, self.limits)
        tool_rules.check_chat(prompt)

    async def tokenize(self, request: GenerationRequest, tenant: Tenant) -> Sequence[int]:
        """A prompt's ids, as `generate` would use them, and let in as a request would be."""
        with self.door.opening(tenant.name):
            limits = self.limits
            check(request, limits, self.card.name)
            tool_rules.check(request)
            tool_rules.check_model(request, self.card, limits)
            if is_long(request.prompt):
                await self._link.ledger.refuse_if_full(tenant.name, 1, tenant.bounds)
            context = limits.context_tokens_max
            return await self._prompter.token_ids(request.prompt, tenant.name, context)

    async def detokenize(self, request: GenerationRequest, tenant: Tenant, field: str) -> str:
        """The text of a TokenPrompt, of as many tokens as `tokenize` may tell of. `field`: where
        they were written.
        """
        with self.door.opening(tenant.name):
            assert isinstance(request.prompt, TokenPrompt)
            limits, token_ids = self.limits, request.prompt.token_ids
            check_model(request.model, self.card.name)
            most = COUNTED_CONTEXTS * limits.context_tokens_max
            validation.check_token_ids(field, token_ids, most, limits)
            pieces = (
                self.card.pieces_with_special if request.show_special_tokens else self.card.pieces
            )
            return await decode_in_turns(pieces, token_ids)

    async def drained(self) -> None:
        """Wait until nobody is followed here any more."""
        await self.door.drained()

    def close(self) -> None:
        """End every stream: clients resume elsewhere, at once. Nothing is cancelled by it."""
        self._is_closed = True
        told = "this gateway is shutting down; attach to the request at another one"
        self.interrupt(Unavailable(told, retry_after_s=0.0))

    def interrupt(self, error: KaitenError) -> None:
        for generation in tuple(self.door.active):
            generation.interrupt(error)

    def _check(self, request: GenerationRequest, tenant: Tenant) -> None:
        """Raise what can be said of it before any work."""
        limits = self.limits
        check(request, limits, self.card.name, priority_max=tenant.priority_max)
        tool_rules.check(request)
        tool_rules.check_model(request, self.card, limits)
        # Too long a grammar is refused here.
        constrained(request, self.card)
        if refusal := self._link.broken_rule or self.readiness.watch.refusal(self.card):
            raise Unavailable(self.readiness.problem or refusal)

    async def _refuse_if_full(self, request: GenerationRequest, tenant: Tenant) -> None:
        """Before work. A request with an id may have been accepted already."""
        has_grammar = is_held(request) or request.sampling.HasField("structured_outputs")
        if not request.request_id and (is_long(request.prompt) or has_grammar):
            await self._link.ledger.refuse_if_full(tenant.name, request.n or 1, tenant.bounds)

    async def _record(self, request: GenerationRequest, tenant: Tenant) -> SubmitRecord:
        """What the ledger gets: tokens for the prompt, a grammar for what it is held to."""
        limits = self.limits
        prompt_ids = await self._prompter.token_ids(
            request.prompt, tenant.name, limits.context_tokens_max
        )
        record = to_record(
            request,
            prompt_ids,
            limits=limits,
            model=self.model,
            tenant=tenant,
            seed=secrets.randbits(64),
            grammar=await self._grammars.of(request, prompt_ids, tenant.name),
        )
        record.render.MergeFrom(marks(request, self.card, prompt_ids))
        return record

    def _complete(
        self, request: GenerationRequest, trace: Trace, tenant: Tenant
    ) -> GenerationRequest:
        """A request with an id, its span, and this gateway's deadline if it brings none."""
        request_id = request.request_id or secrets.token_hex(12)
        return replace(
            request,
            request_id=request_id,
            timeout_s=self._timeout_s if request.timeout_s is None else request.timeout_s,
            traceparent=trace.traceparent(f"{tenant.name}:{request_id}", request.traceparent),
        )

    def _place(self, sequence_id: int, tenant: str) -> QueuePosition:
        return queue_position_of(self.readiness.watch.record, sequence_id, tenant)

    async def _submit(
        self,
        record: SubmitRecord,
        request: GenerationRequest,
        tenant: Tenant,
        delivery: Delivery,
        waiter: str,
    ) -> Submitted:
        """What was accepted must be known."""
        delivery.submitting()
        submitting = self._link.ledger.submit(
            record, request.body_hash, tenant.bounds, note=request.note, waiter=waiter
        )
        left = Release(record.id, waiter=waiter, goes_on=request.keep_running)
        # It may have been accepted. Nobody could ever ask for an id we have just minted.
        unheard = left._replace(goes_on=True) if request.request_id else Release(record.id)
        try:
            submitted = await self._to_its_end(submitting, left, unheard)
        except AlreadyExists:
            raise AlreadyExists(f"request {request.request_id!r}") from None
        delivery.accepted()
        return submitted

    async def _wait(self, id: str, waiter: str, *, goes_on: bool) -> None:
        """Whoever leaves while they come back has left all the same."""
        left = Release(id, waiter=waiter, goes_on=goes_on)
        waiting = self._link.ledger.wait(id, waiter)
        await self._to_its_end(waiting, left, left._replace(goes_on=True))

    async def _to_its_end(
        self, asking: Coroutine[Any, Any, T], left: Release, unheard: Release
    ) -> T:
        """Of the ledger, even if the client leaves. `left`, `unheard`: what is asked then, and
        where it may have been done.
        """
        task = asyncio.ensure_future(asking)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.releases.adopt(task, left, unheard)
            raise
        except Unavailable:
            self.releases.ask(unheard)
            raise

    def _follow(
        self,
        accepted: Accepted,
        id: str,
        sequence_id: int,
        choices: Sequence[Choice],
        *,
        from_seq: int,
        render: RenderOptions,
    ) -> Generation:
        """From the first token on: text and stop strings depend on all of it."""
        sequence_ids = range(sequence_id, sequence_id + len(choices))
        subscription = self._link.follower.subscribe(
            sequence_ids, from_seq=from_seq, positions=dict.fromkeys(sequence_ids, 0)
        )
        generation = Generation(
            accepted=accepted,
            id=id,
            sequence_id=sequence_id,
            choices=choices,
            subscription=subscription,
            ledger=self._link.ledger,
            release=self.releases.ask,
            render=render,
        )
        self.door.came(generation)
        return generation

    def _watch_deadline(self, generation: Generation, wait_s: float) -> None:
        """The scheduler ends a request at its deadline; this gateway when it does not."""

        def give_up() -> None:
            generation.interrupt(DeadlineExceeded(self._phase(generation)))

        generation.on_close(asyncio.get_running_loop().call_later(wait_s, give_up).cancel)

    def _phase(self, generation: Generation) -> str:
        """How far a request has come, as far as this gateway can tell."""
        if any(choice.text.output_tokens for choice in generation.choices):
            return "decode"
        record = self.readiness.watch.record
        is_waiting = record is None or not record.running
        is_waiting = is_waiting or self._place(generation.sequence_id, "").position is not None
        return "queue" if is_waiting else "prefill"

    async def _find(self, request_id: str, tenant: Tenant) -> RequestInfo:
        """The request under its public name: errors must not show the ledger's."""
        if not request_id:
            raise InvalidRequest("request_id", "must be given")
        check_request_id(request_id)
        try:
            return await self._link.ledger.find(_ledger_id(request_id, tenant))
        except NotFound as error:
            raise NotFound(f"request {request_id!r}", error.why) from None


def _waiter() -> str:
    return secrets.token_hex(8)


def _ledger_id(request_id: str, tenant: Tenant) -> str:
    return f"{tenant.name}:{request_id}"
