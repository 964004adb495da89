"""What a model is, as far as computing it goes."""

from dataclasses import dataclass, replace

from gpu_worker.model.layer_groups import LayerGroups, group_layers
from gpu_worker.model.layer_spec import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    positions_max: int
    # One of each layer.
    blocks: tuple[LayerSpec, ...]
    has_tied_embeddings: bool
    checkpoint_dtype: str
    # Times the products of queries and keys.
    attention_scale: float
    # Added to the weights of all norms.
    norm_offset: float = 0.0
    # Times the embeddings, and times what a block adds to the residual.
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    # Logits stay within it, smoothly; None: they are as they are.
    logits_softcap: float | None = None

    def __post_init__(self) -> None:
        assert self.blocks
        assert self.heads % self.kv_heads == 0
        assert self.head_dim % 2 == 0

    @property
    def layers(self) -> int:
        return len(self.blocks)

    def for_context(self, tokens: int) -> "ModelConfig":
        """The model as it computes rows of up to so many tokens."""
        blocks = (
            each if each.rope is None else replace(each, rope=each.rope.for_context(tokens))
            for each in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    def within(self, tokens: int) -> "ModelConfig":
        """The same, where no row has more tokens: windows that reach all of them are none.

        That decides no token, so the fingerprint is of the model before.
        """
        blocks = (
            replace(each, window_tokens=None) if (each.window_tokens or 0) >= tokens else each
            for each in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    @property
    def groups(self) -> LayerGroups:
        return group_layers([each.window_tokens for each in self.blocks])
