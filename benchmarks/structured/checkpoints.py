"""A tiny random model for each format of tool calls: its family's template, marks and tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from benchmarks.structured.worlds import TOKENIZERS, configs
from tests.support.random_model import write_random_model
from tests.support.tokenizers import token_id, write_model_folder

TEMPLATES: Final = Path(__file__).parents[2] / "tests/parity/templates"
VOCAB: Final = 560
CONTEXT: Final = 16384
# Gemma's own knows no tools; what operators put in its place says them as its documentation does.
GEMMA: Final = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else 'user' %}
    {{- '<start_of_turn>' + role + '\\n' }}
    {%- if loop.first and tools %}{{- 'You may call: ' + tools | tojson + '\\n' }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' }}
        {{- call.function.arguments | tojson + '}' }}
    {%- else %}{{- message.content }}{%- endfor %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family is served. The first of `control` ends an answer."""

    architecture: str
    template: str
    control: tuple[str, ...]
    # Tokens of their own that texts show; marks in neither are written letter by letter.
    plain: tuple[str, ...] = ()
    tokenizer: str = "byte-level"
    tool_format: str = "auto"
    # Before each conversation.
    system: str = ""


FAMILIES: Final[Mapping[str, Family]] = {
    "hermes": Family(
        architecture="llama",
        template="hermes.jinja",
        control=("<|im_end|>", "<|im_start|>"),
        plain=("<tool_call>", "</tool_call>"),
    ),
    # With reasoning, when it likes.
    "qwen": Family(
        architecture="qwen3",
        template="qwen3.jinja",
        control=("<|im_end|>", "<|im_start|>"),
        plain=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        tokenizer="sentencepiece, no strip",
    ),
    "mistral": Family(
        architecture="mistral",
        template="mistral_v3.jinja",
        control=("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
        tokenizer="sentencepiece",
    ),
    "mistral-v11": Family(
        architecture="mistral",
        template="mistral_v7.jinja",
        control=("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "llama3": Family(
        architecture="llama",
        template="llama3_1.jinja",
        control=("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        system="Serve.",
    ),
    "phi4": Family(
        architecture="phi3",
        template="phi4_mini.jinja",
        control=("<|end|>", "<|user|>", "<|assistant|>"),
        plain=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "granite": Family(
        architecture="granite",
        template="granite.jinja",
        control=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
    ),
    "jamba": Family(
        architecture="olmo2",
        template="jamba.jinja",
        control=("<|eom|>", "<|bom|>"),
        plain=("<tool_calls>", "</tool_calls>"),
        tokenizer="unigram",
    ),
    # Its template begins the reasoning, which the model ends.
    "nemotron": Family(
        architecture="llama",
        template="nemotron.jinja",
        control=("<SPECIAL_12>", "<SPECIAL_11>"),
        plain=("<think>", "</think>"),
        tokenizer="sentencepiece",
    ),
    "json": Family(
        architecture="gemma3_text",
        template="",
        control=("<end_of_turn>", "<start_of_turn>"),
        tokenizer="sentencepiece, no strip",
        tool_format="json",
    ),
}


def write(folder: Path, family: Family) -> Tokenizer:
    """A folder that can be served; returns its tokenizer."""
    tokenizer: Tokenizer = Tokenizer.from_str(TOKENIZERS[family.tokenizer]().to_str())
    tokenizer.add_special_tokens(list(family.control))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.plain])
    source = (TEMPLATES / family.template).read_text() if family.template else GEMMA
    config: dict[str, Any] = configs()[family.architecture] | {
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": token_id(tokenizer, family.control[0]),
    }
    write_model_folder(folder, tokenizer, config=config, chat_template=source)
    write_random_model(folder, seed=7, **config)
    return tokenizer
