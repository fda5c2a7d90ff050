"""Llama-shaped checkpoints as GGUF files, in the types of blocks that ``gguf`` quantises.

    python -m bench.peers.gguf_writer FOLDER TYPE FILE

Needs ``gguf``, ``numpy`` and ``safetensors``, and nothing of ours: it runs in llama.cpp's environment,
too.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_BELOW_8_BITS = frozenset(BLOCK_TYPES[4:])


def write_gguf(source: Path, kind: str, target: Path, weights: Any = None) -> None:
    """A Llama-shaped checkpoint of one safetensors file, with a byte-level BPE, as GGUF. ``weights``:
    names and fp32 arrays in place of the file's.

    ``kind``: one of ``BLOCK_TYPES``, which matrices become; norms stay fp32. Below 8 bits the embedding,
    which is the head as well where they are tied, is q8_0, as llama.cpp's own tool keeps it in more bits.
    """
    gguf = import_module("gguf")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(target), "llama")
    file_type = "ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    _write_shape(writer, config)
    _write_tokenizer(writer, gguf, source, config)
    for name, weight in weights or _weights(source):
        if name.endswith("q_proj.weight"):
            weight = _interleaved(weight, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = _interleaved(weight, config["num_key_value_heads"])
        wanted = "q8_0" if kind in _BELOW_8_BITS and "embed_tokens" in name else kind
        if weight.ndim == 1:
            wanted = "f32"
        type_ = gguf.GGMLQuantizationType[wanted.upper()]
        data = gguf.quants.quantize(weight, type_)
        writer.add_tensor(_tensor_name(name), data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(writer: Any, gguf: Any, source: Path, config: dict[str, Any]) -> None:
    data = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token_id: token for token, token_id in data["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in data["added_tokens"]}
    count = config["vocab_size"]
    types = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    splits_digits = "'Digits'" in str(data["pre_tokenizer"])
    writer.add_tokenizer_pre("smollm" if splits_digits else "gpt-2")
    writer.add_token_list(
        [special.get(at) or ids.get(at) or f"<unused {at}>" for at in range(count)]
    )
    writer.add_token_types(
        [
            types.CONTROL if at in special else types.NORMAL if at in ids else types.UNUSED
            for at in range(count)
        ]
    )
    merges = data["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    template = source / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def _weights(source: Path) -> Any:
    """Names and fp32 arrays."""
    numpy = import_module("numpy")
    raw = (source / "model.safetensors").read_bytes()
    for name, tensor in import_module("safetensors").deserialize(raw):
        if tensor["dtype"] == "BF16":
            half = numpy.frombuffer(tensor["data"], dtype=numpy.uint16)
            flat = (half.astype(numpy.uint32) << 16).view(numpy.float32)
        else:
            kinds = {"F32": numpy.float32, "F16": numpy.float16}
            flat = numpy.frombuffer(tensor["data"], kinds[tensor["dtype"]]).astype(numpy.float32)
        yield name, flat.reshape(tensor["shape"])


def _interleaved(weight: Any, num_heads: int) -> Any:
    """llama.cpp rotates neighbours, transformers halves: rows of a head change places."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return import_module("numpy").ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _tensor_name(name: str) -> str:
    """GGUF's name for transformers'. Raises KeyError for what a Llama has not."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    at, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{int(at)}.{_IN_LAYER[part.removesuffix('.weight')]}.weight"


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
