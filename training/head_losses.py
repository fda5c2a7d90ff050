"""How heads learn the target's own distributions: losses that keep nothing of a vocabulary's width.

A row of logits has as many numbers as the vocabulary has tokens, far more than all else that a small
head computes. So the loss takes what the output head reads, makes logits of a few rows at a time, which
stay in the processor's caches, and has the gradients at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

STEP_DISCOUNT = 0.85
"""How much less each further step counts."""
_LEAST_ROWS = 256
_NUMBERS_AT_ONCE = {"cpu": 1 << 22}
_NUMBERS_AT_ONCE_ELSEWHERE = 1 << 27


class Rows(NamedTuple):
    """The rows that learn, some of each text's, padded to the most. Row i of a text reads its token
    i + 1; in step d it guesses the token d + 2 after i, as the target does that has read the one
    before."""

    at: Tensor  # [num_texts, num_rows]: ascending; padding is 0
    learns: Tensor  # [num_texts, num_rows] bool: false for padding
    lengths: Tensor  # [num_texts]: tokens of the texts

    def of_step(self, step: int, width: int) -> tuple[Tensor, Tensor]:
        """Returns which of the padded rows learn in a step, and which tokens' distributions they learn,
        both as flat indices; ``width``: of the padded texts."""
        after = self.at + 1 + step
        learns = self.learns & (after < self.lengths[:, None])
        text = torch.arange(len(self.at))[:, None] * width
        return learns.flatten().nonzero()[:, 0], (text + after)[learns]


def chosen_rows(
    first: Sequence[int], lengths: Sequence[int], most: int, generator: torch.Generator
) -> Rows:
    """Returns up to ``most`` rows of each text, from row ``first`` of it on, by chance where it has
    more."""
    counts = [max(0, length - 1 - begin) for begin, length in zip(first, lengths, strict=True)]
    found = [
        begin + torch.randperm(count, generator=generator)[:most].sort().values
        for begin, count in zip(first, counts, strict=True)
    ]
    at = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    learns = torch.arange(at.shape[1]) < torch.tensor([len(each) for each in found])[:, None]
    return Rows(at, learns, torch.tensor(lengths))


class Guesses(NamedTuple):
    """Rows of all steps, in the order of the tokens whose distributions they learn."""

    read: Tensor  # [num_rows, hidden_size]: what the output head reads
    tokens: Tensor  # [num_rows]: flat indices of those tokens, ascending
    steps: Tensor  # [num_rows]
    shares: Tensor  # [num_rows]: how much each counts

    @classmethod
    def of(cls, read: Sequence[Tensor], rows: Rows, width: int) -> Guesses:
        """``read``: per step, of the rows of ``Rows.of_step``."""
        tokens = [rows.of_step(step, width)[1] for step in range(len(read))]
        steps = [torch.full_like(each, step) for step, each in enumerate(tokens)]
        shares = [
            torch.full(each.shape, STEP_DISCOUNT**step / max(1, len(each)))
            for step, each in enumerate(tokens)
        ]
        device = read[0].device
        flat = torch.cat(tokens)
        order = flat.argsort(stable=True)
        return cls(
            torch.cat(list(read)).index_select(0, order.to(device)),
            flat[order].to(device),
            torch.cat(steps)[order].to(device),
            torch.cat(shares)[order].to(device),
        )


def distilled(guesses: Guesses, head: Tensor, normed: Tensor, teacher: Tensor) -> Tensor:
    """Returns the sum over steps, discounted, of the mean cross entropy of the heads' distributions with
    the target's. ``head`` makes logits of what ``guesses`` read and ``teacher`` of ``normed``,
    ``[num_tokens, hidden_size]``; both are ``[draft_vocab_size, hidden_size]``."""
    given = guesses.read, head, guesses.tokens, guesses.shares, normed, teacher
    loss: Tensor = _Distilled.apply(*given)  # type: ignore[no-untyped-call]
    return loss


def distance(guesses: Guesses, normed: Tensor) -> Tensor:
    """Returns the sum over steps, discounted, of how far what the output head reads is from what the
    target's reads, ``normed`` ``[num_tokens, hidden_size]``, beside how large that is. It says far more
    of a row than its likeliest tokens do, and costs nothing of a vocabulary's width."""
    wanted = normed.index_select(0, guesses.tokens).float()
    scale = wanted.square().mean().sqrt()
    apart = functional.smooth_l1_loss(
        guesses.read.float() / scale, wanted / scale, reduction="none"
    )
    return apart.mean(-1).dot(guesses.shares)


@torch.no_grad()
def right(guesses: Guesses, head: Tensor, likeliest: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Returns which rows found the target's likeliest token, ``[num_rows]`` bool. ``likeliest``: ids of
    all tokens' ``[num_tokens]``; ``draft_ids``: the target's ids of the rows of ``head``."""
    head = head.to(guesses.read.dtype)
    found = torch.cat(
        [(guesses.read[part] @ head.T).argmax(-1) for part in _parts(guesses.read, len(head))]
    )
    if draft_ids is not None:
        found = draft_ids[found]
    return found == likeliest[guesses.tokens]


def _parts(rows: Tensor, vocab_size: int) -> Iterator[slice]:
    numbers = _NUMBERS_AT_ONCE.get(rows.device.type, _NUMBERS_AT_ONCE_ELSEWHERE)
    step = max(_LEAST_ROWS, numbers // vocab_size)
    return (slice(start, start + step) for start in range(0, len(rows), step))


class _Distilled(torch.autograd.Function):
    """Products in the type of ``read``, probabilities in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        read: Tensor,
        head: Tensor,
        tokens: Tensor,
        shares: Tensor,
        normed: Tensor,
        teacher: Tensor,
    ) -> Tensor:
        weight, teacher = head.to(read.dtype), teacher.to(normed.dtype)
        wants = ctx.needs_input_grad
        of_read = torch.empty_like(read) if wants[0] else None
        of_head = torch.zeros_like(head) if wants[1] else None
        loss = torch.zeros((), device=read.device)
        for part in _parts(read, len(head)):
            known, which = tokens[part].unique_consecutive(return_inverse=True)
            wanted = (normed.index_select(0, known) @ teacher.T).float().softmax(-1)
            wanted = wanted.index_select(0, which)
            own = (read[part] @ weight.T).float().log_softmax(-1)
            share = shares[part, None]
            loss -= torch.linalg.vecdot(wanted, own).dot(share[:, 0])
            if of_read is None and of_head is None:
                continue
            slope = own.exp_().sub_(wanted).mul_(share).to(read.dtype)
            if of_read is not None:
                torch.mm(slope, weight, out=of_read[part])
            if of_head is not None:
                of_head += slope.T @ read[part]
        ctx.save_for_backward(of_read, of_head)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_read, of_head = ctx.saved_tensors
        scaled = [
            None if each is None else each * gradients[0].to(each.dtype)
            for each in (of_read, of_head)
        ]
        return (*scaled, None, None, None, None)
