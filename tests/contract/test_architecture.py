"""Folders depend in one direction, the core on nothing, and importing a service stays cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "protos": set[str](),
    "kernels": set[str](),
    "service_kit": set[str](),
    "ledger": {"protos", "service_kit"},
    "gateway": {"protos", "ledger", "service_kit"},
    "scheduler_svc": {"protos", "ledger", "service_kit"},
    "gpu_worker": {"protos", "kernels", "service_kit"},
    "kaiten": {"protos"},
}
CORE = ROOT / "scheduler_svc" / "core"
# Of the standard library, what a pure core may not touch.
IMPURE = {"asyncio", "logging", "os", "random", "socket", "subprocess", "threading", "time"}
NEVER = {"pickle", "marshal", "yaml", "dill", "shelve"}


def imported(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


@pytest.mark.parametrize("folder", ALLOWED)
def test_folders_depend_in_one_direction(folder: str) -> None:
    paths = list((ROOT / folder).rglob("*.py"))
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
    lines = {name: path.read_text().count("\n") for name, path in modules.items()}
    assert max(lines.values()) <= 350
    assert sum(lines.values()) <= 3745
    below = {name: imported(path) & modules.keys() for name, path in modules.items()}
    while ground := {name for name, names in below.items() if not names}:
        below = {name: names - ground for name, names in below.items() if name not in ground}
    assert not below, f"these import each other: {sorted(below)}"


def test_no_service_unpickles_or_evaluates() -> None:
    for folder in ALLOWED:
        for path in (ROOT / folder).rglob("*.py"):
            assert not roots(path) & NEVER, path
            calls = {
                node.func.id
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            assert not calls & {"eval", "exec"}, path


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("gateway.main", {"torch", "triton", "transformers", "ledger.archive"}),
        ("scheduler_svc.main", {"torch", "triton", "transformers", "tokenizers", "ledger.archive"}),
        ("kaiten.client", {"torch", "redis", "tokenizers"}),
        ("gpu_worker.main", {"transformers", "redis"}),
        ("kernels", {"torch", "triton"}),
    ],
)
def test_a_role_imports_only_what_it_needs(module: str, banned: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {banned!r}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
