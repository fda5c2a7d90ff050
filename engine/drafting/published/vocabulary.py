"""A head's own vocabulary, where it is smaller than the target's: which of the target's tokens it has.

Files hold ``d2t``, what is added to each of the head's ids to have the target's, and ``t2d``, which of
the target's tokens have one.
"""

from __future__ import annotations

import torch

from engine.drafting.published.folder import DraftFolder

MAPS = ("d2t", "t2d")


def read_token_map(
    folder: DraftFolder, draft_vocab_size: int, vocab_size: int
) -> torch.Tensor | None:
    """Returns the target's id of each of the draft's, ``[draft_vocab_size]``; None: they are the same."""
    sizes = {"d2t": draft_vocab_size, "t2d": vocab_size}
    held = [name for name in MAPS if name in folder.tensors]
    for name in held:
        folder.check_shape(name, (sizes[name],))
    if "d2t" not in held and draft_vocab_size != vocab_size:
        raise folder.refused(
            f"tensors are missing: d2t (for {draft_vocab_size} tokens of the target's {vocab_size})"
        )
    maps = folder.read(held)
    ids = same = torch.arange(draft_vocab_size)
    if "d2t" in maps:
        if maps["d2t"].is_floating_point():
            raise folder.refused(f"d2t holds {maps['d2t'].dtype}")
        ids = same + maps["d2t"].long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise folder.refused(f"d2t gives ids outside of the target's {vocab_size}")
    if len(ids.unique()) < len(ids):
        raise folder.refused("d2t gives an id twice")
    if "t2d" in maps and not torch.equal(maps["t2d"].bool(), is_drafted(ids, vocab_size)):
        raise folder.refused("t2d names other tokens than d2t")
    return None if torch.equal(ids, same) and draft_vocab_size == vocab_size else ids


def is_drafted(token_map: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns which of the target's tokens have an id of the draft's, ``[vocab_size]``."""
    drafted = torch.zeros(vocab_size, dtype=torch.bool, device=token_map.device)
    drafted[token_map] = True
    return drafted
