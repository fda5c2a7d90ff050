"""Which names a server without an API key answers to, and whether others than this machine reach it.

A page in a browser can have its own name resolve to this machine and read what the server answers (DNS
rebinding). Its requests carry that name as their Host, so unknown names are refused.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address


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
        address = _address(name)
        return address is not None and (self._is_open or address.is_loopback)


def is_local(listener: socket.socket) -> bool:
    """Returns whether a bound socket is reached from this machine alone."""
    address = _address(str(listener.getsockname()[0]))
    return address is not None and address.is_loopback


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
