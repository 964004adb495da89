"""The oracle: writes random checkpoints and answers prompts with transformers, in its own process.

Started by `oracle.py` with QUESTIONS.json; leaves all beside that file. Neither transformers nor
what it probes for is ever imported beside our own packages.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.uncompiled_transformers import transformers

_COMMON = {
    "vocab_size": 389,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_THETA = {"rope_type": "default", "rope_theta": 1_000_000.0}

# Grouped and full heads, tied and untied, odd vocabularies, wide heads, scaled rope.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha-bias": (
        "Llama",
        {
            "num_key_value_heads": 4,
            "head_dim": 24,
            "vocab_size": 512,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama-rope-llama3": ("Llama", {"num_key_value_heads": 1, "rope_parameters": _LLAMA3}),
    # It says a window, which this family does not have.
    "llama-rope-linear": (
        "Llama",
        {"vocab_size": 401, "rope_parameters": _LINEAR, "sliding_window": 12},
    ),
    "llama-rope-yarn": ("Llama", {"head_dim": 32, "rope_parameters": _YARN}),
    "mistral-gqa": ("Mistral", {"sliding_window": None}),
    "mistral-wide-head": ("Mistral", {"head_dim": 32, "rope_parameters": _THETA}),
    "mistral-mha-tied": (
        "Mistral",
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "vocab_size": 433},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 12, "vocab_size": 421}),
    "qwen2-gqa-tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": _THETA}),
    "qwen2-mha": ("Qwen2", {"num_key_value_heads": 4, "vocab_size": 397}),
    "qwen2-rope-yarn": ("Qwen2", {"rope_parameters": _YARN, "num_hidden_layers": 3}),
    "qwen3-gqa-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-wide-head": ("Qwen3", {"head_dim": 40, "rope_parameters": _THETA}),
    "qwen3-bias": (
        "Qwen3",
        {"head_dim": 16, "num_key_value_heads": 4, "attention_bias": True, "vocab_size": 411},
    ),
}


def write_checkpoint(name: str, folder: Path, seed: int, published: dict[str, Any] | None) -> None:
    """Random weights, biases and norms, at a scale where the likeliest token is well ahead."""
    torch.manual_seed(seed)
    if published is None:
        family, changes = MODELS[name]
        config = getattr(transformers, f"{family}Config")(**(_COMMON | changes))
    else:
        kind = transformers.CONFIG_MAPPING[published["model_type"]]
        config = kind.from_dict(published)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                mean, spread = (0.0, 0.02) if key.endswith("bias") else (1.0, 0.1)
                if mean and config.model_type.startswith("gemma"):
                    # Of these the norms add one themselves.
                    mean = 0.0
                parameter.normal_(mean, spread)
            elif "embed" not in key:
                parameter.normal_(0, 0.05 if "lm_head" not in key else 0.2)
    # Two files and an index, as large checkpoints come.
    model.save_pretrained(folder, max_shard_size="150KB")
    if published is not None:
        # As others wrote it, not as this version of transformers does.
        (folder / "config.json").write_text(json.dumps(published))


def answer(model: Any, asked: dict[str, Any], top: int) -> dict[str, Any]:
    """Greedy tokens and their log-probabilities of each prompt alone.

    All at once are asked for a draft. One pass over each prompt with its draft, alone, says after
    every token which is the likeliest: where that is the draft, it is what greedy search finds.
    """
    arrays: dict[str, Any] = {}
    drafts = draft(model, asked["prompts"], asked["max_tokens"])
    for index, (prompt, drafted) in enumerate(zip(asked["prompts"], drafts, strict=True)):
        tokens, logits = drafted, logits_after(model, prompt, drafted)
        if not torch.equal(logits.argmax(-1), tokens):
            tokens = draft(model, [prompt], asked["max_tokens"])[0]
            logits = logits_after(model, prompt, tokens)
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.topk(top, dim=-1)
        arrays[f"tokens_{index}"] = tokens.numpy()
        arrays[f"logprob_{index}"] = logprobs.gather(1, tokens[:, None])[:, 0].numpy()
        arrays[f"top_ids_{index}"] = best.indices.numpy()
        arrays[f"top_logprobs_{index}"] = best.values.numpy()
    return arrays


def draft(model: Any, prompts: list[list[int]], max_tokens: int) -> list[Any]:
    """Greedy tokens of each, up to and with the end of its sequence."""
    longest, stop = max(map(len, prompts)), _COMMON["eos_token_id"]
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    # A window that the family does not have is none of the model's, but is its cache's.
    has_stray_window = model.config.model_type == "llama" and hasattr(
        model.config, "sliding_window"
    )
    with torch.inference_mode():
        made = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(masks),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=not has_stray_window,
        )[:, longest:]
    ends = [(row == stop).nonzero()[:1, 0].tolist() or [max_tokens] for row in made]
    return [row[: end + 1] for row, (end,) in zip(made, ends, strict=True)]


def logits_after(model: Any, prompt: list[int], tokens: Any) -> Any:
    """[len(tokens), vocabulary]: those from which each token is chosen."""
    with torch.inference_mode():
        logits = model(torch.cat((torch.tensor(prompt), tokens))[None]).logits[0]
    return logits[len(prompt) - 1 : -1]


def explain(model: Any, asked: dict[str, Any], top: int) -> dict[str, Any]:
    """Log-probabilities of each prompt's own tokens, by one pass over all of it."""
    arrays: dict[str, Any] = {}
    for index, prompt in enumerate(asked["prompts"]):
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1)
        best = logprobs.topk(top, dim=-1)
        arrays[f"logprob_{index}"] = logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        arrays[f"top_ids_{index}"] = best.indices.numpy()
        arrays[f"top_logprobs_{index}"] = best.values.numpy()
    return arrays


def main(listing: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    told, root = json.loads(listing.read_text()), listing.parent
    models = {}
    for name in told["models"]:
        write_checkpoint(name, root / name, seed=0, published=told["published"].get(name))
        load = transformers.AutoModelForCausalLM.from_pretrained
        # Its other ways to attend leave soft-caps out.
        is_capped = told["published"].get(name, {}).get("attn_logit_softcapping") is not None
        chosen = {"attn_implementation": "eager"} if is_capped else {}
        models[name] = load(root / name, dtype=torch.float32, **chosen).eval()
    for asked in told["questions"]:
        work = answer if asked["max_tokens"] else explain
        np.savez(root / asked["target"], **work(models[asked["model"]], asked, told["top"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
