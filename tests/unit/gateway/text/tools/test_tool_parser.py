"""Tool calls and reasoning, from transcripts as families document them, however they are cut."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format_of,
    tool_format_of,
)
from gateway.text.tools.parser import AnswerParser, Said

WEATHER: Final = ("weather", {"city": "São Paulo", "days": 3})
NESTED: Final = ("write", {"text": 'a "}" ] </tool_call> \\ \n é', "at": {"x": [1, {"y": None}]}})
EMPTY: Final[tuple[str, dict[str, Any]]] = ("now", {})
Calls = list[tuple[str, dict[str, Any]]]


def written(call: tuple[str, Any], key: str = "arguments", **more: Any) -> str:
    return json.dumps({"name": call[0], key: call[1], **more}, ensure_ascii=False)


def hermes(*calls: tuple[str, Any]) -> str:
    return "\n".join(f"<tool_call>\n{written(call)}\n</tool_call>" for call in calls)


def listed(*calls: tuple[str, Any]) -> str:
    return f"[{', '.join(map(written, calls))}]"


# Format, reasoning, what the model wrote; content, reasoning, calls.
CASES: Final[list[tuple[str, str, str, str, str, Calls]]] = [
    ("hermes", "", hermes(WEATHER), "", "", [WEATHER]),
    ("hermes", "", hermes(WEATHER, NESTED, EMPTY), "", "", [WEATHER, NESTED, EMPTY]),
    ("hermes", "", f"Let me see.\n\n{hermes(WEATHER)}", "Let me see.", "", [WEATHER]),
    ("hermes", "", f"{hermes(WEATHER)}\nThat is all.\n", "That is all.\n", "", [WEATHER]),
    ("hermes", "", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", "", [EMPTY]),
    ("hermes", "", "5 < 6 and <tool_box> \n", "5 < 6 and <tool_box> \n", "", []),
    ("hermes", "", hermes(WEATHER)[:-20], hermes(WEATHER)[:-20], "", []),
    ("hermes", "", hermes(WEATHER)[:-4], "", "", [WEATHER]),
    (
        "hermes",
        "",
        f"a \n<tool_call>\n{{broken}}\n</tool_call>{hermes(EMPTY)}",
        "a \n<tool_call>\n{broken}\n</tool_call>",
        "",
        [EMPTY],
    ),
    ("hermes", "think", "<think>\nHm.\n\nSo.\n</think>\n\nYes.", "Yes.", "Hm.\n\nSo.", []),
    ("hermes", "think", f"<think>\n\n</think>\n\n{hermes(WEATHER)}", "", "", [WEATHER]),
    ("hermes", "think", f"<think>a</think>b{hermes(EMPTY)}c", "bc", "a", [EMPTY]),
    ("hermes", "think", "<think>cut off ", "", "cut off", []),
    ("hermes", "think", "No <think>.</think>", "No <think>.</think>", "", []),
    ("", "think", " <think>x</think> {", "{", "x", []),
    ("", "think", " plain ", " plain ", "", []),
    ("", "mistral", "[THINK]x[/THINK]y", "y", "x", []),
    ("llama3", "", written(WEATHER, "parameters"), "", "", [WEATHER]),
    ("llama3", "", f"<|python_tag|>{written(WEATHER, 'parameters')}", "", "", [WEATHER]),
    (
        "llama3",
        "",
        f"{written(WEATHER, 'parameters')}; {written(EMPTY, 'parameters')}",
        "",
        "",
        [WEATHER, EMPTY],
    ),
    ("llama3", "", '{"city": "Rome"}', '{"city": "Rome"}', "", []),
    ("llama3", "", '\n{"city": ', '\n{"city": ', "", []),
    ("llama3", "", "<|python_tag|>print(1)", "<|python_tag|>print(1)", "", []),
    ("llama3", "", "Hello {there}", "Hello {there}", "", []),
    ("mistral", "", f"[TOOL_CALLS]{listed(WEATHER, NESTED)}", "", "", [WEATHER, NESTED]),
    ("mistral", "", f"Now: [TOOL_CALLS] {listed(EMPTY)}", "Now:", "", [EMPTY]),
    ("mistral", "", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", "", []),
    (
        "mistral-v11",
        "",
        f"[TOOL_CALLS]weather[ARGS]{json.dumps(WEATHER[1])}[TOOL_CALLS]now[ARGS]{{}}",
        "",
        "",
        [WEATHER, EMPTY],
    ),
    ("mistral-v11", "", "[TOOL_CALLS]a\nb[ARGS]{}", "[TOOL_CALLS]a\nb[ARGS]{}", "", []),
    ("phi4", "", f"<|tool_call|>{listed(WEATHER, EMPTY)}<|/tool_call|>", "", "", [WEATHER, EMPTY]),
    ("json", "", f" {written(WEATHER, 'parameters')}\n", "", "", [WEATHER]),
    ("json", "", f"[{written(WEATHER, 'parameters')}]", "", "", [WEATHER]),
]  # fmt: skip


def parsed(tools: str, reasoning: str, parts: list[str], **how: Any) -> Said:
    parser = AnswerParser(TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning), str, **how)
    said = [*(parser.feed(part) for part in parts), parser.flush()]
    assert parser.flush() == Said()
    return Said(
        "".join(each.content for each in said),
        "".join(each.reasoning for each in said),
        tuple(call for each in said for call in each.calls),
    )


@pytest.mark.parametrize(("tools", "reasoning", "text", "content", "thoughts", "calls"), CASES)
def test_a_transcript(
    tools: str, reasoning: str, text: str, content: str, thoughts: str, calls: Calls
) -> None:
    """Whole, character by character, and cut in two anywhere."""
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for parts in cuts:
        said = parsed(tools, reasoning, parts)
        assert (said.content, said.reasoning) == (content, thoughts), parts
        assert [(call.name, json.loads(call.arguments)) for call in said.calls] == calls, parts
        assert [call.id for call in said.calls] == [str(index) for index in range(len(calls))]


# What begins like a call and is none.
NONE: Final = (
    '<tool_call>{"name": "x"}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}',
    '<tool_call>{"name": "x", "arguments": [1]}',
    '<tool_call>"x"',
    "<tool_call>[]",
    "<tool_call>}",
    '<tool_call>{"name": "a", "arguments": {"x": NaN}}',
    '<tool_call>{"name": "a", "arguments": {"x": 1e999}}',
)
CASES += [("hermes", "", text, text, "", []) for text in NONE]
PIECES: Final = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
        *("<think>", "</think>", written(EMPTY), written(EMPTY, "parameters"), listed(EMPTY)),
        *("{", "}", "[", "]", '"', "\\", ";", " ", "\n", "a", "é", "<", "now", ","),
    ]
)


@given(
    st.lists(PIECES, max_size=12).map("".join),
    st.sampled_from(["", *TOOL_FORMATS]),
    st.sampled_from(["", *REASONING_FORMATS]),
    st.booleans(),
    st.data(),
)
def test_no_cut_changes_what_is_said_and_nothing_is_lost(
    text: str, tools: str, reasoning: str, begins: bool, data: st.DataObject
) -> None:
    how = {"begins_in_reasoning": begins}
    whole = parsed(tools, reasoning, [text], **how)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert parsed(tools, reasoning, parts, **how) == whole
    if not whole.calls:
        # But for markers of reasoning, and white space beside them.
        kept = "".join((whole.reasoning + whole.content).split())
        left = "".join(text.split())
        if not whole.reasoning and not begins and reasoning not in ("think", "mistral"):
            assert whole.content == text
        assert len(left) - len(kept) in (0, 7, 8, 9, 15, 17)


def test_what_cannot_be_a_marker_is_told_at_once() -> None:
    parser = AnswerParser(TOOL_FORMATS["hermes"], None, str)
    assert parser.feed("Hello <too").content == "Hello"
    assert parser.feed("th>").content == " <tooth>"
    assert parser.feed(" ").content == ""
    assert parser.feed("x").content == " x"


def test_a_template_that_opened_the_reasoning_is_known_to_have() -> None:
    said = parsed("", "think", ["I see", ".\n</think>\n\nYes"], begins_in_reasoning=True)
    assert (said.reasoning, said.content) == ("I see.", "Yes")


def test_half_a_surrogate_pair_is_told_as_json() -> None:
    said = parsed("hermes", "", ['<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}'])
    assert said.calls[0].arguments == '{"x": "\\ud800"}'


def test_long_arguments_take_time_in_proportion() -> None:
    parser = AnswerParser(TOOL_FORMATS["hermes"], None, str)
    assert parser.feed('<tool_call>{"name": "a", "arguments": {"x": "') == Said()
    for _ in range(20_000):
        assert parser.feed("word ") == Said()
    (call,) = parser.feed('"}}').calls
    assert json.loads(call.arguments) == {"x": "word " * 20_000}


FOLDER: Final = Path(__file__).parents[4] / "parity/templates"


def test_formats_are_found_in_published_templates() -> None:
    templates = {path.stem: path.read_text() for path in FOLDER.glob("*.jinja")}
    found = {name: tool_format_of(text) for name, text in templates.items()}
    assert {name: each for name, each in found.items() if each} == {
        "granite": "granite",
        "hermes": "hermes",
        "jamba": "jamba",
        "llama3_1": "llama3",
        "mistral_v3": "mistral",
        "mistral_v7": "mistral-v11",
        "nemotron": "nemotron",
        "phi4_mini": "phi4",
        "qwen2_5": "hermes",
        "qwen3": "hermes",
    }
    thinks = {name for name, text in templates.items() if reasoning_format_of(text)}
    assert {"qwen3", "deepseek_r1", "smollm3"} <= thinks
    assert not thinks & {"qwen2_5", "llama3", "mistral_v3", "gemma3"}
