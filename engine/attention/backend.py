"""Attention backends: their interface, their registry, and how a model's layers reach the one in use.

All rows of a step go through a model as one flat batch of shape ``[1, num_rows]``. A backend plans the
step once and then answers every layer: it puts the rows' keys and values into their slots and lets each
row attend to the committed past of its request and to its own ancestors in the draft tree. While a
model's forward runs, its thread is ``attending`` to the plan, where our attention function finds it: not
all models of transformers hand keywords down to their layers.

A backend is a class in a file of this folder, registered by ``@attention_backend(name)``. All files of
the folder are imported; one that needs a package of its own imports it where it is used, and its
``refusal`` says so where the package is not installed.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine import attention
from engine.batch import Bucket, InputBatch, InputTensors
from engine.kernels.triton.joint_ops import Heads
from engine.kernels.triton.row_ops import Sums
from engine.request.info import Determinism
from kvpool.store import KVStore, RowShape

IMPLEMENTATION = "slipstream"

KV_LAYER = "kv_layer"
"""An attention layer's number in the store, if it differs from its number in the model."""
MASK_WINDOW = "mask_window"
"""An attention layer's window, if it is in the model's mask alone."""

LARGEST_KEY = 2.0**60
"""Keys are limited to it: no model has any as large, and sums of their products stay finite."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Heads and dimensions of one layer's queries, keys and values. ``source``: the layer before it whose
    keys and values it attends to, where it has none of its own."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    source: int | None = field(default=None, repr=False)

    @property
    def row(self) -> RowShape:
        """The shape of one token's entry in a store."""
        own = self.num_kv_heads, self.key_dim, self.value_dim
        return own if self.source is None else self.source


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A layer's options. ``scaling`` of scores: None is the usual one. ``window``: how many positions a
    row sees, its own included. ``softcap``: as in Gemma 2; ``sinks``: as in GPT-OSS. ``sees_block``: the
    known rows of a request see each other in both directions, and a window limits what is before a row
    alone."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads]
    sees_block: bool = False


def stored_dtype(setting: Literal["auto", "fp8"]) -> torch.dtype | None:
    """Returns the type of stored keys and values; None: the model's."""
    return torch.float8_e4m3fn if setting == "fp8" else None


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """A model's demands on a backend. ``kv_dtype``: of the store, where it is not the model's type."""

    determinism: Determinism
    device: torch.device
    dtype: torch.dtype
    block_size: int
    shapes: Sequence[KVShape]
    kv_dtype: torch.dtype | None = None

    @staticmethod
    def of(
        model: PreTrainedModel,
        shapes: Sequence[KVShape],
        determinism: Determinism,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> AttentionNeeds:
        return AttentionNeeds(determinism, model.device, model.dtype, block_size, shapes, kv_dtype)

    def store_sizes(self) -> dict[str, Any]:
        """Returns ``KVStore``'s arguments but for device, number of blocks and ``dim_multiple``."""
        return {
            "shapes": [each.row for each in self.shapes],
            "block_size": self.block_size,
            "dtype": self.kv_dtype or self.dtype,
        }


class AttentionPlan(Protocol):
    """The answer to a model's attention layers: one step's plan, or the loader's shape probe."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [num_rows, num_heads, head_dim]
        key: torch.Tensor,  # [num_rows, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_rows, num_kv_heads, value_dim]
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Returns ``[num_rows, num_heads, value_dim]``, in the order of the batch's rows."""


@runtime_checkable
class JointPlan(Protocol):
    """A step's plan that takes queries, keys and values as one product left them."""

    def attend_joint(
        self, layer: int, product: Sums, heads: Heads, options: AttentionOptions
    ) -> torch.Tensor:
        """Returns what ``attend`` does, for the product's rows as ``put_heads`` takes them."""


class _Attended(threading.local):
    plan: AttentionPlan | None = None


attended = _Attended()
"""Has the plan that layers are answered by which this thread runs now."""


@contextmanager
def attending(plan: AttentionPlan | None) -> Iterator[None]:
    """Within it layers of models that this thread runs are answered by ``plan``."""
    before, attended.plan = attended.plan, plan
    try:
        yield
    finally:
        attended.plan = before


class AttentionBackend(ABC):
    """Attention over one store, for one model. Class attributes of a subclass declare what it supports:

    ``determinisms``: the supported settings. ``device_types``: supported devices; None: any.
    ``dtypes``, ``stored_dtypes``: supported types of models, and of keys and values; None: any.
    ``rank``: by default the highest-ranked backend that supports a model is used. ``store_class``: the
    layout of keys and values that it reads; ``dim_multiple``: a row's dimensions are padded to a
    multiple of this. ``can_capture``: steps of equal shape may be recorded on a CPU and replayed: plans
    read only input tensors, whose addresses never change, and the backend's own memory, and they renew
    the kernels' arguments (``engine.kernels.Renews``). ``can_graph``: steps padded to one bucket may be
    captured in a device graph: their kernels are launched alike, over memory at fixed addresses,
    whatever the steps hold.
    """

    name: ClassVar[str]
    determinisms: ClassVar[frozenset[Determinism]]
    device_types: ClassVar[frozenset[str] | None] = None
    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = None
    stored_dtypes: ClassVar[tuple[torch.dtype, ...] | None] = None
    rank: ClassVar[int] = 0
    store_class: ClassVar[type[KVStore]] = KVStore
    dim_multiple: ClassVar[int] = 1
    can_capture: ClassVar[bool] = False
    can_graph: ClassVar[bool] = False

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        self.store = store
        self.needs = needs

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        """Returns the reason why it cannot serve this; None: it can."""
        if needs.determinism not in cls.determinisms:
            return f"it is for determinism {', '.join(cls.determinisms)}, not {needs.determinism}"
        if cls.device_types is not None and needs.device.type not in cls.device_types:
            return f"it runs on {', '.join(sorted(cls.device_types))}, not on {needs.device.type}"
        stored = needs.kv_dtype or needs.dtype
        for dtype, known in ((needs.dtype, cls.dtypes), (stored, cls.stored_dtypes)):
            if known is not None and dtype not in known:
                return f"it knows no {dtype}"
        return None

    @classmethod
    def rank_for(cls, needs: AttentionNeeds) -> int:
        """Returns ``rank``, or another where that depends on what is asked. A backend of a rank below 0
        is taken only where it is asked for by name."""
        del needs
        return cls.rank

    @classmethod
    def reads(cls, store: KVStore) -> bool:
        """Whether ``store`` has the layout that ``make_store`` makes."""
        planes = (*store.key, *store.value)
        are_padded = all(plane.stride(0) % cls.dim_multiple == 0 for plane in planes)
        return isinstance(store, cls.store_class) and are_padded

    @classmethod
    def bytes_per_block(cls, needs: AttentionNeeds) -> int:
        return cls.store_class.bytes_per_block(**needs.store_sizes(), dim_multiple=cls.dim_multiple)

    @classmethod
    def make_store(cls, needs: AttentionNeeds, num_blocks: int) -> KVStore:
        return cls.store_class(
            num_blocks=num_blocks,
            device=needs.device,
            **needs.store_sizes(),
            dim_multiple=cls.dim_multiple,
        )

    @abstractmethod
    def plan(self, batch: InputBatch, inputs: InputTensors) -> AttentionPlan:
        """Plans a step. ``inputs`` is the batch on the device, valid until the step's end. Rows past
        those of the requests are padding: nothing is stored for them, and their outputs are finite."""

    def can_move(self, batch: InputBatch) -> bool:
        """Whether plans take ``batch.moved``, and its rows get the bits of rows that are known to lie
        there."""
        del batch
        return False

    def reserve(self, bucket: Bucket, most_keys: int, most_nodes: int) -> None:
        """Keeps memory for steps of ``bucket`` whose requests have at most ``most_keys`` tokens, drafts
        included, and ``most_nodes`` draft nodes: what plans of such steps tell the device lies there
        from then on. For backends that ``can_graph``; before a first step is captured."""
        del bucket, most_keys, most_nodes

    def write(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Stores a layer's new rows with NaN and infinity replaced by 0 and keys limited. Otherwise one
        request's overflow could reach others, who read its blocks masked, beside it or after it: a masked
        key weighs 0, but 0 times NaN is NaN, and so is infinity less infinity."""
        key, value = key.nan_to_num(0.0, 0.0, 0.0), value.nan_to_num(0.0, 0.0, 0.0)
        largest = min(LARGEST_KEY, torch.finfo(key.dtype).max)
        self.store.write(layer, slot_mapping, key.clamp_(-largest, largest), value)


_BACKENDS: dict[str, type[AttentionBackend]] = {}
_Backend = TypeVar("_Backend", bound=type[AttentionBackend])


def attention_backend(name: str) -> Callable[[_Backend], _Backend]:
    """Registers a class under the name that the setting ``attention_backend`` takes. Raises ValueError
    where the name is taken."""

    def register(backend: _Backend) -> _Backend:
        if name in _BACKENDS:
            raise ValueError(f"two attention backends are called {name!r}")
        backend.name = name
        _BACKENDS[name] = backend
        return backend

    return register


def attention_backends() -> Mapping[str, type[AttentionBackend]]:
    """Returns the backends of all files of this folder, by name."""
    for module in pkgutil.iter_modules(attention.__path__, f"{attention.__name__}."):
        importlib.import_module(module.name)
    return _BACKENDS


def check_backend_name(name: str | None) -> None:
    """Raises ValueError, naming the backends that there are, unless ``name`` is one of them or None."""
    if name is not None and name not in attention_backends():
        known = ", ".join(sorted(_BACKENDS))
        raise ValueError(f"attention_backend: there is no {name!r}; there are {known}")


def choose_backend(
    name: str | None, needs: AttentionNeeds, store: KVStore | None = None, strict: bool = True
) -> type[AttentionBackend]:
    """Returns the backend asked for, or the one of the highest rank that serves ``needs`` (over
    ``store``). ``strict``: no other than the one asked for will do; draft models may take another than
    their target.

    Raises ValueError with the reason where there is none.
    """
    check_backend_name(name)
    wanted = attention_backends() if name is None else {name: _BACKENDS[name]}
    reasons = {key: _refusal(backend, needs, store) for key, backend in wanted.items()}
    fit = [wanted[key] for key, reason in reasons.items() if reason is None]
    if not fit and name is not None and not strict:
        return choose_backend(None, needs, store)
    if not fit:
        listed = "; ".join(f"{key}: {reason}" for key, reason in sorted(reasons.items()))
        raise ValueError(f"attention_backend {listed}")
    return max(fit, key=lambda backend: backend.rank_for(needs))


def _refusal(
    backend: type[AttentionBackend], needs: AttentionNeeds, store: KVStore | None
) -> str | None:
    if store is not None and not backend.reads(store):
        return "it does not read a store of this layout"
    return backend.refusal(needs)


def build_attention(
    needs: AttentionNeeds, store: KVStore | int, name: str | None = None, strict: bool = True
) -> AttentionBackend:
    """Returns a backend over ``store``, or over a new store of so many blocks. Raises as
    ``choose_backend``."""
    if not isinstance(store, int):
        return choose_backend(name, needs, store, strict)(store, needs)
    backend = choose_backend(name, needs, strict=strict)
    return backend(backend.make_store(needs, store), needs)


def layer_number(module: torch.nn.Module) -> int:
    """Returns an attention layer's number in the store."""
    number: Any = getattr(module, KV_LAYER, module.layer_idx)
    if number is None:
        raise TypeError("an attention layer has no number")
    return int(number)


def slipstream_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_rows, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_rows, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Answers a layer of a model of transformers: ``[1, num_rows, num_heads, value_dim]``. A module
    whose rows see their block has a true ``sees_block``.

    Raises RuntimeError outside ``attending``, or if a model brings its own mask.
    """
    if attended.plan is None:
        raise RuntimeError("a layer attends, but there is no plan to answer it")
    if attention_mask is not None or dropout:
        raise RuntimeError("the model's attention layers bring a mask or dropout of their own")
    window = sliding_window or getattr(module, MASK_WINDOW, None)
    output = attended.plan.attend(
        layer_number(module),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionOptions(scaling, window, softcap, s_aux, getattr(module, "sees_block", False)),
    )
    return output.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, slipstream_attention)
