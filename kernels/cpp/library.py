"""The compiled kernels as Python calls them: tensors in, tensors out, one C call between.

Launchers have checked shapes, dtypes and strides; the library checks ids and lengths inside tensors
and refuses them as an IndexError that names the argument.

Arguments cross as the bytes of a struct of kernels.h: packing one takes a third of the time that
ctypes needs for as many arguments (2026-11-23: 0.8 µs against 2.4), and new_empty with the sizes
one by one half of that of torch.empty. A step's thread leaves the interpreter's lock to others
while it computes.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final, NoReturn

import torch
from torch import Tensor

from kernels.checks import require

# Fields in the order of kernels.h: P pointer, q int64, i int, f float, ? bool.
_ATTENTION: Final = Struct("7P5q6i2f?")
_NORM: Final = Struct("5P7qf?")
_GATE: Final = Struct("2P3q2?")
_ROPE: Final = Struct("4P4q4i?")
_WRITE_KV: Final = Struct("5P7q")
_PACK: Final = Struct("2P2q?")
_UNPACK: Final = Struct("4P3q?")
_LINEAR: Final = Struct("5P3q2?")
_PACK_INT4: Final = Struct("4P2q?")
_LAYER: Final = Struct("6P" + 4 * "3P3q" + "3P3q")
_LAYERS: Final = Struct("2P6q5i3f2?")
_LAYER_STEP: Final = Struct("7P4q" + 2 * "2Pq")
_SAMPLE: Final = Struct("10P2q?")
_MASK: Final = Struct("3P4q")
_CALLS: Final = (
    "paged_attention", "rms_norm", "gate_mul", "rope", "write_kv", "pack_linear", "pack_int8",
    "pack_int4", "unpack_rows", "linear", "sample", "mask_logits",
)  # fmt: skip
_OUT_OF_RANGE: Final = 1

_Call = Callable[[bytes, int], int]
# What `pack_int4` packs into: bytes of codes, scales and zeros.
_INT4: Final = torch.uint8
# A packed weight; its bias; its scales, if it is int8; its inputs and outputs.
LayerLinear = tuple[Tensor, Tensor | None, Tensor | None, int, int]
Queries = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What one layer consists of."""

    attention_norm: Tensor | None
    attention_output_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp_output_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: LayerLinear
    output: LayerLinear
    gate_up: LayerLinear
    down: LayerLinear
    cos_sin: Tensor
    k_pages: Tensor
    v_pages: Tensor
    group: int


class Library:
    """One binary, loaded. OSError: it is none, or needs what this machine lacks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._c = ctypes.CDLL(str(path))
        for name in _CALLS:
            self._function(name, ctypes.c_char_p, ctypes.c_int)
        self._function("run_layers", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
        self._function("has_linear", ctypes.c_int, ctypes.c_int64)
        self._function("packed_rows", ctypes.c_int64, returns=ctypes.c_int64)
        self._function("packed_int4_bytes", ctypes.c_int64, ctypes.c_int64, returns=ctypes.c_int64)
        size = ctypes.c_char_p, ctypes.c_int64
        self._function("layers_scratch_bytes", *size, returns=ctypes.c_int64)
        self._function("noise_bits", *(4 * (ctypes.c_int64,)), ctypes.c_void_p, returns=None)
        self._function("instructions", returns=ctypes.c_char_p)
        self._function("refusal", returns=ctypes.c_char_p)

    def _function(self, name: str, *takes: type, returns: type | None = ctypes.c_int) -> None:
        function = getattr(self._c, f"kaiten_{name}")
        function.argtypes, function.restype = takes, returns

    def instructions(self) -> str:
        """Of which vector unit it makes use: the name of its variant."""
        return str(self._c.kaiten_instructions().decode())

    def paged_attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lengths: Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """`window`, `softcap` 0: none."""
        tokens, heads, head_dim = q.shape
        blocks, kv_heads, block_size, _ = k_pages.shape
        out = q.new_empty(tokens, heads, head_dim)
        arguments = _ATTENTION.pack(
            q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), out.data_ptr(),
            block_tables.data_ptr(), query_starts.data_ptr(), context_lengths.data_ptr(),
            q.stride()[0], block_tables.stride()[0], tokens, block_tables.shape[1], blocks,
            context_lengths.shape[0], heads, kv_heads, head_dim, block_size, window,
            scale, softcap, q.dtype is torch.bfloat16,
        )  # fmt: skip
        self._run(self._c.kaiten_paged_attention, arguments)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = x.new_empty(*x.shape)
        arguments = _NORM.pack(
            x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
            *_rows(x), *_strides(x), 0, 0, eps, x.dtype is torch.bfloat16,
        )  # fmt: skip
        self._run(self._c.kaiten_rms_norm, arguments)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, total = x.new_empty(*x.shape), x.new_empty(*x.shape)
        arguments = _NORM.pack(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(),
            *_rows(x), *_strides(x), *_strides(residual), eps, x.dtype is torch.bfloat16,
        )  # fmt: skip
        self._run(self._c.kaiten_rms_norm, arguments)
        return out, total

    def gate_mul(self, gate_up: Tensor, is_gelu: bool) -> Tensor:
        tokens, both = gate_up.shape
        out = gate_up.new_empty(tokens, both // 2)
        arguments = _GATE.pack(
            gate_up.data_ptr(), out.data_ptr(), tokens, both // 2, gate_up.stride()[0],
            gate_up.dtype is torch.bfloat16, is_gelu,
        )  # fmt: skip
        self._run(self._c.kaiten_gate_mul, arguments)
        return out

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        tokens, heads, head_dim = q.shape
        positions_max, _, half = cos_sin.shape
        arguments = _ROPE.pack(
            q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(),
            tokens, q.stride()[0], k.stride()[0], positions_max,
            heads, k.shape[1], head_dim, half, q.dtype is torch.bfloat16,
        )  # fmt: skip
        self._run(self._c.kaiten_rope, arguments)

    def write_kv(
        self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor
    ) -> None:
        tokens, kv_heads, head_dim = k.shape
        blocks, _, block_size, _ = k_pages.shape
        size = k.dtype.itemsize
        arguments = _WRITE_KV.pack(
            k.data_ptr(), v.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(),
            slot_mapping.data_ptr(), tokens, k.stride()[0] * size, v.stride()[0] * size,
            block_size, kv_heads, head_dim * size, blocks * block_size,
        )  # fmt: skip
        self._run(self._c.kaiten_write_kv, arguments)

    def has_linear(self, weight: Tensor) -> bool:
        is_bf16 = weight.dtype is torch.bfloat16
        return bool(self._c.kaiten_has_linear(is_bf16, weight.shape[1]))

    def packed_shape(self, weight: Tensor) -> tuple[int, int]:
        return int(self._c.kaiten_packed_rows(weight.shape[0])), weight.shape[1]

    def pack_linear(self, weight: Tensor, packed: Tensor) -> None:
        """`packed` is of `packed_shape`, aligned to 64 bytes, as for the next."""
        self._run(self._c.kaiten_pack_linear, _pack(weight, packed, weight.dtype))

    def pack_int8(self, codes: Tensor, packed: Tensor, dtype: torch.dtype) -> None:
        """In the layout for an x of `dtype`."""
        self._run(self._c.kaiten_pack_int8, _pack(codes, packed, dtype))

    def packed_int4_bytes(self, outputs: int, inputs: int) -> int:
        return int(self._c.kaiten_packed_int4_bytes(outputs, inputs))

    def pack_int4(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, packed: Tensor, dtype: torch.dtype
    ) -> None:
        """As kernels.h has them, for an x of `dtype`; `packed` of uint8, aligned to 64 bytes."""
        outputs, pairs = codes.shape
        arguments = _PACK_INT4.pack(
            codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(), packed.data_ptr(),
            outputs, 2 * pairs, dtype is torch.bfloat16,
        )  # fmt: skip
        self._run(self._c.kaiten_pack_int4, arguments)

    def unpack_rows(self, packed: Tensor, ids: Tensor, out_features: int) -> Tensor:
        return self._unpacked(packed, ids, out_features, packed.dtype, None)

    def unpack_int8_rows(
        self, packed: Tensor, scales: Tensor, ids: Tensor, dtype: torch.dtype
    ) -> Tensor:
        return self._unpacked(packed, ids, scales.shape[0], dtype, scales)

    def _unpacked(
        self, packed: Tensor, ids: Tensor, outputs: int, dtype: torch.dtype, scales: Tensor | None
    ) -> Tensor:
        count, inputs = ids.numel(), packed.shape[1]
        rows = torch.empty(count, inputs, dtype=dtype)
        arguments = _UNPACK.pack(
            packed.data_ptr(), ids.data_ptr(), rows.data_ptr(), _at(scales),
            count, inputs, outputs, dtype is torch.bfloat16,
        )  # fmt: skip
        self._run(self._c.kaiten_unpack_rows, arguments)
        return rows

    def linear(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        out_features: int,
        scales: Tensor | None = None,
    ) -> Tensor:
        rows, inputs = x.shape
        y = x.new_empty(rows, out_features)
        arguments = _LINEAR.pack(
            x.data_ptr(), packed.data_ptr(), _at(bias), _at(scales), y.data_ptr(),
            rows, inputs, out_features, x.dtype is torch.bfloat16, packed.dtype is _INT4,
        )  # fmt: skip
        self._run(self._c.kaiten_linear, arguments)
        return y

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        choice: Tensor,
        position: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(token_ids, ok); of padding 0 and False."""
        rows, vocab = logits.shape
        token_ids = position.new_empty(rows)
        ok = torch.empty(rows, dtype=torch.bool)
        arguments = _SAMPLE.pack(
            logits.data_ptr(), temperature.data_ptr(), top_p.data_ptr(), min_p.data_ptr(),
            top_k.data_ptr(), seed.data_ptr(), choice.data_ptr(), position.data_ptr(),
            token_ids.data_ptr(), ok.data_ptr(), rows, vocab, logits.dtype is torch.bfloat16,
        )  # fmt: skip
        self._run(self._c.kaiten_sample, arguments)
        return token_ids, ok

    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        count, words = masks.shape
        arguments = _MASK.pack(
            logits.data_ptr(), rows.data_ptr(), masks.data_ptr(), count, words, *logits.shape
        )
        self._run(self._c.kaiten_mask_logits, arguments)

    def noise_bits(self, seed: int, choice: int, position: int, vocab: int) -> Tensor:
        bits = torch.empty(vocab, dtype=torch.int64)
        self._c.kaiten_noise_bits(seed, choice, position, vocab, bits.data_ptr())
        return bits

    def layers_scratch_bytes(self, layers: bytes, tokens: int) -> int:
        return int(self._c.kaiten_layers_scratch_bytes(layers, tokens))

    def run_layers(self, layers: bytes, step: bytes) -> None:
        """Packed by `Layers`."""
        if code := self._c.kaiten_run_layers(layers, step, torch.get_num_threads()):
            self._refuse(code)

    def _run(self, call: _Call, arguments: bytes) -> None:
        if code := call(arguments, torch.get_num_threads()):
            self._refuse(code)

    def _refuse(self, code: int) -> NoReturn:
        rule = self._c.kaiten_refusal().decode()
        raise IndexError(rule) if code == _OUT_OF_RANGE else RuntimeError(rule)


class Layers:
    """All layers of a decoder, and the memory that their steps share: of one thread at a time."""

    def __init__(
        self,
        library: Library,
        parts: Sequence[LayerParts],
        *,
        heads: int,
        hidden: int,
        inner: int,
        is_gelu: bool,
        eps: float,
        scale: float,
        windows: Sequence[int],
        softcap: float,
    ) -> None:
        """`windows` of each group; there and in `softcap` 0: none."""
        first = parts[0]
        blocks, kv_heads, block_size, head_dim = first.k_pages.shape
        for part in parts:
            require(part.cos_sin.shape == first.cos_sin.shape, "cos_sin", "must all have one shape")
        self._library, self._hidden, self._groups = library, hidden, len(windows)
        # Alive as long as the library reads them.
        self._parts = tuple(parts)
        self._windows = torch.tensor(windows, dtype=torch.int64)
        packed = b"".join(_packed_layer(part, head_dim, windows[part.group]) for part in parts)
        self._layers = ctypes.create_string_buffer(packed)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._sizes = _LAYERS.pack(
            ctypes.addressof(self._layers), self._windows.data_ptr(),
            len(parts), hidden, inner, len(windows), len(first.cos_sin), blocks,
            heads, kv_heads, head_dim, first.cos_sin.size(2), block_size,
            eps, scale, softcap, first.k_pages.dtype is torch.bfloat16, is_gelu,
        )  # fmt: skip

    def run(
        self,
        residual: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        tables: Tensor,
        queries: Queries,
        logits_indices: Tensor | None,
        last_queries: Queries | None,
    ) -> tuple[Tensor, Tensor]:
        """(the last layer's output, residual) of `logits_indices`, or of all tokens.

        `residual` holds the embeddings, and is written.
        """
        require(tables.shape[0] == self._groups, "tables", "must have one for each layer group")
        tokens = residual.shape[0]
        last = tokens if logits_indices is None else logits_indices.shape[0]
        out = residual.new_empty(last, self._hidden)
        starts, contexts = queries
        last_starts, last_contexts = last_queries or queries
        step = _LAYER_STEP.pack(
            residual.data_ptr(), out.data_ptr(), self._scratch_of(tokens),
            positions.data_ptr(), slot_mapping.data_ptr(), tables.data_ptr(), _at(logits_indices),
            contexts.shape[0], *tables.stride()[:2], tables.shape[2],
            starts.data_ptr(), contexts.data_ptr(), tokens,
            last_starts.data_ptr(), last_contexts.data_ptr(), last,
        )  # fmt: skip
        self._library.run_layers(self._sizes, step)
        return out, residual[:last]

    def _scratch_of(self, tokens: int) -> int:
        """Grows to what the largest step needs, and stays."""
        size = self._library.layers_scratch_bytes(self._sizes, tokens)
        if self._scratch.numel() < size:
            # Before the new one is there the old one is given back.
            self._scratch = torch.empty(0, dtype=torch.uint8)
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch.data_ptr()


def _packed_layer(of: LayerParts, head_dim: int, window: int) -> bytes:
    linears = (of.qkv, of.output, of.gate_up, of.down)
    return _LAYER.pack(
        _at(of.attention_norm), _at(of.attention_output_norm), _at(of.mlp_norm),
        _at(of.mlp_output_norm), _at(of.q_norm), _at(of.k_norm),
        *(number for linear in linears for number in _packed_weight(linear)),
        of.cos_sin.data_ptr(), of.k_pages.data_ptr(), of.v_pages.data_ptr(),
        of.q_norm is not None and of.q_norm.numel() != head_dim, of.group, window,
    )  # fmt: skip


def _packed_weight(linear: LayerLinear) -> tuple[int, ...]:
    packed, bias, scales, inputs, outputs = linear
    return _at(packed), _at(bias), _at(scales), inputs, outputs, packed.dtype is _INT4


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _rows(x: Tensor) -> tuple[int, int, int]:
    """Rows, those of a token, and their length, of a matrix or of heads."""
    if x.dim() == 2:
        rows, hidden = x.shape
        return rows, 1, hidden
    tokens, heads, hidden = x.shape
    return tokens * heads, heads, hidden


def _strides(x: Tensor) -> tuple[int, int]:
    strides = x.stride()
    return strides[0], strides[1] if len(strides) == 3 else 0


def _pack(weight: Tensor, packed: Tensor, dtype: torch.dtype) -> bytes:
    outputs, inputs = weight.shape
    return _PACK.pack(
        weight.data_ptr(), packed.data_ptr(), outputs, inputs, dtype is torch.bfloat16
    )
