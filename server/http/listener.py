"""The socket that the server listens on, taken before anything is loaded."""

from __future__ import annotations

import errno
import socket

# What a client leaves unread waits in the kernel up to here, and in the transport up to a bound of its
# own; only then is it seen that nobody reads. Linux takes twice as much, for its own bookkeeping.
_SEND_BUFFER_BYTES = 64 << 10


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, which does not listen yet: while a model is loaded, clients are
    refused and not kept waiting, and so is another server that wants the port. ``open_to_successors``
    comes before it listens. Port 0: any free one. Raises OSError, in one line that names both."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # Connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        _bind_alone(listener, host, port)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return listener


def open_to_successors(listener: socket.socket) -> None:
    """Let the port be bound anew as soon as nobody listens on it, whatever connections the kernel still
    remembers: they inherit that, too."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _bind_alone(listener: socket.socket, host: str, port: int) -> None:
    """Binds without SO_REUSEADDR: of two sockets with it both can be bound, and the second fails when it
    listens, after the model was loaded."""
    try:
        listener.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # Perhaps by nothing but what is left of the last server's connections.
        open_to_successors(listener)
        listener.bind((host, port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def url(listener: socket.socket) -> str:
    """Where a bound socket listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
