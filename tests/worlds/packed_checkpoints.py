"""Folders of tiny models whose linear layers lie in few bits, packed number by number as the formats'
tools lay them out, from codes that are known.

Nothing is shared with what reads them: words are put together by Python's whole numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.weights.checkpoint import load_weights
from engine.weights.experts import expert_sizes
from engine.weights.files import described
from engine.weights.formats import read_places
from engine.weights.index import TensorIndex
from engine.weights.layer import StoredLinear, StoredWeight
from worlds.tiny_models import own_logits, tiny_model

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def configuration(layout: str, weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns compressed-tensors' configuration of a model whose inputs keep their floats."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | changes


def with_inputs(found: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    found["config_groups"]["group_0"]["input_activations"] = inputs
    return found


class Codes(NamedTuple):
    """Weights ``(codes - zeros) * scales`` by groups: ``codes`` ``[out, in]``, the rest ``[out,
    groups]``; ``group_of``: each feature's."""

    bits: int
    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_of: torch.Tensor

    def weight(self) -> torch.Tensor:
        """In float32, by the formula."""
        zeros, scales = (each[:, self.group_of] for each in (self.zeros, self.scales.float()))
        return (self.codes - zeros).float() * scales


def draw(
    out_features: int,
    in_features: int,
    bits: int = 4,
    group: int = 32,
    *,
    seed: int = 0,
    symmetric: bool = False,
    shuffled: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> Codes:
    """``group`` -1: a row. ``shuffled``: features belong to groups in a random order."""
    generator = torch.Generator().manual_seed(seed)
    group = in_features if group == -1 else group
    num_groups = -(-in_features // group)
    group_of = torch.arange(in_features) // group
    if shuffled:
        group_of = group_of[torch.randperm(in_features, generator=generator)]
    top = 1 << bits
    shape = out_features, num_groups
    zeros = torch.randint(0, top, shape, generator=generator)
    scales = (torch.rand(shape, generator=generator) + 0.5) * 0.6 / top
    return Codes(
        bits,
        torch.randint(0, top, (out_features, in_features), generator=generator),
        torch.full_like(zeros, top // 2) if symmetric else zeros,
        scales.to(scale_dtype),
        group_of,
    )


def words(rows: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Each row's codes in words of 32 bits, the first lowest. ``order``: which code of those of a word
    comes at each place."""
    in_word = 32 // bits
    order = order or tuple(range(in_word))
    made = []
    for row in rows.tolist():
        row += [0] * (-len(row) % in_word)
        made.append([])
        for start in range(0, len(row), in_word):
            word = sum(row[start + code] << (bits * place) for place, code in enumerate(order))
            made[-1].append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(made, dtype=torch.int32)


def awq(codes: Codes) -> Tensors:
    return {
        "qweight": words(codes.codes.T, 4, AWQ_ORDER),
        "qzeros": words(codes.zeros.T, 4, AWQ_ORDER),
        "scales": codes.scales.T.contiguous(),
    }


def gptq(codes: Codes, v2: bool = False) -> Tensors:
    zeros = words(codes.zeros.T, codes.bits).long()
    if not v2:  # one is subtracted at each code's place, from the word as a whole
        zeros = zeros - sum(1 << place for place in range(0, 32, codes.bits))
        zeros = (zeros + (1 << 31)) % (1 << 32) - (1 << 31)
    return {
        "qweight": words(codes.codes, codes.bits).T.contiguous(),
        "qzeros": zeros.int(),
        "scales": codes.scales.T.contiguous(),
        "g_idx": codes.group_of.int(),
    }


def packed(codes: Codes, symmetric: bool = False) -> Tensors:
    """compressed-tensors' "pack-quantized"."""
    tensors = {
        "weight_packed": words(codes.codes, codes.bits),
        "weight_scale": codes.scales,
        "weight_shape": torch.tensor(codes.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(codes.zeros.T, codes.bits).T.contiguous()
    if not bool((codes.group_of.diff() >= 0).all()):
        tensors["weight_g_idx"] = codes.group_of.int()
    return tensors


def signed(codes: Codes, symmetric: bool = True) -> Tensors:
    """compressed-tensors' "int-quantized": 8 bits."""
    tensors = {"weight": (codes.codes - 128).to(torch.int8), "weight_scale": codes.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (codes.zeros - 128).to(torch.int8)
    return tensors


def draw_fp8(
    linear: nn.Linear, block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales of blocks, and what they mean, value by value."""
    sizes = linear.out_features, linear.in_features
    codes = (torch.randn(sizes) * 20).to(dtype)
    counts = [-(-size // side) for size, side in zip(sizes, block, strict=True)]
    scales = (torch.rand(counts) + 1) / 99
    weight = torch.empty(sizes)
    for row in range(sizes[0]):
        for column in range(sizes[1]):
            scale = scales[row // block[0], column // block[1]]
            weight[row, column] = codes[row, column].float() * scale
    return codes, scales, weight


Make = Callable[[str, nn.Linear], tuple[Tensors, torch.Tensor] | None]


def make_all(lay_out: Callable[[Codes], Tensors], head: bool = False, **drawn: Any) -> Make:
    """Gives ``write_folder`` all layers in one layout, from codes of each layer's own."""

    def make(name: str, linear: nn.Linear) -> tuple[Tensors, torch.Tensor] | None:
        if name == "lm_head" and not head:
            return None
        seed = sum(name.encode())
        codes = draw(linear.out_features, linear.in_features, seed=seed, **drawn)
        return lay_out(codes), codes.weight()

    return make


def in_fp8(block: tuple[int, int]) -> Make:
    """Gives ``write_folder`` all layers but the head in blocks of 8-bit floats."""

    def make(name: str, linear: nn.Linear) -> tuple[Tensors, torch.Tensor] | None:
        if name == "lm_head":
            return None
        codes, scales, weight = draw_fp8(linear, block)
        return {"weight": codes, "weight_scale_inv": scales}, weight

    return make


def write_folder(
    folder: Path,
    quantization: Mapping[str, Any],
    make: Make,
    name: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    experts: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    **changes: Any,
) -> PreTrainedModel:
    """Writes a model whose linear layers are what ``make`` gives: the tensors of a layer and the weight
    that they mean, None: it stays. Experts are layers of these names, or stay. Returns that model with
    plain layers, in float32."""
    model: Any = tiny_model(name, dtype, **changes)
    tensors: Tensors = {key: each.detach().clone() for key, each in model.state_dict().items()}
    plain: Any = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    plain.load_state_dict({key: each.float() for key, each in tensors.items()})
    for key, module in model.named_modules():
        made = make(key, module) if type(module) is nn.Linear else None
        if made is None:
            continue
        del tensors[f"{key}.weight"]
        tensors.update({f"{key}.{each}": value for each, value in made[0].items()})
        plain.get_submodule(key).weight.data = made[1].float()
    for key, module in model.named_modules():
        if experts and expert_sizes(module):
            _split(plain.get_submodule(key), tensors, key, make, experts)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    said = json.loads(model.config.to_json_string(use_diff=False))
    said |= {"quantization_config": dict(quantization), "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(said))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return plain.eval().requires_grad_(False)


def _split(
    own: Any,
    tensors: Tensors,
    key: str,
    make: Make,
    names: Sequence[str],
) -> None:
    """Puts layers of experts in the place of the tensors of all, and what they mean into ``own``."""
    del tensors[f"{key}.gate_up_proj"], tensors[f"{key}.down_proj"]
    for expert in range(own.num_experts):
        weights = *own.gate_up_proj.data[expert].chunk(2), own.down_proj.data[expert]
        for name, weight in zip(names, weights, strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            made = make(f"{key}.{expert}.{name}", linear)
            assert made is not None
            tensors.update({f"{key}.{expert}.{name}.{k}": each for k, each in made[0].items()})
            weight.copy_(made[1])


_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def write_mxfp4(folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Writes a gpt-oss whose experts are random blocks; returns it in floats."""
    expected = write_folder(
        folder, {"quant_method": "mxfp4"}, lambda *_: None, "gpt_oss", dtype, ()
    )
    path = folder / "model.safetensors"
    tensors, values = load_file(path), torch.tensor([*_NUMBERS, *(-each for each in _NUMBERS)])
    generator = torch.Generator().manual_seed(0)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, features, channels = tensors.pop(key).shape
        shape = experts, channels, features // 32
        octets = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 125, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{key}_blocks": octets, f"{key}_scales": scales}
        codes = torch.stack((octets % 16, octets // 16), -1).flatten(-2).long()
        weight = values[codes] * torch.exp2(scales[..., None].float() - 127)
        expected.get_parameter(key).data = weight.flatten(2).transpose(1, 2).contiguous()
    save_file(tensors, path, {"format": "pt"})
    return expected


def load(folder: Path) -> PreTrainedModel:
    """Loads a folder as far as its places are filled: nothing is packed yet."""
    config = AutoConfig.from_pretrained(folder)
    places = read_places(config)
    model = load_weights(str(folder), config, quantization_config=places, dtype="auto")
    return model.eval().requires_grad_(False)


@torch.no_grad()
def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The model with a plain layer in each place, in float32 throughout: to compare what is computed."""
    for name, module in list(model.named_modules()):
        if isinstance(module, StoredWeight):
            bias = module.bias if isinstance(module, StoredLinear) else None
            linear = nn.Linear(module.in_features, module.out_features, bias is not None)
            linear.weight = nn.Parameter(module.dequantized(torch.float32), requires_grad=False)
            if bias is not None:
                linear.bias = nn.Parameter(bias.float(), requires_grad=False)
            model.set_submodule(name, linear)
    model.float()
    model.config.dtype = torch.float32
    return model


def stored(model: PreTrainedModel) -> dict[str, StoredWeight]:
    """The places that were filled, by name."""
    found = model.named_modules()
    return {name: each for name, each in found if isinstance(each, StoredWeight)}


def checked_places(model: PreTrainedModel, expected: PreTrainedModel) -> dict[str, StoredWeight]:
    """Returns the places that were filled; they and all logits are what ``expected`` has."""
    places, ids = stored(model), [1, 5, 9, 3, 40]
    for name, place in places.items():
        assert torch.equal(place.dequantized(torch.float32), expected.get_submodule(name).weight)
    torch.testing.assert_close(own_logits(plain(model), ids), own_logits(expected, ids))
    return places


def fill(place: Any, linear: nn.Linear, tensors: Tensors, name: str = "up") -> Any:
    """Returns what stands in a layer's place, with its tensors; None if nothing does."""
    found = described({f"{name}.{key}": each for key, each in tensors.items()}, Path())
    layer = place(name, linear, TensorIndex(found))
    if layer is not None:
        layer.load_state_dict(tensors, strict=False)
        layer.loaded(name)
    return layer
