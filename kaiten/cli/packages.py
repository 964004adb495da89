"""What must be installed for each role, and what to say where it is not."""

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from kaiten.start_error import StartError

GRPC: Final = ("grpcio", "grpcio-health-checking", "googleapis-common-protos", "protobuf")
CLIENT: Final = (*GRPC, "cyclopts", "rich")
# Services tell which version they are.
SERVICE: Final = ("grpcio-reflection", "kaiten", "opentelemetry-sdk", "pydantic", "structlog")
HTTP: Final = ("h11", "starlette", "uvicorn")
GATEWAY: Final = (*HTTP, "huggingface-hub", "minijinja", "msgspec", "redis", "tokenizers")
SCHEDULER: Final = ("redis",) if sys.version_info >= (3, 14) else ("backports-zstd", "redis")
WORKER: Final = ("huggingface-hub", "numpy", "safetensors", "torch")
# Without which it does not start, by the extra that brings it.
PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "client": CLIENT,
    "batch": (*CLIENT, "httpx"),
    "top": (*CLIENT, "textual"),
    "gateway": (*SERVICE, *GATEWAY),
    "scheduler": (*SERVICE, *SCHEDULER),
    "worker": (*SERVICE, *WORKER),
    "serve": (*SERVICE, *GATEWAY, *SCHEDULER, *WORKER),
}


def version_of(package: str) -> str | None:
    """By its metadata: importing torch takes seconds. None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def version_here() -> str:
    """Of kaiten itself."""
    return version_of("kaiten") or "not installed: a source tree"


def require(extra: str) -> None:
    """StartError names what is missing of an extra, and how to get it."""
    missing = sorted({name for name in PACKAGES[extra] if version_of(name) is None})
    if missing:
        raise StartError(f"not installed: {', '.join(missing)}", f"pip install 'kaiten[{extra}]'")
