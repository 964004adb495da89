"""Key names of one cell. The braces put them all into one hash slot, so that one script may touch
them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key a cell ever writes."""

    cell: str

    @property
    def prefix(self) -> str:
        return f"kaiten:{{{self.cell}}}:"

    @property
    def meta(self) -> str:
        """Hash: schema, nonce of the store, last sequence id minted. Lives as long as the cell."""
        return f"{self.prefix}meta"

    @property
    def lease(self) -> str:
        """Hash: who leads, and how far the journal and its fold have come."""
        return f"{self.prefix}lease"

    @property
    def inbox(self) -> str:
        """Stream: submits and cancels; a request's entries live until its terminal commit."""
        return f"{self.prefix}inbox"

    @property
    def journal(self) -> str:
        """Stream: one entry "<seq>-0" per commit, trimmed at most up to the fold."""
        return f"{self.prefix}journal"

    @property
    def load(self) -> str:
        """Hash: live choices and prompt tokens, and bytes of stored results by when they leave."""
        return f"{self.prefix}load"

    def results(self, tenant: str) -> str:
        """Hash: bytes of a tenant's stored results by when they leave, with TTL."""
        return f"{self.prefix}results:{tenant}"

    def request(self, id: str) -> str:
        """Hash: what submit knew; expires with the result."""
        return f"{self.prefix}request:{id}"

    def result(self, id: str) -> str:
        """String: RequestResult, with TTL."""
        return f"{self.prefix}result:{id}"

    @property
    def sequence_prefix(self) -> str:
        return f"{self.prefix}sequence:"

    def sequence(self, sequence_id: int) -> str:
        """String: the id of its request. No TTL while live, the result's TTL afterwards."""
        return f"{self.sequence_prefix}{sequence_id}"

    def tokens(self, sequence_id: int) -> str:
        """String: FoldedTokens of a live sequence, pieces concatenated."""
        return f"{self.prefix}tokens:{sequence_id}"

    def prompt_logprobs(self, sequence_id: int) -> str:
        """String: StoredPromptLogprobs, by the first sequence id; expires with the result."""
        return f"{self.prefix}prompt_logprobs:{sequence_id}"

    def shelf(self, tenant: str) -> tuple[str, str, str, str]:
        """What a tenant keeps, with TTL. Sorted sets: its files and its batches by when they were
        made, all of them and its conversations with their bytes by when they leave. String: the
        sum of the bytes.
        """
        own = f"{self.prefix}shelf:{tenant}"
        return f"{own}:files", f"{own}:batches", f"{own}:leaving", f"{own}:bytes"

    def file(self, tenant: str, id: str) -> str:
        """Hash: name, purpose, bytes and pieces of a file, and what it counts for, with TTL."""
        return f"{self.prefix}file:{tenant}:{id}"

    def place(self, tenant: str, id: str) -> str:
        """String: when a file or a batch was made, with TTL, which is longer than its own."""
        return f"{self.prefix}place:{tenant}:{id}"

    def file_chunk(self, tenant: str, id: str, number: int) -> str:
        """String: a piece of a file, with TTL."""
        return f"{self.file(tenant, id)}:{number}"

    def conversation(self, tenant: str, id: str) -> str:
        """Hash: content of a conversation and its version, with TTL."""
        return f"{self.prefix}conversation:{tenant}:{id}"

    @property
    def waiting(self) -> str:
        """Hash: the responses that conversations of all tenants wait for."""
        return f"{self.prefix}waiting"

    @property
    def batches(self) -> str:
        """Hash: the live batches of all tenants, which somebody must drive."""
        return f"{self.prefix}batches"

    def answers(self, tenant: str) -> str:
        """Hash: bytes of answers of a tenant's live batches, with TTL."""
        return f"{self.prefix}answers:{tenant}"

    def batch(self, tenant: str, id: str) -> str:
        """Hash: state and counters of a batch, with TTL."""
        return f"{self.prefix}batch:{tenant}:{id}"

    def batch_lines(self, tenant: str, id: str) -> str:
        """Hash: the answers of a live batch by line, with TTL."""
        return f"{self.batch(tenant, id)}:lines"

    def batch_driver(self, tenant: str, id: str) -> str:
        """String: which gateway drives it, with TTL."""
        return f"{self.batch(tenant, id)}:driver"

    def finished(self, sequence_id: int) -> str:
        """String: SequenceFinished of a choice whose request still has others running."""
        return f"{self.prefix}finished:{sequence_id}"
