"""The Triton kernels against their references, in Triton's interpreter.

Whether a process interprets is settled when Triton is imported, so the tests of the folder
`interpreted` run in a process of their own: `pytest` passes over their names, this does not.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import side_by_side
from tests.support.once import made_once

pytest.importorskip("triton", reason="no triton here")

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).with_name("interpreted")
# For what hangs: a busy machine of another kind takes ten times what this one does.
SECONDS_MAX = 840


FILES = sorted(path.stem for path in FOLDER.glob("interpreted_*.py"))
# What compiles late is asked of a process that has compiled nothing else; the others share two:
# on a slow machine that does something else one took more than half of the seconds it may.
LATE = "interpreted_late_compiles"
OTHERS = [name for name in FILES if name != LATE]
PARTS = {
    names[0].removeprefix("interpreted_"): names for names in ([LATE], OTHERS[::2], OTHERS[1::2])
}
# Seconds of CPU time; none compiles anything. The third comes with torch's meta tensors.
IMPORTED = (
    "hypothesis.strategies",
    "gpu_worker.runner.graph_runner",
    "torch._dynamo",
    "triton.runtime.interpreter",
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, side_by_side.Ended]:
    """Each part of the folder, in a process of its own."""
    environ = {
        "TRITON_INTERPRET": "1",
        # One thread: the tensors are tiny.
        "OMP_NUM_THREADS": "1",
        # The other plugins are seconds of imports.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    # Of fixtures only those of the folder: others import what serves.
    words = ["pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={FOLDER}"]
    # The two that pyproject.toml has settings of.
    words += ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
    programs = {
        part: [*words, *(str(FOLDER / f"{name}.py") for name in names)]
        for part, names in PARTS.items()
    }

    def run(folder: Path) -> None:
        found = side_by_side.run(programs, imports=IMPORTED, environ=environ, limit_s=SECONDS_MAX)
        (folder / "ended").write_text(json.dumps(found))

    folder = made_once(tmp_path_factory, "interpreted", run)
    found = json.loads((folder / "ended").read_text())
    return {part: side_by_side.Ended(*each) for part, each in found.items()}


@pytest.mark.timeout(SECONDS_MAX + 60)
@pytest.mark.parametrize("part", PARTS)
def test_in_the_interpreter(part: str, ended: dict[str, side_by_side.Ended]) -> None:
    code, said = ended[part]
    assert code == 0, said[-8000:]
    passed = re.search(r"(\d+) passed", said)
    assert passed, said
    assert int(passed[1]) >= 5 * len(PARTS[part])
    assert "skipped" not in said


KERNELS = [
    path for path in sorted((ROOT / "kernels").rglob("*.py")) if "@jit.compiled" in path.read_text()
]


def loops(tree: ast.AST) -> Iterator[ast.For]:
    """Those of functions that Triton compiles."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            marks = map(ast.unparse, function.decorator_list)
            yield from (
                loop
                for loop in ast.walk(function)
                if isinstance(loop, ast.For) and "jit.compiled" in marks
            )


def counts_upwards(loop: ast.For) -> bool:
    """Without a step, or by a constant, or by as many programs as there are."""
    assert isinstance(loop.iter, ast.Call)
    steps = [ast.unparse(step) for step in loop.iter.args[2:]]
    return all(step.isupper() or step.isdigit() or "num_programs" in step[:15] for step in steps)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_loops_count_upwards(path: Path) -> None:
    """A step that is negative, and no constant, Triton takes for positive: the loop never runs
    where it should. The interpreter has Python's range, and does not tell.
    """
    for loop in loops(ast.parse(path.read_text())):
        assert counts_upwards(loop), f"{path}:{loop.lineno}: {ast.unparse(loop.iter)}"
