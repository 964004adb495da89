"""Which format a model has, by its chat template and tokens, or by a setting."""

from pathlib import Path

import pytest

from gateway.text.tools.formats import knows_tools, reasoning_format, tool_format

TEMPLATES = Path(__file__).parents[4] / "parity" / "templates"
FOUND = {
    "hermes": "hermes",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "llama3_1": "llama3",
    "mistral_v3": "mistral",
    "mistral_v7": "mistral-v11",
    "phi4_mini": "phi4",
    "granite": "granite",
    "jamba": "jamba",
    "nemotron": "nemotron",
}


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_a_format_is_found_by_the_template_or_none_is(name: str) -> None:
    found = tool_format(source(name))
    assert (None if found is None else found.name) == FOUND.get(name)
    assert found is None or knows_tools(source(name))


def test_what_a_setting_says_is_taken() -> None:
    assert tool_format(source("qwen3"), name="none") is None
    named = tool_format(source("gemma3"), name="json")
    assert named is not None
    assert named.name == "json"
    with pytest.raises(KeyError):
        tool_format("", name="gema")


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("qwen3", True),
        ("deepseek_r1", True),
        ("smollm3", True),
        ("qwen2_5", False),
        ("gemma3", False),
    ],
)
def test_reasoning_is_found_by_its_end(name: str, has: bool) -> None:
    assert (reasoning_format(source(name)) is not None) == has
    assert reasoning_format(source(name), name="none") is None
    assert reasoning_format(source(name), name="think") is not None


@pytest.mark.parametrize(("name", "does"), [("qwen3", True), ("gemma3", False), ("llama2", False)])
def test_a_template_knows_tools_if_it_names_them(name: str, does: bool) -> None:
    assert knows_tools(source(name)) == does
