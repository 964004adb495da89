"""The process around every command: its streams, and how it is interrupted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kaiten.cli import app as cli
from kaiten.cli import main as entry_point

ROOT = Path(__file__).parents[4]
FULL = (">/dev/full", 1, "the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        FULL,
        (">&- <&-", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_an_output_that_cannot_be_written_is_told_in_a_sentence(
    redirection: str, code: int, said: str
) -> None:
    line = f"set -o pipefail; '{sys.executable}' -m kaiten keygen acme {redirection}"
    made = ["bash", "-c", line]
    done = subprocess.run(made, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == code
    assert re.fullmatch(rf"key \(shown once\): kt-\S+\n{said}", done.stderr)


@pytest.mark.parametrize(
    ("words", "redirection", "code", "said"),
    [
        ("archive cat FOLDER", *FULL),
        ("archive cat FOLDER", ">&- <&-", 0, ""),
        ("archive cat FOLDER", "| true", 0, ""),
        ("gateway --help", *FULL),
    ],
)
def test_so_it_is_of_a_part_and_of_its_tools(
    words: str, redirection: str, code: int, said: str
) -> None:
    words = words.replace("FOLDER", str(ROOT / "tests/compat/releases/0.2.0"))
    line = f"set -o pipefail; '{sys.executable}' -m kaiten {words} {redirection}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (code, said)


def test_who_becomes_a_part_does_not_import_the_command_line_before() -> None:
    code = (
        "import os, sys; os.execve = lambda *_: sys.exit('cyclopts' in sys.modules)\n"
        "sys.argv = ['kaiten', 'gateway', '--help']\n"
        "from kaiten.cli import main; main()"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(("pid", "code"), [(1, 143), (2, -15)])
def test_the_first_process_of_a_container_ends_before_it_serves_too(pid: int, code: int) -> None:
    """Linux tells it of no signal that it has no handler for."""
    lines = (
        f"import os, signal; os.getpid = lambda: {pid}\n"
        "from kaiten.cli import to_its_end; to_its_end(lambda: signal.raise_signal(signal.SIGTERM))"
    )
    assert subprocess.run([sys.executable, "-c", lines], cwd=ROOT).returncode == code


def test_an_interruption_is_an_exit_code_wherever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    with pytest.raises(SystemExit) as left:
        entry_point()
    assert left.value.code == 130
