"""GGUF files of other types: one rewritten with its blocks in another type, or a model of any shape with
random weights.

    python -m bench.gguf_types SOURCE TARGET --type Q4_K
    python -m bench.gguf_types SOURCE TARGET --random [--architecture gemma3]

Types are rounded to nearest, which is coarser than llama.cpp's search for scales: files are for
measuring time and memory and for telling implementations apart, not for serving.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType
from gguf.quants import dequantize, quantize

from engine.names import locate
from engine.weights.gguf.file import GgufHeader, find_gguf, read_header
from engine.weights.index import StoredTensor

Array = np.ndarray[Any, Any]
Kind = GGMLQuantizationType
FALLBACKS = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}
"""The types llama.cpp takes for rows that are no multiple of 256."""
KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, *FALLBACKS)
_VALUES = {Kind.F32, Kind.F16, Kind.BF16}
_ALIGNMENT = 32
_AT_ONCE = 1 << 22
"""Values that are converted at once."""
_POOL_BLOCKS = 1 << 14
_WINDOW = 512
"""The window of a Gemma 3 of 1 B."""
ARCHITECTURES = ("llama", "qwen3moe", "gemma3")
_STD = 0.02


def pack(weights: Array, kind: Kind) -> Array:
    """Returns rows of blocks ``[rows, bytes]`` for weights ``[rows, features]`` in float32."""
    if kind not in FALLBACKS:
        packed: Array = quantize(weights, kind)
        return packed
    blocks = weights.astype(np.float32).reshape(-1, 256)
    made = _pack_q6_k(blocks) if kind == Kind.Q6_K else _pack_with_minima(blocks, kind)
    return made.reshape(len(weights), -1)


def fitting(kind: Kind, in_features: int) -> Kind:
    """Returns the type for rows of so many values."""
    return FALLBACKS.get(kind, kind) if in_features % 256 else kind


def _pack_with_minima(blocks: Array, kind: Kind) -> Array:
    """Q4_K and Q5_K: 8 runs of 32 values, each with a scale and a minimum of 6 bits."""
    most = 15 if kind == Kind.Q4_K else 31
    runs = blocks.reshape(-1, 8, 32)
    least = np.minimum(runs.min(-1), 0)
    step, steps = _whole_parts((runs.max(-1) - least) / most, 63)
    down, downs = _whole_parts(-least, 63)
    scales, minima = _product(step, steps), _product(down, downs)
    codes = np.rint((runs + minima) / np.where(scales == 0, 1, scales)).clip(0, most)
    codes = codes.astype(np.uint8)
    high = [np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0]] if most == 31 else []
    pairs = codes.reshape(-1, 4, 2, 32) & 15
    low = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.hstack([_bytes(step), _bytes(down), _six_bits(steps, downs), *high, low])


def _six_bits(scales: Array, minima: Array) -> Array:
    """Lays 8 scales and 8 minima out in 12 bytes."""
    scales, minima = scales.astype(np.uint8), minima.astype(np.uint8)
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    return np.hstack([first, second, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4])


def _pack_q6_k(blocks: Array) -> Array:
    """16 runs of 16 values, each with a signed scale of 8 bits."""
    runs = blocks.reshape(-1, 16, 16)
    largest = np.take_along_axis(runs, np.abs(runs).argmax(-1, keepdims=True), -1)[..., 0]
    step, steps = _whole_parts(largest / -32, 127)
    scales = _product(step, steps)
    codes = np.rint(runs / np.where(scales == 0, 1, scales)).clip(-32, 31) + 32
    codes = codes.astype(np.uint8)
    pairs = codes.reshape(-1, 2, 2, 64) & 15
    low = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    fours = codes.reshape(-1, 2, 4, 32) >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(fours, axis=2).reshape(-1, 64)
    return np.hstack([low, high, steps.astype(np.int8).view(np.uint8), _bytes(step)])


def _whole_parts(numbers: Array, most: int) -> tuple[Array, Array]:
    """Returns a float16 number of each block and whole numbers up to ``most``, whose products are near
    ``numbers`` ``[blocks, runs]``."""
    step = (np.abs(numbers).max(-1) / most).astype(np.float16)
    divisor = np.where(step == 0, 1, step.astype(np.float32))[:, None]
    return step, np.rint(numbers / divisor).clip(-most, most)


def _product(step: Array, steps: Array) -> Array:
    """Returns what a block's number makes with those of its runs: ``[blocks, runs, 1]``."""
    made: Array = step.astype(np.float32)[:, None] * steps
    return made[..., None]


def _bytes(halves: Array) -> Array:
    return halves[:, None].view(np.uint8)


class _Tensor(NamedTuple):
    """``shape``: the fastest moving dimension first. ``parts``: its bytes, some at a time."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    parts: Callable[[], Iterable[Array]]

    @property
    def num_bytes(self) -> int:
        in_block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return prod(self.shape) // in_block * block_bytes


def _write(target: Path, metadata: Mapping[str, bytes], tensors: list[_Tensor]) -> None:
    """``metadata``: values with their types, by keys."""
    with target.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + value)
        offset = 0
        for tensor in tensors:
            dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            file.write(_string(tensor.name) + dims + struct.pack("<IQ", tensor.kind, offset))
            offset += -(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
        for tensor in tensors:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            for part in tensor.parts():
                file.write(part.tobytes())


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _metadata_of(source: Path, header: GgufHeader) -> dict[str, bytes]:
    """The file's own bytes, but for the alignment."""
    found = {}
    with source.open("rb") as file:
        for key, (first, end) in header.spans.items():
            start = first + len(_string(key))
            file.seek(start)
            found[key] = file.read(end - start)
    found.pop("general.alignment", None)
    return found


def rewrite(source: Path, target: Path, kind: Kind) -> None:
    """Writes a file with all blocks of matrices in another type. What is no block stays as it is."""
    header = read_header(source)
    with source.open("rb") as file:
        tensors = [_rewritten(file, tensor, kind) for tensor in header.tensors.values()]
        _write(target, _metadata_of(source, header), tensors)


def _rewritten(file: BinaryIO, tensor: StoredTensor, kind: Kind) -> _Tensor:
    own = Kind[tensor.kind]
    is_kept = own in _VALUES or len(tensor.shape) < 2
    wanted = own if is_kept else fitting(kind, tensor.shape[-1])

    def parts() -> Iterator[Array]:
        num_rows = prod(tensor.shape[:-1])
        at_once = max(1, _AT_ONCE // tensor.shape[-1])
        for first in range(0, num_rows, at_once):
            count = min(at_once, num_rows - first)
            row_bytes = tensor.num_bytes // num_rows
            file.seek(tensor.start + first * row_bytes)
            rows = np.frombuffer(file.read(count * row_bytes), np.uint8).reshape(count, -1)
            yield rows if is_kept else pack(dequantize(rows, own), wanted)

    return _Tensor(tensor.name, tensor.shape[::-1], wanted, parts)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model of one of the ``ARCHITECTURES``; those of Llama 7 B unless said. ``head_width`` 0:
    that of all heads is the model's. ``experts``: of a layer, of which each token chooses ``chosen`` and
    each has ``ffn`` features; Llamas and Gemmas have none."""

    width: int = 4096
    layers: int = 32
    ffn: int = 11008
    heads: int = 32
    kv_heads: int = 32
    vocabulary: int = 32000
    head_width: int = 0
    experts: int = 0
    chosen: int = 8
    architecture: str = "llama"

    @property
    def each_head(self) -> int:
        return self.head_width or self.width // self.heads


def write_random(source: Path, target: Path, shape: Shape, seed: int = 0) -> None:
    """Writes a model with random weights in Q4_K, and in Q6_K where llama.cpp's Q4_K_M has it: values,
    half of the down projections and the head, which is a Gemma's embedding; rows that are no multiple of
    256 in what llama.cpp takes for them. Metadata are the source's, a Llama's, with other sizes, the
    vocabulary cut or filled up."""
    header = read_header(source)
    is_gemma = shape.architecture == "gemma3"
    wanted = (Kind.Q4_K, Kind.Q6_K)
    pools = {kind: _pool(kind, seed) for kind in (*wanted, *map(FALLBACKS.__getitem__, wanted))}
    random = np.random.default_rng(seed)

    def matrix(name: str, rows: int, columns: int, wanted: Kind, *experts: int) -> _Tensor:
        kind = fitting(wanted, columns)
        pool, in_block = pools[kind], GGML_QUANT_SIZES[kind][0]

        def parts() -> Iterator[Array]:
            left = prod(experts) * rows * columns // in_block
            while left:
                count = min(left, _AT_ONCE // in_block)
                yield pool[random.integers(0, len(pool), count)]
                left -= count

        return _Tensor(name, (columns, rows, *experts), kind, parts)

    def norm(name: str, width: int = shape.width) -> _Tensor:
        return _Tensor(name, (width,), Kind.F32, lambda: [np.ones(width, np.float32)])

    def router(name: str) -> _Tensor:
        values = random.normal(0, _STD, (shape.experts, shape.width)).astype(np.float32)
        return _Tensor(name, (shape.width, shape.experts), Kind.F32, lambda: [values])

    own_width, kv_width = (each * shape.each_head for each in (shape.heads, shape.kv_heads))
    experts, of_experts = ((shape.experts,), "_exps") if shape.experts else ((), "")
    norms = ["attn_norm", "ffn_norm"]
    norms += ["post_attention_norm", "post_ffw_norm"] * is_gemma
    embedding = Kind.Q6_K if is_gemma else Kind.Q4_K
    tensors = [matrix("token_embd.weight", shape.vocabulary, shape.width, embedding)]
    for layer in range(shape.layers):
        better = Kind.Q4_K if layer % 2 else Kind.Q6_K
        sizes = {
            "attn_q": (own_width, shape.width, Kind.Q4_K),
            "attn_k": (kv_width, shape.width, Kind.Q4_K),
            "attn_v": (kv_width, shape.width, better),
            "attn_output": (shape.width, own_width, Kind.Q4_K),
            f"ffn_gate{of_experts}": (shape.ffn, shape.width, Kind.Q4_K, *experts),
            f"ffn_up{of_experts}": (shape.ffn, shape.width, Kind.Q4_K, *experts),
            f"ffn_down{of_experts}": (shape.width, shape.ffn, better, *experts),
        }
        if experts or is_gemma:
            heads = [f"blk.{layer}.attn_{each}_norm.weight" for each in "qk"]
            tensors += [norm(each, shape.each_head) for each in heads]
        if experts:
            tensors.append(router(f"blk.{layer}.ffn_gate_inp.weight"))
        tensors += [norm(f"blk.{layer}.{each}.weight") for each in norms]
        tensors += [matrix(f"blk.{layer}.{each}.weight", *size) for each, size in sizes.items()]
    tensors.append(norm("output_norm.weight"))
    if not is_gemma:
        tensors.append(matrix("output.weight", shape.vocabulary, shape.width, Kind.Q6_K))
    _write(target, _random_metadata(source, header, shape), tensors)


def _pool(kind: Kind, seed: int) -> Array:
    """Returns blocks of normal random weights, which tensors are drawn from: to pack all would take
    minutes."""
    weights = np.random.default_rng(seed).normal(0, _STD, (_POOL_BLOCKS, 256))
    return pack(weights.astype(np.float32), kind).reshape(-1, GGML_QUANT_SIZES[kind][1])


def _random_metadata(source: Path, header: GgufHeader, shape: Shape) -> dict[str, bytes]:
    if header.architecture != "llama":
        raise SystemExit(f"{source} is a {header.architecture}, not a llama")
    sizes = {
        "block_count": shape.layers,
        "embedding_length": shape.width,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.each_head,
        "attention.value_length": shape.each_head,
        "rope.dimension_count": shape.each_head,
        "vocab_size": shape.vocabulary,
    }
    if shape.experts:
        sizes |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.chosen,
            "expert_feed_forward_length": shape.ffn,
        }
    if shape.architecture == "gemma3":
        sizes["attention.sliding_window"] = _WINDOW
    own = {
        key.replace("llama.", f"{shape.architecture}.", 1): value
        for key, value in _metadata_of(source, header).items()
    }
    own["general.architecture"] = struct.pack("<I", 8) + _string(shape.architecture)
    said = {
        f"{shape.architecture}.{key}": struct.pack("<II", 4, value) for key, value in sizes.items()
    }
    return own | said | _vocabulary(header.metadata, shape.vocabulary)


def _vocabulary(metadata: Mapping[str, Any], num_tokens: int) -> dict[str, bytes]:
    """Returns the lists of a tokenizer with so many tokens; merges whose result is cut go."""
    own = metadata["tokenizer.ggml.tokens"]
    missing = range(len(own), num_tokens)
    tokens = own[:num_tokens] + [f"[PAD{number}]" for number in missing]
    kinds = metadata["tokenizer.ggml.token_type"][:num_tokens]
    kinds += [int(TokenType.UNUSED)] * len(missing)
    known = set(tokens)
    merges = [
        each
        for each in metadata["tokenizer.ggml.merges"]
        if known.issuperset({*each.split(" "), each.replace(" ", "")})
    ]
    return {
        "tokenizer.ggml.tokens": _strings(tokens),
        "tokenizer.ggml.token_type": struct.pack(f"<IIQ{num_tokens}i", 9, 5, num_tokens, *kinds),
        "tokenizer.ggml.merges": _strings(merges),
    }


def _strings(texts: list[str]) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(_string(each) for each in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", help="a file, or what serve takes that is one, as smollm2")
    parser.add_argument("target", type=Path)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--type", choices=[kind.name for kind in KINDS], help="of all blocks")
    chosen.add_argument("--random", action="store_true", help="random weights in Q4_K and Q6_K")
    for name, usual in ((field, getattr(Shape(), field)) for field in Shape.__dataclass_fields__):
        flag = "--" + name.replace("_", "-")
        choices = ARCHITECTURES if isinstance(usual, str) else None
        said = f"with --random; {usual} unless said"
        parser.add_argument(flag, type=type(usual), default=usual, choices=choices, help=said)
    options = parser.parse_args()
    source = find_gguf(locate(options.source))
    if source is None:
        parser.error(f"{options.source} is no GGUF file")
    if options.type:
        rewrite(source, options.target, Kind[options.type])
        return
    shape = Shape(**{name: getattr(options, name) for name in Shape.__dataclass_fields__})
    if shape.width % 32 or shape.ffn % 32 or shape.each_head % 32:
        parser.error("--width, --ffn and the width of a head are multiples of 32")
    if (shape.architecture == "qwen3moe") != bool(shape.experts):
        parser.error("--experts is for qwen3moe, which has some")
    write_random(source, options.target, shape)


if __name__ == "__main__":
    main()
