"""A request that has ended, from its result: what its stream told, though none is opened."""

from collections.abc import Iterator, Sequence
from typing import Self

from gateway.requests.stream import Accepted, Done, Event, Finished, Presentation, new_choices, told
from gateway.text.parsed_text import ParsedText
from kaiten.v1.inference_service_pb2 import Done as DoneMessage
from kaiten.v1.ledger_pb2 import ChoiceResult, RequestResult
from ledger import Update
from ledger.tokens import cut


class Replay:
    """As a Generation is read, from the beginning and once. Without the prompt's logprobs."""

    def __init__(self, request_id: str, result: RequestResult, presentation: Presentation) -> None:
        self.accepted = Accepted(request_id, result.prompt_tokens)
        self.choices = new_choices(presentation, len(result.choices))
        self._result = result
        self._events = self._told()

    @property
    def is_parsed(self) -> bool:
        return isinstance(self.choices[0].text, ParsedText)

    def collect(self) -> None:
        """All of it is there."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Event]:
        for events in self._events:
            return events
        raise StopAsyncIteration

    def ends(self) -> tuple[list[Finished], DoneMessage]:
        """How it ended, as its client was told. It is read then."""
        for _ in self._events:
            pass
        ends = [choice.end for choice in self.choices if choice.end is not None]
        return ends, told(self._result.done, self.choices)

    def _told(self) -> Iterator[Sequence[Event]]:
        yield (self.accepted,)
        for choice, stored in zip(self.choices, self._result.choices, strict=True):
            sequence_id = self._result.sequence_id + choice.index
            yield choice.apply(_update(sequence_id, stored))
            assert choice.end is not None
        yield (Done(told(self._result.done, self.choices)),)


def _update(sequence_id: int, stored: ChoiceResult) -> Update:
    output = cut(stored.output, stored.finished)
    return Update(
        sequence_id=sequence_id,
        position=0,
        token_ids=list(output.token_ids),
        logprobs=list(output.logprobs),
        finished=stored.finished,
    )
