"""What subscribers have not taken yet: merged per sequence, de-duplicated by position. Performs no
I/O itself.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Protocol, Self

from kaiten.v1.common_pb2 import TokenLogprobs
from kaiten.v1.ledger_pb2 import SequenceFinished
from ledger.types import History, Update

UNKNOWN: Final = -1


class Source(Protocol):
    """What a subscription needs of its follower."""

    def forget(self, subscription: "Subscription") -> None: ...

    def forget_sequence(self, pending: "Pending") -> None: ...

    async def fill(self, holed: Sequence["Pending"]) -> None: ...


class Pending:
    """What one subscription has not yet taken of one sequence.

    Invariant: token_ids holds positions [next - len(token_ids), next); next is UNKNOWN until the
    first token.
    """

    __slots__ = (
        "finished",
        "has_hole",
        "is_ready",
        "late",
        "logprobs",
        "next",
        "owner",
        "sequence_id",
        "stream_interval",
        "token_ids",
    )

    def __init__(self, owner: "Subscription", sequence_id: int, position: int) -> None:
        self.owner = owner
        self.sequence_id = sequence_id
        self.next = position
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finished: SequenceFinished | None = None
        self.is_ready = False
        # Fewer tokens than this are not worth a look, unless they are the last or one is missing.
        self.stream_interval = 1
        # Tokens are missing at `next`; what arrives above it is left to the history.
        self.has_hole = False
        # While history is being read: what arrives meanwhile.
        self.late: list[tuple[int, int, TokenLogprobs | None]] | None = None

    def take_token(self, position: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Keep a token if it is the next one; note a hole if it lies beyond."""
        if self.late is not None:
            self.late.append((position, token_id, logprobs))
        elif position == self.next or self.next == UNKNOWN:
            self.next = position + 1
            self.token_ids.append(token_id)
            if logprobs is not None:
                self.logprobs.append(logprobs)
        elif position > self.next:
            self.has_hole = True

    def open_hole(self) -> None:
        """Something was missed: history decides, from the next position wanted or from 0."""
        self.has_hole = True
        self.next = max(self.next, 0)

    def take_history(self, history: History) -> None:
        """What was missed, then what arrived while it was read."""
        late, self.late = self.late or [], None
        output = history.output
        has_logprobs = len(output.logprobs) > 0
        for position in range(self.next, len(output.token_ids)):
            logprobs = output.logprobs[position] if has_logprobs else None
            self.take_token(position, output.token_ids[position], logprobs)
        for token in late:
            self.take_token(*token)
        if history.finished is not None:
            self.finished = history.finished

    def take_end(self, finished: SequenceFinished) -> None:
        self.finished = finished
        if self.late is None and self.next != UNKNOWN and finished.output_tokens > self.next:
            self.has_hole = True

    def drain(self) -> Update | None:
        """Everything there is, as one update; None when there is nothing."""
        if not self.token_ids and self.finished is None:
            return None
        position = self.next - len(self.token_ids) if self.next != UNKNOWN else 0
        token_ids, logprobs = self.token_ids, self.logprobs
        if self.finished is not None:
            # A stop string ends a sequence before the last token that was computed.
            kept = max(0, self.finished.output_tokens - position)
            token_ids, logprobs = token_ids[:kept], logprobs[:kept]
        self.token_ids, self.logprobs = [], []
        return Update(
            sequence_id=self.sequence_id,
            position=position,
            token_ids=token_ids,
            logprobs=logprobs,
            finished=self.finished,
        )


class Subscription:
    """Updates of some sequences until each has finished. Iterate it once; close it when leaving
    early.
    """

    def __init__(
        self, follower: Source, sequence_ids: Sequence[int], positions: Mapping[int, int]
    ) -> None:
        self._follower = follower
        self.pending = [Pending(self, s, positions.get(s, UNKNOWN)) for s in sequence_ids]
        self._open = len(self.pending)
        self._ready: deque[Pending] = deque()
        # Tokens to wait for, once there has been an update.
        self._stream_interval = 1
        # Asked for again and again it would cost a system call each time.
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop receiving. Closing twice is fine."""
        if not self.is_closed:
            self.is_closed = True
            self._follower.forget(self)
            self._wake()

    def fail(self, error: Exception) -> None:
        """The next look at this subscription raises."""
        self._error = error
        self._wake()

    def set_stream_interval(self, tokens: int) -> None:
        """From its next update on, so many tokens of a sequence are awaited, or its end: a look
        costs as much for one as for many (vLLM's --stream-interval).
        """
        self._stream_interval = tokens

    def mark(self, pending: Pending) -> None:
        """Something new is in `pending`."""
        if not pending.is_ready:
            pending.is_ready = True
            self._ready.append(pending)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        while True:
            if self._error is not None:
                raise self._error
            if self._open == 0 or self.is_closed:
                self.close()
                raise StopAsyncIteration
            if self._ready:
                pending = self._ready[0]
                if pending.has_hole:
                    await self._follower.fill([each for each in self._ready if each.has_hole])
                elif (update := self._take(pending)) is not None:
                    return update
                continue
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _take(self, pending: Pending) -> Update | None:
        """Drain the first of the ready ones."""
        self._ready.popleft()
        pending.is_ready = False
        update = pending.drain()
        pending.stream_interval = self._stream_interval
        if update is not None and update.finished is not None:
            self._open -= 1
            self._follower.forget_sequence(pending)
        return update
