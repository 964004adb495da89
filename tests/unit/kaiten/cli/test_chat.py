"""`kaiten chat`: the conversation and its commands by themselves, and in a terminal."""

import asyncio
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kaiten.cli.chat.command import place_of
from kaiten.cli.chat.lines import LineReader
from kaiten.cli.chat.state import SETTINGS, Chat, Message, Outcome, told_of
from kaiten.client.results import Choice, Completion, RequestStatus, Timings, Usage
from service_kit import errors
from tests.support.scripted_gateway import ScriptedGateway, accepted, delta, done, finished
from tests.support.terminal import Terminal


def answer(text: str, *, queue_us: int = 0, reason: str = "stop") -> Completion:
    return Completion(
        request_id="r",
        choices=(Choice(text=text, finish_reason=reason, output_tokens=11),),  # type: ignore[arg-type]
        usage=Usage(prompt_tokens=5, output_tokens=11, cached_tokens=2),
        timings=Timings(queue_us=queue_us, prefill_us=20_000, decode_us=1_000_000, preemptions=0),
    )


def said(*texts: str) -> list[Message]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


def talked(*pairs: tuple[str, str]) -> Chat:
    chat = Chat(system="Be brief.")
    for question, text in pairs:
        chat.asks(question)
        chat.answered(question, answer(text))
    return chat


def test_what_is_asked_comes_after_all_that_was_said() -> None:
    chat = talked(("hello", "Hi!"))
    system = {"role": "system", "content": "Be brief."}
    assert chat.messages("bye") == [system, *said("hello", "Hi!", "bye")]
    assert chat.messages() == [system, *said("hello", "Hi!")]


def test_retry_takes_the_answer_back() -> None:
    chat = talked(("hello", "Hi!"), ("bye", "Bye!"))
    assert chat.obey("/retry") == Outcome(ask="bye")
    assert chat.said == said("hello", "Hi!")


def test_retry_after_a_failure_takes_nothing_back() -> None:
    """Also where the same was asked before."""
    chat = talked(("hello", "Hi!"))
    chat.asks("hello")
    assert chat.obey("/retry") == Outcome(ask="hello")
    assert chat.said == said("hello", "Hi!")


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("/temperature 0.5", {"temperature": 0.5}),
        ("/top_p  0.9 ", {"top_p": 0.9}),
        ("/top_k 3", {"top_k": 3}),
        ("/max_tokens 7", {"max_tokens": 7}),
        ("/seed 9", {"seed": 9}),
        ("/seed off", {}),
    ],
)
def test_settings(line: str, options: dict[str, float]) -> None:
    chat = Chat()
    assert chat.obey(line).say in ("", "seed: the default")
    assert chat.options == options


def test_each_setting_shows_and_forgets_itself() -> None:
    for name in SETTINGS:
        chat = Chat(options={name: 1})
        assert chat.obey(f"/{name}") == Outcome(say=f"{name}: 1")
        assert chat.obey(f"/{name} off") == Outcome(say=f"{name}: the default")
        assert chat.obey(f"/{name}") == Outcome(say=f"{name}: the default")


def test_the_system_message() -> None:
    chat = Chat()
    assert chat.obey("/system").say == "no system message"
    chat.obey("/system You are a chef.")
    assert chat.obey("/system").say == chat.messages()[0]["content"] == "You are a chef."
    chat.obey("/system off")
    assert chat.messages() == []


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("/temperature hot", "/temperature takes a number or off, got 'hot'"),
        ("/seed 1.5", "/seed takes a whole number or off, got '1.5'"),
        ("/tmp", "no command /tmp; /help lists them"),
        ("/", "no command /; /help lists them"),
        ("/retry", "nothing was asked yet"),
        ("/stats", "no answer yet"),
        ("/save", "/save takes the name of a file"),
        ("/load /nowhere", "/load /nowhere: No such file or directory"),
        ("/save /nowhere/a", "/save /nowhere/a: No such file or directory"),
        ("/save a\0b", "/save a\0b: embedded null byte"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(line: str, reply: str) -> None:
    chat = Chat()
    assert reply in chat.obey(line).say
    assert chat == Chat()


def test_clear_forgets_what_was_said_and_no_more() -> None:
    chat = talked(("hello", "Hi!"))
    chat.options["seed"] = 3
    chat.obey("/clear")
    assert (chat.said, chat.system, chat.options) == ([], "Be brief.", {"seed": 3})
    assert chat.obey("/retry").say == "nothing was asked yet"


def test_a_saved_conversation_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    chat = talked(("hello", "Hi é!"))
    assert chat.obey(f"/save {path}").say == f"saved 3 messages to {path}"
    other = Chat(system="Another.")
    other.obey(f"/load {path}")
    assert other.messages() == chat.messages() == json.loads(path.read_text())["messages"]
    assert other.obey("/retry").say == "nothing was asked yet"


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("", "Expecting value"),
        ("[]", 'holds no {"messages": […]}'),
        ('{"messages": []}', 'holds no {"messages": […]}'),
        ('{"messages": [{"role": "chef", "content": "x"}]}', "a role of system, user, assistant"),
        ('{"messages": [{"role": "user", "content": 1}]}', "a text as its content"),
        ('{"messages": ["x"]}', "a role of"),
        ("[" * 100_000, "while decoding a JSON array"),
    ],
)
def test_what_is_no_conversation_is_not_loaded(text: str, reply: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(text)
    chat = talked(("hello", "Hi!"))
    before = chat.messages()
    assert reply in chat.obey(f"/load {path}").say
    assert chat.messages() == before


def test_stats() -> None:
    told = talked(("hello", "Hi!"), ("bye", "Bye!")).obey("/stats").say
    assert told.startswith("answers: 2; tokens: 22 out, 10 in, 4 of them cached; 0.00 s in the")
    assert told.endswith("the last: 11 tokens, 10.0 tokens/s, first after 0.02 s")


def test_what_is_told_of_an_answer() -> None:
    assert "first after 2.02 s, 2.00 s of it in the queue" in told_of(
        answer("", queue_us=2_000_000)
    )
    assert told_of(answer("", reason="length")).endswith("cut off: no more tokens were allowed")


@pytest.mark.parametrize(
    ("position", "reason", "told"),
    [
        (3, "no free slot", "place 3 in the queue: no free slot"),
        (1, "", "place 1 in the queue"),
        (None, "", "the prompt is being read"),
    ],
)
def test_the_place_in_the_queue(position: int | None, reason: str, told: str) -> None:
    status = RequestStatus(
        request_id="r", is_finished=False, queue_position=position, queue_reason=reason
    )
    assert place_of(status) == told


needs_readline = pytest.mark.skipif(
    find_spec("readline") is None, reason="this Python was built without readline"
)


async def in_terminal(story: Callable[[], None]) -> None:
    """Beside this loop, in which the gateway lives."""
    await asyncio.to_thread(story)


@needs_readline
async def test_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    """Several lines, a command completed by Tab, an answer stopped, an error survived."""
    standing = asyncio.Event()
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    async with ScriptedGateway(
        [accepted(), delta(0, "Hi!"), finished(3), done(3)],
        [accepted(), delta(0, "Once"), standing],
        [errors.InvalidRequest("temperature", "must be in [0, 2]")],
        [accepted(), delta(0, "Bye!"), finished(4), done(4)],
    ) as gateway:

        def story() -> None:
            with Terminal("chat", "--address", gateway.address, environ=environ) as terminal:
                terminal.until("› ")
                terminal.types('"""\r')
                terminal.until("… ")
                terminal.types('two\rlines"""\r')
                shown = terminal.until("first after")
                assert "Hi!" in shown
                terminal.until("› ")
                terminal.types("/temp\t9\r")
                terminal.until("› ")
                terminal.types("a story\r")
                terminal.until("Once")
                terminal.interrupt_until(" …")
                terminal.until("› ")
                terminal.types("/retry\r")
                terminal.until("error: temperature: must be in [0, 2]")
                terminal.until("› ")
                terminal.interrupt_until("(Ctrl-D leaves)")
                terminal.until("› ")
                terminal.types("/temperature off\r")
                terminal.until("› ")
                terminal.types("/seed -1\r")
                terminal.until("› ")
                terminal.types("/retry\r")
                terminal.until("error: seed: cannot be -1")
                terminal.until("› ")
                terminal.types("/seed off\r")
                terminal.until("› ")
                terminal.types("//bye\r")
                terminal.until("Bye!")
                terminal.until("› ")
                terminal.types("\x04")
                assert terminal.ends() == 0

        await in_terminal(story)
        await asyncio.wait_for(gateway.left.wait(), 60)
        first, stopped, again, last = gateway.calls
    assert [m.content for m in first.conversation.messages] == ["two\nlines"]
    assert [m.content for m in stopped.conversation.messages] == ["two\nlines", "Hi!", "a story"]
    assert stopped.sampling.temperature == again.sampling.temperature == 9
    assert again.conversation == stopped.conversation
    assert [m.content for m in last.conversation.messages] == ["two\nlines", "Hi!", "/bye"]
    assert not last.sampling.HasField("temperature")


@needs_readline
async def test_what_was_typed_is_remembered_by_the_next_chat(tmp_path: Path) -> None:
    whole = [accepted(), delta(0, "Hi!"), finished(3), done(3)]
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    async with ScriptedGateway(whole, whole) as gateway:

        def story() -> None:
            for typed in ("hello\r", "\x1b[A\x1b[A\r"):
                with Terminal("chat", "--address", gateway.address, environ=environ) as terminal:
                    terminal.until("› ")
                    terminal.types(typed)
                    terminal.until("first after")
                    terminal.types("/quit\r")
                    assert terminal.ends() == 0

        await in_terminal(story)
        first, second = gateway.calls
    assert first.conversation == second.conversation
    history = tmp_path / "kaiten" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0
    assert history.read_text().splitlines() == ["hello", "/quit", "hello", "/quit"]


@needs_readline
def test_who_has_no_home_is_remembered_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a container whose user is a number."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with LineReader(Path("~/.local/state/kaiten/chat_history")):
        pass
    assert [*tmp_path.iterdir()] == []


async def test_the_place_in_the_queue_is_shown_until_the_answer_begins(tmp_path: Path) -> None:
    from kaiten.v1 import inference_service_pb2 as pb

    standing = asyncio.Event()
    waiting = pb.GetRequestResponse(
        request_id="r", state=pb.REQUEST_STATE_LIVE, queue_position=7, queue_reason="no free slot"
    )
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    scripts: Any = ([accepted(), standing], *[[waiting]] * 1000)
    async with ScriptedGateway(*scripts) as gateway:

        def story() -> None:
            with Terminal("chat", "--address", gateway.address, environ=environ) as terminal:
                terminal.until("› ")
                terminal.types("hello\r")
                terminal.until("place 7 in the queue: no free slot")
                terminal.interrupt_until(" …")
                terminal.until("› ")
                terminal.types("\x04")
                assert terminal.ends() == 0

        await in_terminal(story)
