"""A chat template's source, rewritten where minijinja reads it otherwise than jinja2 does. Pure."""

import re
from typing import Final

# A tag of transformers that marks what was generated, for training. It changes no text.
GENERATION: Final = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
END_GENERATION: Final = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
# After this tag alone jinja2 keeps the line end.
RAW: Final = re.compile(r"(\{%-?\s*raw\s*%\}\n)")
STRING: Final = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
# What is no tag (comments, raw blocks) is matched first, to be left alone.
PART: Final = re.compile(
    r"\{#.*?#\}|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}"
    rf"|(?P<tag>\{{[{{%](?:{STRING}|[^\"'])*?[%}}]\}})",
    re.DOTALL,
)
# What is not defined is empty to jinja2: it has no length and is iterable. To minijinja the first
# is an error, and tests written in Python cannot tell it from none.
OF_UNDEFINED: Final = re.compile(
    rf"(?P<string>{STRING})"
    r"|\|\s*(?:length|count|first|last)\b|\bis\s+(?:not\s+)?(?:iterable|sequence)\b",
    re.DOTALL,
)


def rewritten(source: str) -> str:
    source = GENERATION.sub(r"{%\1 if true \2%}", source)
    source = END_GENERATION.sub(r"{%\1 endif \2%}", source)
    return PART.sub(_part, RAW.sub(r"\1\n", source))


def _part(match: re.Match[str]) -> str:
    return OF_UNDEFINED.sub(_use, match[0]) if match["tag"] else match[0]


def _use(match: re.Match[str]) -> str:
    return match[0] if match["string"] else f"|default('') {match[0]}"
