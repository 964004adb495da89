"""Every program of `examples/` does what it says, run as its README says."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs import close_clients
from tests.support.whole_stack import WholeStack

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OF_LLM = ROOT / "tests/integration/test_llm.py"
Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(
    whole_stack: WholeStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """What a program wrote on both streams. In this process, which has imported what it wants."""
    monkeypatch.setenv("OPENAI_BASE_URL", whole_stack.door.openai)
    monkeypatch.setenv("KAITEN_ADDRESS", whole_stack.door.grpc)

    def ran(name: str, *words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [name, *words])
        close_clients(runpy.run_path(str(EXAMPLES / name), run_name="__main__"))
        return capsys.readouterr()

    return ran


def test_structured(run: Run) -> None:
    said, _ = run("structured.py", "Two crabs!", "And an eel.")
    orders = said.splitlines()
    assert [line.rpartition(")")[2].strip() for line in orders] == ["Two crabs!", "And an eel."]
    assert all(line.startswith("Order(dish='") for line in orders)


def test_chat(run: Run) -> None:
    """Sampled: an answer may have any number of lines."""
    said, _ = run("chat.py", "Hello!", "And now?")
    before, first, then = said.partition("> Hello!\n")
    assert (before, first) == ("", "> Hello!\n")
    assert "\n> And now?\n" in then


def test_many(run: Run) -> None:
    said, _ = run("many.py")
    assert said.startswith("Guest number 0 sits down and")
    assert "tokens/s" in said


def test_background(run: Run) -> None:
    response_id, _ = run("background.py", "ask", "Tell me about soup.")
    whole, numbers = run("background.py", "read", response_id.strip())
    # Each after a text that is not empty.
    for number in numbers.split()[:1]:
        rest, _ = run("background.py", "read", response_id.strip(), number)
        assert whole.endswith(rest)
        assert len(rest) < len(whole)


def test_score(run: Run) -> None:
    said, _ = run("score.py")
    best, *_, worst = said.splitlines()
    assert best.endswith("The chef cuts the fish.")
    assert float(best.split()[0]) > float(worst.split()[0])


def test_agent(run: Run) -> None:
    said, _ = run("agent.py", "An eel!")
    first = r"price_of\(\{.*?\}\) -> \{\"dish\": \"(crab|eel|octopus)\", \"price\": \d+\}\n"
    match = re.match(first, said, re.DOTALL)
    assert match is not None, said
    assert said[match.end() :].strip()
    assert run("agent.py", "An eel!") == (said, "")


def test_pydantic_agent(run: Run) -> None:
    said, _ = run("pydantic_agent.py", "Two crabs!")
    *calls, order = said.splitlines()
    assert calls[-1].startswith("order({'dish': '")
    assert re.fullmatch(r"Order\(dish='(crab|eel|octopus)', plates=\d+\)", order)


def test_langchain_tools(run: Run) -> None:
    said, _ = run("langchain_tools.py", "Two crabs!")
    first, *words, order = said.splitlines()
    assert re.fullmatch(r"price_of\(\{'dish': '(crab|eel|octopus)'\}\) -> \d+", first)
    assert any(words)
    assert re.fullmatch(r"Order\(dish='(crab|eel|octopus)', plates=\d+\)", order)


def test_each_has_its_line_and_its_test() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    readme = (EXAMPLES / "README.md").read_text()
    # One has a stack of its own.
    tests = "".join(path.read_text() for path in (Path(__file__), OF_LLM))
    assert {name for name in names if f"`{name}` —" in readme and f'"{name}"' in tests} == names
    assert len(names) == 9
