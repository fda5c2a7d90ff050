"""The playground: one page at ``/`` and the files it asks for, all from the package.

The page is an ordinary client of the API: it needs no key to load, and what it does under ``/v1`` needs
the one the server wants. Its content policy lets it load and call nothing but this server.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from server.http.pages import file_reply

_PAGE = "index.html"

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
    return file_reply(name, _contents()[name])
