"""A conversation at a terminal and the commands that change it: no I/O but of files it is told."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os.path import expanduser
from pathlib import Path
from typing import Final

from kaiten.client.results import Completion

HELP: Final = """\
/system [TEXT]        the system message; without a text: show it; off: none
/temperature [X]      0 is greedy; also /top_p, /top_k, /max_tokens, /seed; off: the model's own
/retry                ask the last question again
/clear                forget what was said; settings stay
/save FILE            write the conversation as JSON
/load FILE            go on with a saved one
/stats                tokens and times so far
/help, /quit          Ctrl-D leaves, too; Ctrl-C stops an answer
\"""                   begins and ends a text of several lines; a \\ at its end continues a line
//…                   says a text that begins with /"""
# By setting: from what was typed. ValueError: it is no such number.
SETTINGS: Final[Mapping[str, Callable[[str], float]]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_tokens": int,
    "seed": int,
}
OFF: Final = "off"
WORDS: Final = (
    *(f"/{name}" for name in ("system", *SETTINGS)),
    *("/retry", "/clear", "/save", "/load", "/stats", "/help", "/quit"),
)
ROLES: Final = ("system", "user", "assistant")

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of a command: what to print, what to ask the model, whether to end."""

    say: str = ""
    ask: str | None = None
    leaves: bool = False


@dataclass(slots=True, kw_only=True)
class Chat:
    """`said`: user's and assistant's messages in turn. `last`: what was asked, maybe in vain."""

    system: str = ""
    options: dict[str, float] = field(default_factory=dict)
    said: list[Message] = field(default_factory=list)
    last: str = ""
    has_answer: bool = False
    answers: list[Completion] = field(default_factory=list)

    def messages(self, question: str = "") -> list[Message]:
        """All that was said, and then the question."""
        first = [_message("system", self.system)] if self.system else []
        return [*first, *self.said, *([_message("user", question)] if question else [])]

    def asks(self, question: str) -> None:
        self.last, self.has_answer = question, False

    def answered(self, question: str, answer: Completion) -> None:
        self.has_answer = True
        self.answers.append(answer)
        self.said += [_message("user", question), _message("assistant", answer.text)]

    def obey(self, line: str) -> Outcome:
        """A line that begins with a slash. What is wrong with it is said, and changes nothing."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in SETTINGS:
            return Outcome(say=self._set(name, rest))
        command = COMMANDS.get(name)
        if command is None:
            return Outcome(say=f"no command /{name}; /help lists them, // begins a text with /")
        return command(self, rest)

    def _set(self, name: str, value: str) -> str:
        if not value:
            return f"{name}: {self.options.get(name, 'the default')}"
        if value == OFF:
            self.options.pop(name, None)
            return f"{name}: the default"
        try:
            self.options[name] = SETTINGS[name](value)
        except ValueError:
            kind = "a whole number" if SETTINGS[name] is int else "a number"
            return f"/{name} takes {kind} or {OFF}, got {value!r}"
        return ""

    def _set_system(self, text: str) -> Outcome:
        if not text:
            return Outcome(say=self.system or "no system message")
        self.system = "" if text == OFF else text
        return Outcome()

    def _retry(self, _rest: str) -> Outcome:
        if not self.last:
            return Outcome(say="nothing was asked yet")
        if self.has_answer:
            del self.said[-2:]
        return Outcome(ask=self.last)

    def _clear(self, _rest: str) -> Outcome:
        self.said.clear()
        self.last, self.has_answer = "", False
        return Outcome()

    def _save(self, name: str) -> Outcome:
        if not name:
            return Outcome(say="/save takes the name of a file")
        try:
            text = json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=2)
            Path(expanduser(name)).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            return Outcome(say=f"/save {name}: {error.strerror}")
        except ValueError as error:
            return Outcome(say=f"/save {name}: {error}")
        return Outcome(say=f"saved {len(self.messages())} messages to {name}")

    def _load(self, name: str) -> Outcome:
        try:
            messages = _messages(Path(expanduser(name)).read_text(encoding="utf-8-sig"))
        except OSError as error:
            return Outcome(say=f"/load {name}: {error.strerror}")
        except (ValueError, RecursionError) as error:
            return Outcome(say=f"/load {name}: {error}")
        self.system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        self.said = messages
        self.last, self.has_answer = "", False
        return Outcome(say=f"loaded {len(messages)} messages")

    def _stats(self, _rest: str) -> Outcome:
        if not self.answers:
            return Outcome(say="no answer yet")
        usages = [answer.usage for answer in self.answers]
        out, prompt, cached = (
            sum(getattr(usage, name) for usage in usages)
            for name in ("output_tokens", "prompt_tokens", "cached_tokens")
        )
        queued_s = sum(answer.timings.queue_us for answer in self.answers) / 1e6
        return Outcome(
            say=f"answers: {len(usages)}; tokens: {out} out, {prompt} in, {cached} of them cached;"
            f" {queued_s:.2f} s in the queue\nthe last: {told_of(self.answers[-1])}"
        )


COMMANDS: Final[Mapping[str, Callable[[Chat, str], Outcome]]] = {
    "system": Chat._set_system,
    "retry": Chat._retry,
    "clear": Chat._clear,
    "save": Chat._save,
    "load": Chat._load,
    "stats": Chat._stats,
    "help": lambda _chat, _rest: Outcome(say=HELP),
    "quit": lambda _chat, _rest: Outcome(leaves=True),
}


def told_of(answer: Completion) -> str:
    """Tokens, how fast, and what was waited for before."""
    tokens, timings = answer.usage.output_tokens, answer.timings
    told = [f"{tokens} token{'s' * (tokens != 1)}"]
    if tokens > 1 and timings.decode_us:
        told.append(f"{(tokens - 1) / timings.decode_us * 1e6:.1f} tokens/s")
    told.append(f"first after {(timings.queue_us + timings.prefill_us) / 1e6:.2f} s")
    if timings.queue_us > timings.prefill_us:
        told.append(f"{timings.queue_us / 1e6:.2f} s of it in the queue")
    if answer.choices[0].finish_reason == "length":
        told.append("cut off: no more tokens were allowed")
    return ", ".join(told)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _messages(text: str) -> list[Message]:
    """Of a saved file. ValueError: it is none."""
    loaded = json.loads(text)
    messages = loaded.get("messages") if isinstance(loaded, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('holds no {"messages": […]}')
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"each message has a role of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ValueError("each message has a text as its content")
    return [_message(message["role"], message["content"]) for message in messages]
