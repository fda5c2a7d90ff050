"""``/v1/models``."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from engine.request.info import AdapterInfo
from server.endpoints import Table
from server.errors import unknown_model
from server.http.openapi import errors
from server.models.services import Services
from server.models.table import Model, Models
from server.request.sampling_defaults import API_DEFAULTS

router = APIRouter(tags=["catalogue"])

_ANTHROPIC = "anthropic-version"
"""A header by which its clients are known."""


@router.get("/v1/models", responses=errors(401))
async def list_models(request: Request, models: Table) -> dict[str, Any]:
    """The models served, and the adapters that are loaded."""
    cards = [card for each in models.all for card in _cards(models, each, request)]
    if _ANTHROPIC in request.headers:
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return {"data": [*map(_as_anthropics, cards)], "has_more": False, **ends}
    return {"object": "list", "data": cards}


@router.get("/v1/models/{name:path}", responses=errors(401, 404))
async def retrieve_model(name: str, request: Request, models: Table) -> dict[str, Any]:
    """The card of a model, or of an adapter."""
    found = {card["id"]: card for each in models.all for card in _cards(models, each, request)}
    if name not in found:
        first, *others = found
        raise unknown_model(name, first, others)
    card = found[name]
    return _as_anthropics(card) if _ANTHROPIC in request.headers else card


def _cards(models: Models, model: Model, request: Request) -> list[dict[str, Any]]:
    """Returns that of the model, and those of its adapters that the request's key may name."""
    own = {"id": model.name, "object": "model", "created": models.created, "owned_by": "slipstream"}
    own |= {"root": model.name, "parent": None, "state": model.state, "max_model_len": None}
    if (served := model.ready) is None:
        return [own]
    own |= _facts(served)
    return [own, *(_adapter_card(own, each) for each in served.adapters_for(request))]


def _as_anthropics(card: dict[str, Any]) -> dict[str, Any]:
    """A card with the fields that Anthropic's clients read."""
    return card | {
        "type": "model",
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def _facts(served: Services) -> dict[str, Any]:
    info = served.engine.info
    return {
        "max_model_len": info.max_model_len,
        "dtype": info.dtype,
        "num_parameters": info.num_parameters,
        "determinism": info.determinism,
        "exact_verified": info.exact_verified,
        "exact_probed": info.exact_probed,
        "exact_failed": info.exact_failed,
        "attention_backend": info.attention_backend,
        "tensor_parallel_size": info.tensor_parallel_size,
        "quantization": None if info.quantization is None else asdict(info.quantization),
        "modalities": ["text"],
        "unserved": info.unserved,
        "embeddings": info.embeddings,
        "hidden_size": info.hidden_size,
        "states": None if info.states is None else asdict(info.states),
        "has_chat_template": served.has_chat_template,
        "fills_in": served.bodies.translator.fills_in,
        "default_sampling_params": API_DEFAULTS | served.bodies.translator.sampling,
    }


def _adapter_card(card: dict[str, Any], adapter: AdapterInfo) -> dict[str, Any]:
    """Returns that of an adapter of the model with this card. Its folder is nobody's business but the
    operator's."""
    return card | {
        "id": adapter.name,
        "parent": card["id"],
        "lora": {
            "rank": adapter.rank,
            "num_layers": adapter.num_layers,
            "num_parameters": adapter.num_parameters,
            "base_model": adapter.base_model,
            "digest": adapter.digest,
        },
    }
