"""What the documentation says of files, flags, defaults and packages is so."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from kaiten.cli.app import app
from kaiten.cli.mistakes import INSTEAD
from scheduler_svc.settings import SchedulerSettings

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, type[BaseModel]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
# A table row of docs/operating.md: service, first flag, default. Rows without a service: gateway.
ROW = re.compile(
    r"^\| (?:(gateway|scheduler|worker) )?`(--[a-z-]+)`[^|]*\| ([^|]*) \|", re.MULTILINE
)
NUMBER = re.compile(r"(-?[\d.]+)( KiB| MiB|)\b")
SOURCE = re.compile(r"`[\w/*.]*?(\w+\.(?:py|lua|cpp|h|proto))\b")
PROGRAMS = {"llama.cpp"}
UNITS = {"": 1, " KiB": 1 << 10, " MiB": 1 << 20}
DISTRIBUTION = re.compile(r"[a-z][a-z0-9-]*")


def pages() -> list[Path]:
    own = [path for path in ROOT.iterdir() if path.is_dir() and (path / "README.md").exists()]
    paths = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(p for f in own for p in f.rglob("*.md")),
    ]
    assert len(paths) > 15
    # In one order, by whichever process and in whatever layers of a file system they are listed.
    return sorted(paths)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_that_pages_name_are_there() -> None:
    """By their last name. What was decided once may name what is no more, and so may changes."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    there = {path.name for folder in folders for path in folder.rglob("*.*")}
    for page in pages():
        if page.parent.name != "adr" and page.name != "CHANGELOG.md":
            named = set(SOURCE.findall(page.read_text())) - PROGRAMS
            assert named <= there, (page, sorted(named - there))


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_modules_that_are_to_be_run_exist() -> None:
    named = {
        (page, module)
        for page in pages()
        for module in re.findall(r"`?python -m (\w+(?:\.\w+)*)", page.read_text())
    }
    assert len(named) > 15
    for page, module in named:
        path = ROOT / module.replace(".", "/")
        is_ours = (ROOT / module.split(".")[0]).is_dir()
        assert not is_ours or path.with_suffix(".py").exists() or path.is_dir(), (page, module)


def defaults() -> Iterator[tuple[str, str, str]]:
    """Service, field and what the page says its default is."""
    for service, flag, text in ROW.findall((ROOT / "docs" / "operating.md").read_text()):
        yield service or "gateway", flag.removeprefix("--").replace("-", "_"), text


def test_operating_names_flags_and_defaults_that_are_so() -> None:
    rows = list(defaults())
    assert len(rows) > 20
    compared = 0
    for service, name, text in rows:
        field = SETTINGS[service].model_fields.get(name)
        assert field is not None, f"{service} has no --{name}"
        said = NUMBER.match(text)
        if said and isinstance(field.default, int | float):
            assert float(said[1]) * UNITS[said[2]] == field.default, f"{service} --{name}: {text}"
            compared += 1
    assert compared > 15


def test_every_dependency_is_explained_and_no_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        name[0]
        for line in [
            *project["dependencies"],
            *(each for extra in extras.values() for each in extra),
        ]
        if (name := DISTRIBUTION.match(line)) and not line.startswith("kaiten[")
    }
    page = (ROOT / "docs" / "dependencies.md").read_text()
    cells = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    explained = {
        name.partition(" ==")[0].strip()
        for cell in cells
        for name in cell.split(", ")
        if DISTRIBUTION.match(name) and cell.strip() != "package"
    }
    assert explained == wanted


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_the_docs_is_python_and_names_what_is_there(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith("kaiten")
            ):
                module = __import__(node.module, fromlist=["*"])
                assert all(hasattr(module, alias.name) for alias in node.names), node.module


def defined(path: Path) -> set[str]:
    """Functions and classes of a file, methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
            names |= {
                f"{node.name}.{each.name}"
                for each in ast.walk(node)
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def test_the_walk_of_a_step_names_what_is_there() -> None:
    folder = ROOT / "gpu_worker"
    walk = re.findall(r"`([\w/]+\.py): ([\w.]+)`", (folder / "README.md").read_text())
    assert len(walk) >= 25
    for name, what in walk:
        path = ROOT / name if name.startswith("kernels/") else folder / name
        assert path.exists(), name
        assert what in defined(path), f"{name}: {what}"


def test_the_rooms_name_every_file() -> None:
    folder = ROOT / "gpu_worker"
    rooms = (folder / "README.md").read_text().partition("## Rooms")[2]
    named = set(re.findall(r"`(\w+)`", rooms))
    there = {path.stem for room in folder.iterdir() for path in room.glob("*.py")}
    assert not there - named


COMING = ROOT / "docs" / "coming_from.md"


def serve_flags() -> dict[str, tuple[str, ...]]:
    """Every name `kaiten serve` takes, with all the names of the same setting, ours first."""
    command = app["serve"].assemble_argument_collection()
    return {name: argument.names for argument in command for name in argument.names}


def rows_of(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """The flags of others and ours, of every row of the tables of flags."""
    part = page.partition("## Flags")[2].partition("## Endpoints")[0]
    for theirs, ours in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", part, re.MULTILINE):
        yield re.findall(r"`(--[a-z0-9-]+)`", theirs), re.findall(r"`(--[a-z0-9-]+)`", ours)


def test_whoever_comes_from_another_server_finds_our_flags() -> None:
    """Ours are taken; theirs either mean the same, or the command says what the page says."""
    known, rows = serve_flags(), list(rows_of(COMING.read_text()))
    assert len(rows) > 40
    for theirs, ours in rows:
        assert known.keys() >= set(ours), ours
        for flag in theirs:
            if flag in known:
                assert ours[0] == known[flag][0], flag
            elif ours:
                assert any(re.search(rf"{each}\b", INSTEAD[flag]) for each in ours), flag


def test_the_page_has_every_name_of_others() -> None:
    shown = {flag for theirs, _ in rows_of(COMING.read_text()) for flag in theirs}
    aliases = {names[1:] for names in serve_flags().values()}
    # Of transformers, and a switch's other side.
    own = {"--max-batch-tokens", "--num-blocks", "--no-archive-prompts"}
    assert shown >= {name for names in aliases for name in names} - own
    assert shown >= INSTEAD.keys()
    assert not INSTEAD.keys() & serve_flags().keys()
