"""How the answers of one request are read: what is content in them, what reasoning, what calls."""

import re
from dataclasses import dataclass
from hashlib import sha256

from gateway.text.tools.formats import AnswerFormats
from gateway.text.tools.parser import AnswerParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    formats: AnswerFormats
    # Whether it has tools: else nothing is a call.
    has_tools: bool
    # Whether texts show control tokens for their markers alone: then no other is told.
    hides_others: bool

    def parser(self, seed: str, *, prompt_end: str) -> AnswerParser:
        """Of one choice. The same `seed`, the same ids; `prompt_end`: how its prompt ended."""
        tools, reasoning = self.formats.tools, self.formats.reasoning
        chars = tools.id_chars if tools is not None else 0

        def id_of(index: int) -> str:
            digest = sha256(f"{seed}:{index}".encode()).hexdigest()
            return digest[:chars] if chars else f"call_{digest[:24]}"

        begins = reasoning is not None and prompt_end.rstrip().endswith(reasoning.begin)
        return AnswerParser(
            tools if self.has_tools else None, reasoning, id_of, begins_in_reasoning=begins
        )

    def shown(self, text: str) -> str:
        """Without control tokens that nobody asked for. Each comes whole, in one text."""
        if not self.hides_others:
            return text
        others = set(self.formats.control_texts) - set(self.formats.marker_ids)
        found = (each for each in others if each in text)
        return re.sub("|".join(map(re.escape, found)) or "(?!)", "", text)
