"""Start-up checks: does our forward write what transformers' own forward writes, and the same bits
however rows are cut into steps?"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from engine.batch import RequestRows, build_batch
from engine.errors import UnsupportedModelError
from engine.model.int8 import Int8Linear
from engine.model.runner import ModelRunner

_NUM_TOKENS = 24
# Rows of the check's steps: a chunk, single rows, a chunk again.
_CHUNKS = (9, 1, 1, 5, 8)
_PREFIX_THEN_SINGLE = (18, *(1,) * 6)
# A draft tree hung under the token at _FORK: its even nodes follow the text, its odd ones do not.
_FORK = 11
_PARENTS = (-1, -1, 0, 0, 2, 1)
# Logit differences relative to the logits' spread, by the bits of the model's type.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
_TOLERANCE_OF_STORES_IN_8_BITS = 3e-1
# Rounded weights and inputs write other logits, and that feeds on itself from layer to layer: up to 0.17
# were seen of real models. Those of two models that have nothing in common differ by 1.1.
_SANE_IN_8_BITS = 5e-1


def blocks_needed(block_size: int) -> int:
    """Of a store that has room for the checks."""
    return 2 * -(-_NUM_TOKENS // block_size)


def _token_ids(vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (_NUM_TOKENS,), generator=generator).tolist()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel) -> torch.Tensor:
    """transformers' own logits of the check's text, ``[24, vocab_size]`` float32."""
    ids = torch.tensor([_token_ids(_vocab_size(model))], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def check_logits(runner: ModelRunner, reference: torch.Tensor) -> None:
    """Raises UnsupportedModelError if the engine's forward, in chunks with a draft tree beside them,
    does not write the reference; where layers have 8 bits, if it writes nothing like it. Whether a model
    keeps state is to be seen before it is quantised. Overwrites the store's blocks: only while it is
    unused."""
    tolerance, reason = _tolerance(runner)
    for what, error in logit_errors(runner, reference).items():
        if not error < tolerance:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__}: run {what}, its logits differ from transformers' "
                f"own by {error:.3g} of their spread; {reason}"
            )


def logit_errors(runner: ModelRunner, reference: torch.Tensor) -> dict[str, float]:
    """How far the engine's logits lie from the reference (of ``reference_logits``), by how rows are cut
    into steps: means of what they differ by, relative to the reference's spread. Nothing where the pool
    is too small. Overwrites the store's blocks."""
    token_ids = _token_ids(_vocab_size(runner.model))
    block_size = runner.store.block_size
    needed = -(-_NUM_TOKENS // block_size)
    if blocks_needed(block_size) > runner.store.num_blocks:
        return {}
    chunks = torch.cat(list(_run_chunks(runner, token_ids, range(needed), _CHUNKS)))
    tree = _run_tree(runner, token_ids, range(needed, 2 * needed))
    spread = float(reference.std()) or 1.0
    compared = {
        "in chunks": (chunks, reference),
        "in a draft tree": (tree, reference[_FORK - 1 : _FORK + 3]),
    }
    return {
        what: float((ours.float() - theirs).abs().mean()) / spread
        for what, (ours, theirs) in compared.items()
    }


def _tolerance(runner: ModelRunner) -> tuple[float, str]:
    """And what it says of a model that is beyond it."""
    if any(isinstance(module, Int8Linear) for module in runner.model.modules()):
        return _SANE_IN_8_BITS, "it does not survive rounding to 8 bits"
    keeps_state = "it must keep state that the engine does not carry"
    if runner.store.dtype.itemsize == 1:
        return _TOLERANCE_OF_STORES_IN_8_BITS, keeps_state
    return _TOLERANCE.get(runner.model.dtype, _TOLERANCE[torch.bfloat16]), keeps_state


class Exactness(NamedTuple):
    """As in ``EngineInfo``."""

    verified: bool | None = None
    probed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def verify_exact(runner: ModelRunner, failed_products: Set[str]) -> Exactness:
    """What the probes of attention and of products (``failed_products``) found, and whether a text in
    steps of several kinds bears them out."""
    attention = getattr(runner.attention, "failures", None)
    text = check_exact(runner)
    probed = ["linear layers and other products"]
    failed = sorted(failed_products)  # complete only now: some are probed when first computed
    if attention is not None:
        probed.append("attention")
        failed += attention
    if text is not None:
        probed.append("a text in steps of several kinds")
    if text is False:
        failed.append("a text in steps of several kinds")
    verified = False if failed else text
    return Exactness(verified, tuple(probed), tuple(failed))


def check_exact(runner: ModelRunner) -> bool | None:
    """Whether chunks, single rows, rows among neighbours and draft rows gave the same bits here; None
    where the pool is too small to tell."""
    token_ids = _token_ids(_vocab_size(runner.model))
    block_size = runner.store.block_size
    needed = -(-_NUM_TOKENS // block_size)
    if blocks_needed(block_size) > runner.store.num_blocks:
        return None
    mine, other = range(needed), range(needed, 2 * needed)
    (whole,) = _run_chunks(runner, token_ids, mine, (_NUM_TOKENS,))
    singly = torch.cat(_run_chunks(runner, token_ids, mine, _PREFIX_THEN_SINGLE))
    steps = []
    base = 0
    for count in _CHUNKS:
        # The neighbour is the same text in other blocks: both have to come out.
        parts = [
            RequestRows(token_ids[base : base + count], count, base, (), table, count)
            for table in (mine, other)
        ]
        logits = runner.forward(build_batch(parts, block_size)).logits
        steps.append(logits.view(2, count, -1))
        base += count
    beside = torch.cat(steps, dim=1)
    tree = _run_tree(runner, token_ids, other)
    return (
        torch.equal(singly, whole)
        and torch.equal(beside, whole.expand_as(beside))
        and torch.equal(tree, whole[_FORK - 1 : _FORK + 3])
    )


def _vocab_size(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def _run_chunks(
    runner: ModelRunner, token_ids: Sequence[int], table: Sequence[int], chunks: Sequence[int]
) -> list[torch.Tensor]:
    logits: list[torch.Tensor] = []
    base = 0
    for count in chunks:
        part = RequestRows(token_ids[base : base + count], count, base, (), table, count)
        logits.append(runner.forward(build_batch([part], runner.store.block_size)).logits)
        base += count
    return logits


def _run_tree(runner: ModelRunner, token_ids: Sequence[int], table: Sequence[int]) -> torch.Tensor:
    """Logits of the anchor and of the tree's path that follows the text: ``[4, vocab_size]``."""
    other = (token_ids[_FORK] + 1) % _vocab_size(runner.model)
    right = token_ids[_FORK : _FORK + 3]
    nodes = [right[0], other, right[1], other, right[2], other]
    known = token_ids[:_FORK]
    part = RequestRows([*known, *nodes], _FORK, 0, _PARENTS, table, 1 + len(nodes))
    output = runner.forward(build_batch([part], runner.store.block_size))
    return output.logits[[0, 1, 3, 5]]
