"""The reference of the API: Swagger UI at ``/docs``, over the schema at ``/openapi.json``. Its files come
from the package fastapi-offline, so that the page needs nothing but this server."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from server.http.pages import file_reply

_PAGE = "index.html"
_SWAGGER_UI = ("swagger-ui-bundle.js", "swagger-ui.css")
# Swagger UI writes styles into its elements, and its icons are addresses that hold them.
_POLICY = {"style-src": "'self' 'unsafe-inline'", "img-src": "'self' data:"}

router = APIRouter(include_in_schema=False)


@cache
def _contents() -> dict[str, bytes]:
    """The page's files by name, read once."""
    own, theirs = files("server") / "reference", files("fastapi_offline") / "static"
    found = {each.name: each.read_bytes() for each in own.iterdir() if each.is_file()}
    return found | {name: (theirs / name).read_bytes() for name in _SWAGGER_UI}


@router.get("/docs")
async def page() -> Response:
    """The reference of the API."""
    return await part(_PAGE)


@router.get("/docs/{name}")
async def part(name: str) -> Response:
    """A file of the reference."""
    if name not in _contents():
        raise HTTPException(404)
    return file_reply(name, _contents()[name], _POLICY)
