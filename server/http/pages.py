"""Files for browsers: pages and what they load, with a policy that keeps them to this server."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping

from fastapi.responses import Response

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
# The system's table may say otherwise, and browsers run modules of these types only.
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def file_reply(name: str, content: bytes, policy: Mapping[str, str] | None = None) -> Response:
    """The answer that brings a file. ``policy``: directives of the content security policy that are to
    be others than for a page that loads and calls nothing but this server's."""
    directives = {**_POLICY, **(policy or {})}
    headers = {
        # Revalidated at every load: the page belongs to the server's version.
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(
            f"{kind} {where}" for kind, where in directives.items()
        ),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    suffix = name[name.rfind(".") :]
    media_type = _TYPES.get(suffix) or mimetypes.guess_type(name)[0]
    return Response(content, headers=headers, media_type=media_type)
