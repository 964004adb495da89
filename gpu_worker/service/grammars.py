"""Whether this worker can sample by grammars: it takes llguidance and the model's tokenizer."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from gpu_worker.batch.grammar_masks import GrammarMasks

log = structlog.get_logger()


def grammar_masks(folder: Path, vocab_size: int) -> "GrammarMasks | None":
    """None: it cannot, and says in a line why."""
    path = folder / "tokenizer.json"
    if find_spec("llguidance") is None:
        _without("llguidance is not installed")
        return None
    if not path.is_file():
        _without(f"{path} is missing")
        return None
    # Not at the top: a worker does without where it is not installed.
    from gpu_worker.batch.grammar_masks import GrammarMasks
    from service_kit.grammars import GrammarTokenizer

    try:
        return GrammarMasks(GrammarTokenizer(path, vocab_size), vocab_size)
    # What a file's author may write, and llguidance may say of it, is of many kinds.
    except Exception as error:
        _without(f"{path} cannot be read for them: {error}")
        return None


def _without(reason: str) -> None:
    log.warning("worker.no_grammars", reason=f"requests with structured outputs go by: {reason}")
