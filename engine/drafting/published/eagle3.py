"""Folders of EAGLE-3 and P-EAGLE: the plain form (yuhuili, AngelSlim, SpecForge) and speculators'.

Both hold the same tensors. The plain form has the layers' sizes at the top of its configuration and
calls the first layer ``midlayer`` or ``layers.0``; speculators has them in ``transformer_layer_config``
and says at the top which method it is of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

import torch

from engine.drafting.facts import TargetFacts
from engine.drafting.published.captured import Layers, readings
from engine.drafting.published.eagle3_network import FAMILIES, Eagle3Network, Eagle3Spec
from engine.drafting.published.folder import (
    CONFIG,
    EMBEDDING,
    FAULTS,
    HEAD,
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
_WINDOW_SETTINGS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_LAYERS = LayerForm(
    {
        "llama": (FAMILIES["llama"].config, (*LAYER_SETTINGS, *_ROPE_SETTINGS)),
        "qwen3": (FAMILIES["qwen3"].config, (*LAYER_SETTINGS, *_ROPE_SETTINGS, *_WINDOW_SETTINGS)),
    },
    "llama",
    "and layers of llama and qwen3 are known",
    "which does not divide {} heads",
    "and there are tensors of {}",
    "the target's is",
)
NUM_PARALLEL = "para_depths"
_NESTED = "eagle_config"
_FIELDS = {
    "target_hidden_size": Field((size, of_target("hidden_size", "the target's is")), default=None),
    "draft_vocab_size": Field((size,), default=attrgetter("vocab_size")),
    "norm_before_residual": Field((flag,), default=None),
    "norm_output": Field((flag,), default=False),
    "norm_before_fc": Field((flag,), f"norm_before_fc {_NESTED}.norm_before_fc", False),
    "fc_norm": Field((flag,), default=False),
    "entered": Field((layer_ids,), LAYER_IDS, None),
    "left": Field((layer_ids,), f"{_NESTED}.{LAYER_IDS}", None),
} | {
    # ModelOpt and SpecForge write these; other values mean another network.
    name: Field((only(value, said="known"),), f"{_NESTED}.{name}", None)
    for name, value in {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 0,
    }.items()
}
_PARALLEL_FIELDS = {
    "mask_token_id": Field((token_id,), "mask_token_id pard_token ptd_token_id"),
    # Tokens of a pass: the default is where the file does not say for how many it was trained.
    NUM_PARALLEL: Field((size,), default=8),
}
_PROPOSAL_KEYS = ("proposal_type", "speculative_tokens", "verifier_accept_k", "accept_tolerance")


def recognised(config: Mapping[str, Any], tensor_names: Collection[str]) -> str | None:
    """Returns the method of a folder, by its own word or by its tensors; None: it is of another."""
    kind = config.get("speculators_model_type")
    given = config.get("architectures")
    architectures = " ".join(map(str, given if isinstance(given, list) else ())).lower()
    norms = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    if kind is None:
        is_known = "eagle3" in architectures or any(each in tensor_names for each in norms)
    else:
        is_known = kind in _SPECULATORS
    if not is_known:
        return None
    return "p_eagle" if _MASK in tensor_names or kind == "peagle" else "eagle3"


def read(folder: DraftFolder, facts: TargetFacts) -> Eagle3Network:
    """Returns a folder's network, with weights of the types that they are stored in; ``networks.place``
    makes them the target's. Raises DraftRefusedError with the reason."""
    folder.check_target(facts)
    names = {name: _name_of_today(name) for name in folder.tensors if name not in MAPS}
    spec = _spec(folder, facts, set(names.values()))
    try:
        with torch.device("meta"):
            network = Eagle3Network(spec)
    except FAULTS as error:
        raise folder.refused(f"the layers of {CONFIG} cannot be read: {error!r}") from error
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
    found = settings.values(_FIELDS, facts, closed=_NESTED)
    section = settings if is_plain else settings.section("transformer_layer_config")
    layer = read_layers(section, _LAYERS, names, facts)
    num_states = _num_states(folder, facts)
    num_parallel, mask_token_id, mask_shape = _parallel(folder, facts, num_states)
    folder.check_ends(facts, layer.hidden_size, found["draft_vocab_size"])
    norm_before_residual = found["norm_before_residual"]
    return Eagle3Spec(
        layer,
        facts.hidden_size,
        _readings(folder, found, num_states, facts.num_layers),
        found["draft_vocab_size"],
        norm_before_residual=not is_plain if norm_before_residual is None else norm_before_residual,
        norm_output=found["norm_output"],
        norms_states=found["norm_before_fc"] or "input_norm.weight" in names,
        norms_each_state=found["fc_norm"] or "fc_norm.0.weight" in names,
        has_fc_bias="fc.bias" in names,
        owns_embedding=EMBEDDING in names,
        owns_head=HEAD in names,
        num_parallel=num_parallel,
        mask_token_id=mask_token_id,
        mask_shape=mask_shape,
    )


def _num_states(folder: DraftFolder, facts: TargetFacts) -> int:
    """Returns how many layers' states the network reads: so many fit into its product."""
    shape = folder.shape("fc.weight", 2)
    num_states, rest = divmod(shape[1], facts.hidden_size)
    if rest or not num_states:
        raise folder.refused(
            f"fc.weight {list(shape)} reads no whole number of states of {facts.hidden_size}"
        )
    return num_states


def _readings(
    folder: DraftFolder, found: Mapping[str, Any], num_states: int, num_layers: int
) -> tuple[Layers, ...]:
    """Returns which layers the file may mean: those at the top are named by the state that enters them,
    nested ones by the state that leaves them."""
    named = ((found["entered"], 0), (found["left"], 1))
    given = [tuple(layer + offset for layer in ids) for ids, offset in named if ids]
    given = given or [(2, num_layers // 2, num_layers - 3)]
    for each in given:
        if len(each) != num_states:
            raise folder.refused(
                f"it names {len(each)} layers, and fc.weight is for the states of {num_states}"
            )
    candidates = readings(given, num_layers)
    if not candidates:
        raise folder.refused(
            f"it reads the states of layers {list(given[0])}, and the target has {num_layers}"
        )
    return candidates


def _parallel(
    folder: DraftFolder, facts: TargetFacts, num_states: int
) -> tuple[int, int | None, tuple[int, ...] | None]:
    """Returns a pass's tokens, the mask token and the shape of what its rows read; 1 and None of
    EAGLE-3."""
    settings = folder.settings
    depth = _proposed(settings, facts)
    mask = folder.tensors.get(_MASK)
    if mask is None and settings.content.get("speculators_model_type") != "peagle":
        return 1, None, None
    width = num_states * facts.hidden_size
    if mask is None or mask.shape not in ((width,), (1, width), (1, 1, width)):
        folder.check_shape(_MASK, (1, 1, width))
    assert mask is not None, "its shape was checked"
    found = settings.values(_PARALLEL_FIELDS, facts)
    return depth or found[NUM_PARALLEL], found["mask_token_id"], mask.shape


def _proposed(settings: Section, facts: TargetFacts) -> int | None:
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
    known = {"speculative_tokens": Field((size,), default=None)}
    return proposals[0].values(known, facts)["speculative_tokens"] if proposals else None
