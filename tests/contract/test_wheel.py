"""What `pip install kaiten` puts where: built, unpacked and run."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PREBUILT = "kernels/cpp/prebuilt/avx2-0123456789abcdef.so"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content. Built of a copy: setuptools leaves its work beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, tracked.stdout.split("\0")):
        source, target = ROOT / name, folder / "source" / name
        if source.is_file() and not name.startswith(("tests/", "benchmarks/", "docs/")):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    prebuilt = folder / "source" / PREBUILT
    prebuilt.parent.mkdir()
    prebuilt.write_bytes(b"as make wheel leaves it")
    # What pip calls: it starts a process for each of three hooks, and imports more than they do.
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=folder / "source", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


def python(installed: Path, *words: str) -> str:
    """As where nothing else of ours is."""
    environ = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-P", *words],
        cwd=installed.parent, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_name_is_put_beside_those_of_others(installed: Path) -> None:
    tops = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"kaiten"}


def test_binaries_are_in_it_and_make_it_of_a_platform_but_of_any_python(installed: Path) -> None:
    assert (installed / "kaiten" / "services" / PREBUILT).is_file()
    (wheel,) = installed.parent.glob("*.whl")
    assert wheel.stem.split("-")[2:4] == ["py3", "none"]
    assert not wheel.stem.endswith("any")


def test_everything_tracked_that_runs_is_in_it(installed: Path) -> None:
    services = installed / "kaiten" / "services"
    suffixes = {".py", ".lua", ".cpp", ".h", ".jinja", ".json", ".safetensors"}
    suffixes |= {".html", ".css", ".js"}
    for place in (installed / "kaiten", *services.iterdir()):
        folder = place.name
        wanted = {
            str(path.relative_to(ROOT / folder))
            for path in (ROOT / folder).rglob("*")
            if path.suffix in suffixes and "__pycache__" not in path.parts
        }
        assert wanted
        assert wanted <= {str(path.relative_to(place)) for path in place.rglob("*")}, folder


def test_services_run_from_it(installed: Path) -> None:
    assert "usage" in python(installed, "-m", "kaiten", "worker", "--help").lower()
    code = (
        "import sys; from importlib import import_module, util\n"
        "from kaiten.local import services\n"
        "sys.path.insert(0, services.environ()['PYTHONPATH'].partition(':')[0])\n"
        "def found(place):\n"
        "    try: return util.find_spec(place)\n"
        "    except ModuleNotFoundError: return None\n"
        "for name in (*services.MODULES.values(), services.REPLAY):\n"
        "    places = f'{name}.main', f'{name}.__main__', name\n"
        "    module = import_module(next(filter(found, places)))\n"
        "    print(callable(module.main) and module.__file__)"
    )
    found = python(installed, "-c", code).split()
    assert len(found) == 6
    assert all(name.startswith(str(installed / "kaiten" / "services")) for name in found)


def test_it_hides_nobodys_packages(installed: Path) -> None:
    code = (
        "import kaiten.client\n"
        "from importlib.util import find_spec\n"
        "names = ['kernels', 'gateway', 'ledger', 'protos', 'service_kit']\n"
        "print(kaiten.__file__, [name for name in names if find_spec(name)])"
    )
    assert python(installed, "-c", code).split() == [str(installed / "kaiten/__init__.py"), "[]"]
