"""Tokenizers of models: what can be had of them without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.hub.name import called
from engine.logs import log_through_root
from engine.names import BUNDLED as BUNDLED
from engine.names import bundled_path as bundled_path
from engine.names import locate, own_chat_template
from engine.request.errors import EngineError, UnsupportedModelError, panics_as_errors
from engine.weights.gguf.file import find_gguf, read_header
from engine.weights.gguf.tokenizer import gguf_tokenizer

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_PROCESSORS_TEMPLATE = "chat_template.json"


def load_tokenizer(
    model: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Raises UnsupportedModelError for what cannot be loaded, OSError if there is no such folder or
    name."""
    # Imported late, and what of it loads torch only where that is needed.
    import transformers

    log_through_root("transformers")

    path = locate(model, revision)
    with naming(model):
        gguf = find_gguf(path)
        if gguf is not None:
            return gguf_tokenizer(read_header(gguf), own_chat_template(model))
        check_folder(path)
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _processors_template(Path(path))
    return tokenizer


def _processors_template(folder: Path) -> str | None:
    """Returns the chat template that a model of several parts brings for its processor alone, as older
    ones do; None: there is none."""
    file = folder / _PROCESSORS_TEMPLATE
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    template = found.get("chat_template") if isinstance(found, dict) else None
    if not isinstance(template, str):
        raise UnsupportedModelError(f"{_PROCESSORS_TEMPLATE} has no text under chat_template")
    return template


def check_folder(model: str, *files: str) -> None:
    """Raises OSError where ``model`` is no folder, or one without these files."""
    folder = Path(model)
    if folder.is_dir():
        lacking = [name for name in files if not (folder / name).is_file()]
        if lacking:
            raise OSError(f"the folder holds no {lacking[0]}")
    elif folder.is_file():
        raise OSError("it is a file, neither a model's folder nor GGUF")
    else:
        on_hub = "" if "/" in model else "; on the hub models are called org/repo"
        raise OSError(f"there is no such folder{on_hub}")


@contextmanager
def naming(model: str) -> Iterator[None]:
    """Turns whatever is raised within into one line that names the model: files from outside are read
    here, and those who read them for us raise what they happen to run into, mostly without its name."""
    model = called(model)
    try:
        with panics_as_errors():
            yield
    except OSError as error:
        raise OSError(f"cannot load {model!r}: {_one_line(error)}") from error
    except (
        EngineError,
        ValueError,
        ImportError,
    ) as error:  # a format may need a package of its own
        raise UnsupportedModelError(f"cannot load {model!r}: {_one_line(error)}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {_one_line(error)}"
        raise UnsupportedModelError(f"cannot load {model!r}: {said}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
