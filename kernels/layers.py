"""layers: all layers of a decoder over one step, in one compiled call (CPU).

formula  of each layer, x being the residual:
         h = rms_norm(x); q, k, v = qkv(h); rope_write_kv; x += output(paged_attention(q))
         x += down(gate_mul(gate_up(rms_norm(x))))
shapes   residual         [tokens, hidden]        float32 | bfloat16, the embeddings; written
         positions, starts, contexts               as for rope_write_kv and paged_attention
         slot_mapping [groups, tokens] int64, tables [groups, rows, blocks_max] int32: the same,
                                  of each layer group; a layer reads and writes by its own
         logits_indices           [K] int64 ascending: the tokens that leave the last layer, with
                                  starts and contexts of their own; None: all
returns  (output of the last layer's down, residual), [K, hidden] each: what is left is their sum
exact    the same bits as the operators one by one, of which it consists
paths    native only (cpp/layers.cpp), where every operator has a native path
cost     that of its operators; between them nothing is allocated, checked or asked of Python.
         3 * inner + hidden elements (or the queries, keys and values, if they are more) of each
         token of the largest step yet stay
measured 2026-11-20, a whole step of 125M parameters in bfloat16, one thread, at once / one by one:
         1 row 7.7/9.1 ms, 16 rows 21.7/23.7, 64 rows 84.8/87.6, 64 rows + a chunk of 448 504/514
         (benchmarks.worker.step_profile)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from kernels import dispatch, native
from kernels.attention.paged_attention import HEAD_DIM_MAX
from kernels.checks import require, require_ids
from kernels.cpp.library import LayerLinear, LayerParts, Layers, Queries
from kernels.linear.packed_linear import PackedLinear


class LayerWeights(Protocol):
    """What a layer consists of; the norms of heads are both there, or both None."""

    @property
    def attention_norm(self) -> Tensor | None: ...
    @property
    def attention_output_norm(self) -> Tensor | None: ...
    @property
    def qkv(self) -> PackedLinear: ...
    @property
    def q_norm(self) -> Tensor | None: ...
    @property
    def k_norm(self) -> Tensor | None: ...
    @property
    def output(self) -> PackedLinear: ...
    @property
    def mlp_norm(self) -> Tensor | None: ...
    @property
    def mlp_output_norm(self) -> Tensor | None: ...
    @property
    def gate_up(self) -> PackedLinear: ...
    @property
    def down(self) -> PackedLinear: ...


Pages = tuple[Tensor, Tensor]


class CompiledLayers:
    """Of one thread at a time: its steps share their memory."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerWeights],
        pages: Sequence[Pages],
        cos_sin: Sequence[Tensor],
        *,
        heads: int,
        hidden: int,
        dtype: torch.dtype,
        is_gelu: bool,
        eps: float,
        scale: float,
        groups: Sequence[int],
        windows: Sequence[int | None],
        softcap: float | None = None,
    ) -> Self | None:
        """None where an operator has no native path: then they are called one by one.

        `groups` of each layer; of each group the window, None: everything.
        """
        k_pages, _ = pages[0]
        if dispatch.path_for(k_pages) != "native" or k_pages.dtype != dtype:
            return None
        if k_pages.size(3) > HEAD_DIM_MAX or not all(map(_is_native, layers)):
            return None
        each = zip(layers, pages, cos_sin, groups, strict=True)
        compiled = Layers(
            native.compiled(),
            [_parts(layer, *own, table, group) for layer, own, table, group in each],
            heads=heads,
            hidden=hidden,
            inner=layers[0].down.in_features,
            is_gelu=is_gelu,
            eps=eps,
            scale=scale,
            windows=[window or 0 for window in windows],
            softcap=softcap or 0.0,
        )
        return cls(compiled)

    def __call__(
        self,
        residual: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        tables: Tensor,
        queries: Queries,
        logits_indices: Tensor | None = None,
        last_queries: Queries | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`queries` are (starts, contexts) of all tokens, `last_queries` of `logits_indices`."""
        tokens, rows = len(residual), len(queries[1])
        require(residual.is_contiguous(), "residual", "must be contiguous")
        require_ids(positions, "positions", dtype=torch.int64, shape=(tokens,))
        require_ids(slot_mapping, "slot_mapping", dtype=torch.int64, shape=(len(tables), tokens))
        _require_queries(queries, rows)
        require(
            (logits_indices is None) == (last_queries is None),
            "logits_indices",
            "needs its queries",
        )
        if logits_indices is not None and last_queries is not None:
            require_ids(
                logits_indices, "logits_indices", dtype=torch.int64, shape=(logits_indices.numel(),)
            )
            _require_queries(last_queries, rows)
        require(tables.dtype == torch.int32, "tables", "must be int32")
        is_dense = tables.dim() == 3 and (tables.size(2) <= 1 or tables.stride(2) == 1)
        require(
            is_dense and tables.size(1) == rows, "tables", "must have a dense row for each context"
        )
        return self._layers.run(
            residual, positions, slot_mapping, tables, queries, logits_indices, last_queries
        )


def _is_native(layer: LayerWeights) -> bool:
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return all(linear.native_weight is not None for linear in linears)


def _parts(
    layer: LayerWeights, k_pages: Tensor, v_pages: Tensor, cos_sin: Tensor, group: int
) -> LayerParts:
    return LayerParts(
        attention_norm=layer.attention_norm,
        attention_output_norm=layer.attention_output_norm,
        mlp_norm=layer.mlp_norm,
        mlp_output_norm=layer.mlp_output_norm,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        qkv=_linear(layer.qkv),
        output=_linear(layer.output),
        gate_up=_linear(layer.gate_up),
        down=_linear(layer.down),
        cos_sin=cos_sin,
        k_pages=k_pages,
        v_pages=v_pages,
        group=group,
    )


def _linear(of: PackedLinear) -> LayerLinear:
    assert of.native_weight is not None, "asked by _is_native"
    packed, scales = of.native_weight
    return packed, of.bias, scales, of.in_features, of.out_features


def _require_queries(queries: Queries, rows: int) -> None:
    starts, contexts = queries
    require_ids(starts, "query_starts", dtype=torch.int32, shape=(rows + 1,))
    require_ids(contexts, "context_lengths", dtype=torch.int32, shape=(rows,))
