"""Gives a model fewer and longer passes over its rows, by compiled kernels.

A module keeps its place and its parts and gets another forward. Four kinds are found, by what they do
with random rows and not by what they are called:

- root mean square norms, which transformers writes as seven operations; for a few rows these cost more
  than what they compute. On GPUs one of them, the mean of the squares, divides a row among threads by how
  many rows there are, so that its bits follow them; our pass has one order for rows of a length.
- attention modules whose rotary position embedding rotates by halves: some eighteen operations, half of
  a small model's step. Modules call it by a name of their file, and to give that another meaning would
  change models that are not the engine's: so they get their class's forward over a copy of the names.
- rotary embeddings, whose cosines and sines of a position are the same in every step: they are looked up.
- gated feed-forward networks, down(activation(gate(x)) * up(x)), of packed layers: two passes. In few
  bits gate and up are one product already, and activation and product of the halves are done where the
  second product's rows are quantised. Of packed floats gate and up become one product, which does both
  where its sums are rounded.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import permutations
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.kernels import KINDS, LANES
from engine.model.fused import (
    PROBED_ROWS,
    Find,
    Fused,
    FusedParts,
    activation_of,
    computed,
    find_norm,
    fused_forward,
    is_near,
)
from engine.model.fused_layers import DEVICE_FINDERS, chain_layers
from engine.model.layers import GroupedLinear, LayerShape, PackedLinear

logger = logging.getLogger(__name__)


@torch.inference_mode()
def fuse(model: nn.Module, num_positions: int | None = None) -> None:
    """Replaces modules' forwards by fused passes, in place, once the model's weights are packed; a
    second call finds nothing. ``num_positions``: upper limit of rows' positions; None: unknown."""
    devices = {each.device.type for each in model.parameters()}
    has_programs = _have_programs(devices)
    if not has_programs and not devices <= {"cpu"}:
        return
    finders = dict(DEVICE_FINDERS if has_programs else _FINDERS)
    if not has_programs and num_positions is not None:
        dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
        angles = partial(_find_angles, num_positions=num_positions, dtype=dtype)
        finders["cosines and sines"] = angles
    counts = dict.fromkeys(finders, 0)
    for kind, find in finders.items():
        for module in list(model.modules()):
            found = find(module) if fused_forward(module) is None else None
            if found is not None:
                vars(module)["forward"] = found
                counts[kind] += 1
    chain_layers(model)
    if devices == {"cuda"}:
        torch.cuda.empty_cache()  # of weights that lie elsewhere now
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    logger.debug("in one pass each: %s", said or "nothing")


def _have_programs(devices: set[str]) -> bool:
    """Whether a model on these kinds of device gets Triton's programs, where they run."""
    return devices == {"cuda"}


# --- rotary position embeddings ---

_ROTATION = "apply_rotary_pos_emb"
_PROBED_SHAPES = ((3, 5, 64), (1, 2, 32))
"""Heads, rows, dimensions."""


class FusedRotation(Fused):
    """The forward of an attention module over its file's names, but for the one of the ``rotation``."""

    def __init__(self, module: nn.Module, rotation: Callable[..., Any]) -> None:
        copied = _with_names(type(module).forward, {_ROTATION: partial(rotated, rotation)})
        self._forward = MethodType(copied, module)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._forward(*given, **named)


def _with_names(function: Any, names: dict[str, Any]) -> FunctionType:
    """Returns a copy of a function, and of what decorates it, that finds ``names`` among its globals."""
    cells, inner = function.__closure__, getattr(function, "__wrapped__", None)
    if inner is not None:
        copied_inner = CellType(_with_names(inner, names))
        cells = tuple(copied_inner if each.cell_contents is inner else each for each in cells)
    known = {**function.__globals__, **names}
    copied = FunctionType(function.__code__, known, function.__name__, function.__defaults__, cells)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _find_rotation(module: nn.Module) -> FusedRotation | None:
    forward = type(module).forward
    inner = inspect.unwrap(forward)
    if "forward" in vars(module) or {type(forward), type(inner)} != {FunctionType}:
        return None
    rotation = inner.__globals__.get(_ROTATION) if _ROTATION in inner.__code__.co_names else None
    if rotation is None or not _rotates_halves(rotation):
        return None
    return FusedRotation(module, rotation)


def rotated(rotation: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Stands in the place of a ``rotation``; what is not for the kernel is still its own."""
    from engine.kernels.rotary import can_rotate, rotate

    if len(given) != 4 or named or not can_rotate(*given):
        return rotation(*given, **named)
    return rotate(*given)


@cache
def _rotates_halves(rotation: Callable[..., Any]) -> bool:
    """Whether its results have the bits of the kernel's."""
    from engine.kernels.rotary import rotate

    generator = torch.Generator().manual_seed(0)

    def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for heads, rows, dim in _PROBED_SHAPES:
        for dtype in KINDS:
            query = drawn(dtype, 1, rows, heads, dim).transpose(1, 2)
            key = drawn(dtype, 1, rows, 1, dim).transpose(1, 2)
            given = query, key, drawn(dtype, 1, rows, dim), drawn(dtype, 1, rows, dim)
            expected = computed(rotation, *given)
            if not isinstance(expected, tuple) or len(expected) != 2:
                return False
            if not all(map(_is_same, rotate(*given), expected)):
                return False
    return True


def _is_same(got: torch.Tensor, expected: object) -> bool:
    return (
        isinstance(expected, torch.Tensor)
        and expected.dtype == got.dtype
        and torch.equal(got, expected)
    )


# --- cosines and sines ---

_MOST_NUMBERS = 1 << 24
"""In both tables of an embedding together: 32 MB in 16 bits."""
_LEAST_POSITIONS = 1024
"""More than checks at start use, however short requests are."""
_ANGLE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""A step of the type: alone, a number may be computed by another instruction than beside others."""


class LookedUpAngles(Fused):
    """A rotary embedding whose cosines and sines lie in tables ``[num_positions, dim]``, of rows of
    ``dtype``. What they do not have is still its own."""

    def __init__(self, module: nn.Module, num_positions: int, dtype: torch.dtype) -> None:
        self._own = type(module).forward.__get__(module)
        like, positions = torch.zeros(1, 1, dtype=dtype), torch.arange(num_positions)[None]
        self._cosines, self._sines = (each[0].contiguous() for each in self._own(like, positions))

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        """``position_ids``: ``[1, num_rows]``, smaller than the number of positions, or these for each of
        an image's axes, which a text's share. Returns cosines and sines, ``[1, num_rows, dim]`` each."""
        are_shared = position_ids.dim() == 3 and position_ids.stride(0) == 0
        positions = position_ids[0] if are_shared else position_ids
        is_other = more or named or positions.shape[:-1] != (1,)
        if is_other or x.dtype != self._cosines.dtype:
            return self._own(x, position_ids, *more, **named)
        tables = self._cosines, self._sines
        return tuple(each.index_select(0, positions[0])[None] for each in tables)


def _find_angles(
    module: nn.Module, num_positions: int, dtype: torch.dtype
) -> LookedUpAngles | None:
    frequencies = dict(module.named_buffers()).get("inv_freq")
    has_more = any(True for _ in module.children()) or any(True for _ in module.parameters())
    if frequencies is None or frequencies.dim() != 1 or has_more or dtype not in KINDS:
        return None
    num_positions = max(num_positions, _LEAST_POSITIONS)
    if 4 * len(frequencies) * num_positions > _MOST_NUMBERS:
        return None
    like, last = torch.zeros(1, 1, dtype=dtype), num_positions - 1
    found: LookedUpAngles | None = computed(LookedUpAngles, module, num_positions, dtype)
    for position in (0, 1, last // 7, last // 2, last):
        given = like, torch.tensor([[position]])
        expected = computed(module, *given)
        if found is None or not isinstance(expected, tuple) or len(expected) != 2:
            return None
        if not all(map(_is_same_angle, found(*given), expected)):
            return None
    return found


def _is_same_angle(got: torch.Tensor, expected: object) -> bool:
    if not isinstance(expected, torch.Tensor) or expected.shape != got.shape:
        return False
    if expected.dtype != got.dtype:
        return False
    difference = (got.float() - expected.float()).abs().max()
    return bool(difference <= _ANGLE_TOLERANCE[got.dtype])


# --- gated feed-forward networks ---

_LARGEST = (4.0, 100.0)
"""Largest values of gate (and up) in probed rows: some networks cut large values off."""


class GatedGroups(FusedParts):
    """A quantized network. ``is_first``: the first of the two halves that ``both`` makes is gated."""

    def __init__(self, both: Any, down: Any, is_first: bool, activation: str) -> None:
        from engine.kernels.row_records import Gate, gate_rows

        super().__init__()
        self._gate_rows = gate_rows
        self._both, self._down, self._gate = both, down, Gate(activation, is_first)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[.., hidden_size]`` to the same."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        both = self._both(rows)
        if self.is_adapted:
            self.adapt(rows, both)
        down: torch.Tensor = self._down(both, self._gate)
        if self.is_adapted:
            self.adapted[-1].add(self._gate_rows(both, self._gate), down)
        return down.view(hidden_states.shape)


class GatedFloats(FusedParts):
    """A network of packed floats with ``down`` as its last layer. If adapters change the gated halves,
    the joint product leaves both as they are, with the same bits."""

    def __init__(
        self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: str
    ) -> None:
        from engine.kernels.float_product import pack_gated
        from engine.kernels.row_records import Gate, gate_rows

        super().__init__()
        self._both, self.down = pack_gated(gate.packed, up.packed, activation), down
        self._gate, self._gate_rows = Gate(activation, True), gate_rows

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[.., hidden_size]`` to the same."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.is_adapted:
            both = self._both.halves(rows)
            self.adapt(rows, both)
            gated = self._gate_rows(both, self._gate)
        else:
            gated = self._both.times(rows)
        down: torch.Tensor = self.down(gated)
        return down.view(hidden_states.shape)


class _Candidate(NamedTuple):
    """A way in which a network may be put together. ``first``: its first product, of rows of ``dtype``;
    ``fused``: makes what is to compute it, given the activation's name; ``parts``: the layers that this
    stands for (``Gated``)."""

    first: Any
    dtype: torch.dtype
    fused: Callable[[str], GatedGroups | GatedFloats]
    parts: Sequence[Any]


def _find_gating(network: nn.Module) -> Fused | None:
    children = list(network.children())
    layers = [each for each in children if isinstance(each, GroupedLinear | PackedLinear)]
    others = [each for each in children if each not in layers]
    candidates = [*_in_few_bits(layers), *_of_floats(layers)] if len(others) < 2 else []
    if not candidates:
        return None
    rows = _probe(candidates[0])
    expected = computed(network, rows)
    if expected is None:
        return None
    for candidate, found in _built(candidates, others):
        if is_near(found(rows), expected):
            return _placed(network, candidate, found)
    return None


def _placed(
    network: nn.Module, candidate: _Candidate, found: GatedGroups | GatedFloats
) -> FusedParts:
    """Returns what is found, which then has the weights that it needs and its parts' names."""
    names = {child: name for name, child in network.named_children()}
    found.parts = {
        names[part]: LayerShape(part.in_features, part.out_features) for part in candidate.parts
    }
    if isinstance(found, GatedFloats):
        # Their weights lie in the joint product.
        for name, child in list(network.named_children()):
            if isinstance(child, PackedLinear) and child is not found.down:
                delattr(network, name)
    return found


def _built(
    candidates: Sequence[_Candidate], others: Sequence[nn.Module]
) -> Iterator[tuple[_Candidate, GatedGroups | GatedFloats]]:
    """Yields networks with the activation that one of the ``others`` is; without these, with each."""
    from engine.kernels.lanes import ACTIVATIONS

    activations = [_activation_of(each) for each in others] if others else [*ACTIVATIONS]
    for candidate in candidates:
        yield from ((candidate, candidate.fused(each)) for each in activations if each is not None)


def _in_few_bits(layers: Sequence[nn.Module]) -> Iterator[_Candidate]:
    grouped = sorted(
        (each for each in layers if isinstance(each, GroupedLinear)), key=lambda each: each.first
    )
    products = {id(each.product): each.product for each in grouped}
    if len(products) != 2:
        return
    # Products come in the order in which layers are declared, which says nothing.
    for both, down in permutations(products.values()):
        parts = [each for product in (both, down) for each in grouped if each.product is product]
        fits = both.out_features == 2 * down.in_features and both.dtype in KINDS
        if fits and down.in_features % LANES == 0:
            for is_first in (True, False):
                fused = partial(GatedGroups, both, down, is_first)
                yield _Candidate(both, both.dtype, fused, parts)


def _of_floats(layers: Sequence[nn.Module]) -> Iterator[_Candidate]:
    from engine.kernels.float_product import PackedFloats, can_gate

    packed = [each for each in layers if isinstance(each, PackedLinear)]
    if len(packed) != 3 or not all(isinstance(each.packed, PackedFloats) for each in packed):
        return
    for gate, up, down in permutations(packed):
        fits = (down.in_features, down.out_features) == (gate.out_features, gate.in_features)
        if fits and can_gate(gate.packed, up.packed):
            fused = partial(GatedFloats, gate, up, down)
            yield _Candidate(gate, gate.packed.weights.dtype, fused, (gate, up))


def _activation_of(module: nn.Module) -> str | None:
    from engine.kernels.lanes import ACTIVATIONS
    from engine.kernels.row_records import Gate, gate_rows

    def gate(rows: torch.Tensor, name: str) -> torch.Tensor:
        return gate_rows(rows, Gate(name, True))

    return activation_of(module, ACTIVATIONS, gate, torch.device("cpu"))


def _probe(candidate: _Candidate) -> torch.Tensor:
    """Returns ``[1, num_rows, hidden_size]``, of small and of large products."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(PROBED_ROWS, candidate.first.in_features, generator=generator)
    by = 1 / candidate.first(drawn.to(candidate.dtype)).abs().amax().float()
    return torch.cat([largest * by * drawn for largest in _LARGEST]).to(candidate.dtype)[None]


_FINDERS: dict[str, Find] = {
    "norms": find_norm,
    "rotary embeddings": _find_rotation,
    "gated networks": _find_gating,
}
