"""Chat templates of the published kinds read exactly as transformers renders them.

`templates/` holds one of each make, written for this test from the formats that models document;
none is a copy. `python -m tools.compare_templates FILE...` says the same of any other.
"""

import json
from pathlib import Path

import pytest

from tests.parity.template_cases import Outcome, agree, oracle, ours, renderings
from tests.support.once import made_once
from tests.unit.gateway.text.test_template import SHAPES

FILES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
TEMPLATES = {path.stem: path.read_text() for path in FILES}
TEMPLATES |= {f"shape {index}": source for index, source in enumerate(SHAPES)}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """What transformers renders, by template."""

    def ask(folder: Path) -> None:
        rendered = dict(zip(TEMPLATES, oracle(list(TEMPLATES.values())), strict=True))
        (folder / "told.json").write_text(json.dumps(rendered))

    folder = made_once(tmp_path_factory, "template-oracle", ask)
    rendered = json.loads((folder / "told.json").read_text())
    return {name: [(kind, text) for kind, text in each] for name, each in rendered.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_conversation_equals_transformers(name: str, told: dict[str, list[Outcome]]) -> None:
    rows = zip(renderings(), ours(TEMPLATES[name]), told[name], strict=True)
    for (case, *_), own, theirs in rows:
        assert agree(own, theirs), f"{name}, {case}: ours {own}, theirs {theirs}"


def test_the_templates_render_and_look_at_tools(told: dict[str, list[Outcome]]) -> None:
    """What all fail at, or say nothing of, proves nothing."""
    assert len(FILES) >= 40
    names = [name for name, *_ in renderings()]
    offered, called = names.index("tools, prompted"), names.index("two calls, prompted")
    texts = [[text for _, text in told[path.stem]] for path in FILES]
    for path in FILES:
        assert [kind for kind, _ in told[path.stem]].count("text") >= 20, path.stem
    assert sum("get_weather" in each[offered] for each in texts) >= 18
    assert sum("São" in each[called] or "S\\u00e3o" in each[called] for each in texts) >= 18
