"""Write the Python stubs beside their .proto files; `--check` only says whether they are fresh.

The stubs import each other as `kaiten.v1`, the protobuf package; the folder `kaiten` is our command
line, so their imports are rewritten to where they live: `protos.kaiten.v1`.
"""

import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent
PACKAGE = ROOT / "kaiten" / "v1"


def generate(target: Path) -> None:
    """Write every stub of the package below `target`."""
    sources = sorted(str(path.relative_to(ROOT)) for path in PACKAGE.glob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", *outputs, *sources]) != 0:
        sys.exit(1)
    for path in (target / "kaiten" / "v1").glob("*_pb2*.py*"):
        path.write_text(re.sub(r"\bfrom kaiten\.v1\b", "from protos.kaiten.v1", path.read_text()))


def stale() -> list[str]:
    """Names of the checked-in stubs that differ from freshly generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {p.name: p.read_text() for p in Path(folder).rglob("*_pb2*.py*")}
    kept = {p.name: p.read_text() for p in PACKAGE.glob("*_pb2*.py*")}
    return sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))


if __name__ == "__main__":
    if "--check" not in sys.argv:
        generate(ROOT)
    elif names := stale():
        sys.exit(f"stale stubs, run `make protos`: {', '.join(names)}")
