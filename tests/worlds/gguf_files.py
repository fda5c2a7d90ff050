"""GGUF files of a few hundred kilobytes: a tiny Llama with random weights and a tokenizer of bytes,
written by gguf's own writer as llama.cpp's conversion does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH, GGMLQuantizationType, TokenType
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from bench.gguf_types import fitting, pack
from engine.weights.gguf.blocks import GgufEmbedding, GgufWeight
from engine.weights.gguf.file import GgufHeader
from engine.weights.gguf.tokenizer import gguf_tokenizer
from engine.weights.index import TensorIndex

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONTROL = ["<|unk|>", "<|start|>", "<|end|>", "<|eot_id|>"]
_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3"]
TOKENS = [*CONTROL, *bytes_to_unicode().values(), *(each.replace(" ", "") for each in _MERGES)]
NUM_LAYERS = 2
_SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
}
Values = dict[str, Any]
Tensors = dict[str, np.ndarray[Any, Any]]


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Frequencies scaled as in Llama 3.1 and later."""


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Tied, with weights large enough for its scores to matter."""
    sizes = _SIZES | {
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()


def values_of(model: LlamaForCausalLM) -> Values:
    """Returns the keys and values of a model's file, tokenizer included."""
    config = model.config
    return {
        "general.architecture": "llama",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.attention.key_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [
            int(TokenType.CONTROL if each in CONTROL else TokenType.NORMAL) for each in TOKENS
        ],
        "tokenizer.ggml.merges": _MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def gemma_vocabulary(space: str) -> Values:
    """Gemma's tokenizer in small: pieces by score, and runs of up to 31 of one white space, which are
    user-defined and matched before anything is merged. ``space``: how the file spells spaces in them."""
    runs = [char * size for char in ("\n", "\t", space) for size in range(1, 32)]
    kinds = {
        TokenType.CONTROL: ["<pad>", "<eos>", "<bos>", "<unk>"],
        TokenType.USER_DEFINED: [*(each for each in runs if each != space), "<b>"],
        TokenType.BYTE: [f"<0x{byte:02X}>" for byte in range(256)],
        TokenType.NORMAL: ["a", "b", "\u2581", "ab", "\u2581a", "\u2581ab"],
    }
    tokens = [(token, int(kind)) for kind, several in kinds.items() for token in several]
    named = {"padding": 0, "eos": 1, "bos": 2, "unknown": 3}
    return {
        "general.architecture": "gemma2",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in named.items()},
    }


def header_of(values: Mapping[str, Any]) -> GgufHeader:
    """The header of a file without tensors; None leaves a value out."""
    said = {key: value for key, value in values.items() if value is not None}
    return GgufHeader(said, TensorIndex({}), {})


def tokenizer_of(values: Mapping[str, Any]) -> Any:
    return gguf_tokenizer(header_of(values))


def with_tokens(values: Values, more: Mapping[str, TokenType]) -> Values:
    """A vocabulary with tokens of these kinds behind its own."""
    added: Values = {"tokens": [*more], "token_type": [int(kind) for kind in more.values()]}
    if "tokenizer.ggml.scores" in values:
        added["scores"] = [-999.0] * len(more)
    longer = {f"tokenizer.ggml.{name}": each for name, each in added.items()}
    return values | {key: [*values[key], *each] for key, each in longer.items()}


def places_of(model: PreTrainedModel) -> dict[str, GgufWeight | GgufEmbedding]:
    named = model.named_modules(remove_duplicate=False)
    return {name: each for name, each in named if isinstance(each, GgufWeight | GgufEmbedding)}


def meant(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's values by name, whatever its places hold."""
    places = places_of(model).items()
    weights = {f"{name}.weight": each.dequantized(model.dtype) for name, each in places}
    return model.state_dict() | weights


def tensors_of(model: LlamaForCausalLM) -> Tensors:
    """Returns the tensors by llama.cpp's names, queries and keys in its order of dimensions."""
    names = gguf.get_tensor_name_map(MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    found = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        for part, num_heads in heads.items():
            if part in name:
                halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        found[stored] = np.ascontiguousarray(weight)
    return found


def write_gguf(
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    model: LlamaForCausalLM | None = None,
    values: Mapping[str, Any] | None = None,
    change_tensors: Callable[[Tensors], object] = lambda _: None,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """``kind``: of the matrices whose rows it fits, else the one that llama.cpp takes instead.
    ``kinds``: of some of them by name. ``values``: said besides, or otherwise; None leaves one out."""
    model = model or tiny_llama()
    said = {**values_of(model), **(values or {})}
    tensors = tensors_of(model)
    change_tensors(tensors)
    writer = gguf.GGUFWriter(path, said.pop("general.architecture"))
    for key, value in said.items():
        if value is not None:
            add_value(writer, key, value)
    for name, weight in tensors.items():
        wanted = (kinds or {}).get(name, kind)
        if weight.ndim == 1 or wanted == GGMLQuantizationType.F32:
            writer.add_tensor(name, weight)
        else:
            own = fitting(wanted, weight.shape[1])
            writer.add_tensor(name, pack(weight, own), raw_dtype=own)
    return written(writer, path)


def any_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """A tiny model of any architecture. Sizes that its files do not say have to be those of its class."""
    sizes = _SIZES | {"max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def write_any(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    kind: GGMLQuantizationType,
    values: Mapping[str, Any] | None = None,
) -> Path:
    """A file with a model's parameters under the names, and its sizes under the keys, that transformers
    reads. Parameters are not turned about as llama.cpp's conversion does: readers are compared on it, and
    what they make of it is another model. ``values``: said besides, or otherwise."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    said: Values = {}
    for key, name in GGUF_CONFIG_MAPPING[config.model_type.removesuffix("_text")].items():
        value = 10000.0 if name == "rope_theta" else getattr(config, str(name), None)
        if value is not None:
            said[f"{architecture}.{key}"] = value
    said[f"{architecture}.attention.key_length"] = config.head_dim
    own_values = values_of(tiny_llama()).items()
    said |= {key: value for key, value in own_values if key.startswith("tokenizer.")}
    for key, value in (said | {**(values or {})}).items():
        add_value(writer, key, value)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    own = model.state_dict()
    left_out = "lm_head.weight" if config.tie_word_embeddings else ""
    for stored, name in get_gguf_hf_weights_map(model, processor).items():
        if name == left_out:
            continue
        weight = own[name].numpy()
        if stored.endswith(("gate_exps", "up_exps")):
            weight = np.ascontiguousarray(weight[:, : config.moe_intermediate_size])
        full_name = stored if "." in stored[-7:] else f"{stored}.weight"
        if weight.ndim == 1:
            writer.add_tensor(full_name, weight)
        else:
            rows = pack(weight.reshape(-1, weight.shape[-1]), kind)
            writer.add_tensor(full_name, rows.reshape(*weight.shape[:-1], -1), raw_dtype=kind)
    return written(writer, path)


def split_in_three(whole: Path, folder: Path) -> list[Path]:
    """As llama.cpp's gguf-split does: metadata in the first part alone."""
    reader = gguf.GGUFReader(whole)
    paths = [folder / f"tiny-{number + 1:05d}-of-00003.gguf" for number in range(3)]
    values = values_of(tiny_llama())
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, values["general.architecture"])
        if number:
            writer.kv_data = [{}]
        for key, value in values.items() if not number else ():
            if key != "general.architecture":
                add_value(writer, key, value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        for tensor in reader.tensors[number::3]:
            writer.add_tensor(tensor.name, tensor.data)
        written(writer, path)
    return paths


def written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    _ADD[type(value)](writer, key, value)


_ADD: dict[type, Callable[[gguf.GGUFWriter, str, Any], None]] = {
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    bool: gguf.GGUFWriter.add_bool,
    str: gguf.GGUFWriter.add_string,
    list: gguf.GGUFWriter.add_array,
}
