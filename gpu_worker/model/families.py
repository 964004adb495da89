"""The families of models that are computed, each as what it always or never has.

A family that differs in data is an entry here. What a block may consist of is `layer_spec`'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpu_worker.model.layer_spec import NormPlace, QkNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    model_type: str
    norms: NormPlace = "pre"
    # The norms' weights are what is added to one.
    has_norms_of_one: bool = False
    qk_norm: QkNorm | None = None
    # None: config's `attention_bias` says.
    has_qkv_bias: bool | None = None
    has_output_bias: bool | None = None
    may_have_mlp_bias: bool = False
    head_dim: int | None = None
    # `sliding_window` counts: elsewhere no layer slides, whatever the file says.
    may_slide: bool = False
    # `layer_types` says which layers do; elsewhere it must say what is so.
    has_layer_types: bool = False
    # Sliding only when `use_sliding_window` says so.
    has_window_switch: bool = False
    is_stacked: bool = False
    # `embedding_multiplier` and its like count.
    has_multipliers: bool = False
    # Embeddings are scaled by the root of their number of elements.
    scales_embeddings: bool = False
    # `query_pre_attn_scalar` counts.
    has_query_scalar: bool = False
    # `attn_logit_softcapping` and `final_logit_softcapping` count.
    has_softcaps: bool = False
    # Of every so many layers the last sees everything, and the others a window.
    has_window_pattern: bool = False
    # Sliding layers rotate by `rope_local_base_freq`.
    has_local_rope: bool = False
    # Of `hidden_act`, names that do not mean what they mean elsewhere.
    activations: Mapping[str, str] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    # Some layers know no positions: `no_rope_layers`, or every so many. If any slide, they do.
    has_layers_without_rope: bool = False
    may_rotate_partly: bool = False
    # Rope types by the names that the family has for them.
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    # Its checkpoints name code, from before the family was known to everybody: it is never run.
    may_name_code: bool = False
    # Of keys that a config.json may leave out, where they are not those of most families.
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Final = {
    "LlamaForCausalLM": Family(model_type="llama", may_have_mlp_bias=True),
    "MistralForCausalLM": Family(
        model_type="mistral",
        may_slide=True,
        has_layer_types=True,
        has_qkv_bias=False,
        has_output_bias=False,
        defaults={"sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        may_slide=True,
        has_layer_types=True,
        has_qkv_bias=True,
        has_output_bias=False,
        has_window_switch=True,
        defaults={"sliding_window": 4096, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        may_slide=True,
        has_layer_types=True,
        qk_norm="head",
        head_dim=128,
        has_window_switch=True,
        defaults={"sliding_window": 4096, "max_window_layers": 28},
    ),
    "GemmaForCausalLM": Family(
        model_type="gemma",
        head_dim=256,
        has_norms_of_one=True,
        scales_embeddings=True,
        activations={"gelu": "gelu_pytorch_tanh"},
        defaults={"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        may_slide=True,
        has_layer_types=True,
        head_dim=256,
        norms="both",
        has_norms_of_one=True,
        scales_embeddings=True,
        has_query_scalar=True,
        has_softcaps=True,
        has_window_pattern=True,
        activation_key="hidden_activation",
        defaults={
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        may_slide=True,
        has_layer_types=True,
        head_dim=256,
        norms="both",
        qk_norm="head",
        has_norms_of_one=True,
        scales_embeddings=True,
        has_query_scalar=True,
        has_window_pattern=True,
        has_local_rope=True,
        activation_key="hidden_activation",
        defaults={
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1_000_000.0,
            "sliding_window": 4096,
        },
    ),
    "GraniteForCausalLM": Family(
        model_type="granite", may_have_mlp_bias=True, has_multipliers=True
    ),
    "Olmo2ForCausalLM": Family(
        model_type="olmo2", norms="post", qk_norm="projection", defaults={"rms_norm_eps": 1e-5}
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        may_slide=True,
        has_qkv_bias=False,
        has_output_bias=False,
        is_stacked=True,
        may_rotate_partly=True,
        rope_kinds={"su": "longrope", "yarn": "longrope"},
        may_name_code=True,
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        may_slide=True,
        has_layer_types=True,
        may_have_mlp_bias=True,
        has_window_switch=True,
        has_layers_without_rope=True,
        defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    ),
}
# Of families that are asked for and not computed: what of their block nothing here knows.
PARTS_MISSING: Final = {
    "Gemma3ForConditionalGeneration": "it has images",
    "GptOssForCausalLM": "it has experts and attention sinks",
    "GraniteMoeForCausalLM": "it has experts",
    "MixtralForCausalLM": "it has experts",
    "Olmo3ForCausalLM": "its sliding layers rotate without the scaling of the others",
    "OlmoForCausalLM": "it has norms without weights",
    "Qwen2MoeForCausalLM": "it has experts",
    "Qwen3MoeForCausalLM": "it has experts",
    "Starcoder2ForCausalLM": "it has layer norms and an MLP without a gate",
}
