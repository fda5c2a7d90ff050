"""Pages for browsers and the files that they load, with a policy that keeps them to this server."""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

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
Contents = dict[str, bytes]


def page_router(
    place: str, what: str, contents: Callable[[], Contents], policy: Mapping[str, str] | None = None
) -> APIRouter:
    """Returns what answers with the page ``index.html`` at ``place``, and with all ``contents``, read
    once, below ``/WHAT``. ``policy``: directives of the content security policy that are to be others
    than for a page that loads and calls nothing but this server's."""
    router, read = APIRouter(include_in_schema=False), cache(contents)
    folder = place.rstrip("/") or f"/{what}"

    async def page() -> Response:
        return await part("index.html")

    async def part(name: str) -> Response:
        if name not in read():
            raise HTTPException(404)
        return _file_reply(name, read()[name], _POLICY | dict(policy or {}))

    page.__doc__, part.__doc__ = f"The {what}.", f"A file of the {what}."
    router.add_api_route(place, page)
    router.add_api_route(f"{folder}/{{name}}", part)
    return router


def own_files(folder: str) -> Contents:
    """Returns the files of a folder of this package by their names."""
    found = (files("server") / folder).iterdir()
    return {each.name: each.read_bytes() for each in found if each.is_file()}


def _file_reply(name: str, content: bytes, policy: Mapping[str, str]) -> Response:
    headers = {
        # Revalidated at every load: the page belongs to the server's version.
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(f"{kind} {where}" for kind, where in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    suffix = name[name.rfind(".") :]
    media_type = _TYPES.get(suffix) or mimetypes.guess_type(name)[0]
    return Response(content, headers=headers, media_type=media_type)
