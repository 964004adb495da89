"""The grammar that a request's output keeps to: compiled, and tried with the tokens it may use."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pydantic_core import from_json

from gateway.children.grammar_process import GrammarProcess
from gateway.requests.reading import constrained, holds, is_held
from gateway.text.model_card import ModelCard
from gateway.values.generation_request import ChatPrompt, GenerationRequest, Tool
from kaiten.v1.common_pb2 import SamplingParams, StructuredOutputs
from service_kit.errors import InvalidRequest

# The lines of a grammar that is ours, which nobody has written.
EXCERPT: Final = re.compile(r" [0-9]+ \| .*", re.DOTALL)


class OutputGrammars:
    """Of all requests for one model."""

    def __init__(self, process: GrammarProcess, card: ModelCard) -> None:
        self._process = process
        self._card = card

    async def of(self, request: GenerationRequest, prompt_ids: Sequence[int], tenant: str) -> str:
        """As workers read it; empty: anything. InvalidRequest: there is none, or no token of those
        that the request leaves begins an output of it.
        """
        held = constrained(request, self._card, prompt_ids)
        if not held.sampling.HasField("structured_outputs"):
            return ""
        if request.must_call and request.sampling.HasField("structured_outputs"):
            # There is no answer that it could be of. It is refused all the same if it is none.
            await self._process.grammar(request.sampling.structured_outputs, tenant)
        try:
            grammar = await self._process.grammar(held.sampling.structured_outputs, tenant)
        except InvalidRequest:
            if not is_held(request):
                raise
            grammar = await self._of_calls(request, prompt_ids, tenant)
        await self._try(grammar, request.sampling, tenant)
        return grammar

    async def _of_calls(
        self, request: GenerationRequest, prompt_ids: Sequence[int], tenant: str
    ) -> str:
        """Of schemas that cannot be taken as they are: each by itself, which says whose fault it
        is, and as that has rewritten it.
        """
        prompt, sampling = request.prompt, SamplingParams()
        assert isinstance(prompt, ChatPrompt)
        sampling.CopyFrom(request.sampling)
        if (wanted := sampling.structured_outputs).WhichOneof("constraint"):
            told = await self._process.grammar(wanted, tenant)
            if wanted.WhichOneof("constraint") == "json":
                wanted.json = _schema_in(told)
        tools = [
            await self._told(index, tool, tenant) if holds(request, tool) else tool
            for index, tool in enumerate(prompt.tools)
        ]
        said = replace(request, prompt=replace(prompt, tools=tuple(tools)), sampling=sampling)
        held = constrained(said, self._card, prompt_ids)
        try:
            return await self._process.grammar(held.sampling.structured_outputs, tenant)
        except InvalidRequest as error:
            raise InvalidRequest("conversation.tools", EXCERPT.sub("", error.rule)) from error

    async def _told(self, index: int, tool: Tool, tenant: str) -> Tool:
        schema = {"type": "object"} | from_json(tool.parameters)
        try:
            wanted = StructuredOutputs(json=json.dumps(schema))
            told = await self._process.grammar(wanted, tenant)
        except InvalidRequest as error:
            field = f"conversation.tools.{index}.parameters"
            raise InvalidRequest(field, f"of {tool.name!r}: {error.rule}") from error
        return replace(tool, parameters=_schema_in(told))

    async def _try(self, grammar: str, sampling: SamplingParams, tenant: str) -> None:
        allowed = list(sampling.allowed_token_ids)
        forbidden = [word.token_ids[0] for word in sampling.bad_words if len(word.token_ids) == 1]
        ends = [*self._card.eos_token_ids, *sampling.stop_token_ids]
        if not (allowed or forbidden):
            return
        if not await self._process.begins(grammar, allowed, forbidden, ends, tenant=tenant):
            field = "sampling.allowed_token_ids" if allowed else "sampling.bad_words"
            raise InvalidRequest(
                field, "leaves no token with which an output of the grammar could begin"
            )


def _schema_in(grammar: str) -> str:
    """A schema in the keywords that llguidance knows, of what was compiled of it."""
    return json.dumps(json.loads(grammar)["grammars"][0]["json_schema"])
