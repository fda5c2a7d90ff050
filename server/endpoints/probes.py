"""Endpoints for those who run the server: probes, version, metrics. None of them needs an API key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from server.endpoints import Served
from server.version import server_version

router = APIRouter(tags=["operations"])


@router.get("/health", responses={503: {"description": "The engine is dead."}})
async def health(served: Served) -> JSONResponse:
    """200 while the event loop answers and the engine goes on, or ends as it was told: restart if not."""
    if not (served.engine.is_alive or served.state == "draining"):
        return JSONResponse({"status": "dead"}, 503)
    if served.is_hung:
        return JSONResponse({"status": "hung"}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/ready", responses={503: {"description": "Not yet, or no more."}})
async def ready(served: Served) -> JSONResponse:
    """200 while requests are taken: send no traffic if not."""
    if served.state == "draining":
        return JSONResponse({"status": "draining"}, 503)
    if served.state != "serving" or not served.engine.is_alive or served.is_hung:
        return JSONResponse({"status": "not ready"}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": server_version()}


@router.get("/metrics", response_class=PlainTextResponse)
async def show_metrics(request: Request, served: Served) -> Response:
    """Figures for Prometheus."""
    content, content_type = await served.metrics.expose(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": content_type})
