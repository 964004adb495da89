"""`make wheel`, asked for what it cannot make. What it makes: `tests/contract/test_wheel.py`."""

from pathlib import Path

import pytest

from kernels.cpp import build
from tools import prebuilt

OTHER = next(name for name in prebuilt.MACHINES if build.every(name) != build.every())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--machine", "sparc"], "invalid choice: 'sparc'"),
        (["--machine", OTHER], f"--machine {OTHER} needs a --compiler for it"),
    ],
)
def test_what_cannot_be_asked_for_leaves_all_as_it_was(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    (tmp_path / "old.so").touch()
    with pytest.raises(SystemExit):
        prebuilt.main(words)
    assert said in capsys.readouterr().err
    assert (tmp_path / "old.so").exists()


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_makes_nothing_is_named(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    with pytest.raises(SystemExit, match=f"^{compiler} makes nothing for {OTHER}: "):
        prebuilt.main(["--machine", OTHER, "--compiler", compiler])
