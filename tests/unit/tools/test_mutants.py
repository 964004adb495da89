"""`make mutants` on a project of two files: what is caught, survives, is equivalent or stale."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.children import environment

SHOP = """
def price(count):
    if count > 10:
        return count * 2
    return count * 3


def least(x, y):
    return x if x < y else y


def countdown(count):
    while count > 0:
        count = count - 1
    return count
"""
NARROW = """
from shop.shop import countdown, price

def test_prices():
    assert price(1) == 3
    assert countdown(3) == 0
"""
WIDE = """
from shop.shop import price

def test_many():
    assert price(11) == 22
"""
LIST = """
seed = 1
[wider]
shop = ["tests/test_wide.py"]
"""
EQUIVALENT = """
[[draw]]
where = "shop/least.py"
count = 5
tests = ["tests/test_narrow.py"]
[[equivalent]]
mutant = "least: x < y -> (x <= y)"
why = "equal ones are the same"
"""


def entry(old: str, new: str, tests: str = "tests/test_narrow.py") -> str:
    lines = ["[[reversal]]", f"of = 'abc'\nsays = '{new}'\nwhere = 'shop'\nold = '{old}'"]
    return "\n".join([*lines, f"new = '{new}'\ntests = ['{tests}']\n"])


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    root = tmp_path / "toy"
    least = SHOP[SHOP.index("def least") : SHOP.index("def countdown")]
    files = {
        "shop/shop.py": SHOP.replace(least, ""),
        "shop/least.py": least,
        "tests/test_narrow.py": NARROW,
        "tests/test_wide.py": WIDE,
        ".gitignore": "built/\n",
        "built/big.bin": "not to be copied",
    }
    for name, text in files.items():
        write(root, name, text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def mutants(root: Path, listed: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    write(root, "tools/mutants.toml", LIST + listed)
    command = [sys.executable, "-m", "tools.mutants", "--root", str(root), *arguments]
    return subprocess.run(
        command, env=environment(root), capture_output=True, text=True, timeout=240, check=False
    )


def test_each_mutant_has_its_verdict_and_the_tree_is_as_it_was(toy: Path) -> None:
    listed = [
        entry("count * 3", "count * 4"),
        entry("count * 2", "count * 5"),
        entry("count > 10", "count > 9"),
        entry("count * 7", "count * 8"),
        entry("return count", "return 1"),
        entry("count > 0", "count > -1", tests="tests/test_gone.py"),
        EQUIVALENT,
    ]
    done = mutants(toy, "".join(listed))
    told = [" ".join(pair.split()) for pair in pairs(done.stdout)]
    assert sorted(told) == [
        "caught abc count * 4 tests/test_narrow.py::test_prices",
        "caught abc count * 5 tests/test_wide.py::test_many",
        "stale abc count * 8 its place is there 0 times in shop",
        "stale abc count > -1 its tests are not there: tests/test_gone.py",
        "stale abc return 1 its place is there 3 times in shop",
        "survived abc count > 9 tests/test_narrow.py tests/test_wide.py",
    ]
    assert "2 caught, 1 survived, 1 equivalent, 3 stale" in done.stdout
    assert done.returncode == 1
    assert (toy / "shop/shop.py").read_text().count("count > 10") == 1


def pairs(text: str) -> list[str]:
    """A verdict takes two lines; the last line counts them."""
    lines = text.splitlines()[:-1]
    return [f"{lines[at]} {lines[at + 1]}" for at in range(0, len(lines), 2)]


def test_all_caught_is_success_and_a_mutant_that_hangs_is_caught(toy: Path) -> None:
    hangs = entry("count = count - 1", "import time; time.sleep(600)")
    done = mutants(toy, hangs + EQUIVALENT, "--limit-s", "5")
    assert done.returncode == 0, done.stdout
    assert "5 s were over" in done.stdout
    assert mutants(toy, hangs + EQUIVALENT, "--only", "least: x <").returncode == 0


def test_nothing_is_said_of_mutants_when_the_tests_fail_without_any(toy: Path) -> None:
    write(toy, "tests/test_narrow.py", "def test_x():\n    assert False, 'always'\n")
    done = mutants(toy, entry("count * 3", "count * 4"))
    assert done.returncode == 2
    assert "without any mutant" in done.stdout
    assert "caught" not in done.stdout
