"""What users touch: the command line, the client, and `LLM` for scripts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kaiten.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    """Services import this package for its stubs: they pay nothing for the rest."""
    if name == "LLM":
        from kaiten.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
