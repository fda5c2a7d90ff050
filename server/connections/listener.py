"""The socket that the server listens on, taken before anything is loaded."""

from __future__ import annotations

import socket

# What a client leaves unread waits in the kernel up to here, and in the transport up to a bound of its
# own; only then is it seen that nobody reads. Linux takes twice as much, for its own bookkeeping.
_SEND_BUFFER_BYTES = 64 << 10


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, which does not listen yet: while a model is loaded, clients are
    refused and not kept waiting. Port 0: any free one. Raises OSError, in one line that names both."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return listener


def url(listener: socket.socket) -> str:
    """Where a bound socket listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
