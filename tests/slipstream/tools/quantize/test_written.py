"""Written files are decoded here word by word, as compressed-tensors describes its format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.kernels.grouped_weight import GroupedWeight
from slipstream.tools.quantize.written import WrittenLinear, has_place, store_4_bits
from worlds.grouped_weights import round_to_nearest
from worlds.tiny_models import tiny_model


def unpacked(words: list[int], count: int) -> list[int]:
    """Signed codes of 4 bits, which lie in words of 32, the first in the lowest bits, 8 added."""
    codes = [(word >> 4 * place & 15) - 8 for word in words for place in range(8)]
    return codes[:count]


def decoded(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    out_features, in_features = tensors["weight_shape"].tolist()
    codes = [unpacked(row, in_features) for row in tensors["weight_packed"].tolist()]
    columns = tensors["weight_zero_point"].T.tolist()
    zeros = torch.tensor([unpacked(column, out_features) for column in columns]).T
    steps = torch.tensor(codes).unflatten(1, (-1, 32)) - zeros[:, :, None]
    return (tensors["weight_scale"].float()[:, :, None] * steps).flatten(1)


def rounded(out_features: int, in_features: int) -> GroupedWeight:
    generator = torch.Generator().manual_seed(5)
    return round_to_nearest(0.1 * torch.randn(out_features, in_features, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out_features", [16, 13])
def test_tensors_mean_what_the_codes_mean(dtype: torch.dtype, out_features: int) -> None:
    weight = rounded(out_features, 96)
    written = WrittenLinear(weight, None, dtype)
    tensors = dict(written.state_dict())
    assert tensors["weight_packed"].shape == (out_features, 12)
    assert tensors["weight_zero_point"].shape == (2, 3)
    kinds = {"weight_packed": torch.int32, "weight_zero_point": torch.int32}
    kinds |= {"weight_scale": dtype, "weight_shape": torch.int64}
    assert {name: each.dtype for name, each in tensors.items()} == kinds
    assert torch.equal(decoded(tensors), weight.dequantized())
    ones = torch.eye(96)
    assert torch.equal(written(ones), weight.dequantized().T)


def test_a_model_is_saved_with_what_readers_have_to_know(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    names = [name for name, module in model.named_modules() if has_place(module)]
    names.remove("lm_head")
    weights = {name: round_to_nearest(model.get_submodule(name).weight.detach()) for name in names}
    bias = model.model.layers[1].self_attn.q_proj.bias.clone()
    groups = [{name: weight} for name, weight in weights.items()]
    assert store_4_bits(model, groups) == 14
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, weight in weights.items():
        parts = {
            key.removeprefix(f"{name}."): each
            for key, each in tensors.items()
            if key.startswith(f"{name}.")
        }
        parts.pop("bias", None)
        assert torch.equal(decoded(parts), weight.dequantized())
    assert torch.equal(tensors["model.layers.1.self_attn.q_proj.bias"], bias)
    assert "lm_head.weight" in tensors
    scheme = type(model.config).from_pretrained(tmp_path).quantization_config
    assert (scheme["quant_method"], scheme["ignore"]) == ("compressed-tensors", ["lm_head"])
    assert scheme["format"] == "pack-quantized"
    (group,) = scheme["config_groups"].values()
    assert group["targets"] == ["Linear"]
    wanted = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}
    assert wanted.items() <= group["weights"].items()


def test_layers_whose_groups_are_not_whole_have_no_place() -> None:
    assert has_place(nn.Linear(96, 5))
    assert not has_place(nn.Linear(100, 5))
    assert not has_place(nn.Embedding(96, 5))
