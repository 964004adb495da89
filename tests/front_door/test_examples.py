"""Every program of `examples/` does what it says, run as its README says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.whole_stack import WholeStack

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WAIT_S = 120


@pytest.fixture
def environ(whole_stack: WholeStack) -> dict[str, str]:
    door = whole_stack.door
    return {"OPENAI_BASE_URL": door.openai, "KAITEN_ADDRESS": door.grpc, "PYTHONPATH": str(ROOT)}


def run(environ: dict[str, str], name: str, *words: str) -> tuple[str, str]:
    """What it wrote on both streams."""
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=os.environ | environ,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, ran.stderr


def test_chat(environ: dict[str, str]) -> None:
    """Sampled: an answer may have any number of lines."""
    said, _ = run(environ, "chat.py", "Hello!", "And now?")
    before, first, then = said.partition("> Hello!\n")
    assert (before, first) == ("", "> Hello!\n")
    assert "\n> And now?\n" in then


def test_many(environ: dict[str, str]) -> None:
    said, _ = run(environ, "many.py")
    assert said.startswith("Guest number 0 sits down and")
    assert "tokens/s" in said


def test_background(environ: dict[str, str]) -> None:
    response_id, _ = run(environ, "background.py", "ask", "Tell me about soup.")
    whole, numbers = run(environ, "background.py", "read", response_id.strip())
    # Each after a text that is not empty.
    for number in numbers.split()[:1]:
        rest, _ = run(environ, "background.py", "read", response_id.strip(), number)
        assert whole.endswith(rest)
        assert len(rest) < len(whole)


def test_score(environ: dict[str, str]) -> None:
    said, _ = run(environ, "score.py")
    best, *_, worst = said.splitlines()
    assert best.endswith("The chef cuts the fish.")
    assert float(best.split()[0]) > float(worst.split()[0])


def test_in_process() -> None:
    said, _ = run({"PYTHONPATH": str(ROOT)}, "in_process.py")
    assert said.count(" -> ") == 3


def test_each_has_its_line_and_its_test() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    readme = (EXAMPLES / "README.md").read_text()
    tests = Path(__file__).read_text()
    assert {name for name in names if f"`{name}` —" in readme and f'"{name}"' in tests} == names
    assert len(names) == 5
