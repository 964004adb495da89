"""The one funnel of both protocols: an accepted request as a series of events.

Tokens come from the journal, become text, and end in exactly one Finished per choice and one Done.
A choice that meets a stop string, or the end of the only call that is wanted, ends here and now,
with the exact token count, and its computation is cancelled; since that is decided from the tokens
alone, every gateway decides the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Final, NamedTuple, Self

from gateway.observe.metrics import Visit
from gateway.requests.cancellation import Release
from gateway.requests.delivery import Delivery
from gateway.requests.reading import Reading
from gateway.text.choice_text import ChoiceText, Fed
from gateway.text.detokenizer import Pieces
from gateway.text.parsed_text import ParsedText
from gateway.text.tools.parser import Piece
from gateway.values.cursor import TokenDigest, position_of
from kaiten.v1.common_pb2 import FinishReason, PromptLogprobs, TokenLogprobs
from kaiten.v1.inference_service_pb2 import Done as DoneMessage
from kaiten.v1.ledger_pb2 import RenderOptions, SequenceFinished
from ledger import Ledger, Subscription, Update
from service_kit.errors import DataLoss, KaitenError, Unavailable

STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH
# With 20 log-probabilities a token takes 200 bytes; gRPC clients refuse messages above 4 MiB.
DELTA_TOKENS_MAX: Final = 8192
# Of a choice of which nobody sees anything before its end. Their log-probabilities are still told
# in a few milliseconds.
STREAM_INTERVAL: Final = 64


class Accepted(NamedTuple):
    """The request is in the ledger."""

    request_id: str
    prompt_tokens: int


class Explained(NamedTuple):
    """The prompt's log-probabilities, before the first output: of all its tokens but the first."""

    # Of the request: they share the prompt.
    choices: int
    token_ids: Sequence[int]
    logprobs: PromptLogprobs


class Delta(NamedTuple):
    """New output of one choice: tokens [position, position + len(token_ids))."""

    choice: int
    position: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs]
    # Of the position after these tokens; empty unless asked for.
    cursor: bytes = b""
    # The text in parts, where the output is parsed; it says what is held back later than the text.
    pieces: Sequence[Piece] | None = None


class Finished(NamedTuple):
    """The terminal event of one choice."""

    choice: int
    reason: FinishReason
    output_tokens: int
    error: str
    # Where the output is parsed: there were calls, and none is broken off.
    has_calls: bool = False
    # Of an error: sent again, under another id, it may be served.
    is_retryable: bool = False
    # Of an error: what the request asks of its output left it no token.
    is_unsatisfiable: bool = False

    @classmethod
    def of(cls, choice: int, ended: SequenceFinished, *, has_calls: bool = False) -> Self:
        """As the journal has it."""
        return cls(
            choice,
            ended.reason,
            ended.output_tokens,
            ended.error,
            has_calls,
            ended.is_retryable,
            ended.is_unsatisfiable,
        )


class Done(NamedTuple):
    """The last event. The message is ours to keep."""

    message: DoneMessage


Event = Accepted | Explained | Delta | Finished | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class Presentation:
    """How one request's output is told."""

    pieces: Pieces
    render: RenderOptions
    # None: all of it is text.
    reading: Reading | None = None

    def text(self, choice: int) -> ChoiceText | ParsedText:
        """At the beginning of a choice."""
        render = self.render
        text = ChoiceText(
            self.pieces,
            tuple(render.stop),
            include_stop=render.include_stop,
            keep_leading_space=render.keep_leading_space,
        )
        return text if self.reading is None else ParsedText(text, self.reading.parser(choice))


class Choice:
    """One choice's progress. Tokens before `start` are fed for their effect but not shown."""

    __slots__ = (
        "_digest",
        "_is_hidden",
        "_resumed",
        "_with_cursors",
        "end",
        "fed_end",
        "index",
        "start",
        "text",
    )

    def __init__(
        self,
        index: int,
        text: ChoiceText | ParsedText,
        start: int,
        *,
        is_hidden: bool = False,
        digest: TokenDigest | None = None,
        with_cursors: bool = False,
        resumed: bytes = b"",
    ) -> None:
        self.index = index
        self.text = text
        self.start = start
        # No output was asked for: nothing is shown but the end.
        self._is_hidden = is_hidden
        self._digest = digest
        self._with_cursors = with_cursors
        # The cursor whose position is `start`, until it has been found to be right.
        self._resumed = resumed
        # What the client was told, and what the journal says; they differ after a stop string.
        self.end: Finished | None = None
        self.fed_end: SequenceFinished | None = None

    def apply(self, update: Update) -> list[Event]:
        """The events of an update. Nothing comes after Finished."""
        ended = update.finished
        if ended is not None:
            self.fed_end = ended
        if self.end is not None or self._is_hidden:
            return self._hide(ended)
        assert update.position == self.text.output_tokens or not update.token_ids
        token_ids = update.token_ids
        events: list[Event] = []
        ends_on_token = ended is not None and ended.reason == STOP and len(token_ids) > 0
        fed = self.text.feed(token_ids[:-1] if ends_on_token else token_ids)
        if ended is not None and not fed.is_stopped:
            last = self.text.feed_last(token_ids[-1]) if ends_on_token else self.text.flush()
            fed = _joined(fed, last)
        count, is_stopped = fed.token_count, fed.is_stopped
        if self._digest is not None and count:
            self._digest.feed(token_ids if count == len(token_ids) else token_ids[:count])
        if self._resumed:
            self._check_cursor(has_ended=ended is not None or is_stopped)
        if count or fed.text or fed.pieces:
            self._show(update, fed, events)
        has_calls = isinstance(self.text, ParsedText) and self.text.has_calls
        if is_stopped:
            self.end = Finished(self.index, STOP, self.text.output_tokens, "", has_calls)
        elif ended is not None:
            self.end = Finished.of(self.index, ended, has_calls=has_calls)
        if self.end is not None:
            events.append(self.end)
        return events

    def _hide(self, ended: SequenceFinished | None) -> list[Event]:
        """Only the end is told, and once."""
        if ended is None or self.end is not None:
            return []
        end = Finished.of(self.index, ended)
        reason = LENGTH if end.reason == STOP else end.reason
        self.end = end._replace(reason=reason, output_tokens=0)
        return [self.end]

    def _show(self, update: Update, fed: Fed, events: list[Event]) -> None:
        """Add the Delta, less what lies before `start`."""
        count, text, pieces = fed.token_count, fed.text, fed.pieces
        position, token_ids, logprobs = update.position, update.token_ids, update.logprobs
        hidden = self.start - position
        if hidden >= count > 0:
            return
        if hidden > 0 or count < len(token_ids):
            hidden = max(hidden, 0)
            token_ids, logprobs = token_ids[hidden:count], logprobs[hidden:count]
            position += hidden
        cursor = self._digest.cursor() if self._digest is not None and self._with_cursors else b""
        events.append(Delta(self.index, position, token_ids, text, logprobs, cursor, pieces))

    def _check_cursor(self, *, has_ended: bool) -> None:
        """DataLoss unless the tokens up to `start` are those that the client's cursor is of."""
        assert self._digest is not None
        if self._digest.position < self.start and not has_ended:
            return
        if self._digest.position < self.start or self._digest.cursor() != self._resumed:
            raise DataLoss(f"choice {self.index}: the cursor is not of this output")
        self._resumed = b""


class Generation:
    """Async iterator of event lists, one list per wake-up: what piled up comes together.

    Leave it with `close`; whoever leaves before the end lets the request be cancelled.
    """

    def __init__(
        self,
        *,
        accepted: Accepted,
        id: str,
        sequence_id: int,
        choices: Sequence[Choice],
        subscription: Subscription,
        ledger: Ledger,
        release: Callable[[Release], None],
        render: RenderOptions,
    ) -> None:
        self.id = id
        self.render = render
        self.accepted = accepted
        self.choices = choices
        self.is_done = False
        self.sequence_id = sequence_id
        self._subscription = subscription
        self._ledger = ledger
        self._release = release
        # The prompt, if its log-probabilities are to be told. Whoever has a token has been told.
        has_begun = any(choice.start for choice in choices)
        self._explained: Sequence[int] = () if has_begun else render.prompt_token_ids
        self.done_message: DoneMessage | None = None
        # Of a request that was submitted here; none of one that is attached to.
        self.visit: Visit | None = None
        self.delivery: Delivery | None = None
        # Who waits for it here, and whether it goes on without them.
        self.waiter = ""
        self.keep_running = False
        self._has_begun = False
        self._on_close: list[Callable[[], None]] = []

    @property
    def tenant(self) -> str:
        return self.id.partition(":")[0]

    @property
    def is_parsed(self) -> bool:
        return isinstance(self.choices[0].text, ParsedText)

    def collect(self) -> None:
        """Nobody sees anything before the end: after a first event, tokens come by the dozen. What
        may end by its own words is looked at as it comes all the same.
        """
        if not self.render.stop and not self.is_parsed:
            self._subscription.set_stream_interval(STREAM_INTERVAL)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Event]:
        delivery = self.delivery
        if delivery is not None:
            delivery.taken()
        if not self._has_begun:
            self._has_begun = True
            return (self.accepted,)
        while not self.is_done:
            try:
                update = await self._subscription.__anext__()
            except StopAsyncIteration:
                done = await self._finish()
                if delivery is not None:
                    delivery.hand()
                return (done,)
            prompt = await self._explain() if self._explained and update.token_ids else ()
            try:
                events = [*prompt, *self._apply(update)] if prompt else self._apply(update)
            except DataLoss:
                # Nothing was followed, so nothing is left behind.
                self.keep_running = True
                raise
            if events:
                has_output = not isinstance(events[0], Finished)
                if self.visit is not None and has_output and not self.visit.first_ns:
                    self.visit.first_ns = perf_counter_ns()
                if delivery is not None:
                    delivery.hand()
                return events
        raise StopAsyncIteration

    async def _explain(self) -> tuple[Explained]:
        """Complete since before the first token of any choice was committed."""
        token_ids, self._explained = self._explained, ()
        logprobs = await self._ledger.prompt_logprobs(self.sequence_id)
        if logprobs.token_count != len(token_ids) - 1:
            raise Unavailable("the log-probabilities of the prompt are no longer kept")
        return (Explained(len(self.choices), token_ids, logprobs),)

    def interrupt(self, error: KaitenError) -> None:
        """End it from outside: the reader gets the error at its next look."""
        self._subscription.fail(error)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this when the stream is left."""
        self._on_close.append(callback)

    def close(self) -> None:
        """Stop following. The request itself goes on."""
        self._subscription.close()
        while self._on_close:
            self._on_close.pop()()

    def _apply(self, update: Update) -> Sequence[Event]:
        choice = self.choices[update.sequence_id - self.sequence_id]
        start = choice.start
        if update.position < start < update.position + len(update.token_ids):
            # The text before and after `start` must come apart: feed it in two.
            parts = _split(update, start - update.position)
            events = [event for part in parts for event in self._apply_bounded(choice, part)]
        else:
            events = self._apply_bounded(choice, update)
        if update.finished is not None and update.finished.HasField("done"):
            self.done_message = update.finished.done
        return events

    def _apply_bounded(self, choice: Choice, update: Update) -> list[Event]:
        """What piled up for a slow reader, or all of a long output, must still fit a message."""
        events: list[Event] = []
        while len(update.token_ids) > DELTA_TOKENS_MAX:
            head, update = _split(update, DELTA_TOKENS_MAX)
            events += self._apply_to(choice, head)
        last = self._apply_to(choice, update)
        return events + last if events else last

    def _apply_to(self, choice: Choice, update: Update) -> list[Event]:
        was_open = choice.end is None
        events = choice.apply(update)
        if was_open and choice.end is not None and choice.fed_end is None:
            # A stop string, or a call: the computation goes on until somebody says otherwise.
            count = choice.end.output_tokens
            self._release(Release(self.id, choice.index, STOP, count))
        return events

    async def _finish(self) -> Done:
        message = self.done_message
        if message is None:
            # Its record was taken from history, which keeps the ends of choices only.
            result = await self._ledger.result(self.id)
            if result is None:
                raise Unavailable("the request has ended and its result is no longer kept")
            message = self.done_message = result.done
        self.is_done = True
        return Done(told(message, self.choices))


def told(message: DoneMessage, choices: Sequence[Choice]) -> DoneMessage:
    """The usage as the client saw it: tokens computed past a stop string never happened. With what
    is known here alone: how many of them were reasoning."""
    adjusted = DoneMessage()
    adjusted.CopyFrom(message)
    for choice in choices:
        if choice.end is not None and choice.fed_end is not None:
            excess = choice.fed_end.output_tokens - choice.end.output_tokens
            adjusted.usage.output_tokens = max(0, adjusted.usage.output_tokens - excess)
        if isinstance(choice.text, ParsedText):
            adjusted.usage.reasoning_tokens += choice.text.reasoning_tokens
    return adjusted


def new_choices(presentation: Presentation, n: int, positions: Sequence[int] = ()) -> list[Choice]:
    """n choices at their beginnings, to be shown from the given positions."""
    starts, is_hidden = [*positions, *[0] * (n - len(positions))], presentation.render.hide_output
    return [
        Choice(index, presentation.text(index), starts[index], is_hidden=is_hidden)
        for index in range(n)
    ]


def checked_choices(
    presentation: Presentation,
    sequence_id: int,
    n: int,
    cursors: Sequence[bytes] = (),
    *,
    with_cursors: bool,
) -> list[Choice]:
    """n choices to be shown from their cursors, if the cursors are of these outputs."""
    resumed = [*cursors, *[b""] * (n - len(cursors))]
    return [
        Choice(
            index,
            presentation.text(index),
            position_of(resumed[index]),
            is_hidden=presentation.render.hide_output,
            digest=TokenDigest(sequence_id + index),
            with_cursors=with_cursors,
            resumed=resumed[index],
        )
        for index in range(n)
    ]


def _joined(fed: Fed, last: Fed) -> Fed:
    pieces = None if fed.pieces is None else [*fed.pieces, *(last.pieces or ())]
    count = fed.token_count + last.token_count
    return Fed(fed.text + last.text, count, last.is_stopped, pieces)


def _split(update: Update, count: int) -> tuple[Update, Update]:
    head = Update(
        sequence_id=update.sequence_id,
        position=update.position,
        token_ids=update.token_ids[:count],
        logprobs=update.logprobs[:count],
        finished=None,
    )
    tail = Update(
        sequence_id=update.sequence_id,
        position=update.position + count,
        token_ids=update.token_ids[count:],
        logprobs=update.logprobs[count:],
        finished=update.finished,
    )
    return head, tail
