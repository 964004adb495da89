"""Render a chat template: minijinja in a box, with the names that templates expect. Pure.

Templates come from the model's folder, never from a request; they are still not trusted: no files,
no attributes of Python objects, a limit on the work (`FUEL`). What fuel cannot bound, memory and
wall time, `template_process` does.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import minijinja

# Instructions; 2 million take some 40 ms. Long conversations with tools stay below 100,000.
FUEL: Final = 2_000_000
# A tag of transformers that marks what was generated, for training. It changes no text.
GENERATION_TAG: Final = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
END_GENERATION_TAG: Final = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")


class TemplateFailed(Exception):
    """The template refused the conversation, or is broken. The text is for the client."""


class ChatTemplate:
    """One compiled template. `names` are what every rendering knows, such as bos_token."""

    def __init__(self, source: str, names: Mapping[str, Any] | None = None) -> None:
        self._names = dict(names or {})
        source = GENERATION_TAG.sub(r"{%\1 if true \2%}", source)
        source = END_GENERATION_TAG.sub(r"{%\1 endif \2%}", source)
        self._environment = minijinja.Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            fuel=FUEL,
            debug=False,
            auto_escape_callback=lambda _: False,
            filters={"tojson": _to_json},
        )
        self._environment.add_global("raise_exception", _raise_exception)
        self._environment.add_global("strftime_now", _strftime_now)
        try:
            self._environment.add_template("chat", source)
        except minijinja.TemplateError as error:
            raise TemplateFailed(f"the chat template does not compile: {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        """The prompt text, ready for the assistant's turn. TemplateFailed says why not."""
        known: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        known |= self._names | names
        try:
            return self._environment.render_template("chat", messages=list(messages), **known)
        except _Refused as error:
            raise TemplateFailed(str(error)) from error
        except minijinja.TemplateError as error:
            raise TemplateFailed(_first_line(error)) from error


class _Refused(Exception):
    """What a template's raise_exception raises."""


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _strftime_now(format_: str) -> str:
    return datetime.now().astimezone().strftime(format_)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """As transformers has it: no HTML escapes, no \\u escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _first_line(error: minijinja.TemplateError) -> str:
    return f"{error.message or error.kind}".splitlines()[0]
