"""The playground: one page at ``/`` and the files it asks for, all from the package.

The page is an ordinary client of the API: it needs no key to load, and what it does under ``/v1`` needs
the one the server wants. Its content policy lets it load and call nothing but this server.
"""

from __future__ import annotations

import mimetypes
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

_PAGE = "index.html"
_HEADERS = {
    # Revalidated at every load: the page belongs to the server's version.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# The system's table may say otherwise, and browsers run modules of these types only.
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


router = APIRouter(include_in_schema=False)


@cache
def _contents() -> dict[str, bytes]:
    """The page's files by name, read once."""
    folder = files("server") / "playground"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}


@router.get("/")
async def page() -> Response:
    """The playground."""
    return await part(_PAGE)


@router.get("/playground/{name}")
async def part(name: str) -> Response:
    """A file of the playground."""
    if name not in _contents():
        raise HTTPException(404)
    suffix = name[name.rfind(".") :]
    media_type = _TYPES.get(suffix) or mimetypes.guess_type(name)[0]
    return Response(_contents()[name], headers=_HEADERS, media_type=media_type)
