"""`kaiten chat`: a conversation with the model behind a gateway. Errors do not end it."""

import sys
from contextlib import suppress
from threading import Event, Thread
from types import TracebackType
from typing import Final, Self, cast

from rich.text import Text

from kaiten.cli.chat.lines import LineReader, history_file, on_interrupt
from kaiten.cli.chat.state import Chat, told_of
from kaiten.cli.complaint import complain, problem_of
from kaiten.client import Client, Delta, RequestStatus
from kaiten.client.errors import ApiError
from kaiten.client.request import GenerateOptions
from kaiten.console import console, harmless, say

# Before it is worth saying that an answer has not begun; then between two looks at its place.
PATIENCE_S: Final = 0.4


def converse(client: Client, chat: Chat, address: str) -> int:
    """Turns until the end of input; the exit code: that of the last turn, where nobody looks."""
    code = 0
    with on_interrupt(lambda: None), LineReader(history_file()) as reader:
        while (line := reader.read()) is not None:
            question: str | None = line.removeprefix("/") if line.startswith("//") else line
            if line.startswith("/") and not line.startswith("//"):
                outcome = chat.obey(line)
                if outcome.say:
                    console().print(Text(harmless(outcome.say), style="dim"), soft_wrap=True)
                if outcome.leaves:
                    break
                question = outcome.ask
            if question and question.strip():
                code = _ask(client, chat, question, address)
    return 0 if sys.stdin.isatty() else code


def _ask(client: Client, chat: Chat, question: str, address: str) -> int:
    """Stream the answer. Interrupted, or failed, it was not given; the code an exit would have."""
    chat.asks(question)
    messages = chat.messages(question)
    asked = {**chat.options, "messages": messages, "parse_output": True}
    thought, has_begun = _Thought(), False
    try:
        generation = client.generate(**cast(GenerateOptions, asked))
        with generation, _Waiting(client, generation.request_id) as waiting:
            with on_interrupt(generation.close) as was_interrupted:
                for delta in generation:
                    waiting.end()
                    thought.tell(delta)
                    say(delta.text)
                    has_begun = True
            if was_interrupted():
                print(" …")
                return 0
            print()
            answer = generation.result
    except ApiError as error:
        print(end="\n" * has_begun)
        return complain(error, address)
    if (problem := problem_of(answer.choices[0])) is not None:
        return complain(problem, address)
    chat.answered(question, answer)
    if sys.stdout.isatty():
        console().print(Text(told_of(answer), style="dim"), soft_wrap=True)
    return 0


class _Thought:
    """Shows at a terminal what the model thinks before its answer; elsewhere nothing does."""

    def __init__(self) -> None:
        self._console = console()
        self._goes_on = False

    def tell(self, delta: Delta) -> None:
        if not self._console.is_terminal:
            return
        if delta.reasoning:
            self._goes_on = True
            self._console.print(
                Text(harmless(delta.reasoning), style="dim"), end="", soft_wrap=True
            )
        if delta.text and self._goes_on:
            self._goes_on = False
            self._console.print("\n")


class _Waiting:
    """Says at a terminal what an answer that has not begun waits for; a context manager."""

    def __init__(self, client: Client, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._has_ended = Event()
        self._thread = Thread(target=self._look, daemon=True)
        self._console = console()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._thread.start()
        else:
            self._has_ended.set()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """It has begun: what was said is gone when this returns. Again is fine."""
        if not self._has_ended.is_set():
            self._has_ended.set()
            self._thread.join()

    def _look(self) -> None:
        if self._has_ended.wait(PATIENCE_S):
            return
        with self._console.status("waiting") as shown:
            while not self._has_ended.wait(PATIENCE_S):
                # It may not be accepted yet; and who lost its gateway is told by the stream.
                with suppress(ApiError):
                    shown.update(place_of(self._client.get(self._request_id)))


def place_of(status: RequestStatus) -> str:
    """What a request that has given nothing yet is doing."""
    if status.queue_position is None:
        return "the prompt is being read"
    why = f": {status.queue_reason}" if status.queue_reason else ""
    return f"place {status.queue_position} in the queue{why}"
