"""What changes are drawn from a file, and that the same are drawn from it wherever it stands."""

import ast
from pathlib import Path

from tools.mutation import KINDS, Change, draw, offered

PYTHON = '''
"""Holds 3 things."""
LIMIT: int = 3


class Till:
    def __init__(self) -> None:
        self.count = 0

    def take(self, n: int, *, most: int = 9) -> int:
        """Takes 4."""
        assert n > 5, "words"
        if n not in self.known and n:
            raise ValueError(f"{n} is above {6 + 1}")
        log.info("taken", n=7)
        self.count += n  # é
        return max(n, most) if n else 8
'''
LUA = """#!lua
-- more than 1 and less
if redis.call('GET 2', KEYS[1]) == 'a or b' and x then return 3 end
redis.call('DEL', 'z')
"""


def changes(tmp_path: Path, name: str, text: str) -> dict[str, Change]:
    (tmp_path / name).write_text(text)
    return {change.name: change for change in offered(tmp_path, Path(name))}


def test_what_a_python_file_offers(tmp_path: Path) -> None:
    found = changes(tmp_path, "till.py", PYTHON)
    assert [(change.kind, name) for name, change in found.items()] == [
        (
            "condition",
            "Till.take: n not in self.known and n -> (not (n not in self.known and n))",
        ),
        ("comparison", "Till.take: n not in self.known -> (n in self.known)"),
        ("statement", "Till.take: self.count += n -> pass"),
        ("condition", "Till.take: n -> (not (n))"),
        ("arguments", "Till.take: max(n, most) -> max(most, n)"),
        ("number", "Till.take: 8 -> 9"),
    ]
    for change in found.values():
        before = change.apply(tmp_path)
        ast.parse((tmp_path / change.path).read_text())
        (tmp_path / change.path).write_bytes(before)


def test_what_a_script_offers(tmp_path: Path) -> None:
    found = changes(tmp_path, "take.lua", LUA)
    assert sorted(change.kind for change in found.values()) == [
        *("comparison", "comparison", "number", "number", "statement")
    ]
    before = found["script: redis.call('DEL', 'z') -> nothing"].apply(tmp_path)
    assert (tmp_path / "take.lua").read_text() == LUA.replace("redis.call('DEL', 'z')", "")
    assert before.decode() == LUA


def test_a_seed_draws_the_same_wherever_the_code_stands(tmp_path: Path) -> None:
    moved = f"import os\n\n{PYTHON}"
    grown = f"{moved}\n\ndef other() -> bool:\n    return 1 < 2\n"
    for folder, text in (("a", PYTHON), ("b/deep", moved), ("c", grown)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"till_{folder[0]}.py").write_text(text)

    def drawn(where: str, seed: int = 3, count: int = 6) -> list[str]:
        return [change.name for change in draw(tmp_path, where, seed=seed, count=count)]

    assert len(drawn("a")) == 6
    assert drawn("b") == drawn("a")
    assert set(drawn("a")) < set(drawn("c", count=9))
    assert drawn("a", seed=4) != drawn("a")


def test_every_kind_is_drawn_before_any_twice(tmp_path: Path) -> None:
    (tmp_path / "till.py").write_text(PYTHON)
    kinds = [change.kind for change in draw(tmp_path, ".", seed=1, count=5)]
    assert kinds == list(KINDS)
