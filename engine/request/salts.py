"""Under what a request's cached blocks and learned texts are kept: its cache salt and, where one changes
the model for it, the adapter of this load.

Both are one string, made once where the engine admits a request, so that whatever is kept by
``cache_salt`` is kept by adapter, too.
"""

from __future__ import annotations

import json
from typing import NamedTuple

_MARK = "\x00adapter "


class Salt(NamedTuple):
    """``adapter``: the name of one, and ``digest`` that of its weights; "": none."""

    cache_salt: str
    adapter: str = ""
    digest: str = ""

    def joined(self) -> str:
        """Returns one string; without an adapter the cache salt as it is, unless it looks like one that
        has an adapter."""
        if not self.adapter and not self.cache_salt.startswith(_MARK):
            return self.cache_salt
        return _MARK + json.dumps(self)


def salt_of(joined: str) -> Salt:
    """Returns the parts of a string that ``Salt.joined`` made."""
    if not joined.startswith(_MARK):
        return Salt(joined)
    return Salt(*json.loads(joined.removeprefix(_MARK)))
