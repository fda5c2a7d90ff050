"""The endpoints, one file each: a file here that has a ``router`` is part of the application, its
OpenAPI schema and the table in docs/api.md. What a handler works with comes as ``Served``, of the model
that it is about, or as ``Table``, of all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request

from server.models.services import Services
from server.models.table import Models
from server.request.wish import Wish


async def _table(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


Table = Annotated[Models, Depends(_table)]


async def _services(
    request: Request, models: Table, model: str | None = None
) -> AsyncIterator[Services]:
    async with models.using(request, lambda: Wish(model)) as services:
        assert services is not None
        yield services


Served = Annotated[Services, Depends(_services)]
