"""The identity that must match before keys and values of an earlier process are used.

Other weights of the same shapes would be read without complaint and answer for another model. So the
identity includes a checksum over every byte of the loaded weights, and the values of settings that
change a row's contents. Where texts are ``exact``, rows must be bit-identical, so CPU instructions and
versions, which affect rounding, are included, too. Drafts, which change no text, are included by their
files' sizes and times.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.drafting.drafts import Draft
from engine.model.quantization import packed_weights
from engine.model.runner import ModelRunner
from engine.offload.rows import Part, layout_of
from engine.request.info import Determinism

_WORDS = 1 << 20
"""Words of 32 bits that are summed up at a time."""


@torch.inference_mode()
def weights_digest(model: PreTrainedModel) -> str:
    """Returns 64 hexadecimal digits over names, types, shapes and all bytes of a model's weights, which
    are not quantised or packed yet. Takes about as long as reading them from memory a few times."""
    digest = hashlib.sha256()
    keys = torch.randint(-(2**63), 2**63 - 1, (_WORDS,), generator=torch.Generator().manual_seed(1))
    keys = keys.to(model.device)
    for name, tensor in sorted(_weights(model), key=lambda each: each[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_sums(tensor, keys.to(tensor.device)).numpy().tobytes())
    return digest.hexdigest()


def identity(
    config: EngineConfig,
    runner: ModelRunner,
    weights: str,
    determinism: Determinism,
    parts: list[Part],
    drafts: Mapping[str, Draft],
) -> dict[str, str]:
    """Returns all of it by name. ``weights``: their digest; ``parts``: the rows that drafts keep."""
    model, needs = runner.model, runner.attention.needs
    names = {part.name for part in parts}
    states = "" if runner.states is None else runner.states.store.shapes
    found = {
        "weights": weights,
        "model": _digest(model.config.to_json_string(use_diff=False)),
        "dtype": str(model.dtype),
        "device": model.device.type,
        "quantization": f"{config.quantization} {config.quantize_head} {config.quantize_activations}",
        "attention": runner.attention.name,
        "rows": _digest(f"{runner.store.layout} {[*needs.shapes]} {states}"),
        "drafts": _digest(
            f"{layout_of(parts)} {config.quantized} {config.quantized_model}"
            f"{[_stamp(each) for name, each in sorted(drafts.items()) if name in names]}"
        ),
        "determinism": determinism,
    }
    if determinism == "exact":
        found["arithmetic"] = _arithmetic(model.device)
    return found


def _arithmetic(device: torch.device) -> str:
    """Returns what may round otherwise: versions, instructions, how sums are divided among threads."""
    where = (
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    )
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    return f"{_version('slipstream-llm')} torch {torch.__version__} {where} {_instructions()}"


def _instructions() -> str:
    """Returns a digest of the CPU's own word on what it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return _digest(flags)[:16]


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, packed in packed_weights(model):
        for part, tensor in packed.tensors.items():
            yield f"{name} {packed.format} {part}", tensor


def _sums(tensor: Tensor, keys: Tensor) -> Tensor:
    """Returns a sum for each chunk of the tensor's words, times random keys, ``[num_chunks]`` int64 on
    the host. Two tensors that differ have equal ones with a probability of about 2 ** -32 per chunk."""
    own = tensor.detach().contiguous().flatten().view(torch.uint8)
    rest = -len(own) % 4
    if rest:
        own = torch.cat([own, own.new_zeros(rest)])
    words = own.view(torch.int32)
    sums = [(part.long() * keys[: len(part)]).sum() for part in words.split(_WORDS)]
    return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)


def _stamp(draft: Draft) -> str:
    """Returns a draft's name, method and path, and names, sizes and times of its files where it is a
    folder or file here."""
    path = Path(draft.path)
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return f"{draft} {stats}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
