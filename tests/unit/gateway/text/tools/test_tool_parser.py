"""Outputs of every family, whole and cut anywhere, say the same: answer, reasoning, calls."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.tools.calls import HEAD_CHARS_MAX
from gateway.text.tools.formats import REASONING_FORMATS, TOOL_FORMATS, ToolFormat
from gateway.text.tools.parser import (
    CallArguments,
    CallBegins,
    Content,
    OutputParser,
    Piece,
    Reasoning,
    Speech,
)
from tests.unit.gateway.text.tools.transcripts import NAMES, ONE, TRANSCRIPTS, TWO, Transcript

FORMATS = {each.name: each for each in TOOL_FORMATS}
THINK = REASONING_FORMATS[0]
ALL = [
    pytest.param(FORMATS[family], transcript, id=f"{family}: {name}")
    for family, cases in TRANSCRIPTS.items()
    for name, transcript in cases.items()
]
# What a text of marks and JSON is made of.
SCRAPS = [
    *(
        mark
        for each in TOOL_FORMATS
        for mark in (each.begin, each.end, each.arguments_mark)
        if mark
    ),
    *(
        '{"name": "clock", "arguments": ',
        '"parameters": {"a": "}"}',
        "clock",
        "rm",
        '{"',
        '"}',
        "{}",
    ),
    *(
        "<think>",
        "</think>",
        " \n",
        " " * 70,
        "\\",
        '"',
        "[",
        "]",
        "{",
        "}",
        ",",
        ";",
        ":",
        "<",
        "é",
    ),
]


def speech(tools: ToolFormat | None, **changes: object) -> Speech:
    given = {"tools": tools, "names": NAMES, "reasoning": THINK} | changes
    return Speech(**given)  # type: ignore[arg-type]


def pieces_of(how: Speech, parts: list[str]) -> list[Piece]:
    parser = OutputParser(how, lambda index: f"id-{index}")
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return pieces + parser.flush()


def said(pieces: list[Piece]) -> Transcript:
    """Put together again; a call's arguments come after it and before the next one."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegins):
            assert (piece.call, piece.id) == (len(calls), f"id-{len(calls)}")
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.fragment)
    return Transcript(
        text="",
        content="".join(each.text for each in pieces if isinstance(each, Content)),
        reasoning="".join(each.text for each in pieces if isinstance(each, Reasoning)),
        calls=calls,
    )


def in_order(pieces: list[Piece]) -> list[Piece]:
    """With the parts of one text or one call's arguments put together."""
    found: list[Any] = []
    for piece in pieces:
        last: Any = found[-1] if found else None
        if type(last) is type(piece) and last[:-1] == piece[:-1]:
            kind: Any = type(last)
            found[-1] = kind(*last[:-1], last[-1] + piece[-1])
        else:
            found.append(piece)
    return found


def expected(transcript: Transcript) -> Transcript:
    return Transcript(
        text="",
        content=transcript.content,
        reasoning=transcript.reasoning,
        calls=transcript.calls,
    )


@pytest.mark.parametrize(("form", "transcript"), ALL)
def test_a_transcript_whole_and_character_by_character(
    form: ToolFormat, transcript: Transcript
) -> None:
    for parts in ([transcript.text], list(transcript.text)):
        assert said(pieces_of(speech(form), parts)) == expected(transcript)


@pytest.mark.parametrize(("form", "transcript"), ALL)
def test_a_transcript_cut_in_two_anywhere(form: ToolFormat, transcript: Transcript) -> None:
    text = transcript.text[:400]
    whole = said(pieces_of(speech(form), [text]))
    for cut in range(len(text)):
        assert said(pieces_of(speech(form), [text[:cut], text[cut:]])) == whole


@settings(max_examples=400, deadline=None)
@given(
    form=st.sampled_from(TOOL_FORMATS),
    scraps=st.lists(st.sampled_from(SCRAPS), max_size=12),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    is_inside=st.booleans(),
)
def test_any_text_cut_anywhere_says_the_same(
    form: ToolFormat, scraps: list[str], cuts: list[int], is_inside: bool
) -> None:
    text = "".join(scraps)
    how = speech(form, begins_in_reasoning=is_inside)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[begin:end] for begin, end in itertools.pairwise(borders)]
    whole = in_order(pieces_of(how, [text]))
    assert in_order(pieces_of(how, parts)) == whole
    assert in_order(pieces_of(how, list(text))) == whole


@settings(max_examples=200, deadline=None)
@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=12))
def test_without_tools_and_reasoning_the_text_is_the_answer(scraps: list[str]) -> None:
    text = "".join(scraps)
    assert said(pieces_of(Speech(), list(text))).content == text


@settings(max_examples=200, deadline=None)
@given(form=st.sampled_from(TOOL_FORMATS), scraps=st.lists(st.sampled_from(SCRAPS), max_size=12))
def test_where_no_call_is_found_nothing_is_lost(form: ToolFormat, scraps: list[str]) -> None:
    """But white space next to marks."""
    text = "".join(scraps)
    found = said(pieces_of(speech(form, reasoning=None), [text]))
    if not found.calls:
        assert "".join(found.content.split()) == "".join(text.split())


def test_arguments_come_as_they_are_written() -> None:
    """Only the head is held back, and what may become the end mark."""
    parser = OutputParser(speech(FORMATS["hermes"]), str)
    assert parser.feed('Hi <tool_call>\n{"name": "clock", "arguments": ') == [Content("Hi")]
    assert parser.feed("{") == [CallBegins(0, "0", "clock"), CallArguments(0, "{")]
    assert parser.feed('"a": "b') == [CallArguments(0, '"a": "b')]
    assert parser.feed("</tool") == [CallArguments(0, "</tool")]
    assert parser.feed('", ') == [CallArguments(0, '", ')]
    assert parser.feed('"c": 1 </') == [CallArguments(0, '"c": 1 ')]
    assert parser.feed("1}}") == [CallArguments(0, "</1}")]
    assert parser.feed("\n</tool_call>\n") == []
    assert parser.flush() == []


def test_text_is_told_at_once() -> None:
    parser = OutputParser(speech(FORMATS["hermes"]), str)
    assert parser.feed("One") == [Content("One")]
    assert parser.feed(" two <") == [Content(" two")]
    assert parser.feed("b>") == [Content(" <b>")]


def test_an_output_that_begins_inside_its_reasoning() -> None:
    how = speech(FORMATS["hermes"], begins_in_reasoning=True)
    text = "\nHm.\n</think>\n\nYes."
    for parts in ([text], list(text)):
        assert said(pieces_of(how, parts)) == Transcript(text="", reasoning="Hm.", content="Yes.")


@pytest.mark.parametrize("family", ["hermes", "mistral", "phi4", "llama3", "mistral-v11"])
def test_one_call_only(family: str) -> None:
    text = TRANSCRIPTS[family].get("two", TRANSCRIPTS[family]["one"]).text
    if family == "phi4":
        text = f"<|tool_call|>{TRANSCRIPTS['mistral']['two'].text[13:]}<|/tool_call|>"
    assert said(pieces_of(speech(FORMATS[family]), [text])).calls == TWO
    for parts in ([text], list(text)):
        assert said(pieces_of(speech(FORMATS[family], is_single_call=True), parts)).calls == ONE


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "clock", "arguments": {"a": "' + "x" * 20_000,
        '<tool_call>{"name": "clock", "arguments": {"a": [' + "1," * 10_000,
        '<tool_call>{"name": "clock", "arguments": {}, "a": "' + "<" * 20_000,
        '<tool_call>{"name": "clock", "arguments": {}' + "}" * 20_000,
        "<tool_call>" * 2_000,
        '<tool_call>{"' * 2_000,
        '<tool_call>{"a": "' + "x" * 20_000,
        " " * 20_000,
        "<think>" + "\n" * 20_000,
        "<" * 20_000,
    ],
)
def test_what_is_held_back_is_short(text: str) -> None:
    """So the work for a token never grows with the output."""
    parser = OutputParser(speech(FORMATS["hermes"]), str)
    for begin in range(0, len(text), 4):
        parser.feed(text[begin : begin + 4])
        assert len(parser.held) <= HEAD_CHARS_MAX
