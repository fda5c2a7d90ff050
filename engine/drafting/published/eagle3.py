"""Folders of EAGLE-3 and P-EAGLE: the plain form (yuhuili, AngelSlim, SpecForge) and speculators'.

Both hold the same tensors. The plain form has the layers' sizes at the top of its configuration and
calls the first layer ``midlayer`` or ``layers.0``; speculators has them in ``transformer_layer_config``
and says at the top which method it is of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from engine.attention.backend import IMPLEMENTATION
from engine.drafting.facts import TargetFacts
from engine.drafting.published.captured import Layers, readings
from engine.drafting.published.eagle3_network import FAMILIES, Eagle3Network, Eagle3Spec
from engine.drafting.published.folder import (
    CONFIG,
    EMBEDDING,
    FAULTS,
    HEAD,
    SIZES,
    DraftFolder,
    DraftRefusedError,
    Section,
)
from engine.drafting.published.vocabulary import MAPS, read_token_map

_SPECULATORS = ("eagle3", "peagle")
"""The methods of speculators that are read here."""
_OLDER_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_MASK = "mask_hidden"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_SETTINGS = ("hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias")
_ROPE_SETTINGS = ("rope_theta", "rope_scaling", "rope_parameters")
_WINDOW_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "llama": (),
    "qwen3": ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
}
"""Settings from which the layers' configuration is made, in addition to their sizes."""
_EAGLE_CONFIG: Mapping[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (0,),
}
"""Fields that ModelOpt and SpecForge write into ``eagle_config``, with the values that mean EAGLE-3:
others mean another network."""
_PROPOSAL_KEYS = ("proposal_type", "speculative_tokens", "verifier_accept_k", "accept_tolerance")
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
NUM_PARALLEL = "para_depths"
_USUAL_PARALLEL = 8
"""Tokens of a P-EAGLE pass where the file does not say for how many it was trained."""


def recognises(config: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
    """Whether a folder is of this method, by its own word or by its tensors."""
    method = config.get("speculators_model_type")
    if method is not None:
        return method in _SPECULATORS
    architectures = config.get("architectures")
    if isinstance(architectures, list) and any("eagle3" in str(a).lower() for a in architectures):
        return True
    return any(f"{first}hidden_norm.weight" in tensor_names for first in ("midlayer.", "layers.0."))


def read(folder: DraftFolder, facts: TargetFacts) -> Eagle3Network:
    """Returns a folder's network, with weights of the types that they are stored in; ``networks.place``
    makes them the target's. Raises DraftRefusedError with the reason."""
    folder.check_target(facts)
    names = {name: _name_of_today(name) for name in folder.tensors if name not in MAPS}
    try:
        spec = _spec(folder, facts, set(names.values()))
        with torch.device("meta"):
            network = Eagle3Network(spec)
    except DraftRefusedError:
        raise
    except FAULTS as error:
        raise folder.refused(f"{CONFIG} is of no model: {type(error).__name__} {error}") from error
    folder.fill(network, names)
    network.token_map = read_token_map(folder, spec.draft_vocab_size, facts.vocab_size)
    return network


def _name_of_today(name: str) -> str:
    for older, newer in _OLDER_NAMES.items():
        if name.startswith(older):
            return newer + name.removeprefix(older)
    return name


def _spec(folder: DraftFolder, facts: TargetFacts, names: Collection[str]) -> Eagle3Spec:
    """``names``: of the folder's tensors, as modules are called today."""
    settings = folder.settings
    is_plain = not settings.has("speculators_model_type")
    eagle = settings.section("eagle_config")
    _check_eagle_config(eagle)
    layer = _layer_config(
        settings if is_plain else settings.section("transformer_layer_config"), names
    )
    if layer.vocab_size != facts.vocab_size:
        raise folder.refused(
            f"vocab_size is {layer.vocab_size}, and the target's is {facts.vocab_size}"
        )
    num_states = _num_states(folder, facts)
    num_parallel, mask_token_id, mask_shape = _parallel(folder, facts, num_states)
    norm_before_fc = settings.flag("norm_before_fc", eagle.flag("norm_before_fc", False))
    draft_vocab_size = settings.size("draft_vocab_size", facts.vocab_size)
    folder.check_ends(facts, layer.hidden_size, draft_vocab_size)
    return Eagle3Spec(
        layer,
        facts.hidden_size,
        _readings(folder, eagle, num_states, facts.num_layers),
        draft_vocab_size,
        norm_before_residual=settings.flag("norm_before_residual", not is_plain),
        norm_output=settings.flag("norm_output", False),
        norms_states=norm_before_fc or "input_norm.weight" in names,
        norms_each_state=settings.flag("fc_norm", False) or "fc_norm.0.weight" in names,
        has_fc_bias="fc.bias" in names,
        owns_embedding=EMBEDDING in names,
        owns_head=HEAD in names,
        num_parallel=num_parallel,
        mask_token_id=mask_token_id,
        mask_shape=mask_shape,
    )


def _check_eagle_config(eagle: Section) -> None:
    eagle.check_keys({*_EAGLE_CONFIG, LAYER_IDS, "norm_before_fc"})
    for key, allowed in _EAGLE_CONFIG.items():
        if eagle.has(key) and eagle.content[key] not in allowed:
            raise eagle.refused(key, f"is {eagle.content[key]!r}, and only {allowed[0]!r} is known")


def _layer_config(section: Section, names: Collection[str]) -> Any:
    """Returns the configuration of the layers, as transformers completes it."""
    family = section.content.get("model_type") or "llama"
    if family not in FAMILIES:
        known = " and ".join(FAMILIES)
        raise section.refused("model_type", f"is {family!r}, and layers of {known} are known")
    for key in SIZES:
        if section.has(key):
            section.size(key)
    settings = (*SIZES, *LAYER_SETTINGS, *_ROPE_SETTINGS, *_WINDOW_SETTINGS[family])
    given = {key: section.content[key] for key in settings if section.has(key)}
    config: Any = FAMILIES[family].config(**given)
    if config.num_attention_heads % config.num_key_value_heads:
        raise section.refused(
            "num_key_value_heads",
            f"is {config.num_key_value_heads}, which does not divide {config.num_attention_heads} heads",
        )
    count = len({name.split(".")[1] for name in names if name.startswith("layers.")})
    if config.num_hidden_layers != count:
        raise section.refused(
            "num_hidden_layers", f"is {config.num_hidden_layers}, and there are tensors of {count}"
        )
    config._attn_implementation = IMPLEMENTATION
    return config


def _num_states(folder: DraftFolder, facts: TargetFacts) -> int:
    """Returns how many layers' states the network reads: so many fit into its product."""
    given = folder.settings.size("target_hidden_size", facts.hidden_size)
    if given != facts.hidden_size:
        raise folder.refused(
            f"target_hidden_size is {given}, and the target's is {facts.hidden_size}"
        )
    shape = folder.shape("fc.weight", 2)
    num_states, rest = divmod(shape[1], facts.hidden_size)
    if rest or not num_states:
        raise folder.refused(
            f"fc.weight {list(shape)} reads no whole number of states of {facts.hidden_size}"
        )
    return num_states


def _readings(
    folder: DraftFolder, eagle: Section, num_states: int, num_layers: int
) -> tuple[Layers, ...]:
    """Returns which layers the file may mean: those at the top are named by the state that enters them,
    nested ones by the state that leaves them."""
    top, nested = folder.settings.layer_ids(LAYER_IDS), eagle.layer_ids(LAYER_IDS)
    given = [] if top is None else [top]
    if nested is not None:
        given.append(tuple(layer + 1 for layer in nested))
    given = given or [(2, num_layers // 2, num_layers - 3)]
    for each in given:
        if len(each) != num_states:
            raise folder.refused(
                f"it names {len(each)} layers, and fc.weight is for the states of {num_states}"
            )
    found = readings(given, num_layers)
    if not found:
        raise folder.refused(
            f"it reads the states of layers {list(given[0])}, and the target has {num_layers}"
        )
    return found


def _parallel(
    folder: DraftFolder, facts: TargetFacts, num_states: int
) -> tuple[int, int | None, tuple[int, ...] | None]:
    """Returns a pass's tokens, the mask token and the shape of what its rows read; 1 and None of
    EAGLE-3."""
    settings = folder.settings
    depth = _proposed(settings)
    mask = folder.tensors.get(_MASK)
    if mask is None and settings.content.get("speculators_model_type") != "peagle":
        return 1, None, None
    width = num_states * facts.hidden_size
    if mask is None or mask.shape not in ((width,), (1, width), (1, 1, width)):
        folder.check_shape(_MASK, (1, 1, width))
    assert mask is not None, "its shape was checked"
    key = next((each for each in _MASK_TOKENS if settings.has(each)), _MASK_TOKENS[0])
    depth = depth or settings.size(NUM_PARALLEL, _USUAL_PARALLEL)
    return depth, settings.token_id(key, facts.vocab_size), mask.shape


def _proposed(settings: Section) -> int | None:
    """Returns how many tokens speculators' default method proposes; None: the file does not say."""
    section = settings.section("speculators_config")
    section.check_keys(("algorithm", "proposal_methods", "default_proposal_method", "verifier"))
    methods = section.content.get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(each, dict) for each in methods):
        raise section.refused("proposal_methods", "is not a list of objects")
    proposals = [
        Section(settings.path, f"{section.name}proposal_methods[{index}].", each)
        for index, each in enumerate(methods)
    ]
    for proposal in proposals:
        proposal.check_keys(_PROPOSAL_KEYS)
    default = section.content.get("default_proposal_method")
    proposals.sort(key=lambda each: each.content.get("proposal_type") != default)
    if not proposals or not proposals[0].has("speculative_tokens"):
        return None
    return proposals[0].size("speculative_tokens")
