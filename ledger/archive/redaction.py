"""Requests and records without what anybody said: lengths, and hashes of blocks as they fill.

Equal hashes are equal prefixes, as the prefix cache sees them, and nothing more: they are chained
from the tenant on, and keyed with a secret that lives as long as the leadership and is written
nowhere, so that nobody can try texts against them.
"""

import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kaiten.v1.archive_pb2 import ArchivedRequest, FilledBlock, ResumedChoice
from kaiten.v1.ledger_pb2 import JournalRecord

BLOCK_TOKENS: Final = 16
HASH_BYTES: Final = 8


@dataclass(slots=True)
class _Chain:
    """A sequence: hash of its full blocks, the tokens behind them, and where both stand."""

    hash: bytes
    blocks: int = 0
    tail: "array[int]" = field(default_factory=lambda: array("I"))
    # Of the output.
    next_position: int = 0

    def copy(self) -> "_Chain":
        return _Chain(self.hash, self.blocks, self.tail[:], self.next_position)


class Redactor:
    """Of one leadership; told everything that is archived, in order."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)
        self._chains: dict[int, _Chain] = {}

    def request(self, request: ArchivedRequest) -> ArchivedRequest:
        """Its lengths and hashes."""
        submit = request.submit
        chain = _Chain(self._hash(b"", submit.tenant.encode()))
        hashes = list(self._extend(chain, submit.prompt_token_ids))
        for choice in range(submit.n):
            own = self._chains[request.sequence_id + choice] = chain.copy()
            if request.choices:
                output = request.choices[choice].token_ids
                list(self._extend(own, output))
                own.next_position = len(output)
        bare = ArchivedRequest(
            entry_id=request.entry_id,
            sequence_id=request.sequence_id,
            submit=submit,
            prompt_tokens=len(submit.prompt_token_ids),
            snapshot_seq=request.snapshot_seq,
            block_hashes=[int.from_bytes(each, "little") for each in hashes],
            choices=[
                ResumedChoice(tokens=len(choice.token_ids), is_finished=choice.is_finished)
                for choice in request.choices
            ],
        )
        for said in ("prompt_token_ids", "render"):
            bare.submit.ClearField(said)
        for said in ("logit_bias", "allowed_token_ids", "bad_words", "grammar"):
            bare.submit.sampling.ClearField(said)
        return bare

    def record(self, record: JournalRecord) -> list[FilledBlock]:
        """Take the tokens out of a record; the blocks that they have filled."""
        filled = []
        for sequence_id, position, token in zip(
            record.sequence_ids, record.positions, record.token_ids, strict=True
        ):
            chain = self._chains.get(sequence_id)
            if chain is None or position != chain.next_position:
                # Something is missing before it: what follows hashes to nothing that compares.
                self._chains.pop(sequence_id, None)
                continue
            chain.next_position += 1
            for block_hash in self._extend(chain, (token,)):
                value = int.from_bytes(block_hash, "little")
                index = chain.blocks - 1
                filled.append(FilledBlock(sequence_id=sequence_id, index=index, hash=value))
        for ended in record.finished:
            self._chains.pop(ended.sequence_id, None)
        for said in ("token_ids", "logprobs"):
            record.ClearField(said)
        for item in record.inputs:
            if item.WhichOneof("input") == "result":
                item.result.step.ClearField("token_ids")
        return filled

    def _extend(self, chain: _Chain, tokens: Sequence[int]) -> Iterator[bytes]:
        """Hash of each block that becomes full."""
        chain.tail.extend(tokens)
        start = 0
        while len(chain.tail) - start >= BLOCK_TOKENS:
            block = chain.tail[start : start + BLOCK_TOKENS].tobytes()
            chain.hash = self._hash(chain.hash, block)
            chain.blocks += 1
            start += BLOCK_TOKENS
            yield chain.hash
        del chain.tail[:start]

    def _hash(self, parent: bytes, content: bytes) -> bytes:
        return blake2b(parent + content, digest_size=HASH_BYTES, key=self._key).digest()
