"""Folders of published heads of every method for the tiny target, and heads of folders on its states.

The target's output head knows the next number of a circle by the embedding of a number, and so do these:
their layers hand on the embedding of a token before, with noise from the states that they read. What
they draft is often right and often wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.attention.backend import AttentionNeeds
from engine.batch import NORMED
from engine.drafting.draft_model import DraftLimits
from engine.drafting.facts import TargetFacts
from engine.drafting.medusa import MedusaHeads
from engine.drafting.published import eagle3
from engine.drafting.published.folder import DraftFolder
from engine.drafting.published.medusa import MedusaNetwork, ResidualHeads
from engine.drafting.published.networks import ChainNetwork, place
from worlds.engine_harness import TINY_VOCAB, Setup, TinyTarget
from worlds.published_blocks import PLAIN, SPARK, SPECULATORS, Tensors, block_tensors, draw
from worlds.published_eagle3 import IDS, Form, write_folder

TARGET = TinyTarget()
HIDDEN_SIZE = 32
FACTS = TargetFacts(HIDDEN_SIZE, TINY_VOCAB, 2, "f" * 32)
CPU = torch.device("cpu")
DRAFT_IDS = torch.arange(TINY_VOCAB)[torch.arange(TINY_VOCAB) % 5 != 3]
"""The target's tokens that a head of a reduced vocabulary knows: most of every circle."""
MASK = TINY_VOCAB - 1
STRENGTH = 4.0
"""How much of what a row passes on is an embedding, in the size of a state."""


def output_head() -> torch.Tensor:
    """Returns the target's, ``[TINY_VOCAB, HIDDEN_SIZE]``."""
    weight: torch.Tensor = TARGET.reference.get_output_embeddings().weight.detach().clone()
    return weight


# --- EAGLE-3 and P-EAGLE ---

EAGLE3 = Form(
    facts=FACTS, hidden_size=32, head_dim=16, draft_vocab=TINY_VOCAB, owns_head=False
).but(more={IDS: [0, 1, 2]})
REDUCED = EAGLE3.but(draft_vocab=len(DRAFT_IDS), owns_head=True)
EAGLE3_FORMS = {
    "eagle3": EAGLE3,
    "eagle3_reduced": REDUCED,
    "eagle3_qwen3": REDUCED.but(
        method="eagle3", model_type="qwen3", prefix="layers.0.", num_layers=2
    ),
    "p_eagle": EAGLE3.but(
        method="peagle",
        prefix="layers.0.",
        norms=("fc_norm.0", "fc_norm.1", "fc_norm.2"),
        more={IDS: [0, 1, 2], "mask_token_id": MASK},
    ),
}


def eagle3_tensors(form: Form) -> Tensors:
    """Returns tensors of a layer that attends to rows of tokens like a row's own and hands on their
    embeddings."""
    tensors = form.tensors()
    own = f"{form.prefix}self_attn."
    split = torch.zeros(64, HIDDEN_SIZE)  # to the first of the query heads that share keys
    split[:16, :16] = split[32:48, 16:] = torch.eye(16)
    half = torch.eye(HIDDEN_SIZE, 64)
    tensors[f"{own}q_proj.weight"] = 1.5 * torch.cat([split, torch.zeros_like(split)], dim=1)
    tensors[f"{own}k_proj.weight"] = 1.5 * half
    tensors[f"{own}v_proj.weight"] = 0.1 * tensors[f"{own}v_proj.weight"] + half
    tensors[f"{own}o_proj.weight"] = (STRENGTH * split.T).contiguous()
    tensors["fc.weight"] *= 0.1
    for name in tensors:
        if name.endswith("down_proj.weight") or name.startswith("layers.1.self_attn.o_proj"):
            tensors[name] *= 0.2
    if form.owns_head:
        known = torch.zeros(TINY_VOCAB, dtype=torch.bool)
        known[DRAFT_IDS] = True
        order = torch.arange(len(DRAFT_IDS))
        tensors |= {"lm_head.weight": output_head()[DRAFT_IDS], "t2d": known}
        tensors["d2t"] = DRAFT_IDS - order
    return tensors


# --- DFlash and DSpark ---

_BLOCK_LAYERS: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "num_key_value_heads": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
    "use_sliding_window": True,
}
_IDS = {"mask_token_id": MASK, "aux_hidden_state_layer_ids": [0, 1, 2]}


def _of_speculators(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    layers = config["transformer_layer_config"] | _BLOCK_LAYERS
    sizes = {"transformer_layer_config": layers, "draft_vocab_size": TINY_VOCAB}
    return {**config, **_IDS, **sizes, **changes}


BLOCK_CONFIGS: dict[str, dict[str, Any]] = {
    "dflash": _of_speculators(SPECULATORS, draft_vocab_size=len(DRAFT_IDS)),
    "dflash_plain": {
        **PLAIN,
        **_BLOCK_LAYERS,
        "num_target_layers": 2,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
    },
    "dspark": _of_speculators(SPARK),
}


def blocks_of(name: str) -> Tensors:
    """Returns tensors of layers the first of which hands on the embeddings of the tokens before."""
    tensors = block_tensors(num_states=2 if name == "dflash_plain" else 3)
    for layer in range(3):
        own = f"layers.{layer}.self_attn."
        tensors[f"{own}k_proj.weight"] = 0.2 * draw(500 + layer, HIDDEN_SIZE, HIDDEN_SIZE)
        tensors[f"{own}v_proj.weight"] = 0.2 * draw(510 + layer, HIDDEN_SIZE, HIDDEN_SIZE)
        tensors[f"{own}o_proj.weight"] *= 0.5
        tensors[f"layers.{layer}.mlp.down_proj.weight"] *= 0.3
    tensors["layers.0.self_attn.v_proj.weight"] = torch.eye(HIDDEN_SIZE)
    tensors["layers.0.self_attn.o_proj.weight"] = STRENGTH * torch.eye(HIDDEN_SIZE)
    tensors["fc.weight"] *= 0.1
    tensors["fc.weight"][:, :HIDDEN_SIZE] += torch.eye(HIDDEN_SIZE)
    if name == "dflash":
        order = torch.arange(len(DRAFT_IDS))
        tensors |= {"d2t": DRAFT_IDS - order, "lm_head.weight": output_head()[DRAFT_IDS]}
    if name == "dspark":
        embeddings = TARGET.reference.get_input_embeddings().weight.detach().clone()
        tensors["markov_head.markov_w1.weight"] = embeddings
        tensors["markov_head.markov_w2.weight"] = 0.5 * output_head()
        features = HIDDEN_SIZE + embeddings.shape[1]
        tensors["confidence_head.proj.weight"] = 0.3 * draw(402, 1, features)
        tensors["confidence_head.proj.bias"] = torch.ones(1)
    return tensors


# --- Medusa and MTP ---


def medusa_tensors(num_heads: int = 3) -> Tensors:
    """Returns the authors' tensors of heads that read the next number's successors off the target's own
    head."""
    following = torch.arange(TINY_VOCAB)
    before = following // 8 * 8 + (following - 1) % 8
    tensors, projection = {}, output_head()
    for head in range(num_heads):
        projection = projection[before]
        tensors[f"{head}.0.linear.weight"] = 0.05 * draw(600 + head, HIDDEN_SIZE, HIDDEN_SIZE)
        tensors[f"{head}.0.linear.bias"] = 0.1 * draw(610 + head, HIDDEN_SIZE)
        tensors[f"{head}.1.weight"] = projection.contiguous()
    return tensors


_MIMO = "model.mtp_layers.0.", "model.layers.0."
_MIMO_NAMES = "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"
_QWEN_NAMES = "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"


def write_checkpoint(path: Path, model: PreTrainedModel) -> Path:
    """Writes a target's checkpoint with an MTP module, under the names of MiMo's; of one whose layers
    keep a state under those of Qwen3.5's."""
    model.save_pretrained(path)
    is_hybrid = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    root, layer = ("mtp.", "model.layers.1.") if is_hybrid else _MIMO
    names = _QWEN_NAMES if is_hybrid else _MIMO_NAMES
    tensors = load_file(path / "model.safetensors")
    size = model.config.hidden_size
    own = {
        name.replace(layer, f"{root}layers.0." if is_hybrid else root): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    for name in [name for name in own if "o_proj" in name or "down_proj" in name]:
        own[name] *= 0.2
    join = 0.05 * draw(700, size, 2 * size)
    tokens = slice(size) if is_hybrid else slice(size, None)
    join[:, tokens] += torch.eye(size)
    own[f"{root}{names[0]}.weight"] = join
    for norm in names[1:]:
        # Qwen3.5's norms add one.
        own[f"{root}{norm}.weight"] = torch.zeros(size) if is_hybrid else torch.ones(size)
    save_file(tensors | own, path / "model.safetensors", metadata={"format": "pt"})
    return path


# --- all of them ---


def write_heads(root: Path) -> dict[str, Path]:
    """Writes a folder for each method and form that comes in one of its own, by names of drafters."""
    found = {}
    for name, form in EAGLE3_FORMS.items():
        found[name] = write_folder(root / name, form.config(), eagle3_tensors(form), form.binary)
    for name, config in BLOCK_CONFIGS.items():
        found[name] = write_folder(root / name, config, blocks_of(name), False)
    found["medusa"] = root / "medusa"
    write_folder(found["medusa"], {"medusa_num_heads": 3, "medusa_num_layers": 1}, {}, True)
    (found["medusa"] / "pytorch_model.bin").unlink()
    torch.save(medusa_tensors(), found["medusa"] / "medusa_lm_head.pt")
    return found


# --- heads without an engine's settings ---


def bound_heads(blocks: ResidualHeads) -> MedusaHeads:
    """Heads in front of the target's own output head."""
    network = MedusaNetwork(blocks.requires_grad_(False), torch.nn.ModuleList(), TINY_VOCAB)
    network.bind(*_ends())
    return MedusaHeads(network)


def eagle_network(form: Form = EAGLE3) -> eagle3.Eagle3Network:
    """Returns the network of a folder of this form, bound to the target."""
    with TemporaryDirectory() as root:
        path = write_folder(Path(root) / "head", form.config(), eagle3_tensors(form), form.binary)
        network = eagle3.read(DraftFolder.open(path), FACTS)
    place(network, CPU, torch.float32)
    network.bind(*_ends())
    return network


def chain_needs(network: ChainNetwork, setup: Setup) -> AttentionNeeds:
    return AttentionNeeds("fast", CPU, torch.float32, setup.block_size, network.shapes)


def limits(setup: Setup) -> DraftLimits:
    return DraftLimits(TINY_VOCAB, 256, setup.max_num_batched_tokens)


def _ends() -> tuple[torch.nn.Module, torch.nn.Module]:
    return TARGET.reference.get_input_embeddings(), TARGET.reference.get_output_embeddings()


@torch.inference_mode()
def target_states(token_ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """Returns transformers' hidden states of a text by layer, ``[num_tokens, HIDDEN_SIZE]``."""
    body: Any = TARGET.reference.base_model
    last: list[torch.Tensor] = []
    hook = body.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
    try:
        found = body(torch.tensor([list(token_ids)]), output_hidden_states=True)
    finally:
        hook.remove()
    entering = [each[0] for each in found.hidden_states[:-1]]
    return dict(enumerate([*entering, *last])) | {NORMED: found.last_hidden_state[0]}
