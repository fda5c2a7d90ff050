"""Which names a server without an API key answers to.

A page in a browser can have its own name resolve to this machine and read what the server answers (DNS
rebinding). Its requests carry that name as their Host, so unknown names are refused.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address


class Hosts:
    """``name in hosts``: whether a Host header may be answered. ``allowed``: names beside this machine's,
    ``*`` for any; ``is_open``: all addresses, too, which no page can have resolve elsewhere."""

    def __init__(self, allowed: Collection[str], is_open: bool) -> None:
        self._names = {each.lower().rstrip(".") for each in allowed}
        self._is_open = is_open

    def __contains__(self, host: str) -> bool:
        bare = host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
        name = bare.lower().rstrip(".")
        if f".{name}".endswith(".localhost") or self._names & {name, "*"}:
            return True
        found = is_loopback(name)
        return found is not None and (found or self._is_open)


def is_loopback(text: str) -> bool | None:
    """Whether an address is reached from this machine alone; None: it is no address."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
