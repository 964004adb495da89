"""Write the Python stubs to `kaiten/v1`, as protobuf names them. `--check`: are they fresh?"""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent
ROOT = PROTOS.parent
PACKAGE = Path("kaiten", "v1")


def generate(target: Path) -> None:
    """Write every stub of the package below `target`."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).rglob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{PROTOS}", *outputs, *sources]) != 0:
        sys.exit(1)


def stale() -> list[str]:
    """Names of the checked-in stubs that differ from freshly generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = _stubs(Path(folder))
    kept = _stubs(ROOT)
    return sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))


def _stubs(root: Path) -> dict[str, str]:
    found = [path for kind in ("py", "pyi") for path in (root / PACKAGE).rglob(f"*_pb2*.{kind}")]
    return {str(path.relative_to(root)): path.read_text() for path in found}


if __name__ == "__main__":
    if "--check" not in sys.argv:
        generate(ROOT)
    elif names := stale():
        sys.exit(f"stale stubs, run `make protos`: {', '.join(names)}")
