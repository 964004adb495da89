"""One decoder for every supported family: what its layers are is data (`layer_spec`).

For T tokens of any rows, in one pass:

    x = embedding[token_ids]
    each layer, as its spec says; of most families:
                  h = norm(x)                       x carries the residual
                  q, k, v = qkv(h)                  q, k normalised (some families), then rotated
                  k, v -> pages;  x += output(attention(q, pages))
                  x += down(activation(gate) * up)
    logits = head(norm(x[some tokens]))             apart

Once the last layer's keys and values are written, it goes on with `logits_indices` alone.
Where the compiled kernels serve every operator, all layers are one call, with the same bits.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gpu_worker.model.model import ModelConfig
from gpu_worker.model.rope import RopeConfig, inverse_frequencies
from gpu_worker.model.weights import Weights
from kernels import dispatch, variants
from kernels.attention.decode_attention import decode_attention, tasks_wanted
from kernels.attention.paged_attention import paged_attention
from kernels.attention.parts import Parts
from kernels.attention.plan import AttentionPlan, plan_attention, with_parts, worst_parts_size
from kernels.kv.rope_write_kv import rope_write_kv
from kernels.layers import CompiledLayers
from kernels.norms_rope.gate_mul import gate_mul
from kernels.norms_rope.rms_norm import (
    add_rms_norm,
    add_rms_norm_rows,
    norm_add_rms_norm,
    rms_norm,
)
from kernels.norms_rope.rope import rope_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Tokens that attend, row after row, as `paged_attention` takes them."""

    starts: Tensor  # [R + 1] int32
    context_lengths: Tensor  # [R] int32
    # No row has more tokens than this; None: nobody knows.
    row_max: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """The step's inputs on the device; shapes as in `step_types.StepInputs`."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    queries: Queries
    block_tables: Tensor
    # [K] int64, the tokens whose states are wanted, and how they attend; None: all.
    logits_indices: tuple[Tensor, Queries] | None = None
    # No row has a longer context; None: nobody knows.
    context_max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Before the last norm, [K, hidden] each; their sum is what the model knows of a token."""

    hidden: Tensor
    residual: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKv:
    """The pages of a layer, and if they are fp8 their scales, [2, kv_heads] (`kernels.kv.fp8`)."""

    k_pages: Tensor
    v_pages: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, pages: Tensor, scales: Tensor | None) -> Self:
        # Memory of its own for each layer's scales, which begins where kernels expect it to.
        own = None if scales is None else scales.to(pages.device, copy=True)
        return cls(k_pages=pages[0], v_pages=pages[1], scales=own)


class _Heads(NamedTuple):
    """A step's projection by heads, and what each head is still to be normed by."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        pages: Tensor,
        *,
        context_tokens: int,
        kv_scales: Tensor | None = None,
    ) -> None:
        """`kv_scales` [layers, 2, kv_heads] go with pages in fp8."""
        self._config = config
        self.vocab_size = config.vocab_size
        self.weights = weights
        groups = config.groups
        self._group_of = [group for group, _ in groups.of_layer]
        self._kv = [
            LayerKv.of(pages[place], None if kv_scales is None else kv_scales[layer])
            for layer, (_, place) in enumerate(groups.of_layer)
        ]
        self._cos_sin = _rope_tables(config, context_tokens, pages.device)
        self._scale, self._softcap = config.attention_scale, config.blocks[0].softcap
        self._scales_logits = config.logits_divisor != 1 or config.logits_softcap is not None
        self._context_tokens = context_tokens
        self._parts: Parts | None = None
        self._tasks_wanted = tasks_wanted(
            weights.norm, heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim
        )
        # None: the operators one by one.
        self.compiled = CompiledLayers.of(
            weights.layers,
            [(kv.k_pages, kv.v_pages) for kv in self._kv],
            self._cos_sin,
            heads=config.heads,
            hidden=config.hidden_size,
            dtype=weights.norm.dtype,
            is_gelu=config.blocks[0].activation == "gelu_tanh",
            eps=config.norm_eps,
            scale=self._scale,
            groups=self._group_of,
            windows=groups.windows,
            softcap=self._softcap,
        )

    def reserve(self, *, rows: int, tokens: int) -> None:
        """From now on no step, of no more rows and tokens, takes memory for attention's parts."""
        if dispatch.path_for(self.weights.norm) != "triton":
            return
        config, norm = self._config, self.weights.norm
        size = worst_parts_size(
            rows=rows,
            tokens=tokens,
            positions=self._context_tokens,
            kv_heads=config.kv_heads,
            group=config.heads // config.kv_heads,
            head_dim=config.head_dim,
            dtype=norm.dtype,
            are_long=self.weights.is_deterministic,
        )
        self._parts = Parts.of(size, norm.device)

    def forward(self, step: StepTensors) -> States:
        """Write the step's keys and values; return the states whose logits are wanted."""
        if self.compiled is not None and dispatch.path_for(self.weights.norm) == "native":
            return self._at_once(self.compiled, self.weights.embed(step.token_ids), step)
        return self._one_by_one(step)

    def _at_once(self, layers: CompiledLayers, residual: Tensor, step: StepTensors) -> States:
        """The same bits as one by one."""
        all_queries = (step.queries.starts, step.queries.context_lengths)
        logits_indices, queries = step.logits_indices or (None, None)
        last_queries = None if queries is None else (queries.starts, queries.context_lengths)
        hidden, residual = layers(
            residual,
            step.positions,
            step.slot_mapping,
            step.block_tables,
            all_queries,
            logits_indices,
            last_queries,
        )
        return States(hidden=hidden, residual=residual)

    def _one_by_one(self, step: StepTensors) -> States:
        layers, queries = self.weights.layers, step.queries
        hidden, residual = self.weights.embed_and_norm(step.token_ids, self._config.norm_eps)
        is_in_one = self._is_in_one(step)
        plan = self._plan(len(hidden), queries, step, is_in_one=is_in_one)
        slot_mapping, block_tables = step.slot_mapping.unbind(), step.block_tables.unbind()
        for index, layer in enumerate(layers):
            is_last, group = index + 1 == len(layers), self._group_of[index]
            if is_in_one:
                hidden = self._decode(index, hidden, step, plan)
            else:
                q, projected = self._project(index, hidden, step.positions, slot_mapping[group])
                own: tuple[Tensor, Tensor] | None = projected
                if is_last and step.logits_indices is not None:
                    tokens, queries = step.logits_indices
                    q, residual = q[tokens], residual[tokens]
                    # No longer beside their keys.
                    own, plan = None, self._plan(len(q), queries, step)
                hidden = self._attend(index, q, own, block_tables[group], queries, plan)
            hidden = layer.output(hidden.flatten(1))
            hidden, residual = self._add(
                hidden, residual, layer.attention_output_norm, layer.mlp_norm
            )
            is_gelu = self._config.blocks[index].activation == "gelu_tanh"
            hidden = layer.down(gate_mul(layer.gate_up(hidden), is_gelu))
            if is_last:
                hidden = self._normed(hidden, layer.mlp_output_norm)
            else:
                hidden, residual = self._add(
                    hidden, residual, layer.mlp_output_norm, layers[index + 1].attention_norm
                )
        return States(hidden=hidden, residual=residual)

    def _normed(self, hidden: Tensor, norm: Tensor | None) -> Tensor:
        return hidden if norm is None else rms_norm(hidden, norm, self._config.norm_eps)

    def _add(
        self, branch: Tensor, residual: Tensor, output_norm: Tensor | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(what the next branch takes, residual with this branch)."""
        if output_norm is not None:
            return norm_add_rms_norm(branch, residual, output_norm, norm, self._config.norm_eps)
        if norm is not None:
            return add_rms_norm(branch, residual, norm, self._config.norm_eps)
        total = residual + branch
        return total, total

    @property
    def logits_dtype(self) -> torch.dtype:
        """The head's, of which kernels widen what they read; of logits that are scaled or capped
        float32, in which that is done.
        """
        return torch.float32 if self._scales_logits else self.weights.head.dtype

    def logits(self, states: States, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """Of some of the states, [len(tokens), vocab] of `logits_dtype`; in `out`, if given.

        Only of those whose logits are wanted: the vocabulary is wide.
        """
        norm, eps = self.weights.norm, self._config.norm_eps
        hidden = add_rms_norm_rows(states.hidden, states.residual, tokens, norm, eps)
        head = self.weights.head
        if not self._scales_logits:
            return head(hidden) if out is None else head.into(hidden, out)
        wide = head(hidden).float() if out is None else out.copy_(head(hidden))
        divisor, cap = self._config.logits_divisor, self._config.logits_softcap
        if divisor != 1:
            wide.div_(divisor)
        return wide if cap is None else wide.div_(cap).tanh_().mul_(cap)

    def _plan(
        self, tokens: int, queries: Queries, step: StepTensors, *, is_in_one: bool = False
    ) -> AttentionPlan | None:
        """Attention shared out once for all layers with these queries, where kernels want that."""
        if dispatch.path_for(self.weights.norm) != "triton":
            return None
        config = self._config
        group, pages = config.heads // config.kv_heads, self._kv[0].k_pages
        plan = plan_attention(
            queries.starts,
            queries.context_lengths,
            tokens=tokens,
            group=group,
            dtype=self.weights.norm.dtype,
            queries_max=queries.row_max,
            context_max=step.context_max or step.block_tables.size(2) * pages.size(2),
            tasks_wanted=self._tasks_wanted if is_in_one else None,
            are_long=self.weights.is_deterministic,
        )
        return with_parts(
            plan,
            rows=len(queries.context_lengths),
            tokens=tokens,
            kv_heads=config.kv_heads,
            group=group,
            head_dim=config.head_dim,
            kept=self._parts,
        )

    def _heads(self, index: int, hidden: Tensor) -> _Heads:
        config, layer = self._config, self.weights.layers[index]
        heads, kv_heads = config.heads, config.kv_heads
        qkv = layer.qkv(hidden).view(len(hidden), heads + 2 * kv_heads, config.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if config.blocks[index].qk_norm != "projection":
            return _Heads(q, k, v, layer.q_norm, layer.k_norm)
        q = self._normed(q.flatten(1), layer.q_norm).view(q.shape)
        k = self._normed(k.flatten(1), layer.k_norm).view(k.shape)
        return _Heads(q, k, v, None, None)

    def _project(
        self, index: int, hidden: Tensor, positions: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The step's queries, [T, heads, head_dim], and (keys, values), which are in the pages."""
        kv, (q, k, v, q_norm, k_norm) = self._kv[index], self._heads(index, hidden)
        q = rope_write_kv(
            q,
            k,
            v,
            positions,
            self._cos_sin[index],
            kv.k_pages,
            kv.v_pages,
            slot_mapping,
            q_norm,
            k_norm,
            self._config.norm_eps,
            kv.scales,
        )
        return q, (k, v)

    def _is_in_one(self, step: StepTensors) -> bool:
        """Whether a launch takes a layer's rows from their projection through attention."""
        if dispatch.path_for(self.weights.norm) != "triton" or step.logits_indices is not None:
            return False
        # A token is to have the same bits whether it decodes or is computed again in a chunk.
        is_wanted = variants.is_on("decode-in-one") and not self.weights.is_deterministic
        return step.queries.row_max == 1 and is_wanted

    def _decode(
        self, index: int, hidden: Tensor, step: StepTensors, plan: AttentionPlan | None
    ) -> Tensor:
        """`_project` and `_attend` of rows with a token each, [R, heads, head_dim]."""
        kv, group = self._kv[index], self._group_of[index]
        q, k, v, q_norm, k_norm = self._heads(index, hidden)
        return decode_attention(
            q,
            k,
            v,
            step.positions,
            self._cos_sin[index],
            kv.k_pages,
            kv.v_pages,
            step.slot_mapping[group],
            step.block_tables[group],
            step.queries.starts,
            step.queries.context_lengths,
            self._scale,
            q_norm,
            k_norm,
            self._config.norm_eps,
            plan,
            kv.scales,
            window=self._config.blocks[index].window_tokens,
            softcap=self._softcap,
        )

    def _attend(
        self,
        index: int,
        q: Tensor,
        own: tuple[Tensor, Tensor] | None,
        block_tables: Tensor,
        queries: Queries,
        plan: AttentionPlan | None,
    ) -> Tensor:
        kv = self._kv[index]
        return paged_attention(
            q,
            kv.k_pages,
            kv.v_pages,
            block_tables,
            queries.starts,
            queries.context_lengths,
            self._scale,
            plan,
            kv.scales,
            own=None if plan is None else own,
            window=self._config.blocks[index].window_tokens,
            softcap=self._softcap,
        )


def _rope_tables(config: ModelConfig, positions: int, device: torch.device) -> list[Tensor]:
    """Of each layer, [positions, 2, half]; layers that rotate alike share one."""
    made: dict[RopeConfig | None, Tensor] = {}
    for rope in {each.rope: None for each in config.blocks}:
        if rope is not None:
            frequencies = inverse_frequencies(rope).to(device)
            made[rope] = rope_table(positions, frequencies, rope.attention_scale)
    halves = {table.size(2) for table in made.values()} or {config.head_dim // 2}
    assert len(halves) == 1, "compiled layers rotate as many elements in each"
    # Turned by nothing, an element stays what it is, to the last bit.
    made[None] = rope_table(positions, torch.zeros(halves.pop(), device=device))
    return [made[each.rope] for each in config.blocks]
