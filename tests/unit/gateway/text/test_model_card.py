"""What a model's folder says, and what is said about a folder that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.text import model_card
from gateway.text.model_card import SamplingDefaults
from service_kit.errors import ConfigError
from tests.support.tokenizers import sentencepiece_bpe, write_model_folder


@pytest.mark.parametrize(
    ("config", "generation", "eos", "defaults"),
    [
        ({}, None, (2,), SamplingDefaults()),
        ({"eos_token_id": [2, 5]}, {}, (2, 5), SamplingDefaults()),
        ({}, {"eos_token_id": [5, 2, 5]}, (5, 2), SamplingDefaults()),
        ({"eos_token_id": None}, {}, (2,), SamplingDefaults()),
        ({}, {"do_sample": False, "temperature": 0.7}, (2,), SamplingDefaults(temperature=0.0)),
        (
            {},
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None},
            (2,),
            SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95),
        ),
    ],
)
def test_defaults_and_stop_ids(
    tmp_path: Path,
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    eos: tuple[int, ...],
    defaults: SamplingDefaults,
) -> None:
    card = model_card.load(write_model_folder(tmp_path, config=config, generation=generation))
    assert (card.eos_token_ids, card.defaults) == (eos, defaults)


def test_names_limits_and_templates(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "my-model", sentencepiece_bpe())
    card = model_card.load(folder)
    assert card.name == "my-model"
    assert model_card.load(folder, "served").name == "served"
    assert card.architecture == "LlamaForCausalLM"
    assert card.context_tokens_max == 256
    assert card.template_names == {"bos_token": "<s>", "eos_token": "</s>"}
    assert "<|user|>" in card.special_texts
    (folder / "chat_template.jinja").write_text("from the file")
    assert model_card.load(folder).chat_template == "from the file"


def test_named_templates_offer_their_default(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert model_card.load(folder).chat_template == "d"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [5, {}]}))
    assert model_card.load(folder).chat_template is None


def test_a_scaled_rope_reaches_as_far_as_the_worker_says(tmp_path: Path) -> None:
    """By Qwen's recipe, of which the tables are in the worker's tests."""
    folder = write_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "max_position_embeddings": 32768,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert model_card.load(folder).context_tokens_max == 131072
    config["rope_scaling"]["factor"] = 1e308
    (folder / "config.json").write_text(json.dumps(config))
    assert model_card.load(folder).context_tokens_max == 2**31 - 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "config.json is missing"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", '{"max_position_embeddings": 0}', "max_position_embeddings must be a"),
        ("config.json", '{"max_position_embeddings": 8, "eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", '{"temperature": 9}', "temperature must be in"),
        ("generation_config.json", '{"top_k": -1.5}', "top_k must be in"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "does not compile"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template must be a text, is 5"),
        ("chat_template.jinja", "\udcff", "chat_template.jinja cannot be read"),
        ("config.json", '{"text_config": 5}', "text_config must be a dict, is 5"),
        ("config.json", '{"architectures": 5}', "architectures must be a list, is 5"),
        ("generation_config.json", '{"eos_token_id": 2147483648}', "eos_token_id must be token"),
    ],
)
def test_a_wrong_folder_is_explained(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    folder = write_model_folder(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match=says):
        model_card.load(folder)
