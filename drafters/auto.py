"""``auto``: copies, the target's own top tokens and what companions draft, in one tree of the likeliest.

Its own draft (``drafters/merged``) is compiled. It is one tree, grown best first: after each node it
guesses what followed the text's last tokens before, in the request and in the tenant's finished ones
(``drafters/copying``), what the target found likeliest after the last tokens, what it nearly said of
late and what it says most often. How likely a guess is, is learned from the text that comes, whether the
guess was used or not.

The engine asks its companions besides, where that is expected to pay: a head, a drafter that reads the
target's hidden states; drafters of other distributions; ``prediction`` where a request brings one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from drafters.base import (
    REGISTERED,
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterUnavailableError,
    DraftRequest,
    NewRequest,
    drafter,
)
from drafters.copying.prediction import PredictionDrafter
from drafters.tree import DraftTree

if TYPE_CHECKING:
    from drafters.merged.merging import MergedText

_NO_HEAD = "none"


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """The operator's settings."""

    head: str | None = field(
        default=None,
        metadata={
            "description": "The drafter with a trained head that auto asks where that pays: its name, or "
            "none; default: the first one that draft names, if any."
        },
    )


@drafter
class AutoDrafter(Drafter):
    """See the module."""

    info = DrafterInfo(
        "auto",
        "Copies what followed the last tokens before, recycles what the target found likely there, and "
        "drafts what is likeliest of it all, as a tree or a chain; asks a trained head, too, where that "
        "pays.",
        cost="Per step and request some 30 microseconds; the target's eight likeliest tokens per row.",
        takes_prediction=True,
    )
    settings = AutoSettings
    auto_width = 8
    row_worth = 0.015
    most_recomputed = 64

    def __init__(self, head: str | None = None) -> None:
        """``head`` as in the settings."""
        # Imported where it is used: numba takes a while.
        from drafters.merged.merging import Merging

        super().__init__()
        self._merging = Merging()
        self._wanted_head = head
        self._companions: list[Drafter] = []
        self._prediction: Drafter = PredictionDrafter()

    @classmethod
    def build(cls, context: DrafterContext) -> AutoDrafter:
        return cls(cls.settings_in(context).head)

    def meet(self, drafters: Mapping[str, Drafter]) -> None:
        """Those of other distributions become companions, and one head. Raises DrafterUnavailableError
        where the head that is set is none of these."""
        self._prediction = drafters.get("prediction", self._prediction)
        self._companions = [
            each
            for name, each in drafters.items()
            if name not in REGISTERED and _needs_no_model(each.info)
        ]
        head = self._head_of(drafters)
        if head is not None:
            self._companions.append(head)
            cost = f"{self.info.cost[:-1]}; where that pays a draft of {head.info.name}."
            self.info = replace(self.info, cost=cost)

    def _head_of(self, drafters: Mapping[str, Drafter]) -> Drafter | None:
        heads = {name: each for name, each in drafters.items() if _is_head(each.info)}
        wanted = self._wanted_head
        if not wanted:
            return next(iter(heads.values()), None)
        if wanted == _NO_HEAD:
            return None
        if wanted not in heads:
            have = ", ".join(heads) or "none"
            raise DrafterUnavailableError(
                f"auto: the head {wanted!r} is not loaded; loaded heads: {have}"
            )
        return heads[wanted]

    def companions(self, has_prediction: bool) -> Sequence[Drafter]:
        return [*self._companions, self._prediction] if has_prediction else self._companions

    def start(self, request: NewRequest) -> MergedText:
        return self._merging.open(request.token_ids, request.cache_salt)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        self._merging.advance()
        return super().propose(requests)

    def finish(self, request_id: str, state: MergedText) -> None:  # noqa: ARG002
        state.finish()


def _needs_no_model(info: DrafterInfo) -> bool:
    needs = info.needs
    return not (needs.hidden_rows or needs.draft_slots or needs.all_or_nothing or needs.draft_model)


def _is_head(info: DrafterInfo) -> bool:
    return info.needs.hidden_rows and not info.needs.all_or_nothing
