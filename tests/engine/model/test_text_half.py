"""Text halves: found in checkpoints of more parts, loaded alone, and held to what the whole writes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from transformers import modeling_utils

from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.model.layers import GroupedLinear
from engine.model.loader import eos_token_ids, load_model, refuse_unservable
from engine.model.text_half import find_text_half, own_names
from engine.request.errors import UnsupportedModelError
from slipstream.tools.quantize.written import written_scheme
from worlds.changed_folders import WEIGHTS, configure, rename_tensors, stored_tensors
from worlds.tiny_models import CPU, own_logits, random_ids
from worlds.tiny_wholes import SERVED, tiny_whole

TEXT = [each for each in random_ids(3, 60) if each < 90][:40]
"""Without the tokens that stand for images."""
SMALL_ENGINE = EngineConfig(
    num_blocks=32, block_size=4, max_num_batched_tokens=8, max_num_seqs=2, drafters=()
)


def saved(name: str, folder: Path) -> hf.PreTrainedModel:
    whole = tiny_whole(name)
    whole.save_pretrained(folder)
    return whole


def load(folder: Path) -> hf.PreTrainedModel:
    return load_model(str(folder), CPU, "float32")


@pytest.mark.parametrize("name", SERVED)
def test_the_half_writes_the_logits_of_the_whole_and_is_driven(name: str, tmp_path: Path) -> None:
    """The engine's own check holds its forward, in chunks and in a draft tree, to transformers'."""
    whole = saved(name, tmp_path)
    for part in (None, "text_config"):  # A file chooses no code: a name on a hub would be fetched.
        chosen = ("_attn_implementation", "_experts_implementation")
        configure(tmp_path, part, **dict.fromkeys(chosen, "some/kernels"))
    half = load(tmp_path)
    torch.testing.assert_close(own_logits(half, TEXT), own_logits(whole, TEXT), rtol=0, atol=2e-4)
    assert half.num_parameters() < whole.num_parameters()
    assert not any(part in each for each in half.state_dict() for part in ("visi", "visu", "audio"))
    info = build_engine_for(half, None, SMALL_ENGINE).info
    assert info.unserved == (("audio",) if name.endswith("audio") else ("vision",))
    assert info.exact_verified


def test_weights_of_other_parts_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and shapes are, all of them; values only where the half has a place for them."""
    saved("llava", tmp_path)
    read: set[str] = set()
    seen: set[str] = set()

    class Slice:
        def __init__(self, name: str, kept: Any) -> None:
            self.name, self.kept = name, kept
            seen.add(name)

        def __getitem__(self, place: Any) -> torch.Tensor:
            read.add(self.name)
            return self.kept[place]  # type: ignore[no-any-return]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.kept, name)

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = opened(*args, **kwargs)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *raised: Any) -> None:
            self.file.__exit__(*raised)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self.file.get_slice(name))

    opened = modeling_utils.safe_open
    monkeypatch.setattr(modeling_utils, "safe_open", Watched)
    half = load(tmp_path)
    names = set(load_file(tmp_path / WEIGHTS))
    assert seen == names
    assert read == {each for each in names if each.startswith("language_model.")} < names
    assert len(read) == len(half.state_dict())


def test_several_files_are_found_by_their_index(tmp_path: Path) -> None:
    whole = tiny_whole("llava")
    whole.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / f"{WEIGHTS}.index.json").exists()
    torch.testing.assert_close(own_logits(load(tmp_path), TEXT), own_logits(whole, TEXT))
    for text in ("{", "[]", '{"weight_map": 1}'):
        (tmp_path / f"{WEIGHTS}.index.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match="cannot load") as refused:
            load(tmp_path)
        assert "\n" not in str(refused.value)


def test_weights_in_torchs_own_format_are_found(tmp_path: Path) -> None:
    whole = saved("llava", tmp_path)
    torch.save(load_file(tmp_path / WEIGHTS), tmp_path / "pytorch_model.bin")
    (tmp_path / WEIGHTS).unlink()
    torch.testing.assert_close(own_logits(load(tmp_path), TEXT), own_logits(whole, TEXT))


def test_names_as_the_modules_have_them_are_found_too(tmp_path: Path) -> None:
    """Checkpoints come with the names of several versions of transformers."""
    whole = saved("llava", tmp_path)
    outer = (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head", "lm_head"),
    )
    for old, new in outer:
        rename_tensors(tmp_path, lambda name, old=old, new=new: name.replace(old, new))
    assert "lm_head.weight" in load_file(tmp_path / WEIGHTS)
    torch.testing.assert_close(own_logits(load(tmp_path), TEXT), own_logits(whole, TEXT))


def test_a_head_that_is_missing_is_the_embedding_only_where_the_configuration_says_so(
    tmp_path: Path,
) -> None:
    saved("gemma3", tmp_path)
    half: Any = load(tmp_path)
    assert half.lm_head.weight is half.model.embed_tokens.weight
    configure(tmp_path, tie_word_embeddings=False)
    configure(tmp_path, "text_config", tie_word_embeddings=False)
    with pytest.raises(UnsupportedModelError, match=r"1 tensors .* missing: lm_head\.weight"):
        load(tmp_path)


def test_the_ends_of_texts_and_the_type_are_the_wholes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_whole("llava").to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[arg-type]
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    configure(tmp_path, eos_token_id=[5, 7])
    with caplog.at_level(logging.INFO, "engine"):
        half = load_model(str(tmp_path), CPU, "bfloat16")
    assert half.dtype == torch.bfloat16
    assert eos_token_ids(half, None) == (5, 7)
    assert "llava: its text half is served; not read: vision" in caplog.messages
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9]}')
    assert eos_token_ids(load(tmp_path), None) == (9,)


# --- refusals ---


def test_halves_that_do_not_write_what_the_whole_writes_are_refused(tmp_path: Path) -> None:
    saved("aya_vision", tmp_path)
    fault = "aya_vision writes other logits of a text than"
    with pytest.raises(UnsupportedModelError, match=fault):
        load(tmp_path)


def test_a_half_that_reads_in_both_directions_is_found_out(tmp_path: Path) -> None:
    saved("paligemma", tmp_path)
    with pytest.raises(UnsupportedModelError, match="its logits differ from transformers' own"):
        build_engine_for(load(tmp_path), None, SMALL_ENGINE)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.MllamaConfig(), "mllama has layers that attend to images"),
        (hf.CLIPConfig(), "clip: transformers has no model of all its parts that writes text"),
        (hf.Kosmos2Config(), "kosmos-2: transformers has no causal LM of its text half"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_configurations_without_a_half_that_can_be_served_are_refused(
    config: Any, reason: str, tmp_path: Path
) -> None:
    """Before any weights are looked for."""
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path)


def test_a_checkpoint_without_weights_of_the_half_is_refused(tmp_path: Path) -> None:
    saved("llava", tmp_path)
    with stored_tensors(tmp_path) as tensors:
        for name in [name for name in tensors if name.startswith("language_model.")]:
            del tensors[name]
    with pytest.raises(UnsupportedModelError, match="llava: the checkpoint has no embed_tokens"):
        load(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModelError, match="there are no weights in model.safetensors"):
        load(tmp_path)


def test_a_whole_model_is_not_driven() -> None:
    with pytest.raises(UnsupportedModelError, match="its text half is served alone"):
        refuse_unservable(hf.LlavaConfig())


def test_a_language_model_is_no_half() -> None:
    assert find_text_half("nowhere", hf.LlamaConfig()) is None


# --- quantised halves ---

ALIASES = {"language_model.model": "model", "language_model.lm_head": "lm_head"}
MODULES = ["", "model", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate", "lm_head"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("language_model.model.layers.0.mlp.gate", ["model.layers.0.mlp.gate"]),
        ("vision_tower.layers.0.fc1", ["vision_tower.layers.0.fc1"]),
        ("Linear", ["Linear"]),
        (r"re:language_model\.model\.layers.*gate$", [r"re:model\.layers.*gate$"]),
        (r"re:^language_model.model.layers", ["re:^model.layers"]),
        # It names the whole's modules behind a wildcard: those of the half are told one by one.
        ("re:.*language_model.*mlp.*", ["re:.*language_model.*mlp.*", "model.layers.0.mlp.gate"]),
        ("re:.*lm_head", ["re:.*lm_head"]),
        ("re:vision_tower.*", ["re:vision_tower.*"]),
    ],
)
def test_modules_in_descriptions_of_a_quantization_get_their_own_names(
    given: str, expected: list[str]
) -> None:
    found = own_names({"bits": 4, "ignore": [given]}, ALIASES, MODULES)
    assert found == {"bits": 4, "ignore": expected}


def test_the_head_and_keys_get_their_own_names() -> None:
    given = {"+:language_model.model.layers.0": {"bits": 8}, "skipped": ["language_model.lm_head"]}
    expected = {"+:model.layers.0": {"bits": 8}, "skipped": ["lm_head"]}
    assert own_names(given, ALIASES, MODULES) == expected


@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_quantization_survives_to_the_half_with_its_own_names(
    part: str | None, tmp_path: Path
) -> None:
    """Names are the checkpoint's, or those of the modules in transformers' own model of the whole."""
    saved("llava", tmp_path)
    ignored = ["language_model.lm_head", "model.language_model.layers.0.mlp.up_proj"]
    scheme = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ignored}
    configure(tmp_path, part, quantization_config=scheme)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    half = find_text_half(str(tmp_path), config)
    assert half is not None
    found = half.config.quantization_config
    assert found["ignore"] == ["lm_head", "model.layers.0.mlp.up_proj"]
    assert found["format"] == "int-quantized"


def test_weights_that_come_in_8_bits_fill_the_half(tmp_path: Path) -> None:
    """The whole computes with what they stand for."""
    whole: Any = saved("llava", tmp_path)
    with stored_tensors(tmp_path) as stored:
        for name, weight in [*stored.items()]:
            if not name.endswith("_proj.weight") or not name.startswith("language_model."):
                continue
            scale = weight.abs().amax(1, keepdim=True) / 127
            stored[name] = (weight / scale).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
            layer = name.removeprefix("language_model.model.").removesuffix(".weight")
            meant = whole.model.language_model.get_submodule(layer)
            meant.weight.copy_(stored[name] * scale)
    ignored = ["language_model.lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"]
    configure(tmp_path, quantization_config=written_scheme(ignored))
    half = load(tmp_path)
    assert sum(isinstance(each, GroupedLinear) for each in half.modules()) == 14
    torch.testing.assert_close(own_logits(half, TEXT), own_logits(whole, TEXT), rtol=0, atol=2e-4)
