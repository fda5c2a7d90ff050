"""Writes trained heads as folders that the engine, vLLM and SGLang load."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.drafting.facts import TargetFacts
from engine.drafting.published.eagle3 import LAYER_IDS, LAYER_SETTINGS, NUM_PARALLEL
from engine.drafting.published.eagle3_network import Eagle3Network
from engine.drafting.published.folder import CONFIG, SIZES, WEIGHTS
from engine.drafting.published.medusa import KIND, SHARED_HEAD, ResidualHeads, blocks_of
from engine.drafting.published.vocabulary import is_drafted
from engine.machine import let_others_read


def write_eagle3(
    path: Path,
    network: Eagle3Network,
    fingerprint: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder of the plain form, which ``read`` makes the same network of, and vLLM and SGLang
    theirs. Layers are named twice, as vLLM and as SGLang read them. ``fingerprint``: of the target's
    weights; with one, ``read`` refuses other targets. ``notes``: more of the configuration.

    Raises ValueError for layers of another family than Llama's, of which there is no plain form.
    """
    if network.spec.layer.model_type != "llama":
        raise ValueError("the plain form of EAGLE-3 is for layers of Llama's family")
    tensors = {
        re.sub(r"^layers\.0\.", "midlayer.", name): tensor
        for name, tensor in _tensors(network).items()
    }
    _write(path, tensors, _plain_config(network), fingerprint, notes)


def write_peagle(
    path: Path,
    network: Eagle3Network,
    target: str,
    target_architectures: Sequence[str],
    fingerprint: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder of P-EAGLE in speculators' form, which ``read`` makes the same network of, and vLLM
    its own: of the plain form vLLM would have to be told that it drafts in parallel. ``target``: its path
    or name, with which vLLM serves the folder by itself. The others as for ``write_eagle3``.

    Raises ValueError for a network that is no P-EAGLE, or that vLLM would take for another.
    """
    spec = network.spec
    if spec.mask_token_id is None:
        raise ValueError("the network has no mask token: it is no P-EAGLE")
    if spec.norm_output or spec.norms_each_state:
        raise ValueError("vLLM knows no P-EAGLE with norms of each state or normed features")
    proposal = {"proposal_type": "greedy", "speculative_tokens": spec.num_parallel}
    content: dict[str, Any] = {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": list(target_architectures)},
        },
        "transformer_layer_config": {
            "model_type": spec.layer.model_type,
            **_layer_content(network),
            "rope_parameters": dict(_layer(network).rope_parameters),
            # Where vLLM looks for how many states are fused, three without it.
            "num_aux_hidden_states": len(network.hidden_layers),
        },
        **_head_content(network),
        LAYER_IDS: list(network.hidden_layers),
        "mask_token_id": spec.mask_token_id,
    }
    _write(path, _tensors(network), content, fingerprint, notes)


def _tensors(network: Eagle3Network) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = network.state_dict()
    if network.token_map is not None:
        ids = network.token_map
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        tensors["t2d"] = is_drafted(ids, _layer(network).vocab_size)
    return tensors


def _write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    content: dict[str, Any],
    fingerprint: str | None,
    notes: Mapping[str, Any] | None,
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if fingerprint is not None:
        content["target_fingerprint"] = fingerprint
    text = json.dumps(content | dict(notes or {}), indent=2)
    # Beside the files and then in their place: a head may be served while it is trained.
    save_file(stored, path / f"{WEIGHTS}.new", metadata={"format": "pt"})
    let_others_read(path / f"{WEIGHTS}.new")
    (path / f"{CONFIG}.new").write_text(text + "\n", encoding="utf-8")
    for name in (WEIGHTS, CONFIG):
        (path / f"{name}.new").replace(path / name)


def _plain_config(network: Eagle3Network) -> dict[str, Any]:
    spec = network.spec
    rope = dict(_layer(network).rope_parameters)
    rope.pop("rope_theta")
    content: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_layer_content(network),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        **_head_content(network),
        LAYER_IDS: list(network.hidden_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            LAYER_IDS: [layer - 1 for layer in network.hidden_layers],
        },
    }
    if spec.mask_token_id is not None:
        content |= dict.fromkeys(("mask_token_id", "ptd_token_id"), spec.mask_token_id)
        content[NUM_PARALLEL] = spec.num_parallel
    return content


def _layer_content(network: Eagle3Network) -> dict[str, Any]:
    layer = _layer(network)
    return {
        **{key: getattr(layer, key) for key in (*SIZES, *LAYER_SETTINGS)},
        "rope_theta": layer.rope_parameters["rope_theta"],
        "torch_dtype": str(network.fc.weight.dtype).removeprefix("torch."),
    }


def _head_content(network: Eagle3Network) -> dict[str, Any]:
    spec = network.spec
    return {
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_size,
        "tie_word_embeddings": False,
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.norm_output,
        "norm_before_fc": spec.norms_states,
        "fc_norm": spec.norms_each_state,
    }


def _layer(network: Eagle3Network) -> Any:
    return network.spec.layer


def write_medusa(
    path: Path,
    heads: ResidualHeads,
    facts: TargetFacts,
    notes: Mapping[str, Any],
    output_head: torch.Tensor | None = None,
) -> None:
    """Writes a folder in vLLM's form, in bf16. ``notes``: more of its configuration. ``output_head``:
    the target's, ``[vocab_size, hidden_size]``, which vLLM asks for; None: ``medusa.read`` takes it from
    the target."""
    tensors = {} if output_head is None else {SHARED_HEAD: output_head}
    for layer, head, name in blocks_of(heads.num_heads, heads.num_layers, "weight"):
        tensors[name] = heads.weight[layer, head].T
    for layer, head, name in blocks_of(heads.num_heads, heads.num_layers, "bias"):
        tensors[name] = heads.bias[layer, head, 0]
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    config = {
        "architectures": ["MedusaModel"],
        "model_type": KIND,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "truncated_vocab_size": facts.vocab_size,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    }
    _write(path, rounded, config, facts.fingerprint, notes)
