"""config.json of each family in its old and new spelling, and every refusal in words."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.model.config import config_from_json, read_config
from gpu_worker.model.layer_spec import LayerSpec
from gpu_worker.model.rope import inverse_frequencies
from service_kit.errors import ConfigError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
SLIDES_THIRD = ["full_attention"] * 2 + ["sliding_attention", "full_attention"]


def changed(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": rope_parameters}


def config(**changes: Any) -> Any:
    return config_from_json(BASE | changes)


def rope(**changes: Any) -> Any:
    return config(**changes).blocks[0].rope


def family(name: str) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"head_dim": 8, "kv_heads": 2, "has_qkv_bias": False, "qk_norm": None}),
        ({"num_key_value_heads": None}, {"kv_heads": 8}),
        ({"head_dim": 24}, {"head_dim": 24}),
        ({"attention_bias": True}, {"has_qkv_bias": True, "has_output_bias": True}),
        ({"mlp_bias": True}, {"has_mlp_bias": True}),
        ({"tie_word_embeddings": True}, {"has_tied_embeddings": True}),
        ({"torch_dtype": "bfloat16"}, {"checkpoint_dtype": "bfloat16"}),
        ({"dtype": "float16"}, {"checkpoint_dtype": "float16"}),
        ({"architectures": None}, {"architecture": "LlamaForCausalLM"}),
        # Mistral never has biases, whatever the file says; Qwen2 always has those of q, k and v.
        (family("Mistral") | {"attention_bias": True}, {"has_qkv_bias": False}),
        (family("Mistral") | {"mlp_bias": True}, {"has_mlp_bias": False}),
        (family("Qwen2"), {"has_qkv_bias": True, "has_output_bias": False}),
        (family("Qwen3"), {"qk_norm": "head", "head_dim": 128, "has_qkv_bias": False}),
        (family("Qwen3") | {"head_dim": 16, "attention_bias": True}, {"has_output_bias": True}),
    ],
)
def test_what_a_family_has(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    read = config(**changes)
    assert len(set(read.blocks)) == 1
    of_block = {field.name for field in fields(LayerSpec)}
    found = {name: getattr(read.blocks[0] if name in of_block else read, name) for name in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (family("Mistral") | {"sliding_window": 1024}, 1024),
        (family("Mistral") | {"sliding_window": None}, None),
        (family("Mistral") | {"sliding_window": 4096}, None),
        (family("Qwen2") | {"sliding_window": 1024}, None),
        (
            family("Qwen2")
            | {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 4},
            None,
        ),
        (
            family("Qwen2")
            | {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 3},
            1024,
        ),
        # What a config.json leaves out is what transformers takes it for.
        (family("Mistral") | {"max_position_embeddings": 8192}, 4096),
        (family("Qwen2") | {"max_position_embeddings": 8192, "use_sliding_window": True}, None),
        (
            family("Qwen3")
            | {
                "max_position_embeddings": 8192,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            4096,
        ),
        (family("Mistral") | {"sliding_window": 9, "layer_types": ["full_attention"] * 4}, None),
        (family("Mistral") | {"sliding_window": 9, "layer_types": ["sliding_attention"] * 4}, 9),
        (family("Phi3") | {"sliding_window": 9, "use_sliding_window": False}, 9),
        # Some families never slide, whatever the file says.
        ({"sliding_window": 9}, None),
        *((family(name) | {"sliding_window": 9}, None) for name in ("Granite", "Olmo2", "Gemma")),
    ],
)
def test_a_sliding_window_is_seen_where_it_matters(
    changes: dict[str, Any], window: int | None
) -> None:
    assert config(**changes).groups.windows[-1] == window


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
            LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5},
        ),
        (
            {
                "rope_theta": 5e5,
                "original_max_position_embeddings": 1024,
                "rope_scaling": {"type": "yarn", "factor": 4.0},
            },
            {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        ),
    ],
)
def test_both_spellings_of_rope_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert config(**old) == config(rope_parameters=new)
    assert rope(**old).theta == 5e5


def test_rope_of_each_kind() -> None:
    """Ends and middles of each curve, worked out by hand from the published definitions."""
    plain = inverse_frequencies(rope())
    assert plain.tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    linear = rope(rope_parameters={"rope_type": "linear", "factor": 4.0})
    assert torch.equal(inverse_frequencies(linear), plain / 4)
    llama3 = inverse_frequencies(rope(rope_parameters=LLAMA3 | {"rope_type": "llama3"}))
    # Waves of 6 and 63 positions stay, of 6283 are stretched; 628 lies between 256 and 1024.
    assert llama3[:2].tolist() == plain[:2].tolist()
    assert llama3[3].item() == pytest.approx(plain[3].item() / 8)
    smooth = (1024 / (2 * math.pi / 0.01) - 1) / 3
    assert llama3[2].item() == pytest.approx(0.01 * ((1 - smooth) / 8 + smooth))


def test_yarn_scales_its_magnitude() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert rope(rope_parameters=yarn).attention_scale == pytest.approx(0.1 * math.log(4) + 1)
    given = rope(rope_parameters=yarn | {"attention_factor": 1.5})
    assert given.attention_scale == 1.5
    both = rope(rope_parameters=yarn | {"mscale": 2.0, "mscale_all_dim": 1.0})
    assert both.attention_scale == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    # Without a factor it follows from the two lengths.
    assert rope(rope_parameters=yarn | {"factor": None}).factor == 4.0
    frequencies = inverse_frequencies(rope(rope_parameters=yarn))
    assert frequencies[0].item() == 1.0
    assert frequencies[3].item() == pytest.approx(0.001 / 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "the architecture GPT2LMHeadModel, which is not"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "LlamaForCausalLM, X"),
        ({"architectures": None, "model_type": "gpt2"}, "the architecture gpt2"),
        ({"architectures": None, "model_type": ""}, "the architecture nothing"),
        ({"architectures": "LlamaForCausalLM2"}, "the architecture LlamaForCausalLM2"),
        ({"architectures": [{}]}, "the architecture {}"),
        ({"architectures": ["MixtralForCausalLM"]}, "computes (it has experts): Llama"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers:"),
        ({"auto_map": {"AutoModel": "modeling.X"}}, "run code from the checkpoint"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized (awq)"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which"),
        (GEMMA2 | {"attn_logit_softcapping": 0}, "attn_logit_softcapping: "),
        (GEMMA2 | {"final_logit_softcapping": math.inf}, "final_logit_softcapping: "),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA2 | {"sliding_window": None}, "layer 0 is a sliding one and sliding_window is null"),
        (
            family("Mistral") | {"sliding_window": None, "layer_types": SLIDES_THIRD},
            "layer 2 is a sliding one and sliding_window is null; say how many tokens",
        ),
        (
            family("Qwen2") | {"sliding_window": 9, "layer_types": SLIDES_THIRD},
            "layer 2 is a sliding one and use_sliding_window is false",
        ),
        (family("Mistral") | {"sliding_window": 0}, "sliding_window 0 is not a number of tokens"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
        (
            {"layer_types": ["full_attention"] * 2 + ["linear_attention", "mamba"]},
            "layer_types has linear_attention, mamba, which kaiten does not compute; it computes",
        ),
        (
            {"layer_types": SLIDES_THIRD, "sliding_window": 9},
            "sliding_attention for other layers than slide in this family, of which none slides",
        ),
        (
            family("Phi3") | {"layer_types": SLIDES_THIRD, "sliding_window": 9},
            "than slide in this family, of which all slide, as sliding_window says",
        ),
        ({"num_key_value_heads": 3}, "8 heads are not a multiple of 3"),
        ({"hidden_size": 60}, "hidden_size 60 is not a multiple of 8"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"vocab_size": "many"}, "vocab_size:"),
        ({"num_hidden_layers": 0}, "num_hidden_layers:"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "spiral"}},
            "rope type 'spiral' is not supported (no such kind is known here); kaiten computes "
            "default, linear",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' needs"),
        (
            family("Phi3")
            | {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}},
            "1 factors, where 4 pairs are rotated",
        ),
        (family("Phi3") | {"partial_rotary_factor": 0.4}, "rotates 3 of 8 elements"),
        (family("Phi3") | {"partial_rotary_factor": math.nan}, "rotates 0 of 8 elements"),
        (
            family("Phi3")
            | {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [0] * 4,
                    "long_factor": 4 * [2],
                }
            },
            "a factor is a number > 0",
        ),
        (family("SmolLM3") | {"no_rope_layers": [1, 0]}, "has 2 entries for 4 layers"),
        (family("Granite") | {"logits_scaling": 0}, "logits_scaling:"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "needs 'low_freq_factor'"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rope parameters of type 'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        # Numbers that would make tables of no numbers, or none at all.
        ({"rms_norm_eps": math.inf}, "rms_norm_eps:"),
        ({"rope_theta": math.inf}, "rope_theta:"),
        *(
            (changed({"rope_type": "default", "rope_theta": theta}), "rope_theta must be a number")
            for theta in (-5, 0, math.nan, math.inf)
        ),
        (changed({"rope_type": "default", "rope_theta": 1e-300}), "some frequency is not a number"),
        *(
            (changed({"rope_type": kind, "factor": factor}), "factor must be a number > 0")
            for kind in ("linear", "yarn")
            for factor in (-2, 0, math.nan, math.inf)
        ),
        (
            {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_theta must not be 1",
        ),
        (changed(YARN | {"original_max_position_embeddings": -3}), "original_max_position_embe"),
        (changed(YARN | {"attention_factor": math.inf}), "attention_factor must be a number"),
        (changed(YARN | {"beta_fast": -1}), "beta_fast must be a number"),
        (changed(LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 0}), "low_freq_factor must"),
        # What changes the computation elsewhere, and not here.
        (changed(YARN | {"llama_4_scaling_beta": 0.1}), "'yarn' have llama_4_scaling_beta, which"),
        (changed({"type": "default", "mrope_section": [1, 1, 2]}), "'default' have mrope_section"),
        (changed({"type": "default", "factor": 2.0}), "'default' have factor, which"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
    ],
)
def test_what_is_refused_says_why(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert said in str(caught.value)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, 4096),
        # Qwen's recipe, in both spellings; and where the published length is the stretched one.
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 4 * 4096),
        (changed(YARN | {"original_max_position_embeddings": 4096}), 4 * 4096),
        (changed(YARN | {"original_max_position_embeddings": 1024}), 4096),
        (changed(YARN | {"original_max_position_embeddings": 512}), 4096),
        (changed(YARN | {"factor": None, "original_max_position_embeddings": 512}), 4096),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 10240),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, 2**31 - 1),
        ({"max_position_embeddings": 10**400}, 2**31 - 1),
        (GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 4096),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, 4096),
        # What says nothing refuses nothing.
        (changed({"rope_type": "default", "factor": 1.0, "mrope_section": None}), 4096),
    ],
)
def test_as_far_as_a_scaled_rope_reaches(changes: dict[str, Any], positions: int) -> None:
    assert config(**changes).positions_max == positions


def test_a_window_is_one_where_a_scaled_rope_reaches_beyond_it() -> None:
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert config(**family("Mistral"), **linear, sliding_window=4096).groups.windows == (4096,)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="vocab_size: field required"):
        config_from_json({name: value for name, value in BASE.items() if name != "vocab_size"})


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json; --model must name"):
        read_config(tmp_path)
    for unreadable in ("{", "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"):
        (tmp_path / "config.json").write_text(unreadable)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert read_config(tmp_path) == config()


def test_stretched_factors_are_those_of_the_context() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    read = config(**family("Phi3"), original_max_position_embeddings=1024, rope_scaling=scaling)
    short, long = (read.for_context(tokens).blocks[0].rope for tokens in (1024, 1025))
    assert read.blocks[0].rope == long
    assert torch.equal(inverse_frequencies(short), rope_frequencies())
    assert torch.equal(inverse_frequencies(long), rope_frequencies() / 2)
    # Part of what decides the tokens, and so of the fingerprint.
    assert repr(read.for_context(1024)) != repr(read.for_context(1025))
    assert long.attention_scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))


def rope_frequencies() -> torch.Tensor:
    return inverse_frequencies(rope())


def test_layers_without_positions() -> None:
    def knows(**changes: Any) -> list[bool]:
        read = config(**family("SmolLM3"), **changes)
        return [each.rope is not None for each in read.blocks]

    assert knows(no_rope_layers=[1, 0, 0, 1]) == [True, False, False, True]
    assert knows() == [True, True, True, False]
    assert knows(no_rope_layer_interval=2) == [True, False, True, False]
    # They are those that slide, where any do.
    slides = config(**family("SmolLM3"), use_sliding_window=True, sliding_window=9)
    assert [each.window_tokens for each in slides.blocks] == [None, None, None, 9]
    # Of another family the key says nothing.
    assert all(each.rope is not None for each in config(no_rope_layers=[0] * 4).blocks)


def test_what_gemma_2_caps() -> None:
    read = config(**GEMMA2, query_pre_attn_scalar=144, sliding_window=512)
    assert [each.window_tokens for each in read.blocks] == [512, None, 512, None]
    assert {each.softcap for each in read.blocks} == {50.0}
    found = read.logits_softcap, read.attention_scale, read.embedding_scale, read.norm_offset
    assert found == (30.0, 1 / 12, 8.0, 1.0)
    assert {(each.norms, each.activation) for each in read.blocks} == {("both", "gelu_tanh")}
    bare = config(**GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (bare.logits_softcap, bare.blocks[0].softcap) == (None, None)
    # The published window reaches everything of so short a model.
    assert {each.window_tokens for each in bare.within(bare.positions_max).blocks} == {None}


def test_multipliers_are_granites_alone() -> None:
    said = {
        "attention_multiplier": 0.5,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    }
    read = config(**family("Granite"), **said)
    found = read.attention_scale, read.embedding_scale, read.residual_scale, read.logits_divisor
    assert found == (0.5, 12.0, 0.22, 8.0)
    assert config(**said) == config()
    assert config(**family("Granite")).attention_scale == 1.0


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 1e4),
        ({"rope_local_base_freq": 2e4, "rope_scaling": {"type": "linear", "factor": 8.0}}, 2e4),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
                }
            },
            3e4,
        ),
    ],
)
def test_two_kinds_of_layers(changes: dict[str, Any], theta: float) -> None:
    """In the old spelling and the new one; the window counts where it does not reach everything."""
    read = config(**GEMMA3, sliding_window=512, sliding_window_pattern=3, **changes)
    local, _, whole, after = read.blocks
    assert (local.rope.theta, local.rope.kind, local.window_tokens) == (theta, "default", 512)
    assert (whole.rope.theta, whole.window_tokens) == (1e6, None)
    assert whole.rope.kind == ("linear" if changes else "default")
    assert after == local
    assert read.groups.windows[-1] == 512
    assert config(**GEMMA3, sliding_window=4096).groups.windows == (None,)


def test_what_gemma_scales() -> None:
    read = config(**GEMMA3, query_pre_attn_scalar=64)
    assert (read.attention_scale, read.embedding_scale, read.norm_offset) == (0.125, 8.0, 1.0)
    assert {each.activation for each in read.blocks} == {"gelu_tanh"}
    # Of this family the old name means the same.
    old = config(**family("Gemma"), hidden_act="gelu", hidden_activation=None)
    assert old == config(**family("Gemma"))
    assert old.blocks[0].activation == "gelu_tanh"
