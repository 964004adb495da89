"""A child of `grammar_process`: makes one grammar of what a request constrains its output to.

Compiled by the model's tokenizer under the limits of the workers: what is let in here they sample
by. What it may cost is CPU time of this process, which no load of the machine can lengthen.
"""

import json
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from gateway.children.alternatives import (
    ALTERNATIVES_MAX,
    ALTERNATIVES_WITHIN_MAX,
    TEXT_CHARS_MAX,
    alternatives,
    longest_run,
    longest_text,
)
from gateway.children.child import Refused, serve
from gateway.children.endings import can_end
from gateway.children.schema_places import place_of
from gateway.children.schema_rewrites import rewritten
from gateway.values.white_space import A_LITTLE_SPACE
from service_kit.grammars import GrammarTokenizer, InvalidGrammar, one_line

MEMORY_BYTES_MAX: Final = 2 << 30
# Half of what may be seen of it: then the process ends.
COMPILE_S_MAX: Final = 0.5
# After which no part of a schema is looked at any more. Each takes less than all of it.
PLACE_S_MAX: Final = 0.1
PLACE_CHARS_MAX: Final = 100
# Behind it a schema stands in Lark, as those of tools do.
_SCHEMA: Final = re.compile(r"%json\s*")
NO_END: Final = "no output could ever be complete"
# What llguidance says where there is no next token.
_NO_TOKEN: Final = "NoExtension"


def _of_schema(schema: str, *, is_tight: bool) -> str:
    # What is no JSON llguidance says better.
    with suppress(json.JSONDecodeError, RecursionError):
        _check_schema(json.loads(schema))
    spaces: dict[str, Any] = {"whitespace_pattern": A_LITTLE_SPACE}
    if is_tight:
        spaces = {"whitespace_flexible": False}
    # With options llguidance takes objects only.
    said = {"true": "{}", "false": '{"enum": []}'}.get(schema.strip(), schema)
    return LLMatcher.grammar_from_json_schema(said, overrides=spaces)  # type: ignore[arg-type]


def _check_schema(told: object, most: int = ALTERNATIVES_MAX) -> None:
    _check_text(longest_text(told))
    if (count := alternatives(told)) > most:
        which = "arrays, and objects that have no `additionalProperties: false`, beside each other"
        raise InvalidGrammar(f"anyOf: at most {most} {which}, got {count}")
    if not can_end(told):
        raise InvalidGrammar(NO_END)


def _check_text(chars: int) -> None:
    if chars > TEXT_CHARS_MAX:
        raise InvalidGrammar(f"a text in it may have at most {TEXT_CHARS_MAX} characters: {chars}")


def _of_choice(texts: list[str]) -> str:
    _check_text(max(map(len, texts), default=0))
    # One terminal: as rules of their own, thousands of choices are too many to be read at once.
    return LLMatcher.grammar_from_lark("start: ONE\nONE: " + " | ".join(map(json.dumps, texts)))


def _of_regex(pattern: str) -> str:
    _check_text(longest_run(pattern))
    return LLMatcher.grammar_from_regex(pattern)


def _of_grammar(text: str) -> str:
    _check_text(longest_run(text))
    for found in _SCHEMA.finditer(text):
        with suppress(json.JSONDecodeError, RecursionError):
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
            _check_schema(schema, ALTERNATIVES_WITHIN_MAX)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    # It raises what it likes, about a text that is no GBNF.
    except Exception as error:
        raise InvalidGrammar(f"is neither Lark nor GBNF: {error}") from error


# By the names of StructuredOutputs.
FORMS: Final[Mapping[str, Callable[..., str]]] = {
    "json": _of_schema,
    "json_object": _of_schema,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
}
ANY_OBJECT: Final = '{"type": "object"}'


class Compiler:
    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._tokenizer = GrammarTokenizer(Path(setup["tokenizer"]), setup["vocab_size"])

    def __call__(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """`form`, `value`, `is_tight`: the grammar as workers read it. Refused says why not.

        Such a grammar, `allowed`, `forbidden`, `ends`: whether there is a first token.
        """
        # Nothing is there to catch it: it ends the process, whatever a library is in.
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S_MAX)
        try:
            if "grammar" in question:
                return {"begins": self._begins(**question)}
            return {"grammar": self._compiled(question)}
        except InvalidGrammar as error:
            raise Refused(f"cannot be compiled: {error}") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _compiled(self, question: Mapping[str, Any]) -> str:
        began_s = process_time()
        try:
            return self._tried(question)
        except InvalidGrammar as error:
            if question["form"] != "json":
                raise
            place = self._place(question, str(error), began_s + PLACE_S_MAX)
            raise InvalidGrammar(f"{place}: {error}" if place else str(error)) from error

    def _place(self, question: Mapping[str, Any], problem: str, until_s: float) -> str:
        """Where in a schema the problem is, as far as there is time to look; empty: all over."""

        def is_wrong(part: object) -> bool:
            if process_time() > until_s:
                return False
            try:
                self._tried({**question, "value": json.dumps(part)})
            except InvalidGrammar as error:
                return str(error) == problem
            return False

        with suppress(ValueError, RecursionError):
            return place_of(json.loads(question["value"]), is_wrong)[:PLACE_CHARS_MAX]
        return ""

    def _tried(self, question: Mapping[str, Any]) -> str:
        try:
            grammar = self._grammar(**question)
            self._check(grammar)
        except InvalidGrammar:
            # As it was asked for first: what llguidance knows itself it knows better.
            if question["form"] != "json" or (told := rewritten(question["value"])) is None:
                raise
            grammar = self._grammar(**{**question, "value": told})
            self._check(grammar)
        return grammar

    def _grammar(self, form: str, value: Any, *, is_tight: bool) -> str:
        if form == "json_object":
            value = ANY_OBJECT
        try:
            is_json = FORMS[form] is _of_schema
            return _of_schema(value, is_tight=is_tight) if is_json else FORMS[form](value)
        except ValueError as error:
            raise InvalidGrammar(str(error)) from error

    def _check(self, grammar: str) -> None:
        """It compiles, and something begins an output of it."""
        self._first_mask(grammar)

    def _begins(
        self, grammar: str, allowed: list[int], forbidden: list[int], ends: list[int]
    ) -> bool:
        """As a worker's masks have it (`gpu_worker/batch/grammar_masks.py`)."""
        bits = np.unpackbits(self._first_mask(grammar).view(np.uint8), bitorder="little")
        bits[ends], bits[self._tokenizer.end] = bits[self._tokenizer.end], 0
        bits[forbidden] = 0
        return bool(bits[allowed or slice(None)].any())

    def _first_mask(self, grammar: str) -> npt.NDArray[np.uint32]:
        matcher = self._tokenizer.compiled(grammar)
        mask = np.zeros(self._tokenizer.mask_words, np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._tokenizer.spell_out([matcher], mask[None])
        problem = one_line(matcher.get_error())
        if problem.startswith(_NO_TOKEN) or not (problem or mask.any()):
            raise InvalidGrammar(NO_END)
        if problem:
            raise InvalidGrammar(problem)
        return mask


if __name__ == "__main__":
    serve(Compiler, MEMORY_BYTES_MAX)
