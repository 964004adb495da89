"""What is kept with a response: what it was asked, so that any gateway can tell it again or go on.

A `Note` in the ledger, packed, for as long as its result.
"""

from collections.abc import Iterable

from msgspec import Struct, field

from gateway.openai.responses.body import ResponseBody
from gateway.openai.responses.reply import Asked, ConversationName
from gateway.text.model_card import SamplingDefaults
from gateway.values.generation_request import Message, ToolCall


class TurnMore(Struct, kw_only=True, omit_defaults=True):
    """What a turn says beside its text. Calls: id, name and arguments."""

    calls: list[tuple[str, str, str]] = field(default_factory=list)
    call_id: str = ""
    reasoning: str = ""


def message_of(role: str, text: str, more: TurnMore | None) -> Message:
    if more is None:
        return Message(role=role, content=text)
    calls = tuple(ToolCall(id=id, name=name, arguments=each) for id, name, each in more.calls)
    return Message(
        role=role,
        content=text or (None if calls else ""),
        tool_calls=calls,
        tool_call_id=more.call_id,
        reasoning=more.reasoning,
    )


def _more_of(message: Message) -> TurnMore:
    return TurnMore(
        calls=[(each.id, each.name, each.arguments) for each in message.tool_calls],
        call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


class Note(Struct, kw_only=True):
    asked: Asked
    # (role, text) of all there was before the answer, the instructions excepted.
    turns: list[tuple[str, str]]
    with_logprobs: bool
    # Of some turns, by their place.
    more: dict[int, TurnMore] = field(default_factory=dict)

    @property
    def messages(self) -> list[Message]:
        return [
            message_of(role, text, self.more.get(index))
            for index, (role, text) in enumerate(self.turns)
        ]

    @property
    def tool_names(self) -> list[str]:
        """Of those that could be called."""
        return [tool.name for tool in self.asked.tools if self.asked.tool_choice != "none"]


def note_of(
    body: ResponseBody, turns: Iterable[Message], created_at: int, defaults: SamplingDefaults
) -> Note:
    conversation_id = body.conversation_id
    asked = Asked(
        created_at=created_at,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        previous_response_id=body.previous_response_id,
        conversation=None if conversation_id is None else ConversationName(conversation_id),
        reasoning=body.told_reasoning,
        store=body.is_stored,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_logprobs=body.top_logprobs or 0,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        tool_choice=body.told_choice,
        tools=[each.reply() for each in body.tools or ()],
        text=body.told_text,
        service_tier="flex" if body.is_flex else "default",
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        truncation=body.truncation or "disabled",
    )
    all_turns = list(turns)
    found = {index: _more_of(each) for index, each in enumerate(all_turns)}
    return Note(
        asked=asked,
        turns=[(each.role, each.content or "") for each in all_turns],
        with_logprobs=body.with_logprobs,
        more={index: more for index, more in found.items() if more != TurnMore()},
    )
