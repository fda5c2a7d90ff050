"""Drafters with trained heads: small networks that go on from the target's hidden states.

``eagle3`` and ``mtp`` draft token after token: a drafted token's row reads what the head made of the row
before (Li et al., EAGLE-3, https://arxiv.org/abs/2503.01840; its trees are EAGLE-2's,
https://arxiv.org/abs/2406.16858; multi-token prediction as in DeepSeek-V3,
https://arxiv.org/abs/2412.19437). ``p_eagle`` and ``dflash`` guess several positions in one forward, each
apart from the others (P-EAGLE, https://arxiv.org/abs/2602.01469), so their trees are products;
``dspark`` reads such a block off left to right. Which one a folder is for is found in the folder.
"""

from __future__ import annotations

from drafters.base import DrafterInfo, DrafterNeeds, drafter
from drafters.model.feature_drafter import FeatureDrafter
from drafters.model.model_drafter import OPTIONS

_NEEDS = DrafterNeeds(hidden_rows=True, draft_slots=True, draft_model="draft")


def _info(name: str, summary: str, cost: str) -> DrafterInfo:
    return DrafterInfo(name, summary, options=OPTIONS, needs=_NEEDS, cost=cost, samples=True)


@drafter
class Eagle3Drafter(FeatureDrafter):
    info = _info(
        "eagle3",
        "A trained layer continues the target's hidden states. More often right than medusa, "
        "at one small forward per drafted token.",
        "A forward of one layer and the output head per level of the tree; a layer's KV.",
    )


@drafter
class MtpDrafter(FeatureDrafter):
    info = _info(
        "mtp",
        "The multi-token prediction layer that comes in some models' own checkpoints.",
        "A forward of one of the target's layers and the output head per level; a layer's KV.",
    )


@drafter
class PEagleDrafter(FeatureDrafter):
    info = _info(
        "p_eagle",
        "A trained head that guesses several tokens in one forward, each by a mask behind the text.",
        "One forward of its layers over as many rows as it drafts positions; its layers' KV.",
    )


@drafter
class DFlashDrafter(FeatureDrafter):
    info = _info(
        "dflash",
        "A trained head that fills in a block of masks behind the text in one forward.",
        "One forward of its layers over a block, and keys and values for each token of the text.",
    )


@drafter
class DSparkDrafter(FeatureDrafter):
    info = _info(
        "dspark",
        "A block of masks as dflash's, read off token by token, with a word on how far to trust it.",
        "As dflash, and a small product per level of the tree.",
    )
