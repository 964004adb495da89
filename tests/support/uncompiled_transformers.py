"""transformers without torch's compiler, and of its parts those that the oracles of tests use.

from tests.support.uncompiled_transformers import transformers
"""

from tests.support import without_compiler

without_compiler.install()

import transformers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
)

__all__ = [
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "LlamaForCausalLM",
    "LogitsProcessorList",
    "PreTrainedTokenizerFast",
    "transformers",
]
