"""How tokens are sampled where a request does not say so: as the operator, the model or the API says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from engine.request.info import SAMPLED
from server.errors import clip
from server.request.body import Body, optional, with_fields
from server.request.chat import SamplingFields

logger = logging.getLogger(__name__)

_FIELDS = {name: SamplingFields.model_fields[name] for name in SAMPLED}
API_DEFAULTS: dict[str, Any] = {name: each.default for name, each in _FIELDS.items()}
API_DEFAULTS["temperature"] = 1.0


def _optional(name: str, field: FieldInfo) -> tuple[Any, Any]:
    """The field with the bounds of requests; None stands for what is not given."""
    bounds = {key: value for each in field.metadata for key, value in asdict(each).items()}
    about = f"{field.description} Default: the model's, else {API_DEFAULTS[name]:g}."
    return field.annotation | None, optional(about, **bounds)  # type: ignore[operator]


@with_fields({name: _optional(name, field) for name, field in _FIELDS.items()})
class SamplingDefaults(Body):
    """Sampling of requests that do not say otherwise."""

    # Flags and variables are text, so types are not strict here.
    model_config = ConfigDict(strict=False)

    def over(self, models: Mapping[str, Any]) -> dict[str, Any]:
        """Returns these values over the model's, of which one that no request could have is left out."""
        found: dict[str, Any] = {}
        for name, value in models.items():
            try:
                type(self).model_validate({name: value}, strict=True)
                found[name] = value
            except ValidationError as error:
                shown, reason = clip(repr(value), 60), error.errors()[0]["msg"]
                logger.warning("the model's default %s=%s is left out: %s", name, shown, reason)
        return found | self.model_dump(exclude_none=True)
