"""Which message a chat template complains of: engines tell but a line of the template. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway.text.chat_template import TemplateFailed

Messages = Sequence[Mapping[str, Any]]
PLAIN: Final = ({"role": "user", "content": "?"},)


def refused_at(
    render: Callable[[Messages], object], messages: Messages, error: TemplateFailed
) -> int | None:
    """The last message of the shortest beginning that is refused for the same reason, found in
    log2 of them.

    None: nobody knows. So it is where a plain question is refused, too (then it is not about the
    messages), and where a beginning is refused for another reason.
    """

    def is_refused(some: Messages) -> bool:
        try:
            render(some)
        except TemplateFailed as again:
            if str(again) != str(error):
                raise _AnotherReason from None
            return True
        return False

    if error.is_of_work or not messages:
        return None
    try:
        return None if is_refused(PLAIN) else _shortest(messages, is_refused) - 1
    except _AnotherReason:
        return None


def _shortest(messages: Messages, is_refused: Callable[[Messages], bool]) -> int:
    """How long it is. What is wrong with the end of a conversation is wrong with its last message,
    whatever shorter ones end with."""
    passed, refused = 0, len(messages)
    if refused > 1 and not is_refused(messages[:-1]):
        return refused
    while refused - passed > 1:
        middle = (passed + refused) // 2
        if is_refused(messages[:middle]):
            refused = middle
        else:
            passed = middle
    return refused


class _AnotherReason(Exception):
    pass
