"""Transcripts of every format as gRPC clients get them: cut anywhere, and taken up anywhere."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from gateway.grpc.convert import write_event
from gateway.requests.reading import Reading
from gateway.requests.stream import (
    Choice,
    Delta,
    Done,
    Event,
    Finished,
    Presentation,
    new_choices,
    told,
)
from gateway.text.detokenizer import Pieces
from gateway.text.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway.text.tools.parser import Speech
from kaiten.client.following import Following
from kaiten.client.results import Choice as Told
from kaiten.client.results import Completion
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import FinishReason
from kaiten.v1.inference_service_pb2 import Done as DoneMessage
from kaiten.v1.ledger_pb2 import RenderOptions, SequenceFinished
from ledger import Update
from tests.support.tokenizers import byte_level_bpe
from tests.unit.gateway.text.tools.transcripts import NAMES, TRANSCRIPTS, Transcript

STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
FORMATS = {each.name: each for each in TOOL_FORMATS}
ALL = [
    pytest.param(family, transcript, id=f"{family}: {name}")
    for family, cases in TRANSCRIPTS.items()
    for name, transcript in cases.items()
    if len(transcript.text) < 600
]


@cache
def pieces() -> Pieces:
    return Pieces(byte_level_bpe())


@cache
def ids_of(text: str) -> list[int]:
    """A token for each byte, so that everything can be cut."""
    alphabet = byte_level_bpe()
    return [id for character in text for id in alphabet.encode(character).ids]


def speech_of(family: str, **changes: Any) -> Speech:
    given: dict[str, Any] = {
        "tools": FORMATS[family],
        "names": NAMES,
        "reasoning": REASONING_FORMATS[0],
    }
    return Speech(**(given | changes))


def choice_of(speech: Speech, start: int = 0) -> Choice:
    shown = Presentation(
        pieces=pieces(), render=RenderOptions(), reading=Reading(speech=speech, request_id="r")
    )
    return new_choices(shown, 1, [start])[0]


def events_of(choice: Choice, token_ids: list[int], size: int) -> Iterator[Event]:
    """Updates of so many tokens; the end, by its length, comes with the last."""
    for begin in range(0, len(token_ids), size):
        part, end = token_ids[begin : begin + size], None
        if begin + size >= len(token_ids):
            end = SequenceFinished(sequence_id=1, reason=LENGTH, output_tokens=len(token_ids))
        update = Update(sequence_id=1, position=begin, token_ids=part, logprobs=[], finished=end)
        # As the funnel has it: what lies on both sides of the start comes apart.
        if begin < choice.start < begin + len(part):
            cut = choice.start - begin
            yield from choice.apply(update._replace(token_ids=part[:cut], finished=None))
            update = update._replace(position=choice.start, token_ids=part[cut:])
        yield from choice.apply(update)


def sent(event: Event) -> pb.GenerationEvent:
    """Over the wire and back."""
    message = pb.GenerationEvent()
    write_event(message, event, with_token_ids=True)
    return pb.GenerationEvent.FromString(message.SerializeToString())


def following() -> Following:
    return Following(generate=pb.GenerateRequest(request_id="r"), resume_s=1)


def whole(client: Following, choice: Choice) -> Completion:
    done = DoneMessage(usage=pb.Usage(output_tokens=choice.text.output_tokens))
    client.feed(sent(Done(told(done, [choice]))))
    return client.completion()


def answer(speech: Speech, token_ids: list[int], size: int) -> Completion:
    client, choice = following(), choice_of(speech)
    for event in events_of(choice, token_ids, size):
        client.feed(sent(event))
    return whole(client, choice)


def said(choice: Told) -> Transcript:
    return Transcript(
        text="",
        content=choice.text,
        reasoning=choice.reasoning,
        calls=[(call.name, call.arguments) for call in choice.tool_calls],
    )


def expected(transcript: Transcript) -> Transcript:
    return Transcript(
        text="",
        content=transcript.content,
        reasoning=transcript.reasoning,
        calls=transcript.calls,
    )


@pytest.mark.parametrize(("family", "transcript"), ALL)
def test_a_transcript_however_it_comes(family: str, transcript: Transcript) -> None:
    token_ids = ids_of(transcript.text)
    for size in (1, 7, len(token_ids)):
        (choice,) = answer(speech_of(family), token_ids, size).choices
        assert said(choice) == expected(transcript)
        assert len({call.id for call in choice.tool_calls}) == len(transcript.calls)


@pytest.mark.parametrize(("family", "transcript"), ALL)
def test_who_comes_back_anywhere_gets_the_same_calls(family: str, transcript: Transcript) -> None:
    """In mid-call, too: cut in many places, each part told by another gateway."""
    token_ids = ids_of(transcript.text)
    speech = speech_of(family)
    first = [[*events_of(choice_of(speech), token_ids, 1)], answer(speech, token_ids, 1)]
    events: Any = first[0]
    for cut in range(0, len(token_ids), max(1, len(token_ids) // 16)):
        client, other = following(), choice_of(speech, cut)
        for event in events:
            if isinstance(event, Delta) and event.position < cut:
                client.feed(sent(event))
        for event in events_of(other, token_ids, 11):
            client.feed(sent(event))
        assert whole(client, other) == first[1]


def test_reasoning_tokens_are_those_up_to_its_end() -> None:
    speech = speech_of("hermes")
    for text, thought in (
        ("<think>Hm.</think>Yes.", "<think>Hm.</think>"),
        (" \n<think>Hm", " \n<think>Hm"),
        ("Yes <think>.", ""),
    ):
        for size in (1, 5, 100):
            usage = answer(speech, ids_of(text), size).usage
            assert usage.reasoning_tokens == len(ids_of(thought)), (text, size)
    inside = speech_of("hermes", begins_in_reasoning=True)
    assert answer(inside, ids_of("Hm.</think>Yes."), 4).usage.reasoning_tokens == 11


@pytest.mark.parametrize("family", sorted(TRANSCRIPTS))
def test_the_only_call_ends_the_output_by_the_same_token_everywhere(family: str) -> None:
    """Also where nobody reads on, and where the computation went on for a while."""
    case = next(each for each in TRANSCRIPTS[family].values() if each.calls)
    token_ids = ids_of(case.text + "\nand more")
    ends: set[Finished] = set()
    for size in (1, 6, len(token_ids)):
        choice = choice_of(speech_of(family, is_single_call=True))
        client = following()
        for event in events_of(choice, token_ids, size):
            client.feed(sent(event))
            if isinstance(event, Finished):
                ends.add(event)
        (got,) = whole(client, choice).choices
        assert [(call.name, call.arguments) for call in got.tool_calls] == case.calls[:1]
        assert got.finish_reason == "stop"
    (end,) = ends
    assert end.output_tokens < len(ids_of(case.text)) or case.text.endswith(case.calls[0][1])
    # Cancelled there: whoever comes later finds just these tokens.
    choice = choice_of(speech_of(family, is_single_call=True))
    kept = token_ids[: end.output_tokens]
    finished = SequenceFinished(sequence_id=1, reason=STOP, output_tokens=len(kept))
    update = Update(sequence_id=1, position=0, token_ids=kept, logprobs=[], finished=finished)
    assert choice.apply(update)[-1] == end


@pytest.mark.parametrize("is_single_call", [False, True])
def test_the_token_that_stopped_it_is_no_text(is_single_call: bool) -> None:
    text = "Hello world"
    choice = choice_of(speech_of("hermes", is_single_call=is_single_call))
    token_ids = [*ids_of(text), *ids_of("#")]
    finished = SequenceFinished(sequence_id=1, reason=STOP, output_tokens=len(token_ids))
    update = Update(sequence_id=1, position=0, token_ids=token_ids, logprobs=[], finished=finished)
    client = following()
    for event in choice.apply(update):
        client.feed(sent(event))
    assert whole(client, choice).text == text
