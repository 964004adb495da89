"""Folders depend in one direction, the core on nothing, and importing a service stays cheap."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    # The stubs of `protos/`: who imports more of `kaiten` than these is no part of it.
    "kaiten.v1": set[str](),
    "kernels": set[str](),
    "service_kit": set[str](),
    "ledger": {"kaiten.v1", "service_kit"},
    "gateway": {"kaiten.v1", "ledger", "service_kit"},
    "scheduler_svc": {"kaiten.v1", "ledger", "service_kit"},
    "gpu_worker": {"kaiten.v1", "kernels", "service_kit"},
    "kaiten": {"kaiten.v1"},
}
CORE = ROOT / "scheduler_svc" / "core"
# Floors of a folder from the roof down; rooms of one floor do not know each other.
ROOMS = {
    "gateway": [
        ("__main__",),
        ("main",),
        ("app",),
        ("openai", "grpc"),
        ("settings",),
        ("http",),
        ("requests",),
        ("cell", "observe"),
        ("text",),
        ("tenants", "children"),
        ("values",),
        ("wrong_keys",),
    ],
    "gpu_worker": [
        ("__main__",),
        ("main",),
        ("service",),
        ("runner",),
        ("batch", "model"),
        ("container", "settings"),
    ],
    "kaiten": [
        ("__main__", "part"),
        ("llm",),
        ("cli",),
        ("bench",),
        ("client", "local"),
        ("api_key", "console", "mini", "public_tls", "start_error", "tls_options", "waits"),
        ("error_groups", "loop_thread", "tls"),
        ("v1",),
    ],
    "kernels": [
        ("layers",),
        ("attention", "linear", "rows"),
        ("sampling",),
        ("kv",),
        ("norms_rope",),
        ("dispatch",),
        ("jit", "native"),
        ("probe",),
        ("cpp",),
        ("checks", "variants"),
    ],
}
# Of the standard library, what a pure core may not touch.
IMPURE = {"asyncio", "logging", "os", "random", "socket", "subprocess", "threading", "time"}
NEVER = {"pickle", "marshal", "yaml", "dill", "shelve"}


@cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Those of a file, anywhere in it."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path: Path) -> set[str]:
    """Every module a file imports."""
    names: set[str] = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module:
            names.add(node.module)
    return names


def code_lines(text: str) -> int:
    """Lines with code on them: what is said of it, and blank lines, cost a reader nothing."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case (
                ast.Module(body=[ast.Expr(value=ast.Constant()) as said, *_])
                | ast.ClassDef(body=[ast.Expr(value=ast.Constant()) as said, *_])
                | ast.FunctionDef(body=[ast.Expr(value=ast.Constant()) as said, *_])
            ):
                documented |= {*range(said.lineno, (said.end_lineno or 0) + 1)}
    coded: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            coded |= {*range(token.start[0], token.end[0] + 1)}
    return len(coded - documented)


def imported_modules(path: Path, folder: str) -> set[str]:
    """The modules of `folder` a file imports, those of `from package import module` too."""
    names: set[str] = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module:
            if (ROOT / node.module.replace(".", "/")).is_dir():
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                names.add(node.module)
    return {name for name in names if name.partition(".")[0] == folder}


def modules_of(folder: Path) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in folder.rglob("*.py")
        if path.name != "__init__.py"
    }


def roots(path: Path) -> set[str]:
    """Folders a file imports from; the stubs are one of their own."""
    names = imported(path)
    stubs = {name for name in names if f"{name}.".startswith("kaiten.v1.")}
    return {name.partition(".")[0] for name in names - stubs} | ({"kaiten.v1"} if stubs else set())


def python_files(folder: str) -> list[Path]:
    return [
        path
        for path in (ROOT / folder.replace(".", "/")).rglob("*.py")
        if folder != "kaiten" or path.parent.name != "v1"
    ]


@pytest.mark.parametrize("folder", ALLOWED)
def test_folders_depend_in_one_direction(folder: str) -> None:
    paths = python_files(folder)
    assert paths
    for path in paths:
        crossed = roots(path) & ALLOWED.keys() - {folder} - ALLOWED[folder]
        assert not crossed, f"{path} may not import {sorted(crossed)}"


def test_the_core_is_pure() -> None:
    for path in CORE.rglob("*.py"):
        foreign = {
            name
            for name in imported(path)
            if not name.startswith("scheduler_svc.core")
            and (name.partition(".")[0] not in sys.stdlib_module_names or name in IMPURE)
        }
        assert not foreign, f"{path} imports {sorted(foreign)}"


def test_the_core_is_small_and_imports_one_way() -> None:
    """A file may import those before it; what several need stands on the ground."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in CORE.rglob("*.py")
    }
    texts = {name: path.read_text() for name, path in modules.items()}
    assert max(text.count("\n") for text in texts.values()) <= 350
    assert sum(map(code_lines, texts.values())) <= 3064
    below = {name: imported(path) & modules.keys() for name, path in modules.items()}
    while ground := {name for name, names in below.items() if not names}:
        below = {name: names - ground for name, names in below.items() if name not in ground}
    assert not below, f"these import each other: {sorted(below)}"


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_only_the_rooms_below_them(folder: str) -> None:
    """From the roof down: a module may import those of later floors, and of its own room."""
    floor_of = {
        f"{folder}.{room}": floor for floor, rooms in enumerate(ROOMS[folder]) for room in rooms
    }

    def room_of(module: str) -> str:
        return ".".join(module.split(".")[:2])

    for name, path in modules_of(ROOT / folder).items():
        for other in imported_modules(path, folder) - {folder}:
            room, below = room_of(name), room_of(other)
            assert room == below or floor_of[room] < floor_of[below], f"{name} imports {other}"


@pytest.mark.parametrize("folder", ROOMS)
def test_no_two_files_import_each_other(folder: str) -> None:
    modules = modules_of(ROOT / folder)
    below = {name: imported_modules(path, folder) for name, path in modules.items()}
    below = {name: names & modules.keys() for name, names in below.items()}
    while ground := {name for name, names in below.items() if not names}:
        below = {name: names - ground for name, names in below.items() if name not in ground}
    assert not below, f"these import each other: {sorted(below)}"


@pytest.mark.parametrize("folder", [*ROOMS, *(f"tests/unit/{folder}" for folder in ROOMS)])
def test_no_room_is_a_street(folder: str) -> None:
    rooms = [ROOT / folder, *(each for each in (ROOT / folder).rglob("*") if each.is_dir())]
    for room in rooms:
        # What tools keep is nobody's to divide, and stubs nobody reads.
        names = room.relative_to(ROOT).parts
        if any(name.startswith((".", "__")) or name == "v1" for name in names):
            continue
        files = [each.name for each in room.iterdir() if each.is_file()]
        assert len(files) <= 16, f"{room.relative_to(ROOT)} has {len(files)} files: divide it"


def test_no_service_unpickles_or_evaluates() -> None:
    for folder in ALLOWED:
        for path in python_files(folder):
            assert not roots(path) & NEVER, path
            text = path.read_text()
            may_call = re.search(r"\b(eval|exec)\(", text)
            calls = {
                node.func.id
                for node in (ast.walk(ast.parse(text)) if may_call else ())
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            assert not calls & {"eval", "exec"}, path


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("gateway.main", {"torch", "triton", "transformers", "ledger.archive"}),
        ("scheduler_svc.main", {"torch", "triton", "transformers", "tokenizers", "ledger.archive"}),
        ("kaiten.client", {"torch", "redis", "tokenizers"}),
        # OpenMP reads its environment when it is loaded, and the worker prepares that first.
        ("gpu_worker.main", {"torch", "numpy", "transformers", "redis"}),
        ("kernels", {"torch", "triton"}),
    ],
)
def test_a_role_imports_only_what_it_needs(module: str, banned: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {banned!r}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=280, check=True
    )
    assert done.stdout.split() == []


def test_services_reach_each_other_by_one_way_only() -> None:
    """A channel or a port that is made elsewhere asks nobody for a proof."""
    made = re.compile(r"\b(insecure_channel|secure_channel|add_(in)?secure_port)\(")
    for folder in ("gateway", "scheduler_svc", "gpu_worker", "ledger"):
        for path in python_files(folder):
            assert not made.search(path.read_text()), f"{path}: service_kit/peers.py makes them"
