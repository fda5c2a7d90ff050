"""The OpenAI endpoints and the lists of what is served."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.info import EngineInfo
from server.errors import unknown_model
from server.reply.chat import ChatWriter
from server.reply.completions import CompletionWriter
from server.reply.replies import ChatCompletion, Completion
from server.reply.streaming import Responder
from server.reply.token_texts import TokenTexts
from server.request.protocol import ChatRequest, CompletionRequest
from server.request.speculative import POLICIES, TREE_STRATEGIES, VERIFICATIONS, SpeculativeResolver
from server.request.translate import Translator


def openai_router(
    translator: Translator,
    responder: Responder,
    texts: TokenTexts,
    model_name: str,
    fingerprint: str,
) -> APIRouter:
    """``/v1/completions`` and ``/v1/chat/completions``."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", responses={200: {"model": Completion}})
    async def create_completion(wire: CompletionRequest, request: Request) -> Response:
        plan = translator.completion(wire, time.perf_counter())
        writer = CompletionWriter(plan, texts, model_name, fingerprint)
        return await responder.answer(request, writer)

    @router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}})
    async def create_chat_completion(wire: ChatRequest, request: Request) -> Response:
        plan = translator.chat(wire, time.perf_counter())
        writer = ChatWriter(plan, texts, model_name, fingerprint)
        return await responder.answer(request, writer)

    return router


def catalogue_router(
    info: EngineInfo, resolver: SpeculativeResolver, model_name: str, has_chat_template: bool
) -> APIRouter:
    """``/v1/models`` and ``/v1/drafters``."""
    router = APIRouter(tags=["catalogue"])
    card: dict[str, Any] = {
        "id": model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "slipstream",
        "max_model_len": info.max_model_len,
        "dtype": info.dtype,
        "num_parameters": info.num_parameters,
        "determinism": info.determinism,
        "exact_verified": info.exact_verified,
        "has_chat_template": has_chat_template,
    }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        if name != model_name:
            raise unknown_model(name, model_name)
        return card

    @router.get("/v1/drafters")
    async def list_drafters() -> dict[str, Any]:
        defaults = asdict(resolver.defaults)
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "drafter",
                    "description": info.drafters[name].description,
                    "drafts_trees": info.drafters[name].drafts_trees,
                    "draws": info.drafters[name].draws,
                    "takes_prediction": info.drafters[name].takes_reference,
                    "cost": info.drafters[name].cost,
                    "options": [asdict(option) for option in info.drafters[name].options],
                }
                for name in resolver.allowed
            ],
            "policies": list(POLICIES),
            "tree_strategies": list(TREE_STRATEGIES),
            "verifications": list(VERIFICATIONS),
            "defaults": {
                "draft_strategy": defaults["drafter"],
                "adaptive_depth": defaults["policy"],
                "num_speculative_tokens": defaults["num_draft_tokens"],
                "min_speculative_tokens": defaults["min_draft_tokens"],
                "max_speculative_tokens": defaults["max_draft_tokens"],
                "target_acceptance_rate": defaults["target_acceptance_rate"],
                "tree_strategy": "tree" if defaults["tree"] else "linear",
                "tree_width": defaults["tree_width"],
                "tree_depth": defaults["tree_depth"],
                "options": defaults["options"],
                "verification": defaults["verification"],
                "return_drafted": defaults["return_drafted"],
            },
            "caps": {
                "max_speculative_tokens": resolver.max_tokens,
                "max_tree_width": resolver.caps.max_tree_width,
                "max_tree_depth": resolver.caps.max_tree_depth,
            },
        }

    return router
