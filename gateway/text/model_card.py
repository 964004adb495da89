"""What a model's folder says to its gateway: tokenizer, limits, defaults, stop ids, chat template.

Weights are never opened. The tokenizer's vocabulary may be smaller than the model's: ids in the gap
are legal and show as nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from tokenizers import Tokenizer

from gateway.text.chat_template import ChatTemplate, TemplateFailed
from gateway.text.detokenizer import Pieces
from gateway.text.tools import formats
from gateway.text.tools.formats import ReasoningFormat, ToolFormat
from service_kit.errors import ConfigError
from service_kit.positions import positions_max

# As in SamplingParams of common.proto.
DEFAULT_RANGES: Final = {
    "temperature": (0, 2),
    "top_k": (0, 2**31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 2),
}
# Of the wire's fields of ids, of which no vocabulary has so many.
IDS: Final = 2**31
SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


_PartT = TypeVar("_PartT", dict[str, Any], list[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What unset sampling fields mean: generation_config.json, else what OpenAI's API means."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Immutable after loading. `special_texts` are the control tokens, longest first."""

    name: str
    architecture: str
    vocab_size: int
    context_tokens_max: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    tokenizer: Tokenizer
    tokenizer_path: Path
    # Hex SHA-256 of its file.
    tokenizer_digest: str
    pieces: Pieces
    # The same with control tokens as text.
    pieces_with_special: Pieces
    chat_template: str | None
    template_names: Mapping[str, Any]
    special_texts: tuple[str, ...]
    # How it writes calls and reasoning; None: it does not, or not so that anybody here can read it.
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None

    @property
    def knows_tools(self) -> bool:
        """Whether it can be told of any."""
        return formats.knows_tools(self.chat_template or "")


def load(
    folder: Path,
    name: str = "",
    *,
    tool_format: str = formats.AUTO,
    reasoning_format: str = formats.AUTO,
) -> ModelCard:
    """Read a model folder. ConfigError says which file is missing or wrong.

    Formats by their names: KeyError when there is no such one.
    """
    config = _read_json(folder, "config.json", is_required=True)
    config |= _part(config, "text_config", dict)
    generation = _read_json(folder, "generation_config.json")
    tokenizer_config = _read_json(folder, "tokenizer_config.json")
    tokenizer = _read_tokenizer(folder)
    names = _template_names(tokenizer_config)
    template = _chat_template(folder, tokenizer_config, names)
    return ModelCard(
        name=name or folder.resolve().name,
        architecture=str((_part(config, "architectures", list) or ["unknown"])[0]),
        vocab_size=_positive(config, "vocab_size", tokenizer.get_vocab_size()),
        context_tokens_max=positions_max(config, _positive(config, "max_position_embeddings", 0)),
        eos_token_ids=_eos_ids(generation, config, tokenizer, names),
        defaults=_defaults(generation),
        tokenizer=tokenizer,
        tokenizer_path=folder / "tokenizer.json",
        tokenizer_digest=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        pieces=Pieces(tokenizer),
        pieces_with_special=Pieces(tokenizer, show_special=True),
        chat_template=template,
        template_names=names,
        special_texts=_special_texts(tokenizer),
        tool_format=formats.tool_format(template or "", tool_format),
        reasoning_format=formats.reasoning_format(template or "", reasoning_format),
    )


def _read_json(folder: Path, name: str, *, is_required: bool = False) -> dict[str, Any]:
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if is_required:
            raise ConfigError(f"{path} is missing; --model names a folder with it") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing; a tokenizer in another format must be converted to it first"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The library raises plain Exception for every problem.
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    # Saved by training scripts; a server must neither cut nor pad prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _part(config: Mapping[str, Any], key: str, kind: type[_PartT]) -> _PartT:
    """A list or an object of config.json; an empty one where there is none."""
    value = config.get(key) or kind()
    if not isinstance(value, kind):
        raise ConfigError(f"config.json: {key} must be a {kind.__name__}, is {value!r}")
    return value


def _positive(config: Mapping[str, Any], key: str, fallback: int) -> int:
    value = config.get(key, fallback)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key} must be a positive integer, is {value!r}")
    return value


def _eos_ids(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    names: Mapping[str, Any],
) -> tuple[int, ...]:
    """generation_config.json wins over config.json; the tokenizer's eos is the last resort."""
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not ids and "eos_token" in names:
        token_id = tokenizer.token_to_id(str(names["eos_token"]))
        ids = [] if token_id is None else [token_id]
    if not all(isinstance(token_id, int) and 0 <= token_id < IDS for token_id in ids):
        raise ConfigError(f"eos_token_id must be token ids, is {value!r}")
    return tuple(dict.fromkeys(ids))


def _defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """do_sample false means greedy; values that are null or absent keep their neutral meaning."""
    if generation.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    given = {key: generation[key] for key in DEFAULT_RANGES if generation.get(key) is not None}
    for key, value in given.items():
        least, most = DEFAULT_RANGES[key]
        if not isinstance(value, int | float) or not least <= value <= most:
            rule = f"{key} must be in [{least:g}, {most:g}], is {value!r}"
            raise ConfigError(f"generation_config.json: {rule}")
    return SamplingDefaults(**given)


def _template_names(tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens by name, as templates use them. Each is a string or {"content": string}."""
    names = {}
    for key in SPECIAL_NAMES:
        value = tokenizer_config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            names[key] = text
    return names


def _chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], names: Mapping[str, Any]
) -> str | None:
    """chat_template.jinja wins; of a list of named templates the "default". Compiled to be sure."""
    path = folder / "chat_template.jinja"
    try:
        source: Any = path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if source is None:
        source = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each for each in source if isinstance(each, dict)}
        source = named.get("default", {}).get("template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"{folder}: chat_template must be a text, is {source!r:.50}")
    try:
        ChatTemplate(source, names)
    except TemplateFailed as error:
        raise ConfigError(f"{folder}: {error}") from error
    return str(source)


def _special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    tokens = tokenizer.get_added_tokens_decoder().values()
    texts = {token.content for token in tokens if token.special and token.content}
    return tuple(sorted(texts, key=lambda text: (-len(text), text)))
