"""The names of the conventions that we use are those of the newest package, and not given up."""

import importlib
import inspect
import re
from types import ModuleType

import pytest

from service_kit import semconv

INCUBATING = "opentelemetry.semconv._incubating.attributes"
MODULES = {
    "GEN_AI": f"{INCUBATING}.gen_ai_attributes",
    "MESSAGING": f"{INCUBATING}.messaging_attributes",
    "ERROR": "opentelemetry.semconv.attributes.error_attributes",
}
NAMES = [name for name in vars(semconv) if re.match("GEN_AI|MESSAGING|ERROR", name)]


def is_given_up(module: ModuleType, name: str) -> bool:
    """The package says so below a name. What only moved to the GenAI repository goes on there."""
    said = inspect.getsource(module).partition(f"\n{name}: Final")[2].partition('"""')[2]
    first = said.partition('"""')[0].strip()
    return first.startswith("Deprecated:") and not first.startswith("Deprecated: Moved to")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_that_of_the_conventions(name: str) -> None:
    module = next(path for prefix, path in MODULES.items() if name.startswith(prefix))
    there = importlib.import_module(module)
    assert getattr(there, name) == getattr(semconv, name)
    assert not is_given_up(there, name)


def test_a_name_that_was_given_up_would_be_noticed() -> None:
    there = importlib.import_module(MODULES["GEN_AI"])
    assert is_given_up(there, "GEN_AI_SYSTEM")
    assert is_given_up(there, "GEN_AI_USAGE_PROMPT_TOKENS")


def test_values_are_those_of_the_conventions() -> None:
    gen_ai = importlib.import_module(MODULES["GEN_AI"])
    messaging = importlib.import_module(MODULES["MESSAGING"])
    assert gen_ai.GenAiOperationNameValues.CHAT.value == semconv.CHAT
    assert gen_ai.GenAiOperationNameValues.TEXT_COMPLETION.value == semconv.TEXT_COMPLETION
    assert messaging.MessagingOperationTypeValues.SEND.value == semconv.SEND
    assert messaging.MessagingOperationTypeValues.RECEIVE.value == semconv.RECEIVE
