"""config.json files as they were published, every flag kept; widths, depths and lengths shrunk.

Compared on 2026-11-23 with copies that others have published of the files of Granite 3.3 8B and
4.1 3B, OLMo 2 7B, Gemma 7B, 2 2B, 2 9B, 3 1B, 3 270M and 3 27B, SmolLM3 3B and its base, Phi-3
mini 4k, Phi-3.5 mini and Phi-4-mini; the others differ from these in what is said below.
"""

from typing import Any

# Of what would be gigabytes. The ids of special tokens follow the vocabulary.
SHRUNK: dict[str, Any] = {
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
    "torch_dtype": "float32",
}


def granite(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.1,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "logits_scaling": 8.0,
        "mlp_bias": False,
        "model_type": "granite",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        **SHRUNK,
        **changes,
    }


def olmo2(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "olmo2",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "use_cache": True,
        **SHRUNK,
        **changes,
    }


def smollm3(**changes: Any) -> dict[str, Any]:
    layers = 5
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0, 1],
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_cache": False,
        "use_sliding_window": False,
        **SHRUNK,
        "num_hidden_layers": layers,
        **changes,
    }


def phi3(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "embd_pdrop": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "phi3",
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "use_cache": True,
        **SHRUNK,
        "original_max_position_embeddings": 4096,
        **changes,
    }


def gemma(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["GemmaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "model_type": "gemma",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_cache": True,
        **SHRUNK,
        "head_dim": 32,
        **changes,
    }


def gemma2(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "model_type": "gemma2",
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "use_cache": True,
        **SHRUNK,
        "head_dim": 32,
        "num_hidden_layers": 3,
        **changes,
    }


def gemma3(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "use_cache": True,
        **SHRUNK,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 7,
        **changes,
    }


def qwen2(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        **SHRUNK,
        **changes,
    }


def _longrope(pairs: int, least: float, most: float) -> list[float]:
    """Factors that rise, as the published do."""
    return [round(least + (most - least) * at / (pairs - 1), 3) for at in range(pairs)]


PUBLISHED: dict[str, dict[str, Any]] = {
    # granite-3.0-2b-base, granite-3.3-8b-instruct, granite-4.1-3b
    "granite-3.0-2b": granite(num_key_value_heads=2),
    "granite-3.3-8b": granite(
        attention_dropout=0.0,
        attention_multiplier=0.0078125,
        logits_scaling=16.0,
        rope_theta=10000000.0,
    ),
    "granite-4.1-3b": granite(
        attention_dropout=0.0,
        logits_scaling=10.0,
        rope_theta=10000000.0,
        num_attention_heads=5,
        num_key_value_heads=1,
        hidden_size=80,
    ),
    # OLMo-2-0425-1B, OLMo-2-1124-7B-Instruct, OLMo-2-0325-32B
    "olmo2-1b": olmo2(num_key_value_heads=4),
    "olmo2-7b": olmo2(num_key_value_heads=4, vocab_size=401, use_cache=False),
    "olmo2-32b": olmo2(num_attention_heads=5, num_key_value_heads=1, hidden_size=80),
    # gemma-2b, gemma-7b-it, gemma-1.1-2b-it
    "gemma-2b": gemma(num_key_value_heads=1),
    "gemma-7b": gemma(num_key_value_heads=4, hidden_activation=None),
    "gemma-1.1-2b": gemma(hidden_act="gelu_pytorch_tanh", num_key_value_heads=1),
    # gemma-2-2b, gemma-2-9b, gemma-2-27b; the window reaches everything here. And caps that bite
    # models of this size as the published ones bite theirs
    "gemma2-2b": gemma2(),
    "gemma2-9b": gemma2(sliding_window_size=4096, num_attention_heads=8, num_key_value_heads=4),
    "gemma2-27b": gemma2(query_pre_attn_scalar=144, head_dim=16, hidden_size=72),
    "gemma2-tight": gemma2(
        # Crossed by every prompt but the shortest.
        sliding_window=12,
        query_pre_attn_scalar=1,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=6.0,
    ),
    # gemma-3-1b-it, gemma-3-270m, the text of gemma-3-27b-it; the window reaches everything here
    "gemma3-1b": gemma3(cache_implementation="hybrid", sliding_window_pattern=6),
    "gemma3-270m": gemma3(
        _sliding_window_pattern=6,
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        use_bidirectional_attention=False,
    ),
    "gemma3-27b": gemma3(
        query_pre_attn_scalar=168,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
        num_key_value_heads=2,
    ),
    # Of 3 full layers and 8 of a window, of 2 and 2: rows are many windows long.
    "gemma3-windows": gemma3(sliding_window=12, sliding_window_pattern=3, num_hidden_layers=11),
    "qwen2-windows": qwen2(
        sliding_window=12, use_sliding_window=True, max_window_layers=2, num_hidden_layers=4
    ),
    # SmolLM3-3B, SmolLM3-3B-Base, and what older versions of transformers wrote of it
    "smollm3-3b": smollm3(),
    "smollm3-3b-base": smollm3(bos_token_id=None, tie_word_embeddings=True, use_cache=True),
    "smollm3-interval": smollm3(no_rope_layers=None, layer_types=None),
    # Phi-3-mini-4k, of which the window shrinks too, Phi-3-medium-4k, Phi-3-mini-128k, Phi-4-mini
    "phi3-mini-4k": phi3(num_key_value_heads=4, sliding_window=31),
    "phi3-medium-4k": phi3(num_key_value_heads=1),
    "phi3-mini-128k": phi3(
        rope_scaling={
            "long_factor": _longrope(8, 1.08, 64.75),
            "short_factor": _longrope(8, 1.0, 2.9),
            "type": "longrope",
        },
        original_max_position_embeddings=64,
        sliding_window=262144,
    ),
    "phi4-mini": phi3(
        hidden_size=128,
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        mlp_bias=False,
        rope_scaling={
            "long_factor": _longrope(12, 1.0, 47.8),
            "short_factor": [1.0] * 12,
            "type": "longrope",
        },
        original_max_position_embeddings=64,
        sliding_window=262144,
    ),
}
