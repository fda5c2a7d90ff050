"""``/admin/lora``: adapters that the operator loads and unloads while the server serves."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from engine.lora.names import check_name
from engine.request.errors import AdapterError
from engine.request.info import AdapterInfo
from server.endpoints import Served
from server.errors import bad_request
from server.http.openapi import REFUSED_BODY, errors
from server.models.services import Services
from server.models.table import Models
from server.request.body import Body
from server.request.large_bodies import BodyRoute, LargeBody, as_it_is

logger = logging.getLogger("slipstream.admin")
router = APIRouter(tags=["operations"], route_class=BodyRoute)
_PATH = "/admin/lora"
_CHANGED = errors(*REFUSED_BODY, 404, 503)


class AdapterToLoad(Body):
    """``path``: of a folder that PEFT wrote, where the server runs."""

    name: str = Field(min_length=1, max_length=128)
    path: str = Field(min_length=1, max_length=4096)


@router.get(_PATH, responses=errors(401, 404))
async def list_adapters(served: Served) -> dict[str, Any]:
    """The adapters that are loaded."""
    return {"object": "list", "data": [_shown(each) for each in served.adapters]}


@router.post(_PATH, responses=_CHANGED)
async def load_adapter(body: AdapterToLoad, request: Request, served: Served) -> Response:
    """Load an adapter under a name that is free."""
    return await _load(body, request, served, may_replace=False)


@router.put(_PATH, responses=_CHANGED)
async def replace_adapter(body: AdapterToLoad, request: Request, served: Served) -> Response:
    """The same, also in the place of one of that name."""
    return await _load(body, request, served, may_replace=True)


@router.delete(_PATH + "/{name:path}", responses=errors(401, 404, 503))
async def unload_adapter(name: str, served: Served) -> dict[str, Any]:
    """Unload an adapter: requests that run with it go on, new ones get a 404."""
    found = await served.engine.unload_adapter(name)
    logger.warning("adapter %s was unloaded", found.name, extra={"fields": {"adapter": name}})
    return _shown(found) | {"object": "adapter.deleted"}


async def _load(
    body: AdapterToLoad | LargeBody, request: Request, served: Services, *, may_replace: bool
) -> Response:
    models: Models = request.app.state.models
    wanted = await served.bodies.read(body, as_it_is)
    try:
        check_name(wanted.name)
    except AdapterError as error:
        raise bad_request("name", f"name: {error}") from None
    own = {each.name for each in served.adapters}
    if wanted.name in set(models.names) - own:
        raise bad_request("name", "name: a model or an adapter of another one is called that")
    if not may_replace and wanted.name in own:
        raise bad_request("name", "name: an adapter of that name is loaded; PUT replaces it")
    found = await served.engine.load_adapter(wanted.name, wanted.path, may_replace)
    fields = {"adapter": found.name, "path": found.path, "digest": found.digest}
    # A log that leaves out requests still says who changed what they get.
    logger.warning("an adapter was loaded: %s", fields, extra={"fields": fields})
    return JSONResponse(_shown(found))


def _shown(adapter: AdapterInfo) -> dict[str, Any]:
    return {"object": "adapter", **asdict(adapter)}
