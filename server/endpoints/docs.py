"""The reference of the API: Swagger UI at ``/docs``, over the schema at ``/openapi.json``. Its files come
from the package fastapi-offline, so that the page needs nothing but this server."""

from importlib.resources import files

from server.http.pages import Contents, own_files, page_router

# Swagger UI writes styles into its elements, and its icons are addresses that hold them.
_POLICY = {"style-src": "'self' 'unsafe-inline'", "img-src": "'self' data:"}


def _contents() -> Contents:
    theirs = files("fastapi_offline") / "static"
    names = ("swagger-ui-bundle.js", "swagger-ui.css")
    return own_files("reference") | {name: (theirs / name).read_bytes() for name in names}


router = page_router("/docs", "reference of the API", _contents, _POLICY)
