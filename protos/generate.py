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
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{PROTOS}", *outputs, *sources]) != 0:
        sys.exit(1)


def stale() -> list[str]:
    """Names of the checked-in stubs that differ from freshly generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {p.name: p.read_text() for p in Path(folder).rglob("*_pb2*.py*")}
    kept = {p.name: p.read_text() for p in (ROOT / PACKAGE).glob("*_pb2*.py*")}
    return sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))


if __name__ == "__main__":
    if "--check" not in sys.argv:
        generate(ROOT)
    elif names := stale():
        sys.exit(f"stale stubs, run `make protos`: {', '.join(names)}")
