"""What models of each family write, as they are documented to, and as they do it wrong."""

from dataclasses import dataclass, field
from typing import Final

Calls = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """An output, and what it says: calls are pairs of a name and the text of the arguments."""

    text: str
    content: str = ""
    reasoning: str = ""
    calls: Calls = field(default_factory=list)


NAMES: Final = frozenset({"get_weather", "clock", "write-file"})
PARIS: Final = '{"city": "Paris"}'
NESTED: Final = (
    '{"where": {"lat": 1.50, "tags": ["a}", "{b", "]"]}, "say": "\\"hi\\" \\\\", "x": null}'
)
UNICODE: Final = '{"city": "São Paulo 東京 🍣", "note": "\\u00e9\\n<b>"}'
SPACED: Final = '{\n  "city" : "Paris"\n}'


def _hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def _llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def _list(*calls: tuple[str, str], more: str = "") -> str:
    inside = ", ".join(f'{{"name": "{n}", "arguments": {a}{more}}}' for n, a in calls)
    return f"[{inside}]"


def _named(*calls: tuple[str, str], id: str = "") -> str:
    return "".join(f"[TOOL_CALLS]{name}{id}[ARGS]{arguments}" for name, arguments in calls)


ONE: Final[Calls] = [("get_weather", PARIS)]
TWO: Final[Calls] = [("get_weather", PARIS), ("clock", "{}")]
HARD: Final[Calls] = [("get_weather", NESTED), ("write-file", UNICODE), ("clock", SPACED)]
MARKS_INSIDE: Final[Calls] = [
    ("write-file", '{"text": "<tool_call></tool_call>[TOOL_CALLS]<|/tool_call|>```<think>"}')
]

TRANSCRIPTS: Final[dict[str, dict[str, Transcript]]] = {
    "hermes": {
        "text only": Transcript(text="It is <b>sunny</b>. \n", content="It is <b>sunny</b>. \n"),
        "one": Transcript(text=_hermes(*ONE), calls=ONE),
        "two": Transcript(text=_hermes(*TWO), calls=TWO),
        "hard": Transcript(text=_hermes(*HARD), calls=HARD),
        "marks in arguments": Transcript(text=_hermes(*MARKS_INSIDE), calls=MARKS_INSIDE),
        "text around": Transcript(
            text=f"Let me see.\n\n{_hermes(*ONE)}\nDone.", content="Let me see.Done.", calls=ONE
        ),
        "reasoning": Transcript(
            text=f"<think>\nWeather? <tool_call>\n</think>\n\n{_hermes(*ONE)}",
            reasoning="Weather? <tool_call>",
            calls=ONE,
        ),
        "no reasoning": Transcript(text="<think>\n\n</think>\n\nHi.", content="Hi."),
        "reasoning and an answer": Transcript(
            text="\n<think>Hm. </think>Hi <think>.", reasoning="Hm.", content="Hi <think>."
        ),
        "reasoning cut off": Transcript(text="<think>Hm. </thi", reasoning="Hm. </thi"),
        "no arguments": Transcript(
            text='<tool_call>{"name": "clock"}</tool_call>', calls=[("clock", "{}")]
        ),
        "more keys": Transcript(
            text='<tool_call>{"type": "function", "id": 7, "name": "clock", "arguments": {"a": 1},'
            ' "x": {"y": "}"}}</tool_call>',
            calls=[("clock", '{"a": 1}')],
        ),
        "a brace too many": Transcript(
            text='<tool_call>{"name": "clock", "arguments": {}}}</tool_call>',
            calls=[("clock", "{}")],
        ),
        "a brace too few": Transcript(
            text='<tool_call>{"name": "clock", "arguments": {}</tool_call> Done.',
            calls=[("clock", "{}")],
            content="Done.",
        ),
        "no end": Transcript(text=_hermes(*ONE)[:-13], calls=ONE),
        "half an end": Transcript(text=_hermes(*ONE)[:-3], calls=ONE),
        "cut in the arguments": Transcript(
            text=_hermes(*ONE)[:-17], calls=[("get_weather", '{"city": "Pari')]
        ),
        "cut in the head": Transcript(
            text='I say <tool_call>\n{"name": "get_we',
            content='I say <tool_call>\n{"name": "get_we',
        ),
        "cut in the mark": Transcript(text="So: <tool_c", content="So: <tool_c"),
        "broken arguments": Transcript(
            text='<tool_call>{"name": "clock", "arguments": {"a": ]]}, </tool_call>!',
            calls=[("clock", '{"a": ]')],
            content=", </tool_call>!",
        ),
        "arguments without an end": Transcript(
            text='<tool_call>{"name": "clock", "arguments": {"a": [1}</tool_call>!',
            calls=[("clock", '{"a": [1}')],
            content="!",
        ),
        "no JSON": Transcript(
            text="<tool_call>\nclock()\n</tool_call>", content="<tool_call>\nclock()\n</tool_call>"
        ),
        "not offered": Transcript(
            text='<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
            content='<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
        ),
        "arguments first": Transcript(
            text='<tool_call>{"arguments": {}, "name": "clock"}</tool_call>',
            content='<tool_call>{"arguments": {}, "name": "clock"}</tool_call>',
        ),
        "a list for arguments": Transcript(
            text='<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
            content='<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
        ),
        "arguments in a string": Transcript(
            text='<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>',
            content='<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>',
        ),
        "one none, one call": Transcript(
            text=f"<tool_call> is how.\n{_hermes(*ONE)}", content="<tool_call> is how.", calls=ONE
        ),
        "a mark in a mark": Transcript(
            text=f"<tool_call><tool_<{_hermes(*ONE)}", content="<tool_call><tool_<", calls=ONE
        ),
        "a head that is none": Transcript(
            text='<tool_call>{"a": "' + "x" * 2000 + '"}',
            content='<tool_call>{"a": "' + "x" * 2000 + '"}',
        ),
        "much space": Transcript(text=f"{' ' * 100}{_hermes(*ONE)}", content=" " * 36, calls=ONE),
        "only space": Transcript(text=" \n" * 50, content=" \n" * 50),
    },
    "llama3": {
        "text only": Transcript(text="It {is}.", content="It {is}."),
        "one": Transcript(text=_llama("get_weather", PARIS), calls=ONE),
        "after the tag": Transcript(text=f"<|python_tag|>{_llama(*ONE[0])}", calls=ONE),
        "two": Transcript(text="; ".join(_llama(*each) for each in TWO), calls=TWO),
        "hard": Transcript(text=";".join(_llama(*each) for each in HARD), calls=HARD),
        "with a type": Transcript(
            text='\n{"type": "function", "name": "clock", "parameters": {}}',
            calls=[("clock", "{}")],
        ),
        "JSON that is no call": Transcript(
            text='{"city": {"name": "clock"}}', content='{"city": {"name": "clock"}}'
        ),
        "code": Transcript(
            text='<|python_tag|>clock.call(x="1")', content='<|python_tag|>clock.call(x="1")'
        ),
        "half a call": Transcript(text='{"name": "cl', content='{"name": "cl'),
        "a call later": Transcript(text=f"So {_llama(*ONE[0])}", content=f"So {_llama(*ONE[0])}"),
        "a second that is none": Transcript(
            text=_llama(*ONE[0]) + '; {"a": 1}', calls=ONE, content='; {"a": 1}'
        ),
    },
    "mistral": {
        "text only": Transcript(text="It [is].", content="It [is]."),
        "one": Transcript(text=f"[TOOL_CALLS]{_list(*ONE)}", calls=ONE),
        "two": Transcript(text=f"[TOOL_CALLS] {_list(*TWO)}", calls=TWO),
        "with ids": Transcript(
            text="[TOOL_CALLS] " + _list(*HARD, more=', "id": "Ab]}12345"'), calls=HARD
        ),
        "without the list": Transcript(text=f"[TOOL_CALLS] {_list(*ONE)[1:-1]}", calls=ONE),
        "cut": Transcript(
            text=f"[TOOL_CALLS]{_list(*ONE)}"[:-4], calls=[("get_weather", PARIS[:-2])]
        ),
        "one of two": Transcript(
            text='[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "rm"}]',
            calls=[("clock", "{}")],
            content=', {"name": "rm"}]',
        ),
        "none": Transcript(text="[TOOL_CALLS] []", content="[TOOL_CALLS] []"),
        "only the mark": Transcript(text="[TOOL_CALLS]  ", content="[TOOL_CALLS]  "),
        "text before": Transcript(
            text=f"I see. [TOOL_CALLS]{_list(*ONE)}", content="I see.", calls=ONE
        ),
    },
    "mistral-v11": {
        "one": Transcript(text=_named(*ONE), calls=ONE),
        "two": Transcript(text=_named(*TWO), calls=TWO),
        "hard, with ids": Transcript(text=_named(*HARD, id="[CALL_ID]Ab1234567"), calls=HARD),
        "text before": Transcript(text=f"I see.\n{_named(*ONE)}", content="I see.", calls=ONE),
        "not offered": Transcript(text="[TOOL_CALLS]rm[ARGS]{}", content="[TOOL_CALLS]rm[ARGS]{}"),
        "no arguments": Transcript(
            text="[TOOL_CALLS]clock[ARGS]x", content="[TOOL_CALLS]clock[ARGS]x"
        ),
        "cut": Transcript(text="[TOOL_CALLS]clock[AR", content="[TOOL_CALLS]clock[AR"),
    },
    "granite": {
        "two": Transcript(text=f"<|tool_call|>{_list(*TWO)}", calls=TWO),
        "one and text": Transcript(text=f"<|tool_call|>{_list(*ONE)} So", calls=ONE, content="So"),
    },
    "jamba": {
        "two": Transcript(text=f"<tool_calls>{_list(*TWO)}</tool_calls>", calls=TWO),
    },
    "nemotron": {
        "two": Transcript(text=f"<TOOLCALL>{_list(*TWO)}</TOOLCALL>", calls=TWO),
        "hard": Transcript(
            text=f"I see. <TOOLCALL>{_list(*HARD)}</TOOLCALL>", content="I see.", calls=HARD
        ),
    },
    "phi4": {
        "one": Transcript(text=f"<|tool_call|>{_list(*ONE)}<|/tool_call|>", calls=ONE),
        "hard": Transcript(text=f"<|tool_call|>\n{_list(*HARD)}\n<|/tool_call|>", calls=HARD),
        "text around": Transcript(
            text=f"So: <|tool_call|>{_list(*TWO)}<|/tool_call|> Done.",
            content="So:Done.",
            calls=TWO,
        ),
        "cut": Transcript(text=f"<|tool_call|>{_list(*ONE)}<|/too", calls=ONE),
        "no JSON": Transcript(
            text="<|tool_call|>clock<|/tool_call|>", content="<|tool_call|>clock<|/tool_call|>"
        ),
    },
    "json": {
        "one": Transcript(text=_llama(*ONE[0]), calls=ONE),
        "in a block": Transcript(text=f"```json\n{_llama(*ONE[0])}\n```", calls=ONE),
        "text and a block": Transcript(
            text=f"So:\n```json\n{_llama(*HARD[0])}\n```\nDone.", content="So:Done.", calls=HARD[:1]
        ),
        "another block": Transcript(
            text='```json\n{"a": [1, 2]}\n```', content='```json\n{"a": [1, 2]}\n```'
        ),
        "Python": Transcript(text="```python\nx\n```", content="```python\nx\n```"),
    },
}
