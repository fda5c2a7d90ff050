"""A Llama padded to a larger one that writes the same text, as a checkpoint, with its heads.

    python -m bench.scaled --model smollm2 --width 4 --gguf q4_0 --output DIR

DIR is then a model for every command, and DIR/NAME is a draft for it (``--draft``), for every head that
comes with the model or is given.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench.options import positive
from bench.peers.gguf_writer import BLOCK_TYPES, write_gguf
from bench.peers.model_files import dequantised, find_heads
from bench.scaled_model import build_scaled_copy, scaled_config, scaled_tensors
from engine.drafting.published.folder import CONFIG, SIZES, WEIGHTS
from engine.model.loader import load_tokenizer
from engine.names import locate
from engine.weights.gguf.file import find_gguf

_SHARD = "1GB"


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    save_scaled(args.model, args.width, args.gguf, args.output)
    heads = find_heads(args.model, args.draft)
    for name, head in heads.items():
        save_scaled_head(head, args.width, args.output / name)
    drafts = [f"{name}={args.output / name}" for name in heads]
    print(" ".join([str(args.output), *(["--draft", *drafts] if drafts else ())]))
    return 0


def save_scaled(model: str, width: int, block_type: str | None, folder: Path) -> None:
    """Writes the copy of ``model``, a name, folder or GGUF file, as a folder of bf16, or of one GGUF file
    whose tensors are made one after the other. ``block_type``: one of ``BLOCK_TYPES``. Raises TypeError
    for a model that is no Llama, ValueError as ``scaled_config``."""
    small = _load(model, torch.bfloat16 if block_type is None else torch.float32)
    tokenizer = load_tokenizer(model)
    folder.mkdir(parents=True, exist_ok=True)
    if block_type is None:
        num_layers = small.config.num_hidden_layers
        build_scaled_copy(small, width, num_layers).save_pretrained(folder, max_shard_size=_SHARD)
        tokenizer.save_pretrained(folder)
        return
    with tempfile.TemporaryDirectory() as described:
        scaled_config(small.config, width).save_pretrained(described)
        tokenizer.save_pretrained(described)
        wide = scaled_tensors(small.config, small.state_dict(), width)
        file = folder / f"{Path(model).stem}-x{width}-{block_type}.gguf"
        arrays = ((name, weight.numpy()) for name, weight in wide)
        write_gguf(Path(described), block_type, file, arrays)


def save_scaled_head(head: Path, width: int, folder: Path) -> None:
    """Writes an EAGLE-3 head, in the plain form, for a copy of its target. Raises ValueError for a head
    of another kind."""
    config = json.loads((head / CONFIG).read_text(encoding="utf-8"))
    state = load_file(head / WEIGHTS)
    if "fc.weight" not in state:
        raise ValueError(f"{head}: only EAGLE-3 heads have scaled copies")
    given = {key: config[key] for key in (*SIZES, "rms_norm_eps") if key in config}
    own = LlamaConfig(**given, tie_word_embeddings=False)
    wide = scaled_config(own, width).to_dict()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(scaled_tensors(own, state, width)), folder / WEIGHTS)
    config |= {key: wide[key] for key in (*SIZES, "rms_norm_eps")}
    if "target_hidden_size" in config:
        config["target_hidden_size"] *= width
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _load(model: str, dtype: torch.dtype) -> LlamaForCausalLM:
    path = locate(model)
    gguf = find_gguf(path)
    found: Any = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        if gguf is None
        else dequantised(gguf, dtype)
    )
    if not isinstance(found, LlamaForCausalLM):
        raise TypeError("only a Llama has a scaled copy")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.scaled", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a folder or file")
    parser.add_argument(
        "--width", type=positive, default=4, help="times the hidden size: a power of four (4)"
    )
    parser.add_argument(
        "--gguf",
        choices=BLOCK_TYPES,
        help="write a GGUF file of this type; default: bf16, a folder",
    )
    parser.add_argument(
        "--draft", nargs="+", default=[], metavar="[NAME=]PATH", help="more EAGLE-3 heads to pad"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
