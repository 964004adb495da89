"""The leader's side: read the inbox, commit steps, fold old tokens away, and recover after an
election.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

from google.protobuf.message import DecodeError

from kaiten.v1.ledger_pb2 import (
    FoldedTokens,
    InboxRecord,
    JournalRecord,
    RequestResult,
    SequenceFinished,
    StoredPromptLogprobs,
    SubmitRecord,
)
from ledger import scripts
from ledger.servers.connections import Argument
from ledger.store import Call, Store
from ledger.tokens import Outputs, joined
from ledger.types import (
    WHOLE,
    Commit,
    DamagedLedger,
    Fenced,
    FoldPart,
    InboxEntry,
    Leader,
    Recovered,
)

Between: TypeAlias = Callable[[], Awaitable[None]]
CURSOR_START: Final = "0-0"
# Entries per read while recovering: few enough for a page of long prompts to be read and decoded
# well within a lease.
PAGE_ENTRIES: Final = 64


async def _nothing() -> None:
    """Between two pages."""


def commit_call(store: Store, leader: Leader, commit: Commit) -> Call:
    """Keys and arguments of one commit, in the order commit.lua states."""
    record, endings, prompt_logprobs, data = commit
    keys = store.keys
    ending_sequence_ids = {
        sequence_id for result in endings for sequence_id in sequence_ids_of(result)
    }
    goes_on = [ended for ended in record.finished if ended.sequence_id not in ending_sequence_ids]
    call_keys = [keys.lease, keys.inbox, keys.journal, keys.load]
    call_keys += [keys.prompt_logprobs(sequence_id) for sequence_id in prompt_logprobs]
    call_keys += [keys.finished(ended.sequence_id) for ended in goes_on]
    args: list[Argument] = [
        leader.epoch,
        leader.nonce,
        record.seq,
        data or record.SerializeToString(),
        store.limits.result_ttl_s,
        max(store.limits.result_ttl_s, store.limits.response_ttl_s),
        len(prompt_logprobs),
        len(goes_on),
        len(endings),
        *(StoredPromptLogprobs(runs=[run]).SerializeToString() for run in prompt_logprobs.values()),
        *(ended.SerializeToString() for ended in goes_on),
    ]
    for result in endings:
        call_keys += [keys.request(result.id), keys.result(result.id)]
        call_keys.append(keys.prompt_logprobs(result.sequence_id))
        for sequence_id in sequence_ids_of(result):
            call_keys += [
                keys.tokens(sequence_id),
                keys.finished(sequence_id),
                keys.sequence(sequence_id),
            ]
        args += [result.sequence_id, len(result.choices), result.SerializeToString()]
    return scripts.COMMIT, call_keys, args


def sequence_ids_of(result: RequestResult) -> range:
    """Of its choices."""
    return range(result.sequence_id, result.sequence_id + len(result.choices))


def _refuse(reply: Sequence[Any], leader: Leader, doing: str) -> None:
    """Raise what a leader script's verdict means, if it is not OK."""
    verdict = reply[0]
    if verdict == b"OK":
        return
    found = reply[1].decode() if len(reply) > 1 and reply[1] is not None else "none"
    reasons = {
        b"FENCED": f"epoch {leader.epoch} no longer leads (the lease says {found})",
        b"GAP": f"out of sequence: the journal is at {found}",
        b"STALE": f"out of sequence: the fold is at {found}",
        b"MISMATCH": f"sequence id or n differ from what {found} was accepted with",
    }
    raise Fenced(f"{doing} refused: {reasons.get(verdict, verdict)}")


def _entry(entry_id: bytes, fields: Sequence[bytes], read_ns: int = 0) -> InboxEntry:
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    sequence_id, record = 0, InboxRecord()
    with suppress(KeyError, ValueError, DecodeError):
        sequence_id = int(named[b"s"])
        record = InboxRecord.FromString(named[b"r"])
    kind = record.WhichOneof("record")
    return InboxEntry(
        entry_id=entry_id.decode(),
        sequence_id=sequence_id,
        record=record.submit if kind == "submit" else record.cancel,
        is_known=kind is not None,
        read_ns=read_ns,
    )


def _pages(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class Commits:
    """Part of Ledger; see there."""

    _store: Store
    # What this leader knows of the fold, by epoch: so that a fold built on another state is
    # refused.
    _folded: tuple[int, int] | None = None

    async def commit(
        self,
        leader: Leader,
        record: JournalRecord,
        endings: Sequence[RequestResult] = (),
    ) -> None:
        """Append one record and end what ends with it, atomically. A repeat is OK. Fenced: stop
        leading.
        """
        await self.commit_many(leader, [Commit(record, endings)])

    async def commit_many(self, leader: Leader, commits: Sequence[Commit]) -> None:
        """Commit in order in one round trip. When it raises, a prefix of them may have been
        applied; sending the same again is safe."""
        if not commits:
            return
        calls = [commit_call(self._store, leader, commit) for commit in commits]
        replies = await self._store.run_scripts(calls)
        for commit, reply in zip(commits, replies, strict=True):
            _refuse(reply, leader, f"commit {commit.record.seq}")

    async def fold(
        self,
        leader: Leader,
        through_seq: int,
        pieces: Mapping[int, FoldedTokens],
        *,
        trim_seq: int | None = None,
        part: FoldPart = WHOLE,
    ) -> None:
        """Append each live sequence's tokens of records (last fold, through_seq] and trim records
        through `trim_seq`; None: all that are folded. In parts, each of other sequences and one
        after the other, it is done with the last.

        A repeat is OK. After Unavailable repeat the same fold: it may have been applied.
        """
        keys = self._store.keys
        from_seq = await self._folded_seq(leader)
        call_keys = [keys.lease, keys.journal]
        args: list[Argument] = [leader.epoch, leader.nonce, from_seq, through_seq]
        args += [through_seq if trim_seq is None else trim_seq, *part]
        for sequence_id, piece in pieces.items():
            call_keys += [keys.tokens(sequence_id), keys.sequence(sequence_id)]
            args.append(piece.SerializeToString())
        reply = await self._store.script(scripts.FOLD, call_keys, args)
        _refuse(reply, leader, f"fold through {through_seq}")
        if part.number + 1 == part.of:
            self._folded = (leader.epoch, through_seq)

    async def _folded_seq(self, leader: Leader) -> int:
        if self._folded is None or self._folded[0] != leader.epoch:
            (found,) = await self._store.read((("HGET", self._store.keys.lease, "folded_seq"),))
            self._folded = (leader.epoch, int(found or 0))
        return self._folded[1]

    async def inbox_read(
        self, after_id: str, *, block_ms: int = 1000, count: int = PAGE_ENTRIES
    ) -> list[InboxEntry]:
        """Entries after a cursor, waiting up to block_ms for the first. Entries stay until
        terminal.
        """
        entries, read_ns = await self._store.read_stream(
            self._store.keys.inbox, after_id, block_ms=block_ms, count=count
        )
        return [_entry(entry_id, fields, read_ns) for entry_id, fields in entries]

    async def inbox_all(self, between: Between = _nothing) -> list[InboxEntry]:
        """Every entry there is, oldest first."""
        entries: list[InboxEntry] = []
        start = "-"
        while True:
            (page,) = await self._store.read(
                (("XRANGE", self._store.keys.inbox, start, "+", "COUNT", PAGE_ENTRIES),)
            )
            entries += [_entry(*entry) for entry in page]
            if len(page) < PAGE_ENTRIES:
                return entries
            await between()
            start = f"({entries[-1].entry_id}"

    async def recover(self, leader: Leader, between: Between = _nothing) -> Recovered:
        """Every live request with its committed tokens. Only the leader may rely on it: nobody else
        commits. `between` is awaited after each page: much may be live.
        """
        entries = await self.inbox_all(between)
        live = [
            sequence_id
            for entry in entries
            if isinstance(entry.record, SubmitRecord)
            for sequence_id in range(entry.sequence_id, entry.sequence_id + entry.record.n)
        ]
        wanting = [
            entry.sequence_id
            for entry in entries
            if isinstance(entry.record, SubmitRecord)
            and entry.record.sampling.HasField("prompt_logprobs")
        ]
        folded, ended = await self._folded_state(live, between)
        folded_counts = {
            sequence_id: len(output.token_ids) for sequence_id, output in folded.items()
        }
        outputs, decided_ns = Outputs(folded), 0
        async for record in self._journal(between):
            outputs.apply(record)
            decided_ns = record.unix_ns
        prompt_logprobs_from = {}
        for sequence_id in wanting:
            try:
                prompt_logprobs_from[sequence_id] = await self._prompt_logprobs_from(sequence_id)
            except DamagedLedger as error:
                outputs.damaged[sequence_id] = str(error)
            await between()
        (lease,) = await self._store.read(
            (("HMGET", self._store.keys.lease, "epoch", "nonce", "journal_seq", "folded_seq"),)
        )
        if (int(lease[0]), int(lease[1] or 0)) != (leader.epoch, leader.nonce):
            raise Fenced(f"recover refused: epoch {leader.epoch} no longer leads")
        self._folded = (leader.epoch, int(lease[3]))
        return Recovered(
            entries=tuple(entry for entry in entries if entry.is_known),
            unknown=tuple(entry for entry in entries if not entry.is_known),
            tokens=outputs.tokens,
            folded_counts=folded_counts,
            finished={**ended, **outputs.finished},
            prompt_logprobs_from=prompt_logprobs_from,
            journal_seq=int(lease[2]),
            decided_ns=decided_ns,
            cursor=entries[-1].entry_id if entries else CURSOR_START,
            damaged=outputs.damaged,
        )

    async def _prompt_logprobs_from(self, sequence_id: int) -> int:
        """The next prompt position. One request at a time: the values are large and not kept."""
        (stored,) = await self._store.read(
            (("GET", self._store.keys.prompt_logprobs(sequence_id)),)
        )
        prompt = joined(StoredPromptLogprobs.FromString(stored or b""))
        return prompt.position + prompt.token_count

    async def _folded_state(
        self, sequence_ids: Sequence[int], between: Between
    ) -> tuple[dict[int, FoldedTokens], dict[int, SequenceFinished]]:
        keys = self._store.keys
        folded: dict[int, FoldedTokens] = {}
        ended: dict[int, SequenceFinished] = {}
        for page in _pages(sequence_ids, PAGE_ENTRIES):
            tokens, finished = await self._store.read(
                (
                    ("MGET", *(keys.tokens(sequence_id) for sequence_id in page)),
                    ("MGET", *(keys.finished(sequence_id) for sequence_id in page)),
                )
            )
            for sequence_id, output, end in zip(page, tokens, finished, strict=True):
                folded[sequence_id] = FoldedTokens.FromString(output or b"")
                if end is not None:
                    ended[sequence_id] = SequenceFinished.FromString(end)
            await between()
        return folded, ended

    async def _journal(self, between: Between) -> AsyncIterator[JournalRecord]:
        """What is not folded."""
        (folded_seq,) = await self._store.read((("HGET", self._store.keys.lease, "folded_seq"),))
        start = f"({int(folded_seq or 0)}-0"
        while True:
            (page,) = await self._store.read(
                (("XRANGE", self._store.keys.journal, start, "+", "COUNT", PAGE_ENTRIES),)
            )
            for entry_id, (_, record) in page:
                yield JournalRecord.FromString(record)
                start = f"({entry_id.decode()}"
            if len(page) < PAGE_ENTRIES:
                return
            await between()
