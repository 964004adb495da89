"""What a batch took: the sum of what its lines did that were answered."""

from typing import Final

import msgspec
from msgspec import Struct

from gateway.openai.batches.lines import LineAnswer
from gateway.openai.responses.reply import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
    usage_of,
)
from gateway.openai.usage import Usage


class _Generated(Struct):
    """Of chat and completions, what is looked at."""

    model: str
    usage: Usage

    @property
    def used(self) -> ResponseUsage:
        return usage_of(self.usage)


class _Responded(Struct):
    model: str
    usage: ResponseUsage

    @property
    def used(self) -> ResponseUsage:
        return self.usage


RESPONSES: Final = "/v1/responses"


class UsageSum:
    """`add` the answers, then `fields` are what is kept with the batch."""

    def __init__(self, endpoint: str) -> None:
        self._kind: type[_Generated | _Responded] = (
            _Responded if endpoint == RESPONSES else _Generated
        )
        self._model = ""
        self._input = self._cached = self._output = self._reasoning = 0

    def add(self, answer: bytes) -> None:
        line = msgspec.json.decode(answer, type=LineAnswer)
        assert line.response is not None
        body = msgspec.json.decode(line.response.body, type=self._kind)
        used, self._model = body.used, body.model
        self._input += used.input_tokens
        self._cached += used.input_tokens_details.cached_tokens
        self._output += used.output_tokens
        self._reasoning += used.output_tokens_details.reasoning_tokens

    @property
    def fields(self) -> dict[str, str]:
        """None, if there was no answer."""
        if not self._model:
            return {}
        usage = ResponseUsage(
            input_tokens=self._input,
            input_tokens_details=InputTokensDetails(self._cached),
            output_tokens=self._output,
            output_tokens_details=OutputTokensDetails(self._reasoning),
            total_tokens=self._input + self._output,
        )
        return {"model": self._model, "usage": msgspec.json.encode(usage).decode()}
