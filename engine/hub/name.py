"""Names of models on the hub, ``org/repo[:QUANT]`` with or without the hub's address, and their names
in its cache. Does not ask the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ADDRESS = re.compile(r"^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
_REPO = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/:?]+)(?:/(?P<file>[^:?]+))?)?"
    r"/?(?:\?download=true)?(?::(?P<quant>[\w.-]+))?",
    re.ASCII,
)
_QUANT = re.compile(
    r"(?<![a-z0-9])(?:UD-)?(?:I?Q[1-8]\w*|TQ\d\w*|MXFP4\w*|NVFP4\w*|BF16|FP?16|FP?32)(?![a-z0-9])",
    re.IGNORECASE | re.ASCII,
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_FOLDER = "models--"


@dataclass(frozen=True, slots=True)
class HubName:
    """``quant``: a type of weights (Q4_K_M) or a file's name, in any case; None: whichever fits."""

    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def parse_name(model: str) -> HubName | None:
    """Returns what a model's name means on the hub; None: it is a path, or can only be meant as one.
    Raises ValueError as ``read_name`` for addresses."""
    if "://" in model or _ADDRESS.match(model):
        return read_name(model)
    found = _REPO.fullmatch(model)
    if found and not found["quant"] and (model.endswith(".gguf") or Path(model).exists()):
        return None
    return read_name(model) if found is not None and _is_repo(found["repo"]) else None


def read_name(text: str) -> HubName:
    """Returns the model that a name on the hub, or an address there, means. Raises ValueError for what
    names none, or a revision."""
    found = _REPO.fullmatch(_ADDRESS.sub("", text, count=1))
    if found is None or not _is_repo(found["repo"]):
        raise ValueError(f"{text[:200]!r} is not org/repo[:QUANT], nor its address on the hub")
    if found["revision"] not in (None, "main"):
        raise ValueError(f"{text!r}: say the revision by its own flag, --revision")
    file = found["file"] and PurePosixPath(found["file"]).name
    return HubName(found["repo"], found["quant"] or file)


def _is_repo(name: str) -> bool:
    """Whether the hub's own rules allow it."""
    return len(name) <= 96 and not re.search(r"--|\.\.|[.-](/|$)|\.git$", name)


def called(path: str) -> str:
    """Returns the name of what lies in the hub's cache, ``org/repo[:QUANT]``; other paths as they are."""
    parts = Path(path).parts
    for number, part in enumerate(parts[:-2]):
        if part.startswith(_FOLDER) and parts[number + 1] == "snapshots":
            repo = part.removeprefix(_FOLDER).replace("--", "/")
            file = "/".join(parts[number + 3 :])
            return f"{repo}:{label_of(file)}" if file else repo
    return path


def label_of(file: str) -> str:
    """Returns what a GGUF file in a repository is chosen by: the type of its weights, else its name."""
    whole = without_part(file)
    found = _QUANT.findall(whole)
    return found[-1].upper() if found else PurePosixPath(whole).stem


def bits_of(label: str) -> int:
    """Returns the bits of a type's weights, as its name says; 0: it says none."""
    found = _QUANT.fullmatch(label) and re.search(r"\d+", label)
    return int(found[0]) if found else 0


def without_part(file: str) -> str:
    """Returns the name that all parts of a split file share."""
    return _PART.sub("", file)


def num_parts(file: str) -> int:
    """Returns in how many files a GGUF file lies, as its name says."""
    found = _PART.search(file)
    return int(found[2]) if found else 1
