"""Render a chat template: minijinja in a box, with the names that templates expect. Pure.

Templates come from the model's folder, never from a request; they are still not trusted: no files,
no attributes of Python objects, a limit on the work (`FUEL`). What fuel cannot bound, memory and
wall time, `template_process` does.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import minijinja

from gateway.text import template_names, template_source

# Instructions; 2 million take some 40 ms. Long conversations with tools stay below 100,000.
FUEL: Final = 2_000_000
# Behind a message that goes on: from there on nothing is the prompt's. As transformers has it, a
# template that leaves out this last space leaves out those of the message, too.
GOES_ON: Final = "\ue002goes on "
FILTERS: Final = {"tojson": template_names.to_json}
TESTS: Final = {
    "iterable": template_names.is_iterable,
    "sequence": template_names.is_sequence,
    "number": template_names.is_number,
    "float": template_names.is_float,
}


class TemplateFailed(Exception):
    """The template refused the conversation, or is broken. The text is for the client.

    `is_of_work`: it was too much of it, whatever stands in which message.
    """

    def __init__(self, reason: str, *, is_of_work: bool = False) -> None:
        super().__init__(reason)
        self.is_of_work = is_of_work


class ChatTemplate:
    """One compiled template. `names` are what every rendering knows, such as bos_token."""

    def __init__(self, source: str, names: Mapping[str, Any] | None = None) -> None:
        self._names = dict(names or {})
        self._environment = minijinja.Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            fuel=FUEL,
            debug=False,
            auto_escape_callback=lambda _: False,
            filters=FILTERS,
            tests=TESTS,
        )
        self._environment.add_global("raise_exception", template_names.raise_exception)
        self._environment.add_global("strftime_now", template_names.strftime_now)
        try:
            self._environment.add_template("chat", template_source.rewritten(source))
        except minijinja.TemplateError as error:
            raise TemplateFailed(f"the chat template does not compile: {error.message}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], goes_on: bool = False, /, **names: Any
    ) -> str:
        """The prompt text, ready for the assistant's turn; or, if the last message goes on, up to
        the end of its content. TemplateFailed says why not.
        """
        known: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        known |= self._names | names
        known["messages"] = [template_names.as_templates_read(message) for message in messages]
        if goes_on:
            *_, last = known["messages"]
            known["messages"][-1] = {**last, "content": last["content"] + GOES_ON}
        try:
            rendered: str = self._environment.render_template(
                "chat", **template_names.with_whole_floats(known)
            )
        except template_names.TemplateRefused as error:
            raise TemplateFailed(str(error)) from error
        except minijinja.TemplateError as error:
            is_of_work = error.kind == "OutOfFuel"
            raise TemplateFailed(_first_line(error), is_of_work=is_of_work) from error
        return _open(rendered) if goes_on else rendered


def _open(rendered: str) -> str:
    text, *behind = rendered.split(GOES_ON.strip())
    if len(behind) != 1:
        raise TemplateFailed("the last message is not written once, as it is, and cannot go on")
    [rest] = behind
    return text if rest.startswith(" ") else text.rstrip()


def _first_line(error: minijinja.TemplateError) -> str:
    return f"{error.message or error.kind}".splitlines()[0]
