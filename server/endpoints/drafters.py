"""``/v1/drafters``: all that a form or a client has to know to ask for speculation."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Request

from drafters.base import DrafterInfo
from drafters.options import SpeculativeParams, about
from engine.request.info import DraftInfo
from engine.speculation.gamma.policy import registered_policies
from server.endpoints import Served
from server.http.openapi import errors
from server.request.speculative import SpeculativeResolver

router = APIRouter(tags=["catalogue"])


@router.get("/v1/drafters", responses=errors(401))
async def list_drafters(request: Request, served: Served) -> dict[str, Any]:
    """Lists the drafters, and the limits of requests."""
    resolver = served.resolver_for(request)
    info = served.engine.info
    caps = caps_of(resolver)
    return {
        "object": "list",
        "data": [_drafter(info.drafters[name], info.drafts.get(name)) for name in resolver.allowed],
        "policies": policy_names(),
        "tree_strategies": list(about("tree_strategy")["choices"]),
        "verifications": list(about("verification")["choices"]),
        "fields": described_fields(caps),
        "defaults": asdict(resolver.defaults),
        "caps": caps,
    }


def caps_of(resolver: SpeculativeResolver) -> dict[str, int]:
    """The numbers that requests may not exceed."""
    return {
        "max_speculative_tokens": resolver.max_tokens,
        "max_tree_width": resolver.caps.max_tree_width,
        "max_tree_depth": resolver.caps.max_tree_depth,
    }


def policy_names() -> list[str]:
    return [policy.name for policy in registered_policies()]


def described_fields(caps: dict[str, int]) -> list[dict[str, Any]]:
    """Each field of ``speculative``, with the bounds that it has here."""
    return [_field(each.name, caps) for each in fields(SpeculativeParams)]


def _drafter(info: DrafterInfo, draft: DraftInfo | None) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "drafter",
        "description": info.description,
        "drafts_trees": info.drafts_trees,
        "draws": info.samples,
        "takes_prediction": info.takes_prediction,
        "cost": info.cost,
        "options": [asdict(option) for option in info.options],
        "draft": None if draft is None else _draft(draft),
    }


def _draft(info: DraftInfo) -> dict[str, Any]:
    """Describes a draft. Where it lies on the server is not the client's business, but for its name."""
    return {
        "method": info.method,
        "path": PurePath(info.path).name,
        "num_parameters": info.num_parameters,
        "hidden_layers": list(info.hidden_layers),
        "agreement": info.agreement,
        "note": info.note,
    }


def _field(name: str, caps: dict[str, int]) -> dict[str, Any]:
    """Describes a field of ``speculative``; ``maximum`` is this server's."""
    meta = about(name)
    bounds = meta["bounds"]
    choices: list[dict[str, Any]] = [
        {"id": each, "description": text} for each, text in (meta["choices"] or {}).items()
    ]
    if name == "adaptive_depth":
        choices = [
            {"id": each.name, "description": each.description, "fields": list(each.settings)}
            for each in registered_policies()
        ]
    cap = caps.get(f"max_{name}", caps["max_speculative_tokens"] if "tokens" in name else None)
    return {
        "name": name,
        "description": meta["description"],
        "minimum": bounds.get("ge", bounds.get("gt")),
        "maximum": bounds.get("le", bounds.get("lt")) if cap is None else cap,
        "choices": choices,
    }
