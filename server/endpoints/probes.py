"""Endpoints for those who run the server: probes, version, metrics. None of them needs an API key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from server.endpoints import Table
from server.version import server_version

router = APIRouter(tags=["operations"])


@router.get("/health", responses={503: {"description": "The engine is dead."}})
async def health(models: Table) -> JSONResponse:
    """200 while event loop and engine work, or drain: restart if not."""
    is_alive = all(each.engine.is_alive for each in models.kept)
    if not (is_alive or models.state == "draining"):
        return JSONResponse({"status": "dead"}, 503)
    if any(each.is_hung for each in models.kept):
        return JSONResponse({"status": "hung"}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/ready", responses={503: {"description": "Not yet, or no more."}})
async def ready(models: Table) -> JSONResponse:
    """200 while requests are taken: send no traffic if not."""
    if models.state == "draining":
        return JSONResponse({"status": "draining"}, 503)
    works = all(each.engine.is_alive and not each.is_hung for each in models.kept)
    if models.state != "serving" or not works:
        return JSONResponse({"status": "not ready"}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": server_version()}


@router.get("/metrics", response_class=PlainTextResponse)
async def show_metrics(request: Request, models: Table) -> Response:
    """Figures for Prometheus."""
    content, content_type = await models.metrics.expose(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": content_type})
