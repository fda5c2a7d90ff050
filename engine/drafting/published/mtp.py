"""MTP: the layer of the target's own checkpoint that predicts one token further.

A row joins a token's embedding and the state of the token before it and runs one decoder layer of the
target's own class; the target's output head reads what leaves it behind a norm, and so does the next
draft step. To transformers the module is loaded as a model of the target's class with one layer, its
norm in the place of the last, so that names, experts and shapes are transformers' affair.

Only the first module runs, for all depths; the log says where a checkpoint has several.
"""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention.backend import KVShape
from engine.drafting.facts import TargetFacts
from engine.drafting.published.folder import DraftFolder, Field, Section
from engine.drafting.published.mtp_network import Form, MtpNetwork
from engine.model.loader import attach_attention, refuse_unservable
from engine.request.errors import UnsupportedModelError
from engine.weights.checkpoint import load_weights
from engine.weights.shards import whole

logger = logging.getLogger(__name__)

_FIRST_LAYER = "layers.0."
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


FORMS = (
    # DeepSeek-V3, GLM-4.x
    Form(
        r"layers\.{}\.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        own_ends=True,
        is_blank_first=True,
    ),
    # Qwen3-Next, Qwen3.5, EXAONE MoE, Mellum
    Form(r"mtp\.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), _FIRST_LAYER),
    # MiMo
    Form(
        r"mtp_layers\.0\.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        is_hidden_first=True,
        is_blank_first=True,
    ),
)
_HEAD, _EMBEDDING = "shared_head.head.weight", "embed_tokens.weight"


def _kinds(value: Any, _: TargetFacts) -> str | None:
    are_kinds = isinstance(value, list | tuple) and all(type(each) is str for each in value)
    return None if are_kinds else "is not a list of kinds of layers"


_FIELDS = dict.fromkeys(("mtp_layer_types", "layer_types"), Field((_kinds,), default=()))


@dataclass(frozen=True, slots=True)
class _Module:
    """A checkpoint's first MTP module. ``root``: what its tensors' names begin with."""

    folder: DraftFolder
    form: Form
    root: str

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns one tensor by its name in the module. Raises DraftRefusedError where it is missing, of
        another shape or not finite."""
        return self.folder.tensor(self.root + name, shape)

    def count(self) -> int:
        """Returns how many modules the checkpoint has: further ones are numbered on."""
        start, number = f"{self.root}{self.form.layer}".removesuffix(".").rsplit(".", 1)
        last = int(number)
        while any(name.startswith(f"{start}.{last + 1}.") for name in self.folder.tensors):
            last += 1
        return last - int(number) + 1

    def layer_names(self) -> list[str]:
        """Returns the names of what the module has besides its own parts: the decoder layer's. Raises
        DraftRefusedError where there is anything else."""
        known = {f"{self.root}{part}.weight" for part in self.form.parts}
        if self.form.own_ends:
            known |= {self.root + each for each in (_HEAD, _EMBEDDING)}
        found = [
            name for name in self.folder.tensors if name.startswith(self.root) and name not in known
        ]
        start = self.root + self.form.layer
        layers = start.removesuffix("0.")  # further modules may lie beside the first
        if unknown := [name for name in found if not name.startswith(layers)]:
            raise self.folder.refused(f"its MTP module: unknown tensors: {unknown[0]}")
        return [name for name in found if name.startswith(start)]


def read_mtp(target: PreTrainedModel, path: Path, facts: TargetFacts) -> MtpNetwork:
    """Returns the MTP module of the target's own checkpoint, in its type and on its device; it is still
    to be bound. ``target`` is not packed yet; of ranks that share it, all have to read. Of the folder's
    tensors only the module's are read.

    Raises DraftRefusedError where the checkpoint has none that is known, its tensors are not those of
    such a module, or its layer keeps other state than keys and values.
    """
    module = find_module(DraftFolder.open(path), facts.num_layers)
    if module.count() > 1:
        logger.warning("%s has %d MTP modules: the first drafts all tokens", path, module.count())
    try:
        body, shapes = _load_body(target, module, facts)
    except UnsupportedModelError as error:
        # The loader knows the layer as its model's first, and the user as the file has it.
        own = f"{target.base_model_prefix}.{_FIRST_LAYER}"
        fault = str(error).replace(own, module.root + module.form.layer)
        raise module.folder.refused(f"its MTP module: {fault}") from error
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    own_ends = (
        _own_end(target, module, _EMBEDDING, embedding),
        _own_end(target, module, _HEAD, head),
    )
    network = MtpNetwork(body, shapes, module.form, own_ends)
    network.fill(
        lambda name, shape: module.read(f"{name}.weight", shape), target.dtype, target.device
    )
    return network


def find_module(folder: DraftFolder, num_layers: int) -> _Module:
    """Returns the first MTP module of a checkpoint whose model has so many layers. Raises
    DraftRefusedError where it has none."""
    for form in FORMS:
        join = f"{form.parts[2]}.weight"
        joined = re.compile(rf".*\b{form.root.format(num_layers)}{re.escape(join)}")
        for name in filter(joined.fullmatch, folder.tensors):
            return _Module(folder, form, name.removesuffix(join))
    raise folder.refused("the checkpoint has no MTP module of a kind that is known")


def _load_body(
    target: PreTrainedModel, module: _Module, facts: TargetFacts
) -> tuple[Any, list[KVShape]]:
    """Returns the decoder layer with the last norm behind it, as a model of the target's class on the
    engine's attention, and its shapes. Raises UnsupportedModelError or DraftRefusedError with the
    reason."""
    names = module.layer_names()
    start = module.root + module.form.layer
    if not any(name.startswith(f"{start}self_attn.") for name in names):
        raise UnsupportedModelError(
            "its layer has no self_attn: state that is not keys and values is not kept"
        )
    _check_experts(module.folder, names)
    has_experts = any(".experts." in name for name in names)
    config = layer_config(target.config, module.folder.path, facts, has_experts)
    prefix, size = target.base_model_prefix, int(config.hidden_size)
    tensors = {
        f"{prefix}.{_FIRST_LAYER}{name.removeprefix(start)}": tensor.clone()
        for name, tensor in module.folder.read(names).items()
    }
    tensors[f"{prefix}.norm.weight"] = module.read(f"{module.form.parts[-1]}.weight", (size,))
    for end in (target.get_input_embeddings(), target.get_output_embeddings()):
        name = next(name for name, each in target.named_modules() if each is end)
        tensors[f"{name}.weight"] = torch.zeros(1, size)
    loaded = load_weights(None, config, type(target), state_dict=tensors, dtype=target.dtype)
    body: Any = loaded.base_model
    loaded.to(target.device).eval()  # type: ignore[arg-type]  # its decorator loses the signature
    return body, attach_attention(loaded)


def _check_experts(folder: DraftFolder, names: list[str]) -> None:
    """Raises UnsupportedModelError where experts do not have the same tensors, of one shape: transformers
    makes one tensor of all."""
    found = {match.groups() for match in map(_EXPERT.match, names) if match}
    numbers = {number for _, number, _ in found}
    for start, _, end in sorted(found):
        every = [folder.tensors.get(f"{start}{number}{end}") for number in numbers]
        if len({each and each.shape for each in every}) > 1:
            raise UnsupportedModelError(
                f"experts do not all have {start}*{end}, or not in one shape"
            )


def layer_config(config: Any, path: Path, facts: TargetFacts, has_experts: bool) -> Any:
    """Returns the target's configuration for one layer, with a vocabulary of one token, since the layer
    has no embedding and head. Per-layer settings of model families are rewritten for this layer. Raises
    UnsupportedModelError if the kind of the layer's attention cannot be derived or is not served."""
    said = {name: getattr(config, name, None) for name in _FIELDS}
    found = Section(path, "", said).values(_FIELDS, facts)
    layer = copy.deepcopy(config)
    layer.num_hidden_layers = layer.vocab_size = 1
    layer.pad_token_id = layer.bos_token_id = layer.eos_token_id = None
    layer.tie_word_embeddings = False
    kinds = found["mtp_layer_types"]
    if not kinds:
        # Where layers with states of another kind lie between, modules have attention.
        kinds = sorted({*found["layer_types"]} - {"linear_attention"})
        if len(kinds) > 1:
            raise UnsupportedModelError(
                f"its layer may be of kind {' or '.join(kinds)}: mtp_layer_types is not given"
            )
    rewritten = {
        "layer_types": [*kinds[:1]] or ["full_attention"],
        "mlp_layer_types": ["sparse" if has_experts else "dense"],
        "first_k_dense_replace": 0 if has_experts else 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [] if has_experts else [0],
        "num_nextn_predict_layers": 0,
    }
    for name, value in rewritten.items():
        if getattr(config, name, None) is not None:
            setattr(layer, name, value)
    refuse_unservable(layer)
    return layer


def _own_end(target: PreTrainedModel, module: _Module, name: str, end: Any) -> torch.Tensor | None:
    """Returns the weight of the module's own embedding or output head; None: it has none, or the
    target's again."""
    if not module.form.own_ends or module.root + name not in module.folder.tensors:
        return None
    theirs = whole(end.weight.detach()).cpu()
    own = module.read(name, tuple(theirs.shape)).to(target.dtype)
    return None if torch.equal(own, theirs) else own
