"""What custom kinds may hold, as far as ``deploy/kubernetes`` uses them: their definitions, trimmed.

InferencePool: Gateway API inference extension, v1. HTTPRoute: Gateway API, v1. PodMonitor: Prometheus'
operator, v1. EndpointPickerConfig: llm-d's router, v1alpha1. Nothing that is not named here is allowed.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABELS = {
    "type": "object",
    "additionalProperties": {
        "type": "string",
        "maxLength": 63,
        "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
    },
}
_DURATION = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+s)?(\d+ms)?$", "minLength": 2}
_TEXTS = {"type": "array", "items": {"type": "string"}}


def _object(required: Schema, **optional: Any) -> Schema:
    return {
        "type": "object",
        "properties": required | optional,
        "required": sorted(required),
        "additionalProperties": False,
    }


def _list(items: Schema, most: int = 64) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _kind(api_version: str, kind: str, **parts: Schema) -> Schema:
    head = {"apiVersion": {"const": api_version}, "kind": {"const": kind}}
    return _object(head | parts)


def _resource(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object({"name": _NAME}, namespace=_NAME, labels=_LABELS)
    return _kind(api_version, kind, metadata=metadata, spec=spec)


INFERENCE_POOL = _resource(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    _object(
        {
            "selector": _object({"matchLabels": _LABELS}),
            "targetPorts": _list(_object({"number": _PORT}), most=8),
            "endpointPickerRef": _object(
                # The port may only be left out where the kind is not a Service.
                {"name": _NAME, "port": _object({"number": _PORT})},
                group={"type": "string", "maxLength": 253},
                kind={"type": "string", "pattern": "^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$"},
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        }
    ),
)

HTTP_ROUTE = _resource(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    _object(
        {
            "parentRefs": _list(_object({"name": _NAME}, namespace=_NAME, sectionName=_NAME)),
            "rules": _list(
                _object(
                    {
                        "backendRefs": _list(
                            _object(
                                {"name": _NAME},
                                group={"type": "string"},
                                kind={"type": "string"},
                                port=_PORT,
                            )
                        )
                    },
                    matches=_list(
                        _object(
                            {
                                "path": _object(
                                    {
                                        "type": {"enum": ["Exact", "PathPrefix"]},
                                        "value": {"type": "string", "pattern": "^/"},
                                    }
                                )
                            }
                        )
                    ),
                )
            ),
        }
    ),
)

POD_MONITOR = _resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    _object(
        {
            "selector": _object({"matchLabels": _LABELS}),
            "podMetricsEndpoints": _list(
                _object(
                    {"port": _NAME},
                    path={"type": "string", "pattern": "^/"},
                    interval=_DURATION,
                    scrapeTimeout=_DURATION,
                    relabelings=_list(
                        _object(
                            {"sourceLabels": _TEXTS, "targetLabel": _NAME},
                            action={"enum": ["replace", "keep", "drop", "labelmap"]},
                            regex={"type": "string"},
                            replacement={"type": "string"},
                        )
                    ),
                )
            ),
        }
    ),
)

_ENGINE = {
    name: {"type": "string"}
    for name in (
        "queuedRequestsSpec",
        "runningRequestsSpec",
        "kvUsageSpec",
        "loraSpec",
        "cacheInfoSpec",
        "cacheBlockSizeSpec",
        "cacheNumBlocksSpec",
    )
}
PICKER_CONFIG = _kind(
    "llm-d.ai/v1alpha1",
    "EndpointPickerConfig",
    plugins=_list(
        _object(
            {"type": _NAME},
            name=_NAME,
            parameters=_object(
                {},
                defaultEngine=_NAME,
                engineLabelKey=_NAME,
                engineConfigs=_list(_object({"name": _NAME}, **_ENGINE)),
            ),
        )
    ),
    dataLayer=_object(
        {
            "sources": _list(
                _object({"pluginRef": _NAME, "extractors": _list(_object({"pluginRef": _NAME}))})
            )
        }
    ),
    schedulingProfiles=_list(
        _object(
            {
                "name": _NAME,
                "plugins": _list(_object({"pluginRef": _NAME}, weight={"type": "number"})),
            }
        )
    ),
)

SCHEMAS = {
    each["properties"]["kind"]["const"]: each for each in (INFERENCE_POOL, HTTP_ROUTE, POD_MONITOR)
}
