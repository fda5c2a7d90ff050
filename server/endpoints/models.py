"""``/v1/models``."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from engine.request.info import AdapterInfo
from server.endpoints import Served, Services
from server.errors import unknown_model
from server.http.openapi import errors
from server.request.sampling_defaults import API_DEFAULTS

router = APIRouter(tags=["catalogue"])

_ANTHROPIC = "anthropic-version"
"""A header by which its clients are known."""


@router.get("/v1/models", responses=errors(401))
async def list_models(request: Request, served: Served) -> dict[str, Any]:
    """What is served: the model, and the adapters that are loaded, which have it as their parent."""
    cards = [_card(served), *(_adapter_card(served, each) for each in served.adapters_for(request))]
    if _ANTHROPIC in request.headers:
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return {"data": [*map(_as_anthropics, cards)], "has_more": False, **ends}
    return {"object": "list", "data": cards}


@router.get("/v1/models/{name:path}", responses=errors(401, 404))
async def retrieve_model(name: str, request: Request, served: Served) -> dict[str, Any]:
    """The card of the model served, or of an adapter."""
    found = {each.name: each for each in served.adapters_for(request)}
    if name != served.model_name and name not in found:
        raise unknown_model(name, served.model_name, tuple(found))
    card = _card(served) if name == served.model_name else _adapter_card(served, found[name])
    return _as_anthropics(card) if _ANTHROPIC in request.headers else card


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


def _card(served: Services) -> dict[str, Any]:
    info = served.engine.info
    return {
        "id": served.model_name,
        "object": "model",
        "created": served.created,
        "owned_by": "slipstream",
        "root": served.model_name,
        "parent": None,
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


def _adapter_card(served: Services, adapter: AdapterInfo) -> dict[str, Any]:
    """Its folder is nobody's business but the operator's."""
    return _card(served) | {
        "id": adapter.name,
        "parent": served.model_name,
        "lora": {
            "rank": adapter.rank,
            "num_layers": adapter.num_layers,
            "num_parameters": adapter.num_parameters,
            "base_model": adapter.base_model,
            "digest": adapter.digest,
        },
    }
