"""Answers what Ollama's clients ask about a server: its models, the facts of each, its version. The
models were chosen at start, so what would change them is refused."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from time import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from engine.request.info import EngineInfo
from server.apis.ollama.reply import OllamaError, timestamp
from server.apis.ollama.request import OllamaShowRequest
from server.endpoints import Served, Table
from server.errors import ApiError
from server.http.openapi import REFUSED_BODY, errors
from server.models.services import Services
from server.models.table import Model
from server.request.large_bodies import AnyTypeRoute
from server.request.translate import Translator
from server.request.wish import known_name, tagged
from server.version import server_version

router = APIRouter(tags=["ollama"], route_class=AnyTypeRoute)

OLLAMA_VERSION = "0.12.11"
"""The version of the Ollama whose API this is: clients ask for at least one that has what they use."""
# The longest time that Ollama can count: it says so of a model that is kept for ever.
_FOR_EVER = timedelta(microseconds=(2**63 - 1) // 1000)
_BYTES = {"float32": 4, "float64": 8}
_PREFIXES = ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, ""))
_REFUSED = errors(401, shape=OllamaError)


@router.head("/", include_in_schema=False)
async def is_running() -> Response:
    """Whether a server is here, as Ollama's clients ask."""
    return PlainTextResponse("Ollama is running")


@router.get("/api/version", responses=_REFUSED)
@router.head("/api/version", include_in_schema=False)
async def ollama_version() -> dict[str, str]:
    """Ollama's: the version of Ollama whose API this is, and the server's own."""
    return {"version": OLLAMA_VERSION, "slipstream": server_version()}


@router.get("/api/tags", responses=_REFUSED)
@router.head("/api/tags", include_in_schema=False)
async def ollama_tags(request: Request, models: Table) -> dict[str, Any]:
    """Ollama's: the models served, and their adapters."""
    when = {"modified_at": timestamp(models.created)}
    cards = (card for each in models.all for card in _cards(each, request))
    return {"models": [each | when for each in cards]}


@router.get("/api/ps", responses=_REFUSED)
async def ollama_ps(request: Request, models: Table) -> dict[str, Any]:
    """Ollama's: the models that are loaded, and when each goes if nothing uses it."""
    found = []
    for model in models.all:
        if (served := model.ready) is None:
            continue
        info, for_ever = served.engine.info, models.created + _FOR_EVER.total_seconds()
        ends = min(time() + model.expires_in, for_ever)
        running = {
            "expires_at": timestamp(ends),
            "size_vram": 0 if info.device == "cpu" else _num_bytes(info),
            "context_length": info.max_model_len,
        }
        found += [each | running for each in _cards(model, request)]
    return {"models": found}


@router.post("/api/show", responses=errors(*REFUSED_BODY, 404, 500, 503, shape=OllamaError))
async def ollama_show(body: OllamaShowRequest, request: Request, served: Served) -> Response:
    """Ollama's: facts of a model, which is loaded for that."""
    (template, capabilities), headers = await served.read_apart(body, request, _facts)
    info = served.engine.info
    family = info.architecture or "unknown"
    shown = {
        "modelfile": f"FROM {served.model_name}\n",
        "parameters": f"num_ctx {info.max_model_len}",
        "template": template,
        "details": _details(info),
        "model_info": {
            "general.architecture": family,
            "general.basename": served.model_name,
            "general.parameter_count": info.num_parameters,
            f"{family}.context_length": info.max_model_len,
            f"{family}.embedding_length": info.hidden_size,
            f"{family}.vocab_size": info.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": timestamp(request.app.state.models.created),
    }
    return JSONResponse(shown, headers=headers)


def _facts(translator: Translator, body: OllamaShowRequest) -> tuple[str, list[str]]:
    """Returns the chat template, and what the model can do. Raises ApiError 404."""
    translator.check_model(known_name(body.model, translator.served_names))
    can = {
        "tools": translator.takes_tools,
        "insert": translator.fills_in,
        "thinking": translator.formats.splits_reasoning,
        "embedding": translator.info.embeddings != "none",
    }
    source = translator.template.source or ""
    return source, ["completion", *(name for name in can if can[name])]


@router.delete("/api/delete", include_in_schema=False)
@router.head("/api/blobs/{digest}", include_in_schema=False)
@router.post("/api/blobs/{digest}", include_in_schema=False)
@router.post("/api/copy", include_in_schema=False)
@router.post("/api/create", include_in_schema=False)
@router.post("/api/push", include_in_schema=False)
async def ollama_refused(request: Request, models: Table) -> Response:
    """Ollama's: refused, since the models are chosen at start."""
    what = request.url.path.split("/")[2]
    served = ", ".join(f"'{each.name}'" for each in models.all)
    message = f"{what} is not supported: this server serves {served}, chosen at start."
    raise ApiError(400, message, code="unsupported")


def _cards(model: Model, request: Request) -> list[dict[str, Any]]:
    if (served := model.ready) is None:
        return [_card_of_file(model)]
    adapters = served.adapters_for(request)
    return [_card(served, name) for name in (None, *(each.name for each in adapters))]


def _card(served: Services, adapter: str | None) -> dict[str, Any]:
    info = served.engine.info
    name = tagged(adapter or served.model_name)
    parent = "" if adapter is None else tagged(served.model_name)
    return {
        "name": name,
        "model": name,
        "size": _num_bytes(info),
        "digest": hashlib.sha256(served.fingerprint_of(adapter).encode()).hexdigest(),
        "details": _details(info) | {"parent_model": parent},
    }


def _card_of_file(model: Model) -> dict[str, Any]:
    """Returns that of a model which is not loaded."""
    name = tagged(model.name)
    unknown = ("parent_model", "format", "family", "parameter_size", "quantization_level")
    return {
        "name": name,
        "model": name,
        "size": 0 if model.launcher is None else model.launcher.file_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {**dict.fromkeys(unknown, ""), "families": []},
    }


def _details(info: EngineInfo) -> dict[str, Any]:
    quantization = info.quantization
    is_gguf = quantization is not None and quantization.method == "gguf"
    family = info.architecture or "unknown"
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _rounded(info.num_parameters),
        "quantization_level": _level(info),
    }


def _level(info: EngineInfo) -> str:
    if info.quantization is None:
        return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(info.dtype, info.dtype)
    # The kind that most weights have.
    schemes = info.quantization.schemes
    return max(schemes, key=lambda each: schemes[each], default=info.quantization.method)


def _num_bytes(info: EngineInfo) -> int:
    if info.quantization is not None:
        return info.quantization.num_bytes
    return info.num_parameters * _BYTES.get(info.dtype, 2)


def _rounded(number: int) -> str:
    """A number of parameters as Ollama shows it: 134.5M."""
    unit, prefix = next(each for each in _PREFIXES if number >= each[0] or each[0] == 1)
    return f"{number / unit:.4g}{prefix}"
