"""Random-init Llamas of the comparison's shapes, with a tokenizer that can write any token.

    python -m benchmarks.peers.checkpoint FOLDER [--shape 125m] [--dtype bf16]

The weights are larger than the usual initial ones, so that a greedy choice is not a tie.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

SHAPES: Final[dict[str, dict[str, int]]] = {
    "125m": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "15m": {
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    # For trying the comparison itself: seconds, not minutes.
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
VOCAB_SIZE: Final = 32_000
CONTEXT_TOKENS: Final = 2048
SPREAD: Final = 0.05


def write_checkpoint(folder: Path, shape: str, dtype: str, *, seed: int = 0) -> Path:
    """The folder, made unless it is there already. The same seed gives the same weights."""
    done = folder / "tokenizer.json"
    if not done.exists():
        _write_weights(folder, shape, dtype, seed)
        _write_tokenizer(folder)
    return folder


def _write_weights(folder: Path, shape: str, dtype: str, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    options: dict[str, Any] = dict(SHAPES[shape])
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **options,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.normal_(0, SPREAD)
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    torch.nn.Module.to(model, dtype=kinds[dtype])
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges: 256 bytes, and made-up words for all other ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {name: index for index, name in enumerate(names)}
    vocab |= {f"\u0120w{index}": index for index in range(len(vocab), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    # Last: its presence says that the folder is whole.
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="125m")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    chosen = parser.parse_args()
    print(write_checkpoint(chosen.folder, chosen.shape, chosen.dtype))


if __name__ == "__main__":
    main()
