"""``/admin``: settings that the operator may change while the server serves. It has a key of its own."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.endpoints import Served
from server.endpoints.drafters import caps_of, described_fields, policy_names
from server.errors import bad_request
from server.http.openapi import REFUSED_BODY, errors
from server.models.services import Services
from server.request.large_bodies import BodyRoute, LargeBody, as_it_is
from server.request.speculative import SpeculativeChange, SpeculativeResolver

logger = logging.getLogger("slipstream.admin")
router = APIRouter(tags=["operations"], route_class=BodyRoute)
_PATH = "/admin/speculative"
_CHANGED = errors(*REFUSED_BODY, 404, 503)


@router.get(_PATH, responses=errors(401, 404))
async def show_speculation(served: Served) -> dict[str, Any]:
    """Speculation of requests that do not say otherwise, its caps, and what may be set."""
    return _shown(served.resolver)


@router.patch(_PATH, responses=_CHANGED)
async def change_speculation(body: SpeculativeChange, request: Request, served: Served) -> Response:
    """Change the fields given, for requests that come from now on."""
    return await _change(body, request, served, from_built_in=False)


@router.put(_PATH, responses=_CHANGED)
async def replace_speculation(
    body: SpeculativeChange, request: Request, served: Served
) -> Response:
    """The same, from the built-in values."""
    return await _change(body, request, served, from_built_in=True)


async def _change(
    body: SpeculativeChange | LargeBody, request: Request, served: Services, *, from_built_in: bool
) -> Response:
    del request
    change = await served.bodies.read(body, as_it_is)
    if not from_built_in and change.defaults is None and change.caps is None:
        raise bad_request("defaults", "defaults: give 'defaults' or 'caps', or both")
    found = await served.change_speculation(change, from_built_in=from_built_in)
    fields = {
        "defaults": found.wished,
        "caps": found.caps.given(),
        "from_built_in": from_built_in,
    }
    # A log that leaves out requests still says who changed what they get.
    logger.warning("speculation was changed: %s", fields, extra={"fields": fields})
    return JSONResponse(_shown(found))


def _shown(resolver: SpeculativeResolver) -> dict[str, Any]:
    caps = caps_of(resolver)
    return {
        "object": "speculation",
        "defaults": asdict(resolver.defaults),
        "caps": {"draft_strategies": resolver.allowed, **caps},
        "set": {
            "defaults": resolver.wished,
            "caps": resolver.caps.given(),
        },
        "may_be_set": {
            "draft_strategies": list(resolver.info.drafters),
            "policies": policy_names(),
            "max_speculative_tokens": resolver.info.max_num_nodes,
            "fields": described_fields(caps),
        },
    }
