"""Render chat templates in child processes.

minijinja holds the interpreter's lock while it renders and has no memory limit: a template that
doubles a string forty times would take the gateway down.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.children.pool import ChildLimits, ChildPool, Work

WORK: Final = Work(
    module="gateway.text.template_child", field="conversation.messages", subject="the chat template"
)
CONTROLS_MAX: Final = 1 << 20


class TemplateProcess(ChildPool):
    """One model's template."""

    def __init__(
        self,
        source: str,
        names: Mapping[str, Any],
        limits: ChildLimits | None = None,
        *,
        control_texts: Sequence[str] = (),
    ) -> None:
        limits = limits or ChildLimits()
        setup = {
            "source": source,
            "names": dict(names),
            "control_texts": list(control_texts),
            "text_bytes_max": limits.text_bytes_max,
        }
        super().__init__(WORK, setup, limits)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        *,
        goes_on: bool = False,
        controls_max: int = CONTROLS_MAX,
    ) -> list[str] | None:
        """The prompt as text, control token's text that a client wrote, text, … None: more of
        those than `controls_max`. `goes_on`: it ends with the last message's text.

        InvalidRequest when the template refuses (WorkRefused, `at` a message) or outgrows its
        limits.
        """
        question = {"messages": list(messages), "options": dict(options or {})}
        said = await self.ask(question | {"goes_on": goes_on, "controls_max": controls_max})
        pieces: list[str] | None = said["pieces"]
        return pieces
