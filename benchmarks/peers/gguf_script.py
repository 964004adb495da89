# mypy: ignore-errors
# (what it imports has no types, or is not installed where types are checked)
"""Write a checkpoint as GGUF, with a made-up vocabulary. A script for a Python that has `gguf`,
`numpy`, `torch` and `safetensors`; it imports nothing of kaiten.

    python gguf_script.py CHECKPOINT FILE --dtype bf16

llama.cpp interleaves the two halves of a rotary pair, Hugging Face puts them behind each other:
query and key rows are reordered for that. The rest is renaming.
"""

import argparse
import json
import sys
from pathlib import Path

import gguf
from safetensors.torch import load_file

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
KINDS = {
    "fp32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}


def interleaved(weight, heads):
    """Rows (half, pair) of each head as (pair, half)."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def add_header(writer, config, file_type):
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)


def add_vocabulary(writer, size):
    """Bytes where SentencePiece has them, words elsewhere: every id can be written as text."""
    tokens, kinds = ["<unk>", "<s>", "</s>"], [gguf.TokenType.UNKNOWN]
    kinds += [gguf.TokenType.CONTROL] * 2
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [gguf.TokenType.BYTE] * 256
    tokens += [f"\u2581w{index}" for index in range(len(tokens), size)]
    kinds += [gguf.TokenType.NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_scores([-float(index) for index in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


def add_weights(writer, folder, config, kind):
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        weight = tensor.float().numpy()
        short = WHOLE.get(name)
        if short is None:
            _, _, layer, inner = name.removesuffix(".weight").split(".", 3)
            part = LAYER[inner]
            weight = interleaved(weight, heads[part]) if part in heads else weight
            short = f"blk.{layer}.{part}.weight"
        if weight.ndim == 1:
            writer.add_tensor(short, weight)
        else:
            writer.add_tensor(short, gguf.quants.quantize(weight, kind), raw_dtype=kind)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", choices=KINDS, required=True)
    chosen = parser.parse_args()
    config = json.loads((chosen.checkpoint / "config.json").read_text())
    kind, file_type = KINDS[chosen.dtype]
    writer = gguf.GGUFWriter(str(chosen.file), "llama")
    writer.add_name(chosen.checkpoint.name)
    add_header(writer, config, file_type)
    add_vocabulary(writer, config["vocab_size"])
    add_weights(writer, chosen.checkpoint, config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
