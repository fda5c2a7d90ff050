"""A model on the hub, fetched into huggingface's own cache by its library: HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE and HF_HOME mean what they mean elsewhere. What the library leaves is done here: a large
file that broke off is gone on with at the next start, and what cannot be is said before anything is
fetched.
"""

from __future__ import annotations

import hashlib
import io
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, tqdm  # type: ignore[attr-defined]

from engine.hub.choice import Choice, HubError, HubFile, choose, gguf_choices, shown, size
from engine.hub.name import HubName

logger = logging.getLogger(__name__)

_HTTP_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]
"""The base error of the library's HTTP client, which covers transport errors, too."""
_LOG_SECONDS = 10.0
_REFUSALS = {
    GatedRepoError: "it is gated: accept its terms on its page on the hub, and set HF_TOKEN",
    RepositoryNotFoundError: "there is no such model on the hub, or HF_TOKEN does not open it",
    RevisionNotFoundError: "there is no such revision of it on the hub",
}
"""The first that an error is one of says what it means."""
Told = Callable[[HubFile, int], None]
"""Is called with a file and how many of its bytes are there. What it raises ends the download, which can
be gone on with."""


def fetch(
    name: HubName,
    revision: str | None = None,
    *,
    memory: int | None = None,
    told: Told | None = None,
) -> Path:
    """Returns where a model lies in the cache: its GGUF file, the first of several, or a folder. Fetches
    what is not there; where the hub cannot be reached, what is there is all there is. ``memory``: bytes
    in which what is yet to be fetched has to fit. ``told``: of each piece that comes; default: bars on a
    terminal, a line every ten seconds elsewhere.

    Raises HubError: none such, no access, no such type, too little disk or memory, broken off.
    """
    with _one_line(name):
        try:
            info = HfApi().model_info(name.repo, revision=revision, files_metadata=True)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except (OSError, _HTTP_ERROR) as error:
            return _cached(name, revision, error)
        files = [_file(each) for each in info.siblings or ()]
        choice, sha, folder = choose(name, files), str(info.sha), _folder(name.repo)
        missing = [each for each in choice.files if not _is_there(folder, sha, each)]
        if missing:
            _check_room(name, choice, missing, memory, files)
            total = size(sum(each.size for each in missing))
            logger.info("%s: fetching %s into %s", name, total, folder)
        for each in missing:
            if each.is_large and each.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                _go_on(name, sha, folder, each, told)
        places = [hf_hub_download(name.repo, each.path, revision=revision) for each in choice.files]
        return _place(choice, Path(places[0].removesuffix(choice.files[0].path)))


class _Log(io.StringIO):
    def write(self, text: str) -> int:
        if text.strip():
            logger.info("%s", text.strip())
        return len(text)


class LogLine(tqdm):
    """Writes how far a download is to the log, every ten seconds, in place of a bar."""

    def __init__(self, **options: Any) -> None:
        options |= dict.fromkeys(("mininterval", "maxinterval", "delay"), _LOG_SECONDS)
        form = "{desc}: {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left"
        options |= {"disable": False, "file": _Log(), "bar_format": form}
        super().__init__(**options)  # type: ignore[no-untyped-call]


def _file(found: Any) -> HubFile:
    blob = found.blob_id if found.lfs is None else found.lfs.sha256
    return HubFile(found.rfilename, found.size or 0, blob or "", found.lfs is not None)


def _cached(name: HubName, revision: str | None, reason: Exception) -> Path:
    """Returns where a model lies in the cache. ``reason``: why the hub was not asked. Raises HubError."""
    is_offline = isinstance(reason, OfflineModeIsEnabled)
    why = "HF_HUB_OFFLINE is set" if is_offline else f"the hub does not answer: {_said(reason)}"
    try:
        options: Any = {"local_files_only": True, "allow_patterns": ""}  # whatever is there
        snapshot = Path(snapshot_download(name.repo, revision=revision, **options))
        files = [each for each in snapshot.rglob("*") if each.is_file()]
        named = [HubFile(str(each.relative_to(snapshot)), each.stat().st_size) for each in files]
        choice = choose(name, named)
    except LocalEntryNotFoundError:
        raise HubError(f"{name}: it is not in the cache, and {why}") from reason
    except HubError as error:
        raise HubError(f"{error} (what the cache has; {why})") from reason
    if not is_offline:
        logger.warning("%s: served from the cache; %s", name, why)
    return _place(choice, snapshot)


def _check_room(
    name: HubName,
    choice: Choice,
    missing: Sequence[HubFile],
    memory: int | None,
    files: Sequence[HubFile],
) -> None:
    """Raises HubError where the disk or the memory has no room for a model."""
    folder = _folder(name.repo)
    needed = sum(each.size - _size(_part(folder, each)) for each in missing)
    disk = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise HubError(
            f"{name}: {size(needed)} are to be fetched, and {disk} has {size(free)} left"
        )
    if memory is not None and choice.num_bytes > memory:
        fitting = shown(each for each in gguf_choices(files) if each.num_bytes < memory)
        raise HubError(
            f"{name}: {choice.label or 'it'} needs {size(choice.num_bytes)} of memory, and "
            f"{size(memory)} are left" + (f"; {fitting} would fit" if fitting else "")
        )


def _go_on(name: HubName, sha: str, folder: Path, file: HubFile, told: Told | None) -> None:
    """Brings a large file's blob into the cache, from where an earlier start left it."""
    blob, part = folder / "blobs" / file.blob, _part(folder, file)
    lock = folder.parent / ".locks" / folder.name / f"{file.blob}.lock"
    for each in (blob, lock):
        each.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        if _size(part) > file.size:
            part.unlink()
        begun = _size(part)
        bar: Any = None if sys.stderr.isatty() else LogLine
        try:
            with part.open("ab") as target:
                http_get(
                    hf_hub_url(name.repo, file.path, revision=sha),
                    target,
                    resume_size=begun,
                    headers=build_hf_headers(),
                    expected_size=file.size,
                    displayed_filename=file.path,
                    tqdm_class=bar if told is None else _watched(file, told),
                )
        except (OSError, _HTTP_ERROR) as error:
            if isinstance(error, HfHubHTTPError) and not _size(part):
                raise
            got = f"{size(_size(part))} of {size(file.size)}"
            raise HubError(
                f"{name}: broken off at {got}, where the next start goes on: {_said(error)}"
            ) from error
        if begun and _sha256(part) != file.blob:
            part.unlink()
            raise HubError(f"{name}: {file.path} has come damaged and is deleted; start again")
        part.replace(blob)


def _watched(file: HubFile, told: Told) -> type:
    """Returns what the library takes for a bar's class."""

    class Watched(tqdm):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options | {"disable": True})  # type: ignore[no-untyped-call]
            told(file, self.n)

        def update(self, n: float | None = 1) -> bool | None:
            self.n += int(n or 0)
            told(file, self.n)
            return None

    return Watched


@contextmanager
def _one_line(name: HubName) -> Iterator[None]:
    try:
        yield
    except HubError:
        raise
    except (OSError, HFValidationError, _HTTP_ERROR) as error:
        meant = (said for kind, said in _REFUSALS.items() if isinstance(error, kind))
        raise HubError(f"{name}: {next(meant, _said(error))}") from error


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _folder(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _place(choice: Choice, snapshot: Path) -> Path:
    return snapshot if choice.label is None else snapshot / choice.files[0].path


def _is_there(folder: Path, sha: str, file: HubFile) -> bool:
    places = folder / "snapshots" / sha / file.path, folder / "blobs" / file.blob
    return any(each.is_file() for each in places)


def _part(folder: Path, file: HubFile) -> Path:
    """Returns a large file's partial download, named as in earlier versions of the library."""
    return folder / "blobs" / f"{file.blob}.incomplete"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
