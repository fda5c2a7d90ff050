"""Start-up checks: whether our forward writes what transformers' own forward writes, and the same bits
however rows are cut into steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from engine.batch import RequestRows, build_batch, slot_of
from engine.model.quantization import is_rounded
from engine.model.runner import ModelRunner
from engine.request.errors import UnsupportedModelError
from engine.states.build import LEAST_PLACES
from kvpool.state_slots import NOWHERE, StateRows

logger = logging.getLogger(__name__)

_NUM_TOKENS = 24
# Rows of the check's steps: a chunk, single rows, a chunk again.
_CHUNKS = (9, 1, 1, 5, 8)
_PREFIX_THEN_SINGLE = (18, *(1,) * 6)
# A draft tree hung under the token at _FORK: its even nodes follow the text, its odd ones do not.
_FORK = 11
_PARENTS = (-1, -1, 0, 0, 2, 1)
_PATH = (0, 2, 4)
# Logit differences relative to the logits' spread, by the bits of the model's type.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
_TOLERANCE_OF_STORES_IN_8_BITS = 3e-1
# Rounded weights and inputs write other logits, and that feeds on itself from layer to layer: up to 0.17
# were seen of real models. Those of two models that have nothing in common differ by 1.1.
_SANE_IN_8_BITS = 5e-1


def blocks_needed(block_size: int) -> int:
    """Returns the blocks of a store that has room for the checks."""
    return 2 * -(-_NUM_TOKENS // block_size)


def _token_ids(model: PreTrainedModel) -> list[int]:
    """Returns a text without the padding token, whose embedding may be zeros: a router's scores are then
    equal for all experts, and which of them it takes is not defined."""
    generator = torch.Generator().manual_seed(1)
    padding = getattr(model.get_input_embeddings(), "padding_idx", None)
    count = _vocab_size(model) - (padding is not None)
    ids = torch.randint(0, count, (_NUM_TOKENS,), generator=generator)
    return (ids if padding is None else ids + (ids >= padding)).tolist()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel) -> torch.Tensor:
    """Returns transformers' own logits of the check's text, ``[24, vocab_size]`` float32."""
    ids = torch.tensor([_token_ids(model)], device=model.device)
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
    """Returns how far the engine's logits lie from the reference (of ``reference_logits``), by how rows
    are cut into steps: means of what they differ by, relative to the reference's spread. Nothing where
    the pool is too small. Overwrites the store's blocks."""
    tables = _tables(runner)
    if tables is None:
        return {}
    spread = float(reference.std()) or 1.0
    compared = {
        "in chunks": (_run_chunks(runner, tables[:1], _CHUNKS)[0], reference),
        "in a draft tree": (_run_tree(runner, tables[1]), reference[_FORK - 1 : _FORK + 4]),
    }
    return {
        what: float((ours.float() - theirs).abs().mean()) / spread
        for what, (ours, theirs) in compared.items()
    }


def _tolerance(runner: ModelRunner) -> tuple[float, str]:
    """Returns how far logits may lie from the reference, and what it says of a model beyond that."""
    if is_rounded(runner.model):
        return _SANE_IN_8_BITS, "it does not survive rounding to 8 bits"
    ours = f"the attention backend {runner.attention.name}"
    if runner.states is not None:
        ours += " or an operator of its states"
    keeps_state = (
        f"it must keep state that the engine does not carry, or {ours} computes something else"
    )
    if runner.store.dtype.itemsize == 1:
        return _TOLERANCE_OF_STORES_IN_8_BITS, keeps_state
    return _TOLERANCE.get(runner.model.dtype, _TOLERANCE[torch.bfloat16]), keeps_state


class Exactness(NamedTuple):
    """The fields of ``EngineInfo`` that begin with ``exact_``."""

    verified: bool | None = None
    probed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def verify_exact(runner: ModelRunner, failed_products: Set[str], is_asked: bool) -> Exactness:
    """Returns what the probes of products (``failed_products``) found, and whether a text in steps of
    several kinds bears them out. Raises UnsupportedModelError where a row has not its own bits in all
    steps and that ``is_asked`` for."""
    text = check_exact(runner)
    probed = ["linear layers and other products"]
    failed = sorted(failed_products)  # complete only now: some are probed when first computed
    if text is not None:
        probed.append("a text in steps of several kinds")
    if text is False:
        failed.append(probed[-1])
    if failed:
        reason = f"determinism=exact does not hold here: {'; '.join(failed)}"
        if is_asked:
            raise UnsupportedModelError(reason)
        logger.warning("%s; texts may part where two tokens nearly tie", reason)
    return Exactness(False if failed else text, tuple(probed), tuple(failed))


def check_exact(runner: ModelRunner) -> bool | None:
    """Returns whether chunks, single rows, rows among neighbours and draft rows gave the same bits here;
    None where the pool is too small to tell."""
    tables = _tables(runner)
    if tables is None:
        return None
    whole = _run_chunks(runner, tables[:1], (_NUM_TOKENS,))
    singly = _run_chunks(runner, tables[:1], _PREFIX_THEN_SINGLE)
    # The neighbour is the same text in other blocks: both have to come out.
    beside = _run_chunks(runner, tables, _CHUNKS)
    tree = _run_tree(runner, tables[1])
    return (
        torch.equal(singly, whole)
        and torch.equal(beside, whole.expand_as(beside))
        and torch.equal(tree, whole[0, _FORK - 1 : _FORK + 4])
    )


def _tables(runner: ModelRunner) -> tuple[range, range] | None:
    """Returns blocks for the text twice; None: the store has too few."""
    needed = blocks_needed(runner.store.block_size) // 2
    if 2 * needed > runner.store.num_blocks:
        return None
    return range(needed), range(needed, 2 * needed)


def _vocab_size(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.num_embeddings)


def _run_chunks(
    runner: ModelRunner, tables: Sequence[Sequence[int]], chunks: Sequence[int]
) -> torch.Tensor:
    """Returns logits ``[texts, tokens, vocab_size]`` of the text in each table, side by side, in steps of
    so many rows of each."""
    token_ids = _token_ids(runner.model)
    logits, base = [], 0
    for count in chunks:
        parts = [
            RequestRows(token_ids[base : base + count], count, base, (), table, count)
            for table in tables
        ]
        for slot, part in enumerate(parts):
            part.states = StateRows(slot if base else NOWHERE, target=slot)
        found = runner.forward(build_batch(parts, runner.store.block_size)).logits
        logits.append(found.view(len(tables), count, -1).clone())
        base += count
    return torch.cat(logits, dim=1)


def _run_tree(runner: ModelRunner, table: Sequence[int]) -> torch.Tensor:
    """Returns logits of the anchor, of the tree's path that follows the text, and of the text's next
    token, in a step of its own: ``[5, vocab_size]``."""
    token_ids = _token_ids(runner.model)
    other = (token_ids[_FORK] + 1) % _vocab_size(runner.model)
    right = token_ids[_FORK : _FORK + 3]
    nodes = [right[0], other, right[1], other, right[2], other]
    assert len(nodes) <= LEAST_PLACES
    known = token_ids[:_FORK]
    states = StateRows(NOWHERE, target=0, places=range(len(nodes)))
    part = RequestRows([*known, *nodes], _FORK, 0, _PARENTS, table, 1 + len(nodes), states=states)
    size = runner.store.block_size
    found = runner.forward(build_batch([part], size)).logits[[0, *(1 + each for each in _PATH)]]
    slots = [slot_of(table, _FORK + place, size) for place in (*_PATH, *range(len(_PATH)))]
    runner.move(slots[: len(_PATH)], slots[len(_PATH) :])
    base = _FORK + len(_PATH)
    states = StateRows(source=0, replayed=_PATH, target=0)
    part = RequestRows([token_ids[base]], 1, base, (), table, 1, states=states)
    return torch.cat((found, runner.forward(build_batch([part], size)).logits))
