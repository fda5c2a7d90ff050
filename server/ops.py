"""Routes for those who run the server: probes, version, metrics. None of them needs an API key."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from server.engine_client import EngineClient
from server.metrics import Metrics
from server.version import server_version


@dataclass(slots=True)
class Lifecycle:
    """Written by the app's lifespan: whether requests may be sent here."""

    serving: bool = False


def ops_router(engine: EngineClient, metrics: Metrics, lifecycle: Lifecycle) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while the event loop answers and the engine thread lives: restart the server if
        not.
        """
        if not engine.is_alive:
            return JSONResponse({"status": "dead"}, 503)
        return JSONResponse({"status": "ok"})

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """200 while requests are taken: send no traffic if not."""
        if not (lifecycle.serving and engine.is_alive):
            return JSONResponse({"status": "not ready"}, 503)
        return JSONResponse({"status": "ready"})

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": server_version()}

    @router.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), headers={"content-type": content_type})

    return router
