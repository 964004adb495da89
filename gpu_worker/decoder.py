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

from gpu_worker.model import ModelConfig
from gpu_worker.rope_config import inverse_frequencies
from gpu_worker.weights import LayerWeights, Weights
from kernels import dispatch
from kernels.attention_plan import AttentionPlan, plan_attention
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope_table
from kernels.rope_write_kv import rope_write_kv
from kernels.silu_mul import silu_mul


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
    # No row has more tokens, or a longer context, than these; None: nobody knows.
    queries_max: int | None = None
    context_max: int | None = None


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
        plan = self._plan(hidden, step)
        for index, layer in enumerate(layers):
            hidden = self._attend(layer, hidden, *self._pages[index], step, plan)
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

    def _plan(self, hidden: Tensor, step: StepTensors) -> AttentionPlan | None:
        """The step's attention shared out once for all layers, where the kernels want that."""
        if dispatch.path_for(hidden) != "triton":
            return None
        return plan_attention(
            step.query_starts,
            step.context_lengths,
            group=self._config.heads // self._config.kv_heads,
            dtype=hidden.dtype,
            queries_max=step.queries_max,
            context_max=step.context_max,
        )

    def _attend(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        step: StepTensors,
        plan: AttentionPlan | None,
    ) -> Tensor:
        config = self._config
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        qkv = layer.qkv(hidden).view(len(hidden), heads + 2 * kv_heads, head_dim)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        v = qkv[:, heads + kv_heads :]
        q = rope_write_kv(
            q,
            k,
            v,
            step.positions,
            self._cos_sin,
            k_pages,
            v_pages,
            step.kv_slots,
            layer.q_norm,
            layer.k_norm,
            config.norm_eps,
        )
        mixed = paged_attention(
            q,
            k_pages,
            v_pages,
            step.block_tables,
            step.query_starts,
            step.context_lengths,
            self._scale,
            plan,
        )
        return layer.output(mixed.view(len(hidden), heads * head_dim))
