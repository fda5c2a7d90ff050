"""Which names a server without an API key answers to.

A page in a browser can have its own name resolve to this machine and read what the server answers (DNS
rebinding). Its requests carry that name as their Host, so unknown names are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address


class Hosts:
    """``name in hosts``: whether a Host header may be answered. ``allowed``: names beside this machine's,
    ``*`` for any; ``is_open``: all addresses, too, which no page can have resolve elsewhere."""

    def __init__(self, allowed: Collection[str], is_open: bool) -> None:
        self._names = set(map(_name, allowed))
        self._is_open = is_open

    def __contains__(self, host: str) -> bool:
        name = _name(host)
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


def _name(host: str) -> str:
    """Returns a host without its port."""
    found = re.fullmatch(r"\[(.*)\](:\d*)?|([^:]*):\d*", host)
    return (found[1] or found[3] or "" if found else host).lower().rstrip(".")
