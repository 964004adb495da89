"""Events as the bytes that clients get: keys, their order, and what is null or not there."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Final

import pytest

from gateway.http.json_reply import to_json
from gateway.openai.chat import CHAT
from gateway.openai.completions import COMPLETION
from gateway.openai.logprobs import LogprobFormatter
from gateway.openai.parts import Echo, Format, Parts, Shown, send_stream
from gateway.requests.stream import Accepted, Delta, Done, Event, Explained, Finished
from gateway.text.choice_text import ChoiceText
from gateway.text.detokenizer import Pieces
from kaiten.v1.common_pb2 import FinishReason, PromptLogprobs, TokenLogprobs
from kaiten.v1.inference_service_pb2 import Done as DoneMessage
from service_kit.errors import DeadlineExceeded
from tests.support.tokenizers import byte_level_bpe

PIECES: Final = Pieces(byte_level_bpe(300))
FORMATTER: Final = LogprobFormatter(PIECES)
HEAD: Final = {"id": "x-r", "created": 1, "model": "m"}
LATE: Final = FinishReason.FINISH_REASON_DEADLINE_EXCEEDED
USAGE: Final = (
    '"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":'
    '{"cached_tokens":1},"completion_tokens_details":{"reasoning_tokens":0}},"kaiten":{"queue_ms":0.5,"prefill_ms":0.0,"decode_ms":0.0,'
    '"tokens_per_s":null,"preemptions":0}'
)


class Told:
    """A generation of one choice whose events are known."""

    def __init__(self, *events: Event) -> None:
        self.choices = (SimpleNamespace(text=ChoiceText(PIECES, ())),)
        self._events = [*events]

    def collect(self) -> None:
        """They are all there."""

    def __aiter__(self) -> "Told":
        return self

    async def __anext__(self) -> Sequence[Event]:
        if not self._events:
            raise StopAsyncIteration
        return (self._events.pop(0),)


class Sink:
    """Keeps what an exchange would send."""

    def __init__(self) -> None:
        self.sent = ""

    async def start_events(self) -> None:
        pass

    async def send_events(self, raw: bytes) -> None:
        self.sent += raw.decode()

    end_events = send_events

    @asynccontextmanager
    async def pinged(self, _silent_s: float) -> AsyncIterator[None]:
        yield


def told(
    *more: Event, logprobs: bool = False, end: FinishReason = FinishReason.FINISH_REASON_STOP
) -> Told:
    known = [TokenLogprobs(logprob=-1.5, top_token_ids=[9], top_logprobs=[-0.5])] * logprobs
    done = DoneMessage()
    done.usage.prompt_tokens, done.usage.output_tokens, done.usage.cached_tokens = 3, 2, 1
    done.timings.queue_us = 500
    return Told(
        Accepted("r", 3),
        *more,
        Delta(0, 0, [70], "寿", known),
        # Half a character.
        Delta(0, 1, [71], "", []),
        Finished(0, end, 2, "too late"),
        Done(done),
    )


def parts_of(generation: Told, shown: Shown, *echoes: Echo) -> Parts:
    given: Any = [generation]
    return Parts(given, FORMATTER, shown, echoes or (Echo(),))


async def streamed(form: Format, parts: Parts, *, with_usage: bool) -> list[str]:
    sink: Any = Sink()
    await send_stream(sink, form, HEAD, parts, with_usage=with_usage, ping_s=1.0)
    events = [each.removeprefix("data: ") for each in sink.sent.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    return events[:-2]


async def test_a_chat_as_a_stream() -> None:
    parts = parts_of(told(), Shown())
    head = '{"id":"x-r","object":"chat.completion.chunk","created":1,"model":"m","choices":['
    first = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":'
    assert await streamed(CHAT, parts, with_usage=True) == [
        head + first + 'null}],"usage":null}',
        head + '{"index":0,"delta":{"content":"寿"},"logprobs":null,"finish_reason":null}],'
        '"usage":null}',
        head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}',
        head + "]," + USAGE + "}",
    ]


async def test_a_completion_as_a_stream() -> None:
    parts = parts_of(told(), Shown(token_ids=True), Echo("say"))
    head = '{"id":"x-r","object":"text_completion","created":1,"model":"m","choices":[{"index":0,'
    nothing = '"logprobs":null,"finish_reason":null'
    assert await streamed(COMPLETION, parts, with_usage=False) == [
        head + '"text":"say",' + nothing + "}]}",
        head + '"text":"寿",' + nothing + ',"token_ids":[70]}]}',
        head + '"text":"",' + nothing + ',"token_ids":[71]}]}',
        head + '"text":"","logprobs":null,"finish_reason":"stop"}]}',
    ]


PROMPT: Final = Explained(
    1,
    [70, 71],
    PromptLogprobs(
        position=1, token_count=1, logprobs=[-2.0], top_token_ids=[9], top_logprobs=[-0.5]
    ),
)


async def test_a_completion_whole_with_its_prompt() -> None:
    shown = Shown(token_ids=True, prompt_logprobs=0)
    parts = parts_of(told(PROMPT, logprobs=True), shown, Echo("ab", 0))
    reply = to_json(COMPLETION.reply(HEAD, await parts.collect(), parts.ends())).decode()
    assert reply == (
        '{"id":"x-r","object":"text_completion","created":1,"model":"m","choices":[{"index":0,'
        '"text":"ab寿","logprobs":{"tokens":["a","b","a"],"token_logprobs":[null,-2.0,-1.5],'
        '"top_logprobs":[null,{},{"$":-0.5}],"text_offset":[0,1,2]},"finish_reason":"stop",'
        '"token_ids":[70,71],"prompt_logprobs":[null,{"71":{"logprob":-2.0,"rank":null,'
        '"decoded_token":"b"}}]}],' + USAGE + "}"
    )


@pytest.mark.parametrize("at_once", [1, 2, 100])
async def test_offsets_are_those_of_the_text_however_its_tokens_come(at_once: int) -> None:
    """Characters are of several tokens, and a stop string that is none holds text back."""
    ids = byte_level_bpe(300).encode("寿 sushi 🍣!", add_special_tokens=False).ids
    text, deltas = ChoiceText(PIECES, ["sushi 🍣?"]), []
    for position in range(0, len(ids), at_once):
        run = ids[position : position + at_once]
        known = [TokenLogprobs(logprob=-1.5)] * len(run)
        deltas.append(Delta(0, position, run, text.feed(run).text, known))
    over = Finished(0, FinishReason.FINISH_REASON_STOP, len(ids), "")
    parts = parts_of(Told(Accepted("r", 3), *deltas, over, Done(DoneMessage())), Shown())
    (whole,) = await parts.collect()
    before = [PIECES.join(ids[:count]).decode(errors="ignore") for count in range(len(ids))]
    assert [each.offset for each in whole.logprobs or ()] == [*map(len, before)]


async def test_a_chat_whole_with_its_prompt() -> None:
    parts = parts_of(told(PROMPT, logprobs=True), Shown(prompt_logprobs=1))
    reply = to_json(CHAT.reply(HEAD, await parts.collect(), parts.ends())).decode()
    assert reply == (
        '{"id":"x-r","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
        '"message":{"role":"assistant","content":"寿","refusal":null},"logprobs":{"content":['
        '{"token":"a","logprob":-1.5,"bytes":[97],"top_logprobs":[{"token":"$","logprob":-0.5,'
        '"bytes":[36]}]}],"refusal":null},"finish_reason":"stop"}],"prompt_logprobs":[null,'
        '{"71":{"logprob":-2.0,"rank":null,"decoded_token":"b"},"9":{"logprob":-0.5,"rank":1,'
        '"decoded_token":"$"}}],' + USAGE + "}"
    )


async def test_a_long_choice_is_put_together_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def whole() -> bytes:
        more = [Delta(0, 2 + index, [72], "x", []) for index in range(20)]
        generation = told(PROMPT, *more, logprobs=True)
        parts = parts_of(generation, Shown(token_ids=True, prompt_logprobs=0), Echo("ab", 0))
        return to_json(COMPLETION.reply(HEAD, await parts.collect(), parts.ends()))

    expected = await whole()
    assert b"ab" + b"x" * 20 in expected
    monkeypatch.setattr("gateway.openai.parts.PARTS_MAX", 3)
    assert await whole() == expected


@pytest.mark.parametrize("form", [CHAT, COMPLETION])
async def test_a_prompt_that_nobody_asked_to_see_is_no_chunk(form: Format) -> None:
    """Whoever comes back to a stream did not ask for what the request asked for."""
    with_it = await streamed(form, parts_of(told(PROMPT), Shown()), with_usage=False)
    assert with_it == await streamed(form, parts_of(told(), Shown()), with_usage=False)


async def test_an_end_that_is_an_error_is_raised_by_those_who_have_no_word_for_it() -> None:
    with pytest.raises(DeadlineExceeded, match="too late"):
        await parts_of(told(end=LATE), Shown()).collect()
    with pytest.raises(DeadlineExceeded, match="too late"):
        await streamed(CHAT, parts_of(told(end=LATE), Shown()), with_usage=False)
    (whole,) = await parts_of(told(end=LATE), Shown()).collect(is_strict=False)
    assert whole.end is not None
    assert (whole.text, whole.end.reason) == ("寿", LATE)
