"""What one block of a decoder is: the decoder, the weight names and the compiled layers read it.

h = norm(x)                     if norms stand before ("pre", "both")
q, k, v = qkv(h)                q, k normalised by head or over all heads; rotated by `rope`
a = output(attention(q, k, v))
x += norm(a)                    if norms stand after ("post", "both"), else a
... and the same around down(activation(gate) * up)
"""

from dataclasses import dataclass
from typing import Final, Literal

from gpu_worker.model.rope import RopeConfig

NormPlace = Literal["pre", "post", "both"]
# Of one head, or of the whole projection.
QkNorm = Literal["head", "projection"]


Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    norms: NormPlace = "pre"
    # None: queries and keys are as projected.
    qk_norm: QkNorm | None = None
    # None: the layer knows no positions.
    rope: RopeConfig | None
    # Tokens back to which attention reaches, or None when it reaches everything.
    window_tokens: int | None = None
    # Products of queries and keys stay within it, smoothly; None: they are as they are.
    softcap: float | None = None
    activation: Activation = "silu"
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    # The checkpoint has q, k, v as one tensor, and gate and up.
    is_stacked: bool = False


# Field of `LayerWeights` -> its tensor, by where the norms stand.
NORM_NAMES: Final[dict[NormPlace, dict[str, str]]] = {
    "pre": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "post": {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}
