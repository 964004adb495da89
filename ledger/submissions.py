"""The gateway's side: submit, cancel, and look at requests, results and the cell."""

import asyncio
from collections.abc import Sequence
from typing import Any

from kaiten.v1.common_pb2 import FinishReason, PromptLogprobs
from kaiten.v1.ledger_pb2 import (
    CancelRecord,
    CellRecord,
    FoldedTokens,
    InboxRecord,
    JournalRecord,
    RenderOptions,
    RequestResult,
    SequenceFinished,
    StoredPromptLogprobs,
    SubmitRecord,
)
from ledger import scripts
from ledger.store import Store, time_ns
from ledger.tokens import Outputs, cut, joined
from ledger.types import (
    UNBOUNDED,
    CellView,
    DamagedLedger,
    History,
    Lease,
    Load,
    RequestInfo,
    Submitted,
    TenantBounds,
)
from service_kit.errors import AlreadyExists, InvalidRequest, NotFound, Overloaded, TooLong

# What a full queue tells clients: about the time some request of a busy cell takes to end.
RETRY_AFTER_S = 1.0
NO_BOUNDS = TenantBounds()
# A millisecond or two; a tail has hundreds, and the streams go on meanwhile.
RECORDS_AT_ONCE = 16
RESULTS_AT_ONCE = 32
HEADS_AT_ONCE = 256
LEASE_FIELDS = ("epoch", "nonce", "address", "renew_seq", "journal_seq", "folded_seq")
# What submit.lua refuses with: the reason, whose bound it is, and which.
REFUSALS = {
    b"FULL_REQUESTS": ("too many live requests", "cell", "requests_max"),
    b"FULL_TOKENS": ("too many live prompt tokens", "cell", "prompt_tokens_max"),
    b"FULL_RESULTS": (
        "too many bytes of results (results_mb) are kept",
        "cell",
        "results_bytes_max",
    ),
    b"TENANT_REQUESTS": ("too many live requests of tenant", "tenant", "requests_max"),
    b"TENANT_TOKENS": ("too many live prompt tokens of tenant", "tenant", "prompt_tokens_max"),
    b"TENANT_RESULTS": (
        "too many bytes of results (results_mb) are kept of tenant",
        "tenant",
        "results_bytes_max",
    ),
}


class Submissions:
    """Part of Ledger; see there."""

    _store: Store

    async def submit(
        self,
        record: SubmitRecord,
        body_hash: bytes,
        bounds: TenantBounds = NO_BOUNDS,
        *,
        note: bytes = b"",
        waiter: str = "",
    ) -> Submitted:
        """Accept a request, or find it accepted already. All bounds are decided before anything is
        written. `note`: kept with it for `note`, and read by nobody else. `waiter`: a name that
        nobody else has, for `cancel`.
        """
        limits = self._store.limits
        prompt_tokens = len(record.prompt_token_ids)
        tokens_max = _least(limits.prompt_tokens_max, bounds.prompt_tokens_max)
        self._check_choices(record.n, bounds)
        # The scheduler takes these two for granted: an entry that crashes it is there again when it
        # is back.
        if not prompt_tokens:
            raise InvalidRequest("prompt", "must not be empty")
        if record.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens", "must be at least 1, got 0")
        if prompt_tokens > tokens_max:
            raise TooLong("prompt tokens", tokens_max, prompt_tokens)
        verdict, *rest = await self._store.script(
            scripts.SUBMIT,
            self._submit_keys(record),
            (
                body_hash,
                record.n,
                prompt_tokens,
                limits.requests_max,
                limits.prompt_tokens_max,
                InboxRecord(submit=record).SerializeToString(),
                record.render.SerializeToString(),
                record.id,
                self._store.keys.sequence_prefix,
                record.tenant,
                _least(UNBOUNDED, bounds.requests_max),
                _least(UNBOUNDED, bounds.prompt_tokens_max),
                limits.results_bytes_max,
                note,
                _least(UNBOUNDED, bounds.results_bytes_max),
                waiter,
            ),
        )
        if verdict == b"OTHER":
            raise AlreadyExists(f"request {record.id}")
        if verdict in REFUSALS:
            _, subject, rule = REFUSALS[verdict]
            bound = getattr(bounds if subject == "tenant" else limits, rule)
            raise _overloaded(verdict, bound, int(rest[0]), record.tenant)
        return Submitted(
            sequence_id=int(rest[0]),
            journal_seq=int(rest[1]),
            is_new=verdict == b"NEW",
        )

    def _check_choices(self, choices: int, bounds: TenantBounds) -> None:
        """InvalidRequest: more than there may ever be, however long one waits."""
        most = _least(self._store.limits.requests_max, bounds.requests_max)
        if not 1 <= choices <= most:
            raise InvalidRequest("n", f"must be in [1, {most}], got {choices}")

    def _submit_keys(self, record: SubmitRecord) -> tuple[str, ...]:
        keys, tenant = self._store.keys, record.tenant
        return keys.inbox, keys.load, keys.lease, keys.request(record.id), keys.results(tenant)

    async def refuse_if_full(self, tenant: str, choices: int, bounds: TenantBounds) -> None:
        """Raise what `submit` would raise now, at the price of a look: for before expensive work.

        Passing promises nothing; only submit decides.
        """
        limits = self._store.limits
        self._check_choices(choices, bounds)
        theirs, all_ = await self.load(tenant), await self.load()
        requests_max, tokens_max = limits.requests_max, limits.prompt_tokens_max
        for verdict, live, bound in (
            (b"TENANT_REQUESTS", theirs.choices + choices - 1, bounds.requests_max),
            (b"TENANT_TOKENS", theirs.prompt_tokens, bounds.prompt_tokens_max),
            (b"FULL_REQUESTS", all_.choices + choices - 1, requests_max),
            (b"FULL_TOKENS", all_.prompt_tokens, tokens_max),
        ):
            if bound is not None and live >= bound:
                raise _overloaded(verdict, bound, live, tenant)

    async def cancel(
        self,
        id: str,
        *,
        choice: int | None = None,
        reason: FinishReason = FinishReason.FINISH_REASON_CANCELLED,
        output_tokens: int = 0,
        waiter: str = "",
        goes_on: bool = False,
    ) -> bool:
        """Ask for the end of a request or of one choice. False: it had ended. Repeats write
        nothing. `waiter`: who waits for it no more; it ends with the last of them, unless it
        `goes_on`.
        """
        found = await self.find(id)
        if choice is not None and not 0 <= choice < found.n:
            raise InvalidRequest("choice", f"must be in [0, {found.n}), got {choice}")
        record = CancelRecord(
            id=id,
            sequence_id=found.sequence_id,
            n=found.n,
            reason=reason,
            output_tokens=output_tokens,
        )
        if choice is not None:
            record.choice = choice
        keys = self._store.keys
        verdict, *_ = await self._store.script(
            scripts.CANCEL,
            (keys.inbox, keys.request(id)),
            (
                found.sequence_id,
                "*" if choice is None else choice,
                InboxRecord(cancel=record).SerializeToString(),
                waiter,
                int(goes_on),
            ),
        )
        if verdict == b"NONE":
            raise NotFound(f"request {id}")
        return bool(verdict != b"ENDED")

    async def wait(self, id: str, waiter: str) -> None:
        """Come back to a request, as a repeat of `submit` does; nothing if it is not there."""
        await self._store.script(scripts.WAIT, (self._store.keys.request(id),), (waiter,))

    async def find(self, id: str) -> RequestInfo:
        """A live request, or a finished one while its result is kept. NotFound otherwise."""
        keys = self._store.keys
        fields = ("sequence_id", "n", "finished", "prompt_tokens", "render", "forgotten")
        known, seq = await self._store.read(
            (("HMGET", keys.request(id), *fields), ("HGET", keys.lease, "journal_seq"))
        )
        if known[0] is None or known[5] is not None:
            raise await self._gone(id)
        return RequestInfo(
            sequence_id=int(known[0]),
            n=int(known[1]),
            is_finished=known[2] is not None,
            prompt_tokens=int(known[3]),
            render=RenderOptions.FromString(known[4]),
            journal_seq=int(seq or 0),
        )

    async def live(self, ids: Sequence[str]) -> list[bool]:
        """Whether each of them has been accepted and has not ended."""
        found: list[bool] = []
        for start in range(0, len(ids), HEADS_AT_ONCE):
            some = [self._store.keys.request(id) for id in ids[start : start + HEADS_AT_ONCE]]
            heads = await self._store.read(
                [("HMGET", key, "sequence_id", "finished") for key in some]
            )
            found += [accepted is not None and ended is None for accepted, ended in heads]
        return found

    async def note(self, id: str) -> bytes:
        """What was given to `submit` with it. NotFound: no such request, or it had none."""
        (stored,) = await self._store.read((("HGET", self._store.keys.request(id), "note"),))
        if stored is None:
            raise await self._gone(id)
        return bytes(stored)

    async def _gone(self, id: str) -> NotFound:
        """Nobody keeps account of what has left: it says all that may be."""
        names = ("results:ttl", "noted:ttl")
        ((ttl_s, noted_s),) = await self._store.read((("HMGET", self._store.keys.load, *names),))
        kept = f"for {int(ttl_s)} s at most (--result-ttl-s)" if ttl_s else "for --result-ttl-s"
        noted = f"{int(noted_s)} s (--response-ttl-s)" if noted_s else "--response-ttl-s"
        rule = (
            f"results are kept {kept}, stored responses for {noted}, for less where results_mb"
            " runs short"
        )
        return NotFound(f"request {id}", f"it never was, was deleted, or is kept no more; {rule}")

    async def forget(self, id: str) -> None:
        """`find` finds it no more, and its note and result are gone. NotFound: it was not there.

        Who forgets a live request cancels it before. Its id stays taken until it would have left.
        """
        keys = self._store.keys
        verdict, *_ = await self._store.script(
            scripts.FORGET, (keys.request(id), keys.result(id), keys.load), ()
        )
        if verdict == b"NONE":
            raise NotFound(f"request {id}")

    async def result(self, id: str) -> RequestResult | None:
        """What a finished request ended with; None while it is live, unknown, or no longer kept."""
        (stored,) = await self._store.read((("GET", self._store.keys.result(id)),))
        return None if stored is None else RequestResult.FromString(stored)

    async def prompt_logprobs(self, sequence_id: int) -> PromptLogprobs:
        """Log-probabilities of a request's prompt, as far as committed, by its first sequence id.

        Complete once a token of any choice is. Empty when unknown or no longer kept.
        """
        (stored,) = await self._store.read(
            (("GET", self._store.keys.prompt_logprobs(sequence_id)),)
        )
        return joined(StoredPromptLogprobs.FromString(stored or b""))

    async def history(self, sequence_id: int, *, through_seq: int) -> History:
        """Of one sequence, see `histories`. Raises what is wrong with it."""
        found = (await self.histories((sequence_id,), through_seq=through_seq))[sequence_id]
        if isinstance(found, Exception):
            raise found
        return found

    async def histories(
        self, sequence_ids: Sequence[int], *, through_seq: int
    ) -> dict[int, History | Exception]:
        """Everything of some sequences up to at least journal record through_seq, from position 0.

        What was folded or ended since may be in it too; positions tell. Instead of a history:
        NotFound when it is no longer kept, DamagedLedger when it has a hole. The journal is read
        once for all of them.
        """
        keys = self._store.keys
        call_keys = [keys.lease, keys.journal]
        for sequence_id in sequence_ids:
            call_keys.append(keys.sequence(sequence_id))
            call_keys += [keys.tokens(sequence_id), keys.finished(sequence_id)]
        _, tail, *stored = await self._store.script(scripts.HISTORY, call_keys, (through_seq,))
        states = dict(zip(sequence_ids, stored, strict=True))
        live = {one: state for one, state in states.items() if state[0] and state[1] < 0}
        outputs = Outputs({one: FoldedTokens.FromString(live[one][2] or b"") for one in live})
        for index, (_, (_, record)) in enumerate(tail if live else ()):
            outputs.apply(JournalRecord.FromString(record))
            if index % RECORDS_AT_ONCE == 0:
                await asyncio.sleep(0)
        over = {
            one: state[0].decode() for one, state in states.items() if state[0] and state[1] >= 0
        }
        results = await self._results(tuple(dict.fromkeys(over.values())))
        found: dict[int, History | Exception] = {}
        for sequence_id, (*_, ended) in states.items():
            try:
                if sequence_id in live:
                    found[sequence_id] = _history_of(sequence_id, outputs, ended)
                else:
                    found[sequence_id] = _history_in(
                        results.get(over.get(sequence_id, "")), sequence_id
                    )
            except (NotFound, DamagedLedger) as error:
                found[sequence_id] = error
        return found

    async def _results(self, ids: Sequence[str]) -> dict[str, RequestResult]:
        """Of those that are kept."""
        found = {}
        for start in range(0, len(ids), RESULTS_AT_ONCE):
            some = ids[start : start + RESULTS_AT_ONCE]
            stored = await self._store.read([("GET", self._store.keys.result(id)) for id in some])
            for id, result in zip(some, stored, strict=True):
                if result is not None:
                    found[id] = RequestResult.FromString(result)
        return found

    async def journal_read(
        self, after_seq: int, *, block_ms: int, count: int
    ) -> list[JournalRecord]:
        """Records after a seq, waiting up to block_ms for the first. Trimmed ones are skipped."""
        entries, _ = await self._store.read_stream(
            self._store.keys.journal, f"{after_seq}-0", block_ms=block_ms, count=count
        )
        if entries:
            # The commit waits for replicas before it counts; its record was to be read at once.
            await self._store.replicated()
        return [JournalRecord.FromString(fields[1]) for _, fields in entries]

    async def cell(self) -> CellView:
        """The leader's last CellRecord. Its lease standing still for long: nobody leads."""
        fields = (*LEASE_FIELDS, "cell")
        (found,) = await self._store.read((("HMGET", self._store.keys.lease, *fields),))
        record = None if found[-1] is None else CellRecord.FromString(found[-1])
        return CellView(record, _lease_in(found))

    async def leader(self) -> Lease | None:
        """The lease as it stands; None before the first election."""
        (found,) = await self._store.read((("HMGET", self._store.keys.lease, *LEASE_FIELDS),))
        return _lease_in(found)

    async def load(self, tenant: str | None = None) -> Load:
        """Live choices and prompt tokens, of the cell or of one tenant: what the bounds of submit
        are checked against.
        """
        suffix = "" if tenant is None else f":{tenant}"
        fields = (f"choices{suffix}", f"prompt_tokens{suffix}")
        (found,) = await self._store.read((("HMGET", self._store.keys.load, *fields),))
        return Load(choices=int(found[0] or 0), prompt_tokens=int(found[1] or 0))

    async def now_ns(self) -> int:
        """The cell's clock: the store's own, so that every process reads the same one."""
        (found,) = await self._store.commands((("TIME",),))
        return time_ns(found)


def _lease_in(found: Sequence[Any]) -> Lease | None:
    """Of LEASE_FIELDS, as the store has them."""
    if found[0] is None:
        return None
    return Lease(
        epoch=int(found[0]),
        nonce=int(found[1] or 0),
        address=found[2].decode(),
        renew_seq=int(found[3]),
        journal_seq=int(found[4]),
        folded_seq=int(found[5]),
    )


def _history_in(stored: RequestResult | None, sequence_id: int) -> History:
    """Of a finished request."""
    if stored is None:
        raise NotFound(f"sequence {sequence_id}")
    choice = stored.choices[sequence_id - stored.sequence_id]
    return History(cut(choice.output, choice.finished), choice.finished)


def _history_of(sequence_id: int, outputs: Outputs, ended: bytes | None) -> History:
    """Of a live sequence."""
    if sequence_id in outputs.damaged:
        raise DamagedLedger(outputs.damaged[sequence_id])
    finished = outputs.finished.get(sequence_id)
    if finished is None and ended is not None:
        finished = SequenceFinished.FromString(ended)
    return History(cut(outputs.tokens[sequence_id], finished), finished)


def _overloaded(verdict: bytes, bound: int, live: int, tenant: str) -> Overloaded:
    reason, subject, rule = REFUSALS[verdict]
    if subject != "tenant":
        return Overloaded(reason, RETRY_AFTER_S, bound, live=live, subject=subject, rule=rule)
    return Overloaded(
        f"{reason} {tenant}",
        RETRY_AFTER_S,
        bound,
        live=live,
        subject=subject,
        rule=rule,
        tenant=tenant,
    )


def _least(limit: int, bound: int | None) -> int:
    return limit if bound is None else min(limit, bound)
