"""Where models lie, and their tokenizers: what can be had without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.config import EngineConfig
from engine.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

BUNDLED = Path(__file__).parent / "bundled"


def bundled_path(name: Literal["target", "draft"]) -> Path:
    """The folder of a bundled model; raises FileNotFoundError when it is not there."""
    folder = BUNDLED / name
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"no bundled {name} model in {folder}")
    return folder


def model_path(config: EngineConfig) -> str:
    """Folder or hub id of the model served."""
    return config.model or str(BUNDLED / "target")


def load_tokenizer(
    model: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Raises UnsupportedModelError for what cannot be loaded, OSError if there is no such folder or hub
    id."""
    from transformers import AutoTokenizer

    with naming(model):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        )
    return tokenizer


@contextmanager
def naming(model: str) -> Iterator[None]:
    """transformers' messages often leave out which model they are about."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot load {model!r}: {error}") from error
    except (ValueError, ImportError) as error:  # a format may need a package of its own
        raise UnsupportedModelError(f"cannot load {model!r}: {error}") from error
