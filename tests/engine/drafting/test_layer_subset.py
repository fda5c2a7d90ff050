"""Some of a model's layers as a model: what it writes, what it shares, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.census import tiny_model as census_model
from engine.drafting.layer_subset import layer_subset, parse_layers
from engine.request.errors import UnsupportedModelError
from worlds.tiny_models import own_logits, random_ids, reference_model, tiny_model

IDS = random_ids(5, 12)
ATTENTION = "full_attention"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mixtral", "gpt2"])
@torch.inference_mode()
def test_first_layers_write_what_the_head_reads_from_their_hidden_state(name: str) -> None:
    model = tiny_model(name)
    base = model.base_model
    kept: list[torch.Tensor] = []
    layers = next(c for c in base.children() if isinstance(c, nn.ModuleList) and len(c) > 1)
    hook = layers[0].register_forward_hook(
        lambda _, __, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    own_logits(model, IDS)
    hook.remove()
    norm = base.norm if hasattr(base, "norm") else base.ln_f
    wanted = model.get_output_embeddings()(norm(kept[0]))[0]
    if getattr(model.config, "final_logit_softcapping", None):
        cap = model.config.final_logit_softcapping
        wanted = torch.tanh(wanted / cap) * cap
    torch.testing.assert_close(own_logits(layer_subset(model, [0]), IDS), wanted)


def test_modules_are_shared_and_the_whole_model_stays_as_it_was() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    before = own_logits(model, IDS)
    twin = layer_subset(model, [0, 1, 3])
    assert [layer.self_attn.layer_idx for layer in twin.base_model.layers] == [0, 1, 3]
    assert twin.base_model.layers[2] is model.base_model.layers[3]
    assert {id(p) for p in twin.parameters()} < {id(p) for p in model.parameters()}
    assert not torch.allclose(own_logits(twin, IDS), before)
    torch.testing.assert_close(own_logits(model, IDS), before)
    assert model.config.num_hidden_layers == len(model.base_model.layers) == 4
    calls: list[int] = []
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    own_logits(twin, IDS)
    assert not calls, "a hook on the whole model fires for its part"


def test_kinds_of_layers_go_with_their_layers() -> None:
    model = tiny_model("gemma2")
    twin = layer_subset(model, [1, 2])
    kinds = model.config.layer_types
    assert twin.config.layer_types == [kinds[1], kinds[2]]


def test_layers_that_are_listed_by_number_are_numbered_anew() -> None:
    model = census_model("bamba")
    attending = [at for at, each in enumerate(model.config.layer_types) if each == ATTENTION]
    assert 0 not in attending
    twin = layer_subset(model, [0, *attending])
    assert twin.config.layer_types[1:] == [ATTENTION] * len(attending)
    assert own_logits(twin, IDS).isfinite().all()


@pytest.mark.parametrize(
    ("text", "layers"), [("3", [0, 1, 2]), ("0,1,4,5", [0, 1, 4, 5]), ("0, 5", [0, 5])]
)
def test_layers_are_a_number_or_a_list(text: str, layers: list[int]) -> None:
    assert parse_layers(text, 6) == layers


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "7", "0,6", "1,0", "1,1", "6", "0,1,2,3,4,5"])
def test_what_names_no_layers_is_refused_by_the_settings_name(text: str) -> None:
    with pytest.raises(ValueError, match="prefix_layers"):
        parse_layers(text, 6)


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    model = reference_model("llama")
    config = model.config
    twin = layer_subset(model, [0])
    twin.config.num_hidden_layers = config.num_hidden_layers
    with pytest.raises(UnsupportedModelError, match="no single list of decoder layers"):
        layer_subset(twin, [0])
