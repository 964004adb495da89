"""How one request's output is read: which marks show in its text, and what they mean.

What depends on the request alone is in its record, so every gateway reads it the same.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.requests.validation import TooMany
from gateway.text.detokenizer import Pieces
from gateway.text.model_card import ModelCard
from gateway.text.tools.grammar import (
    ANY_OBJECT,
    Calls,
    Function,
    forced_calls,
    free_calls,
    schema,
)
from gateway.text.tools.parser import OutputParser, Speech
from gateway.values.generation_request import ChatPrompt, GenerationRequest, Tool
from kaiten.v1.common_pb2 import SamplingParams
from kaiten.v1.ledger_pb2 import OutputParsing, RenderOptions

ID_CHARS: Final = 24
# A mark at the end of a prompt is a few tokens, and white space.
TAIL_TOKENS: Final = 16
# What would end a regular expression in Lark, where it is not escaped, or is.
NO_DELIMITER: Final = re.compile(r"\\.|/|\n", re.DOTALL)
# As StructuredOutputs has it.
GRAMMAR_BYTES_MAX: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Of one request."""

    speech: Speech
    request_id: str

    def parser(self, choice: int) -> OutputParser:
        return OutputParser(self.speech, lambda call: self._id(choice, call))

    def _id(self, choice: int, call: int) -> str:
        """The same at every gateway, whoever asks again."""
        seed = f"{self.request_id}:{choice}:{call}"
        digest = hashlib.sha256(seed.encode()).hexdigest()
        tools = self.speech.tools
        if tools is not None and tools.id_chars:
            return digest[: tools.id_chars]
        return f"call_{digest[:ID_CHARS]}"


def is_read(card: ModelCard, names: Collection[str]) -> bool:
    """Whether an output of this model may be more than text."""
    return card.reasoning_format is not None or bool(names and card.tool_format)


def reading(card: ModelCard, render: RenderOptions, request_id: str) -> Reading | None:
    """None: all of the output is text."""
    parsing = render.parsing
    if not (render.HasField("parsing") and is_read(card, parsing.tool_names)):
        return None
    speech = Speech(
        tools=card.tool_format if parsing.tool_names else None,
        names=frozenset(parsing.tool_names),
        reasoning=card.reasoning_format,
        begins_in_reasoning=render.begins_in_reasoning,
        is_single_call=parsing.is_single_call,
        must_call=parsing.must_call,
    )
    return Reading(speech=speech, request_id=request_id)


def marks(request: GenerationRequest, card: ModelCard, prompt_ids: Sequence[int]) -> RenderOptions:
    """The part of a request's RenderOptions that tells how to read its output."""
    has_tools = isinstance(request.prompt, ChatPrompt) and bool(request.prompt.tools)
    if not (request.is_read or has_tools):
        return RenderOptions()
    # What must keep to a language of the client's has no other part, whatever the template opened.
    is_whole = request.sampling.HasField("structured_outputs") and not request.must_call
    return RenderOptions(
        shown_token_ids=_control_ids(card, has_tools=has_tools),
        begins_in_reasoning=not is_whole and ends_in_reasoning(card, prompt_ids),
        parsing=_parsing(request) if request.is_read else None,
    )


def _parsing(request: GenerationRequest) -> OutputParsing:
    tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()
    return OutputParsing(
        tool_names=[tool.name for tool in tools],
        # A grammar ends the output behind the call by itself.
        is_single_call=request.is_single_call and not is_held(request),
        must_call=bool(request.must_call),
    )


def constrained(
    request: GenerationRequest, card: ModelCard, prompt_ids: Sequence[int] = ()
) -> GenerationRequest:
    """Where calls are held to their schemas, a request whose output has that grammar; without a
    prompt, as if it left the reasoning to the output.

    InvalidRequest: it is too long.
    """
    if not is_held(request):
        return request
    assert isinstance(request.prompt, ChatPrompt)
    assert card.tool_format is not None
    added = card.tokenizer.get_added_tokens_decoder().items()
    token_ids = {token.content: token_id for token_id, token in added}
    # What must keep to a language of the client's has no reasoning; where a call must be made there
    # is no answer that could.
    answer = "" if request.must_call else _answer(request.sampling)
    calls = Calls(
        form=card.tool_format,
        functions=list(_functions(request, request.prompt.tools)),
        token_of=token_ids.get,
        is_single=request.is_single_call or len(request.must_call) == 1,
        reasoning=None if answer else card.reasoning_format,
        begins_in_reasoning=ends_in_reasoning(card, prompt_ids),
    )
    grammar = forced_calls(calls) if request.must_call else free_calls(calls, answer)
    size_bytes = len(grammar.encode())
    if size_bytes > GRAMMAR_BYTES_MAX:
        raise TooMany("conversation.tools", GRAMMAR_BYTES_MAX, size_bytes, "bytes as a grammar")
    sampling = SamplingParams()
    sampling.CopyFrom(request.sampling)
    sampling.structured_outputs.Clear()
    sampling.structured_outputs.grammar = grammar
    return replace(request, sampling=sampling)


def is_held(request: GenerationRequest) -> bool:
    """Whether a grammar holds its calls: they must be made, or only some may, they are strict, or
    stand beside an answer that has one."""
    if not (request.is_read and isinstance(request.prompt, ChatPrompt) and request.prompt.tools):
        return False
    is_strict = any(tool.is_strict for tool in request.prompt.tools)
    is_chosen = bool(request.must_call or request.may_call)
    return is_chosen or is_strict or request.sampling.HasField("structured_outputs")


def holds(request: GenerationRequest, tool: Tool) -> bool:
    """Whether a call of it keeps to its schema."""
    return tool.name in request.must_call if request.must_call else tool.is_strict


def _functions(request: GenerationRequest, tools: Sequence[Tool]) -> Iterator[Function]:
    for tool in tools:
        if request.may_call and tool.name not in request.may_call:
            continue
        if holds(request, tool):
            yield Function(tool.name, tool.parameters)
        elif not request.must_call:
            yield Function(tool.name, ANY_OBJECT)


def _answer(sampling: SamplingParams) -> str:
    """What the client's own language is in Lark; empty: it has none."""
    wanted = sampling.structured_outputs
    match wanted.WhichOneof("constraint"):
        case "json":
            return schema(wanted.json, is_tight=wanted.disable_any_whitespace)
        case "json_object":
            return schema(ANY_OBJECT, is_tight=wanted.disable_any_whitespace)
        case "regex":
            return f"/{NO_DELIMITER.sub(_spelled, wanted.regex)}/"
        case "choice":
            # One terminal, as in `grammar_child`.
            return "ONE\nONE: " + " | ".join(map(json.dumps, wanted.choice.texts))
    return ""


def _spelled(match: re.Match[str]) -> str:
    return {"/": r"\x2F", r"\/": r"\x2F", "\n": r"\n"}.get(match[0], match[0])


def ends_in_reasoning(card: ModelCard, prompt_ids: Sequence[int]) -> bool:
    """Whether a template has begun the reasoning, as some do with some options."""
    if card.reasoning_format is None:
        return False
    tail: Pieces = card.pieces_with_special
    text = tail.join(prompt_ids[-TAIL_TOKENS:]).decode("utf-8", "replace")
    return text.rstrip().endswith(card.reasoning_format.begin)


def _control_ids(card: ModelCard, *, has_tools: bool) -> list[int]:
    """Of those marks that are control tokens, which no text has otherwise."""
    tools, reasoning = card.tool_format, card.reasoning_format
    texts = [reasoning.begin, reasoning.end] if reasoning is not None else []
    if has_tools and tools is not None:
        texts += [tools.begin, tools.end, tools.arguments_mark, tools.id_mark]
    found = [card.tokenizer.token_to_id(text) for text in texts if text in card.special_texts]
    return [each for each in found if each is not None]
