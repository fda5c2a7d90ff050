"""DFlash and DSpark: a few layers that draft a block of tokens in one pass (``dflash_network``).

Folders come in two formats: z-lab's, whose layers stand at the top of the configuration and the rest in
``dflash_config``, and speculators', the other way round. DSpark's (``dspark.py``) come in both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from engine.drafting.facts import TargetFacts
from engine.drafting.published.dflash_network import Attention, DFlashNetwork, Settings
from engine.drafting.published.folder import (
    FAULTS,
    DraftFolder,
    Field,
    LayerForm,
    Section,
    flag,
    layer_ids,
    of_target,
    only,
    read_layers,
    size,
    token_id,
)
from engine.drafting.published.vocabulary import read_token_map

_KINDS = ("dflash", "dflash2", "dspark")
"""Kinds in speculators' format; the second is recognized in order to be refused by name."""
_NESTED = "dflash_config"
_LAYER_KEYS = (
    "attention_bias",
    "hidden_act",
    "layer_types",
    "max_window_layers",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
)
_FAMILIES = {"llama": (LlamaConfig, _LAYER_KEYS), "qwen3": (Qwen3Config, _LAYER_KEYS)}
_SAID = ("neither llama nor qwen3", "of {} heads", "and tensors are of {}", "this model has")
_LAYERS = LayerForm(_FAMILIES, "qwen3", *_SAID)


def _is_block(rows: int, _: TargetFacts) -> str | None:
    return None if rows > 1 else f"is {rows}, and a block has at least 2 rows"


def _within(own: int, facts: TargetFacts) -> str | None:
    known = facts.vocab_size
    return f"is {own}, and this model has {known}" if own > known else None


_FIELDS = {
    "block_size": Field((size, _is_block), f"{_NESTED}.block_size block_size"),
    "mask_token_id": Field((token_id,), f"{_NESTED}.mask_token_id mask_token_id"),
    "sample_from_anchor": Field((flag,), f"{_NESTED}.sample_from_anchor sample_from_anchor", None),
    "draft_vocab_size": Field((size, _within), default=attrgetter("vocab_size")),
    "target_hidden_size": Field((size, of_target("hidden_size")), default=None),
    "num_target_layers": Field((size, of_target("num_layers")), default=None),
    "sliding_window_non_causal": Field((flag,), default=False),
    "is_causal": Field((flag,), f"is_causal {_NESTED}.causal", None),
    "use_swa": Field((flag,), f"{_NESTED}.use_swa", False),
    "swa_window_size": Field((size,), f"{_NESTED}.swa_window_size", None),
    "entered": Field((layer_ids,), "aux_hidden_state_layer_ids", None),
    "left": Field((layer_ids,), f"{_NESTED}.target_layer_ids target_layer_ids", None),
    "input_embedding_scale": Field((only(1.0),), default=None),
    "logit_scale": Field((only(1.0),), default=None),
    "markov_head_type": Field((only("vanilla"),), default=None),
    "output_multiplier": Field((only(1.0),), default=None),
    "rope_is_neox_style": Field((only(True),), default=None),
}
_MASK_FILE = "mask_embedding.pt"
_MARKOV = "markov_head.markov_w1.weight"
_CONFIDENCE = "confidence_head.proj.weight"
_NOT_READ = ("d2t", "t2d")
"""Tensors that are no weights: the first becomes ``token_map``, the second says the same again."""


def recognised(config: Mapping[str, Any], tensor_names: Collection[str]) -> str | None:
    """Returns the method of a folder, by its configuration and its tensors; None: it is of another."""
    kind = config.get("speculators_model_type")
    # EAGLE-3's heads have a norm of this name too, but within their layer.
    is_plain = kind is None and (_NESTED in config or "hidden_norm.weight" in tensor_names)
    if not is_plain and kind not in _KINDS:
        return None
    has_markov = any(name.startswith("markov_head.") for name in tensor_names)
    return "dspark" if has_markov or kind == "dspark" else "dflash"


def read(folder: DraftFolder, facts: TargetFacts) -> DFlashNetwork:
    """Returns a folder's network on the CPU, in the types that it is stored in. Raises DraftRefusedError
    with the reason where it does not fit the target, or holds anything that is not understood."""
    settings = _read_settings(folder, facts)
    folder.check_ends(facts, settings.layers.hidden_size, settings.draft_vocab_size)
    token_map = read_token_map(folder, settings.draft_vocab_size, facts.vocab_size)
    network = DFlashNetwork(settings, facts.hidden_size, token_map)
    folder.fill(network, {name: name for name in folder.tensors if name not in _NOT_READ})
    return network


def _read_settings(folder: DraftFolder, facts: TargetFacts) -> Settings:
    settings = folder.settings
    kind = settings.content.get("speculators_model_type")
    if kind == "dflash2":
        raise folder.refused("dflash2's convolutions and selector are not read")
    folder.check_target(facts)
    found = settings.values(_FIELDS, facts, closed=_NESTED)
    if (folder.path / _MASK_FILE).exists():
        raise folder.refused(f"{_MASK_FILE} holds another embedding of the mask, which is not read")
    section = settings if kind is None else settings.section("transformer_layer_config")
    config = _layer_config(section, folder.tensors, facts)
    is_spark = kind == "dspark" or (
        kind is None and bool(folder.tensors.keys() & {_MARKOV, _CONFIDENCE})
    )
    anchor_predicts = found["sample_from_anchor"]
    rank = folder.shape(_MARKOV, 2)[1] if is_spark and _MARKOV in folder.tensors else 0
    has_confidence = is_spark and _CONFIDENCE in folder.tensors
    return Settings(
        layers=config,
        attentions=_attentions(config, settings, found),
        candidate_layers=_candidate_layers(settings, found, facts.num_layers, config),
        block_size=found["block_size"],
        mask_token_id=found["mask_token_id"],
        anchor_predicts=is_spark if anchor_predicts is None else anchor_predicts,
        has_norms=config.model_type == "qwen3"
        or "layers.0.self_attn.k_norm.weight" in folder.tensors,
        draft_vocab_size=found["draft_vocab_size"],
        markov_rank=rank,
        confidence_size=_confidence_size(folder, config.hidden_size, rank) if has_confidence else 0,
        confidence_has_bias=has_confidence and "confidence_head.proj.bias" in folder.tensors,
        owns=[name for name in ("embed_tokens", "lm_head") if f"{name}.weight" in folder.tensors],
    )


def _layer_config(section: Section, names: Iterable[str], facts: TargetFacts) -> Any:
    """Returns transformers' configuration of the layers. Raises DraftRefusedError where transformers
    cannot make any of it, or not what is computed here."""
    config = read_layers(section, _LAYERS, names, facts)
    if not 0 <= config.rms_norm_eps < 1:
        raise section.refused("rms_norm_eps", f"is {config.rms_norm_eps!r}")
    if config.hidden_act not in ACT2FN:
        raise section.refused("hidden_act", f"is {config.hidden_act!r}, which transformers lacks")
    _check_rotations(config, section)
    return config


def _check_rotations(config: Any, section: Section) -> None:
    """Raises DraftRefusedError where rotary embeddings cannot be made, or differ by layer."""
    try:
        frequencies = Qwen3RotaryEmbedding(config).inv_freq
        is_whole = config.rope_parameters.get("partial_rotary_factor", 1) == 1
    except FAULTS as error:
        raise section.refused("rope_parameters", f"cannot be read: {error!r}") from error
    if not is_whole:
        raise section.refused("rope_parameters", "turn parts of heads")
    if len(frequencies) != config.head_dim // 2 or not bool(frequencies.isfinite().all()):
        raise section.refused("rope_parameters", "give no frequencies for these heads")


def _attentions(config: Any, settings: Section, found: Mapping[str, Any]) -> list[Attention]:
    """Returns how each layer attends. Layers with a window are causal, others are not, unless a key of
    either format says otherwise."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if others := set(types) - {"full_attention", "sliding_attention"}:
        raise settings.refused("layer_types", f"has {', '.join(sorted(others))}")
    is_sliding = [each == "sliding_attention" for each in types]
    is_causal = is_sliding
    if found["sliding_window_non_causal"] or found["is_causal"] is not None:
        is_causal = [bool(found["is_causal"])] * len(types)
    if found["use_swa"] and not any(is_sliding):
        is_sliding = [True] * len(types)
    window = found["swa_window_size"] or getattr(config, "sliding_window", None)
    if any(is_sliding) and (type(window) is not int or window < 1):
        raise settings.refused("sliding_window", f"is {window!r}, and there are sliding layers")
    return [
        Attention(window if slides else None, not causal)
        for slides, causal in zip(is_sliding, is_causal, strict=True)
    ]


def _candidate_layers(
    settings: Section, found: Mapping[str, Any], num_layers: int, config: Any
) -> tuple[tuple[int, ...], ...]:
    """Returns the layers that the folder names, and their alternatives if the author counted from the
    other end of a layer, as far as the target has them. Layers as in ``InputBatch.hidden_layers``."""
    name = "entered" if found["entered"] else "left"
    ids = found[name]
    if not ids and settings.has("speculators_model_type"):
        name, ids = "entered", (2, num_layers // 2, num_layers - 3)
    elif not ids:
        ids = spread_layers(num_layers, config.num_hidden_layers)
    offset = 1 if name == "left" else 0
    named, others = (tuple(each + shift for each in ids) for shift in (offset, 1 - offset))
    if not _are_within(named, num_layers):
        listed = ", ".join(map(str, ids))
        section, key = settings.holder(_FIELDS[name].keys)
        raise section.refused(key, f"names layers {listed}, and this model has {num_layers}")
    return (named, others) if _are_within(others, num_layers) else (named,)


def _are_within(layers: Sequence[int], num_layers: int) -> bool:
    return all(0 <= each <= num_layers for each in layers)


def spread_layers(num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Returns the ``target_layer_ids`` of a folder of z-lab's that names none."""
    if num_draft_layers == 1:
        return (num_layers // 2,)
    step = (num_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + each * step) for each in range(num_draft_layers))


def _confidence_size(folder: DraftFolder, hidden_size: int, markov_rank: int) -> int:
    """Returns how many features the confidence head reads."""
    found = folder.shape(_CONFIDENCE, 2)[1]
    if found not in (hidden_size, hidden_size + markov_rank):
        raise folder.refused(
            f"{_CONFIDENCE} reads {found} features, neither {hidden_size} nor "
            f"{hidden_size + markov_rank}"
        )
    return found
