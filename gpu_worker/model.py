"""What a model is, as far as computing it goes."""

from dataclasses import dataclass

from gpu_worker.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    positions_max: int
    # Tokens back to which attention reaches, or None when it reaches everything.
    window_tokens: int | None
    rope: RopeConfig
    has_tied_embeddings: bool
    has_qk_norm: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    checkpoint_dtype: str

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0
        assert self.head_dim % 2 == 0
