"""EAGLE's head: one decoder layer that goes on from the target's hidden states by itself.

A row reads a token's embedding and the hidden state of the token before it, and writes what the
target's hidden state of its own token would be; the target's output head turns that into
candidates. The layer is transformers' own Llama, run on the engine's attention over a store of its own
with the target's block ids. Rows of known tokens read the target's hidden states. Where those are not
known (before the first token, and in a cached prefix that another request computed) a row reads zeros
in their place, which training shows it now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.model.protocol import DraftRows
from drafters.tree import ROOT
from engine.attention.backend import (
    IMPLEMENTATION,
    AttentionBackend,
    AttentionNeeds,
    AttentionPlan,
    KVShape,
    build_attention,
    choose_backend,
)
from engine.batch import ForwardOutput, InputBatch, InputBuffers, InputTensors
from engine.capture.replays import GraphSizes, graph_sizes, make_replays
from engine.drafting.draft_model import DraftLimits, LevelModel
from engine.drafting.heads import DraftHeads, HeadFolder, HeadsRefusedError, OutputHead
from engine.machine import can_pack
from engine.model.fusing import fuse
from engine.model.linear import pack_linears
from engine.model.runner import ModelRunner

KIND = "eagle"
SIZES = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_MAX_KEPT_ROWS = 4096
"""Hidden states kept for rows that were not run yet; of longer stretches the newest."""


class FeatureLayer(nn.Module):
    """``sizes`` as in ``SIZES``. The two inputs are normalised, since their scales differ by far."""

    def __init__(self, hidden_size: int, sizes: Sequence[int], attention: str) -> None:
        super().__init__()
        self.sizes = dict(zip(SIZES, sizes, strict=True))
        rest: dict[str, Any] = {"attn_implementation": attention, **self.sizes}
        config = LlamaConfig(
            hidden_size=hidden_size,
            vocab_size=1,
            num_hidden_layers=1,
            rms_norm_eps=1e-5,
            bos_token_id=None,
            eos_token_id=None,
            **rest,
        )
        self.token_norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.join = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        body: Any = LlamaModel(config)
        body.embed_tokens = nn.Identity()  # rows arrive as vectors
        self.body = body

    def forward(
        self,
        embeddings: torch.Tensor,  # [num_sequences, num_rows, hidden_size]
        hidden: torch.Tensor,  # the same: of the tokens before
        **keywords: Any,
    ) -> torch.Tensor:
        """Returns hidden states of the rows' own tokens, as far as the layer can tell; the same shape."""
        both = torch.cat([self.token_norm(embeddings), self.hidden_norm(hidden)], dim=-1)
        output = self.body(inputs_embeds=self.join(both), use_cache=False, **keywords)
        result: torch.Tensor = output.last_hidden_state
        return result


@dataclass(slots=True)
class _Features:
    """One request's states. ``known``: the target's, of positions ``first ..``; ``drafted``: the
    layer's own, of the anchor and of this step's drafted rows in the order of their slots."""

    first: int = 0
    known: list[torch.Tensor] = field(default_factory=list)  # each [num_rows, hidden_size]
    drafted: list[torch.Tensor] = field(default_factory=list)  # each [hidden_size]

    @property
    def end(self) -> int:
        return self.first + sum(len(part) for part in self.known)

    def add(self, first: int, hidden: torch.Tensor) -> None:
        """Adds newly committed rows; a gap or a step back starts anew."""
        if first != self.end:
            self.first, self.known = first, []
        self.known.append(hidden)
        while self.known and self.end - self.first - len(self.known[0]) >= _MAX_KEPT_ROWS:
            self.first += len(self.known.pop(0))

    def before(self, position: int, count: int, blank: torch.Tensor) -> torch.Tensor:
        """Returns the states before ``position .. position + count - 1``; zeros where unknown."""
        rows = blank.repeat(count, 1)
        start = position - 1
        low, high = max(start, self.first), min(start + count, self.end)
        if low < high:
            known = torch.cat(self.known)
            rows[low - start : high - start] = known[low - self.first : high - self.first]
        return rows

    def drop(self, position: int) -> None:
        """Rows before ``position`` were run: their states are not asked for again."""
        while self.known and self.first + len(self.known[0]) < position:
            self.first += len(self.known.pop(0))


class EagleModel(LevelModel):
    """A ``drafters.model.protocol.FeatureModel``: its rows also read hidden states."""

    owns_rows = True

    def __init__(
        self,
        layer: FeatureLayer,
        embed: nn.Module,
        output_head: OutputHead,
        attention: AttentionBackend,
        limits: DraftLimits,
        graphs: GraphSizes | None = None,
    ) -> None:
        """``graphs``: what ``prepare`` captures where the device has graphs; None: nothing."""
        super().__init__(attention, limits)
        self._layer = layer
        self._embed = embed
        self._output_head = output_head
        self._blank = torch.zeros_like(layer.token_norm.weight)  # [hidden_size]
        self._buffers = InputBuffers(attention.store.device, limits.max_catch_up_rows)
        self._replays = make_replays(attention, graphs, can_capture=False)
        most = 0 if graphs is None else graphs.most_rows
        self._captured_hidden = self._blank.repeat(most, 1)
        """The memory in which captured forwards read hidden states."""
        self._requests: dict[str, _Features] = {}

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures what is captured at start. Once, while the store is unused."""
        self._replays.prepare(
            lambda batch: partial(self._run, *self._plan(batch), self._memory(batch.num_rows))
        )

    def take_hidden(self, request_id: str, first: int, hidden: torch.Tensor) -> None:
        """Takes the target's states of newly committed tokens, ``[num_rows, hidden_size]``."""
        self._requests.setdefault(request_id, _Features()).add(first, hidden)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _logits(self, rows: Sequence[DraftRows], batch: InputBatch) -> torch.Tensor:
        padded = self._replays.pad(batch)
        hidden = self._memory(padded.num_rows)
        for each, run in zip(rows, batch.requests, strict=True):
            hidden[run.first_row : run.first_row + run.num_rows] = self._read(each)
        output = self._forward(padded, hidden)
        features = output.hidden
        assert features is not None
        for each, run in zip(rows, batch.requests, strict=True):
            self._keep(each, features[run.first_row : run.first_row + run.num_rows])
        return output.logits[: len(batch.logits_indices)]

    def _memory(self, num_rows: int) -> torch.Tensor:
        """Returns memory for the hidden states that a forward reads."""
        if num_rows <= len(self._captured_hidden):
            return self._captured_hidden[:num_rows]
        return self._blank.repeat(num_rows, 1)

    def _read(self, rows: DraftRows) -> torch.Tensor:
        """Returns the states before each row: the target's, or those of the draft's own parents."""
        state = self._requests.setdefault(rows.ask.request_id, _Features())
        if rows.base < len(rows.ask.token_ids):
            return state.before(rows.base, len(rows.token_ids), self._blank)
        if rows.parents:
            parents = rows.parents[rows.num_stored :]
            return torch.stack([state.drafted[parent - ROOT] for parent in parents])
        return state.drafted[rows.base - len(rows.ask.token_ids)][None]

    def _keep(self, rows: DraftRows, features: torch.Tensor) -> None:
        state = self._requests[rows.ask.request_id]
        known_end = len(rows.ask.token_ids)
        if rows.base < known_end:
            state.drop(rows.base + len(rows.token_ids) - 1)
            state.drafted = []
            if rows.base + len(rows.token_ids) == known_end:
                state.drafted = [features[-1]]
        else:
            state.drafted += features.unbind(0)

    def _forward(self, batch: InputBatch, hidden: torch.Tensor) -> ForwardOutput:
        inputs, plan = self._plan(batch)
        return self._replays.forward(batch, inputs, plan, partial(self._run, inputs, plan, hidden))

    def _plan(self, batch: InputBatch) -> tuple[InputTensors, AttentionPlan]:
        inputs = self._buffers.fill(batch)
        return inputs, self._attention.plan(batch, inputs)

    def _run(
        self, inputs: InputTensors, plan: AttentionPlan, hidden: torch.Tensor
    ) -> ForwardOutput:
        """``hidden``: what each row's layer wrote."""
        features: torch.Tensor = self._layer(
            self._embed(inputs.token_ids)[None],
            hidden[None],
            position_ids=inputs.positions[None],
            slipstream_plan=plan,
        )[0]
        picked = features.index_select(0, inputs.logits_indices)
        return ForwardOutput(self._output_head(picked), features)


def eagle_config(layer: FeatureLayer) -> dict[str, Any]:
    """Returns what ``load_layer`` has to know besides the target's facts."""
    return {"kind": KIND} | layer.sizes


def eagle_bytes_per_block(prepared: DraftHeads) -> int:
    """Returns the bytes that one more block of the pool costs in the head's store; 0 without a head."""
    if KIND not in prepared.folders:
        return 0
    needs = _needs(prepared)
    backend = choose_backend(prepared.config.attention_backend, needs, strict=False)
    return backend.bytes_per_block(needs)


def load_eagle(prepared: DraftHeads, runner: ModelRunner) -> EagleModel:
    """Returns the head that was prepared for the runner's model. Raises DrafterUnavailableError with the
    reason where there is none, and HeadsRefusedError if the folder's tensors do not fit its sizes."""
    config = prepared.config
    layer = load_layer(prepared.folder(KIND), prepared.dtype, prepared.device)
    max_len, max_rows = layer.sizes["max_position_embeddings"], config.max_num_batched_tokens
    attention = build_attention(
        _needs(prepared), runner.store.num_blocks, config.attention_backend, strict=False
    )
    model = EagleModel(
        layer,
        *prepared.ends_of(runner),
        attention,
        DraftLimits(prepared.facts.vocab_size, max_len, max_rows),
        graph_sizes(config, attention, max_len, strict=False),
    )
    model.prepare()
    return model


def _needs(prepared: DraftHeads) -> AttentionNeeds:
    num_heads, num_kv_heads, dim = prepared.folders[KIND].sizes(*SIZES[1:4])
    shape = KVShape(num_heads, num_kv_heads, dim, dim)
    block_size = prepared.config.block_size
    return AttentionNeeds("fast", prepared.device, prepared.dtype, block_size, [shape])


def load_layer(folder: HeadFolder, dtype: torch.dtype, device: torch.device) -> FeatureLayer:
    """Returns a folder's layer. Raises HeadsRefusedError if the folder's tensors do not fit its sizes."""
    sizes = folder.sizes(*SIZES)
    layer_sizes = dict(zip(SIZES, sizes, strict=True))
    if layer_sizes["num_attention_heads"] % layer_sizes["num_key_value_heads"]:
        raise HeadsRefusedError(f"{folder.path}: num_key_value_heads do not divide the heads")
    layer = FeatureLayer(folder.facts.hidden_size, sizes, IMPLEMENTATION)
    folder.load_into(layer)
    layer.to(device=device, dtype=dtype).requires_grad_(False).eval()
    # The cast above also rounded the rotary frequencies.
    layer.body.rotary_emb = LlamaRotaryEmbedding(layer.body.config).to(device)
    fuse(layer)
    if can_pack(device, dtype):
        pack_linears(layer, 1024, exact=False)
    return layer
