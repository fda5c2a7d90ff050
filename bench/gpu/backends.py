"""Does every attention backend of this device compute what transformers computes, and do a row's bits
hold?"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.equality import TINY_MODELS, tiny_models
from engine.attention.backend import (
    AttentionBackend,
    AttentionNeeds,
    attention_backends,
    build_attention,
)
from engine.batch import RequestRows, build_batch
from engine.model.linear import pack_linears
from engine.model.loader import attach_attention, prepare_model
from engine.model.runner import ModelRunner
from engine.model.selfcheck import check_exact, logit_errors, reference_logits
from engine.request.info import Determinism

_BLOCK_SIZE = 16
_NUM_BLOCKS = 64
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2}
_FLIP_ROWS = (1, 2, 3, 5, 8)
"""Numbers of rows that a text is cut into, over and over."""


@dataclass(frozen=True, slots=True)
class BackendResult:
    """``error``: of logits against transformers', relative to their spread, the larger of chunks' and a
    tree's. ``same_bits``: whether a row's bits are the same in chunks, alone, beside others and in a
    tree; None where the check has no room. ``flip_rate``: share of tokens whose likeliest successor
    changes when the text is cut into other steps."""

    model: str
    backend: str
    determinism: Determinism
    dtype: str
    error: float
    tolerance: float
    same_bits: bool | None
    flip_rate: float

    @property
    def holds(self) -> bool:
        """``exact`` has to keep its word; ``fast`` gives none but its tolerance."""
        kept = (self.same_bits is not False and not self.flip_rate) or self.determinism == "fast"
        return self.error < self.tolerance and kept


def check_backends(
    device: torch.device,
    num_tokens: int,
    names: Sequence[str] | None = None,
    models: Sequence[str] = TINY_MODELS,
) -> list[BackendResult]:
    """Tiny models on every backend that serves the device, or on ``names``, in both types and at both
    settings of determinism. ``num_tokens``: of the text that flips are counted on."""
    results = []
    for name, tiny in tiny_models(models):
        for dtype in (torch.float32, torch.bfloat16):
            model = prepare_model(copy.deepcopy(tiny).to(dtype), device)  # type: ignore[arg-type]
            reference = reference_logits(model)
            shapes = attach_attention(model)
            # Last, since it replaces the model's layers.
            for determinism in ("fast", "exact"):
                if determinism == "exact":
                    pack_linears(model, num_tokens, exact=True)
                needs = AttentionNeeds.of(model, shapes, determinism, _BLOCK_SIZE)
                results += [
                    _check(name, backend, ModelRunner(model, attention), reference, num_tokens)
                    for backend, attention in _served(needs, names)
                ]
    return results


def _served(
    needs: AttentionNeeds, names: Sequence[str] | None
) -> Iterator[tuple[str, AttentionBackend]]:
    for name, backend in sorted(attention_backends().items()):
        is_wanted = names is None or name in names
        if is_wanted and backend.refusal(needs) is None:
            yield name, build_attention(needs, _NUM_BLOCKS, name)


def _check(
    model: str, backend: str, runner: ModelRunner, reference: torch.Tensor, num_tokens: int
) -> BackendResult:
    errors = logit_errors(runner, reference)
    needs = runner.attention.needs
    return BackendResult(
        model=model,
        backend=backend,
        determinism=needs.determinism,
        dtype=str(needs.dtype).removeprefix("torch."),
        error=max(errors.values()),
        tolerance=_TOLERANCE[needs.dtype],
        same_bits=check_exact(runner),
        flip_rate=flip_rate(runner, num_tokens),
    )


def serving_backends(device: torch.device, names: Sequence[str] | None = None) -> list[str]:
    """Those that serve the device in fp32 under ``fast``, or those of ``names`` that do."""
    _, tiny = next(tiny_models(TINY_MODELS[:1]))
    model = prepare_model(tiny, device)
    needs = AttentionNeeds.of(model, attach_attention(model), "fast", _BLOCK_SIZE)
    return [name for name, _ in _served(needs, names)]


def flip_rate(runner: ModelRunner, num_tokens: int) -> float:
    """Measures the share of a text's tokens whose likeliest successor differs between one chunk and
    steps of few rows beside a neighbour. Overwrites the store's blocks."""
    vocab_size = int(runner.model.get_output_embeddings().out_features)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()
    size = runner.store.block_size
    num_blocks = -(-num_tokens // size)
    tables = (range(num_blocks), range(num_blocks, 2 * num_blocks))
    whole = _run(runner, [(text, 0, num_tokens, tables[0])])
    chosen, base, turn = [], 0, 0
    while base < num_tokens:
        count = min(_FLIP_ROWS[turn % len(_FLIP_ROWS)], num_tokens - base)
        parts = [(text, base, count, table) for table in tables]
        chosen.append(_run(runner, parts)[:count])
        base, turn = base + count, turn + 1
    return float((torch.cat(chosen) != whole).double().mean())


def _run(
    runner: ModelRunner, parts: Sequence[tuple[Sequence[int], int, int, Sequence[int]]]
) -> torch.Tensor:
    """The likeliest token after every row."""
    rows = [
        RequestRows(text[base : base + count], count, base, (), table, count)
        for text, base, count, table in parts
    ]
    return runner.forward(build_batch(rows, runner.store.block_size)).logits.argmax(-1)
