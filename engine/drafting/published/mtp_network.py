"""An MTP module's network: a token's embedding and the state of the token before it are joined, run
through one decoder layer of the target's own class, and normed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.attention.backend import AttentionPlan, KVShape, attending
from engine.batch import NORMED
from engine.model.loader import max_position


class Form(NamedTuple):
    """How a family writes its first module. ``root``: a pattern of what its tensors' names begin with,
    with {} for the model's number of layers. ``parts``: names of the token's norm, the state's, what
    joins both, and the last norm; ``layer``: what the decoder layer's own names begin with. ``own_ends``:
    whether it may bring an embedding and an output head. ``is_blank_first``: the embedding of the row at
    position 0 is zeros."""

    root: str
    parts: tuple[str, str, str, str]
    layer: str = ""
    own_ends: bool = False
    is_hidden_first: bool = False
    is_blank_first: bool = False


class MtpNetwork(nn.Module):
    """A module as a ``ChainNetwork``. ``ends``: the weights of its own embedding and output head, where
    they are not the target's."""

    hidden_layers: tuple[int, ...] = (NORMED,)
    candidate_layers: tuple[tuple[int, ...], ...] = ((NORMED,),)
    token_map: torch.Tensor | None = None
    num_parallel = 1

    def __init__(
        self,
        body: Any,
        shapes: list[KVShape],
        form: Form,
        ends: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        super().__init__()
        config = body.config
        self.shapes, self.max_len = shapes, max_position(config)
        self.feature_size = size = int(config.hidden_size)
        self._form = form
        norm = type(body.norm)
        self.token_norm = norm(size, config.rms_norm_eps)
        self.hidden_norm = norm(size, config.rms_norm_eps)
        self.join = nn.Linear(2 * size, size, bias=False)
        body.embed_tokens = nn.Identity()  # rows arrive as vectors
        self.body = body
        embedding, head = ends
        self.own_embed = None if embedding is None else nn.Embedding.from_pretrained(embedding)
        self.own_head: nn.Linear | None = None
        if head is not None:
            self.own_head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
            self.own_head.weight = nn.Parameter(head)
        # In a tuple, so that the target's modules are none of this network's own.
        self._bound: tuple[nn.Module, ...] = ()

    def fill(
        self,
        read: Callable[[str, tuple[int, ...]], torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Gives the module's own parts their weights, which ``read`` returns by name and shape, and moves
        all of it."""
        parts = self.token_norm, self.hidden_norm, self.join
        for name, part in zip(self._form.parts, parts, strict=False):
            part.weight = nn.Parameter(read(name, tuple(part.weight.shape)).to(dtype))
        self.to(device)
        self.requires_grad_(False).eval()

    def bind(self, embed: nn.Module, output_head: nn.Module) -> None:
        self._bound = (self.own_embed or embed, self.own_head or output_head)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_rows] int64
        features: torch.Tensor,  # [num_rows, feature_size], of the tokens before
        positions: torch.Tensor,  # [num_rows] int64
        plan: AttentionPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ChainNetwork``: what leaves the last norm is both."""
        embeddings = self._bound[0](token_ids)
        if self._form.is_blank_first:
            embeddings = embeddings.masked_fill((positions == 0)[:, None], 0)
        both = self.token_norm(embeddings), self.hidden_norm(features)
        joined = self.join(torch.cat(both[::-1] if self._form.is_hidden_first else both, dim=-1))
        with attending(plan):
            output = self.body(
                inputs_embeds=joined[None], position_ids=positions[None], use_cache=False
            )
        states: torch.Tensor = output.last_hidden_state[0]
        return states, states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._bound[1](hidden)
        return logits
