"""What the manifests of deploy/kubernetes come to, by kustomize itself or by the one in kubectl."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

from tools.containers.engine import EngineError

FOLDER: Final = Path(__file__).parents[2] / "deploy" / "kubernetes"
PROGRAMS: Final = (("kustomize", "build"), ("kubectl", "kustomize"))
RENDER_S: Final = 60
# libyaml's, where PyYAML was built with it: ten times as fast.
LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Document = dict[str, Any]


def program() -> tuple[str, ...] | None:
    """None: neither is here."""
    return next((words for words in PROGRAMS if shutil.which(words[0])), None)


def render(folder: Path) -> list[Document]:
    """Every document of a folder with a kustomization.yaml. EngineError with what is wrong."""
    if (words := program()) is None:
        raise EngineError("neither kustomize nor kubectl is installed")
    done = subprocess.run(
        [*words, str(folder)], capture_output=True, text=True, timeout=RENDER_S, check=False
    )
    if done.returncode:
        raise EngineError(f"{' '.join(words)} {folder}: {done.stderr.strip()}")
    return list(yaml.load_all(done.stdout, Loader=LOADER))
