"""Mutants: one small change of one file, written by hand or drawn from what a file offers.

A drawn mutant is a comparison flipped, a number one higher, a condition negated, a statement
dropped, or two arguments swapped. Which are drawn is decided by a hash of the seed and of what is
changed in which function, so a file that moves or a change elsewhere draws the same ones again.
"""

import ast
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# In the order they are drawn.
KINDS: Final = ("comparison", "statement", "number", "condition", "arguments")
_FLIPS: Final[dict[type[ast.cmpop], ast.cmpop]] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
}
# What Lua compares and joins with, and what becomes of it.
_LUA_FLIPS: Final = {
    b"==": b"~=",
    b"~=": b"==",
    b"<=": b"<",
    b">=": b">",
    b"<": b"<=",
    b">": b">=",
    b"and": b"or",
    b"or": b"and",
}
# Strings and comments are passed over.
_LUA_TOKEN: Final = re.compile(
    rb"^#!.*|'[^']*'|--.*|(==|~=|<=|>=|<|>|\band\b|\bor\b)|\b(\d+)\b", re.MULTILINE
)
_LUA_STATEMENT: Final = re.compile(rb"^ *(redis\.call\(.*\))$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Of a file: bytes [start, end) become `new`. `name` holds neither path nor line."""

    path: Path
    kind: str
    name: str
    start: int
    end: int
    new: bytes

    def apply(self, root: Path) -> bytes:
        """Write the mutant; what the file held before."""
        target = root / self.path
        before = target.read_bytes()
        target.write_bytes(before[: self.start] + self.new + before[self.end :])
        return before

    def line(self, root: Path) -> int:
        """Where it begins in a tree without it."""
        return (root / self.path).read_bytes().count(b"\n", 0, self.start) + 1


def draw(root: Path, where: str, *, seed: int, count: int) -> list[Change]:
    """So many changes of the files under a folder (or of one file), as many of each kind."""
    kinds: dict[str, list[Change]] = {}
    for path in sources(root, where):
        for change in offered(root, path):
            kinds.setdefault(change.kind, []).append(change)
    for changes in kinds.values():
        changes.sort(key=lambda change: _rank(seed, change))
    rows = itertools.zip_longest(*(kinds.get(kind, []) for kind in KINDS))
    drawn = (change for row in rows for change in row if change is not None)
    return list(itertools.islice(drawn, count))


def sources(root: Path, where: str) -> list[Path]:
    """Python and Lua files under a folder, relative to the root, or the one file it names."""
    place = root / where
    found = [place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.lua")]
    return sorted(path.relative_to(root) for path in found)


def offered(root: Path, path: Path) -> list[Change]:
    """Every change a file offers."""
    text = (root / path).read_bytes()
    found = _lua_changes if path.suffix == ".lua" else _python_changes
    times: Counter[str] = Counter()
    changes = []
    for kind, scope, start, end, new in found(text):
        words = " ".join(text[start:end].decode().split())
        name = f"{scope}: {words} -> {new.decode() or 'nothing'}"
        times[name] += 1
        # The second of the same in one function.
        name += f" (#{times[name]})" if times[name] > 1 else ""
        changes.append(Change(path=path, kind=kind, name=name, start=start, end=end, new=new))
    return changes


def _rank(seed: int, change: Change) -> bytes:
    return hashlib.sha256(f"{seed} {change.name}".encode()).digest()


# kind, function it stands in, [start, end) in bytes, what takes its place
Found = tuple[str, str, int, int, bytes]


def _python_changes(text: bytes) -> Iterator[Found]:
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    visitor = _Offered()
    visitor.visit(ast.parse(text))
    for kind, scope, node, new in visitor.found:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        yield kind, scope, start, end, new.encode()


class _Offered(ast.NodeVisitor):
    """Looks at what functions do: not at annotations, assertions, log calls or texts for people."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, ast.expr | ast.stmt, str]] = []
        self._names: list[str] = []
        self._functions = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name == "__init__":  # nothing works without it
            return
        self._names.append(node.name)
        self._functions += 1
        for statement in node.body:
            self.visit(statement)
        self._functions -= 1
        self._names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def _skip(self, node: ast.AST) -> None:
        """Changes that no test should see."""

    visit_Assert = visit_Raise = visit_JoinedStr = visit_AnnAssign = _skip

    def visit_Expr(self, node: ast.Expr) -> None:
        match node.value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log"))):
                return
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        if self._functions:
            scope = ".".join(self._names)
            self.found += [(kind, scope, part, new) for kind, part, new in _of(node)]
        super().generic_visit(node)


def _of(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """What can be done to one node: kind, the part that is replaced, by what."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _FLIPS:
            flipped = ast.Compare(node.left, [_FLIPS[type(op)]], node.comparators)
            yield "comparison", node, f"({ast.unparse(flipped)})"
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "number", node, str(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(
            test, ast.Compare
        ):
            yield "condition", test, f"(not ({ast.unparse(test)}))"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue():
            yield "statement", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", node, "pass"
        case ast.Call(args=[first, second, *_]) if not _is_starred(first, second):
            swapped = ast.Call(node.func, [second, first, *node.args[2:]], node.keywords)
            yield "arguments", node, ast.unparse(swapped)


def _is_starred(*arguments: ast.expr) -> bool:
    return any(isinstance(argument, ast.Starred) for argument in arguments)


def _lua_changes(text: bytes) -> Iterator[Found]:
    for match in _LUA_TOKEN.finditer(text):
        line = text[text.rfind(b"\n", 0, match.start()) + 1 : match.end()]
        scope = line.strip()[:40].decode(errors="ignore")
        if operator := match[1]:
            yield "comparison", scope, *match.span(1), _LUA_FLIPS[operator]
        elif number := match[2]:
            yield "number", scope, *match.span(2), b"%d" % (int(number) + 1)
    for match in _LUA_STATEMENT.finditer(text):
        yield "statement", "script", *match.span(1), b""
