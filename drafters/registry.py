"""The drafters of the core, by name: a new one is one file and one line here. Drafters from outside
(``drafters.plugins``) are built by the same function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from drafters.auto import AutoDrafter
from drafters.base import Drafter
from drafters.copying.ngram import NgramDrafter
from drafters.copying.prediction import PredictionDrafter
from drafters.copying.suffix import SuffixDrafter
from drafters.model.eagle import EagleDrafter, FeatureModel
from drafters.model.medusa import MedusaDrafter, PredictionHeads
from drafters.model.model_drafter import prefix_layers, quantized, small_model
from drafters.model.protocol import DraftModel
from drafters.none import NoneDrafter
from drafters.parallel.jacobi import JacobiDrafter
from drafters.parallel.lookahead import LookaheadDrafter
from drafters.tables.nasd import NasdDrafter, NasdOneLevelDrafter
from drafters.tables.recycling import RecyclingDrafter
from drafters.tables.stand import StandDrafter


class DrafterUnavailableError(ValueError):
    """The drafter cannot work with this model and these settings; the message says why."""


class DrafterContext(Protocol):
    """What drafters may ask of the engine that they are built for."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stand_template(self) -> str | None: ...

    @property
    def encode(self) -> Callable[[str], Sequence[int]]:
        """The target's token ids of a text, without special tokens."""

    @property
    def draft_model(self) -> Callable[[str], DraftModel]: ...

    @property
    def medusa_heads(self) -> Callable[[], PredictionHeads]: ...

    @property
    def eagle_head(self) -> Callable[[], FeatureModel]: ...


class PlainContext:
    """An engine that has no models to lend: enough for drafters that need none."""

    def __init__(self, vocab_size: int = 0) -> None:
        self.vocab_size = vocab_size
        self.stand_template: str | None = None

    def __getattr__(self, name: str) -> Any:
        raise DrafterUnavailableError(f"needs {name.replace('_', ' ')}, and there is none here")


_MEMBERS_OF_AUTO = ("prediction", "ngram", "nasd", "suffix", "stand", "recycling")


def _auto(context: DrafterContext) -> Drafter:
    return AutoDrafter(build_drafters(_MEMBERS_OF_AUTO, context))


Factory: TypeAlias = Callable[[DrafterContext], Drafter]

_FACTORIES: dict[str, Factory] = {
    "none": lambda _: NoneDrafter(),
    "ngram": lambda _: NgramDrafter(),
    "nasd_one_level": lambda _: NasdOneLevelDrafter(),
    "nasd": lambda _: NasdDrafter(),
    "suffix": lambda _: SuffixDrafter(),
    "jacobi": lambda _: JacobiDrafter(),
    "lookahead": lambda _: LookaheadDrafter(),
    "prediction": lambda _: PredictionDrafter(),
    "stand": lambda context: StandDrafter(context.stand_template),
    "recycling": lambda _: RecyclingDrafter(),
    "auto": _auto,
    "small_model": lambda context: small_model(context.draft_model),
    "quantized": lambda context: quantized(context.draft_model),
    "prefix_layers": lambda context: prefix_layers(context.draft_model),
    "medusa": lambda context: MedusaDrafter(context.medusa_heads()),
    "eagle": lambda context: EagleDrafter(context.eagle_head()),
}


def drafter_names() -> tuple[str, ...]:
    """The names ``build_drafters`` knows."""
    return tuple(_FACTORIES)


def drafter_settings() -> Mapping[str, type]:
    """By drafter, a frozen dataclass of the settings that it wants when it is loaded; their metadata
    has a ``description``. Drafters without such settings are not in it."""
    return {}


def build_drafters(
    names: Iterable[str] | None = None,
    context: DrafterContext | None = None,
    plugins: Mapping[str, Factory] | None = None,
) -> dict[str, Drafter]:
    """A fresh drafter per name, of the core or of ``plugins``; all that can work in ``context`` when
    ``names`` is None.

    Raises ValueError for an unknown name, listing the known ones, and DrafterUnavailableError for a
    name whose drafter cannot work here.
    """
    context = context or PlainContext()
    factories = _FACTORIES | dict(plugins or {})
    drafters: dict[str, Drafter] = {}
    for name in factories if names is None else names:
        if name not in factories:
            raise ValueError(f"unknown drafter {name!r}; known: {', '.join(factories)}")
        try:
            drafters[name] = factories[name](context)
        except DrafterUnavailableError as error:
            if names is not None:
                raise DrafterUnavailableError(
                    f"drafter {name!r} cannot be used: {error}"
                ) from error
    return drafters
