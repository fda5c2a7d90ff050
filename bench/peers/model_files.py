"""The model that everybody runs, and the draft model, as checkpoints that everybody can read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.models import OWN, SCALED, scaled_copy
from bench.peers.gguf_writer import BLOCK_TYPES, write_gguf
from bench.peers.llama_cpp import quantize
from bench.peers.place import Place, distinct_name, once
from engine.config import EngineConfig
from engine.drafting.drafts import SMALL_MODEL, find_drafts, with_bundled_drafts
from engine.model.loader import bundled_path, load_tokenizer
from engine.names import locate
from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.file import find_gguf, needing_gguf


class Models(NamedTuple):
    """``target``: a folder of floats. ``draft``: likewise, None where there is none. ``gguf``: the file
    that the target was dequantised from, None where there is none."""

    target: Path
    draft: Path | None
    gguf: Path | None


def find_heads(model: str, given: Sequence[str]) -> dict[str, Path]:
    """Returns the folders of trained heads that this server drafts with, by name: those ``given`` as
    ``[NAME=]PATH`` and those that come with the model. Raises ValueError as ``find_drafts``."""
    found = find_drafts(with_bundled_drafts(EngineConfig(model=model, draft=tuple(given))))
    return {
        name: Path(draft.path).resolve()
        for name, draft in found.items()
        if draft.method != SMALL_MODEL
    }


def model_files(
    model: str, draft: str | None, block_type: str | None, cache: Path, num_threads: int
) -> Models:
    """``model``: ``scaled``, ``bundled``, ``smollm2``, a folder or a GGUF file; ``draft``: a folder, else
    the bundled draft model for those that it fits; ``block_type``: what the model is written in as a GGUF
    file, None where it is taken as it is.

    Raises OSError and UnsupportedModelError as loading does, and PeerUnavailableError where llama.cpp's
    tool is needed and cannot be had.
    """
    own_draft = bundled_path("draft") if model in OWN else None
    wanted_draft = own_draft if draft is None else Path(draft)
    if model == SCALED:
        source, gguf = once(cache / "scaled", _save_scaled), None
    else:
        source = Path(locate(model)).resolve()
        gguf = find_gguf(str(source))
    if block_type is not None:
        if gguf is not None:
            raise UnsupportedModelError(f"{gguf.name} is in blocks already: leave out --gguf")
        gguf = _write_once(source, block_type, cache, num_threads)
        # Its own tokenizer, since a file does not say all of it.
        model = str(source)
    if gguf is None:
        return Models(source, wanted_draft, None)
    target = once(
        cache / f"{distinct_name(gguf)}-dequantised", partial(_save_dequantised, gguf, model)
    )
    return Models(target, wanted_draft, gguf)


def _write_once(source: Path, block_type: str, cache: Path, num_threads: int) -> Path:
    folder = cache / f"{distinct_name(source)}-{block_type}"
    name = f"{source.name}-{block_type}.gguf"

    def write(folder: Path) -> None:
        if block_type in BLOCK_TYPES:
            with needing_gguf():
                write_gguf(source, block_type, folder / name)
        else:
            quantize(Place(cache, source, None, num_threads, 1, 128), block_type, folder, name)

    return once(folder, write) / name


def dequantised(gguf: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a file's model by transformers alone: nothing of ours is between what a file says and what
    others get."""
    with needing_gguf():
        # Of newer versions than everything else needs.
        from transformers.utils.quantization_config import GgufConfig

        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
        )
    # A model like any other is saved.
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False
    return model.eval()


def _save_dequantised(gguf: Path, tokenizer: str, folder: Path) -> None:
    dequantised(gguf, torch.bfloat16).save_pretrained(folder)
    load_tokenizer(tokenizer).save_pretrained(folder)


def _save_scaled(folder: Path) -> None:
    path = str(bundled_path("target"))
    scaled_copy(path).save_pretrained(folder)
    load_tokenizer(path).save_pretrained(folder)
