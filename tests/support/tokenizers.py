"""Small tokenizers of every kind a checkpoint may bring, built here from a fixed corpus."""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

CORPUS: Final = (
    "hello world, this is a test. don't you think so? yes!",
    "the quick brown fox jumps over the lazy dog and runs away",
    "naïve café über straße 日本語のテキスト 中文 русский текст",
    "emoji 😀 😀😎 👩‍👩‍👧‍👦 flags 🇯🇵 and tabs\tand\nnew lines  double  spaces",
) * 8
SPECIALS: Final = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>")


@cache
def byte_level_bpe(vocab_size: int = 480) -> Tokenizer:
    """GPT-2, Llama 3, Qwen: bytes as printable stand-ins."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken("<plain>", normalized=False), AddedToken("日本", normalized=False)]
    )
    return tokenizer


@cache
def sentencepiece_bpe() -> Tokenizer:
    """Llama 2, Mistral: ▁ for space, byte tokens for what is unknown, one space stripped."""
    tokenizer = _trained_bpe("▁")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@cache
def gemma_like_bpe() -> Tokenizer:
    """As above without the strip."""
    tokenizer = _trained_bpe("▁")
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


@cache
def metaspace_unigram() -> Tokenizer:
    """T5, ALBERT: Unigram with the Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=list(SPECIALS), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """BERT: ## continues a word, and the decoder cleans up before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=list(SPECIALS), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def word_level() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=list(SPECIALS), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _trained_bpe(space: str) -> Tokenizer:
    """A BPE with all 256 byte tokens, merges learnt from the corpus."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", space)
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=list(SPECIALS), show_progress=False, limit_alphabet=60
    )
    learner.train_from_iterator(CORPUS, trainer)
    learnt = json.loads(learner.to_str())["model"]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in learnt["vocab"] if token not in SPECIALS]
    merges = [tuple(pair) for pair in learnt["merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that is known to be there."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('unknown role ' ~ message.role) }}"
    "{%- endif -%}"
    "<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>{{ message.content }}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def write_model_folder(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """A model folder as the gateway reads it: everything but weights."""
    tokenizer = tokenizer or byte_level_bpe()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    base = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 256,
        "eos_token_id": tokenizer.token_to_id("</s>"),
    }
    (folder / "config.json").write_text(json.dumps(base | (config or {})))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
