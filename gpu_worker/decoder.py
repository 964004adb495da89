"""One decoder for every supported family: which parts it has is data in `ModelConfig`.

For T tokens of any rows, in one pass:

    x = embedding[token_ids]
    each layer:   h = norm(x)                       x carries the residual
                  q, k, v = qkv(h)                  q, k normalised (some families), then rotated
                  k, v -> pages;  x += output(attention(q, pages))
                  x += down(silu(gate) * up)
    logits = head(norm(x[some tokens]))             float32, apart
"""

from dataclasses import dataclass

from torch import Tensor

from gpu_worker.model_config import ModelConfig
from gpu_worker.rope_config import inverse_frequencies
from gpu_worker.weights import LayerWeights, Weights
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope, rope_table
from kernels.silu_mul import silu_mul
from kernels.write_kv import write_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """The step's inputs on the device; shapes as in `device.StepInputs`."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    block_tables: Tensor
    sampled_tokens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Before the last norm, [T, hidden] each; their sum is what the model knows of a token."""

    hidden: Tensor
    residual: Tensor


class Decoder:
    def __init__(
        self, config: ModelConfig, weights: Weights, pages: Tensor, *, context_tokens: int
    ) -> None:
        self._config = config
        self.vocab_size = config.vocab_size
        self._weights = weights
        self._pages = [(pages[layer, 0], pages[layer, 1]) for layer in range(config.layers)]
        frequencies = inverse_frequencies(config.rope).to(pages.device)
        self._cos_sin = rope_table(context_tokens, frequencies, config.rope.attention_scale)
        self._scale = config.head_dim**-0.5

    def forward(self, step: StepTensors) -> States:
        """Write the step's keys and values; return every token's last state."""
        eps = self._config.norm_eps
        layers = self._weights.layers
        residual = self._weights.embed(step.token_ids)
        hidden = rms_norm(residual, layers[0].attention_norm, eps)
        for index, layer in enumerate(layers):
            hidden = self._attend(layer, hidden, *self._pages[index], step)
            hidden, residual = add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = layer.down(silu_mul(layer.gate_up(hidden)))
            if index + 1 < len(layers):
                next_norm = layers[index + 1].attention_norm
                hidden, residual = add_rms_norm(hidden, residual, next_norm, eps)
        return States(hidden=hidden, residual=residual)

    def logits(self, states: States, tokens: Tensor) -> Tensor:
        """Of some of the step's tokens, [len(tokens), vocab] float32.

        Only of those whose logits are looked at: the vocabulary is wide.
        """
        hidden, residual = states.hidden[tokens], states.residual[tokens]
        hidden, _ = add_rms_norm(hidden, residual, self._weights.norm, self._config.norm_eps)
        return self._weights.head(hidden).float()

    def _attend(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        step: StepTensors,
    ) -> Tensor:
        config = self._config
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        qkv = layer.qkv(hidden).view(len(hidden), heads + 2 * kv_heads, head_dim)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        v = qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.norm_eps)
            k = rms_norm(k, layer.k_norm, config.norm_eps)
        rope(q, k, step.positions, self._cos_sin)
        write_kv(k, v, k_pages, v_pages, step.kv_slots)
        mixed = paged_attention(
            q,
            k_pages,
            v_pages,
            step.block_tables,
            step.query_starts,
            step.context_lengths,
            self._scale,
        )
        return layer.output(mixed.view(len(hidden), heads * head_dim))
