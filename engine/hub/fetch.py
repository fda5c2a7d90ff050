"""A model on the hub, fetched into huggingface's own cache by its library: HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE and HF_HOME mean what they mean elsewhere. What the library leaves is done here: a large
file that broke off is gone on with at the next start, and what cannot be is said before anything is
fetched.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
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
"""Of the HTTP client that this version of the library uses: its errors of transport, too."""
_LOG_SECONDS = 10.0
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
    terminal, lines of a log elsewhere.

    Raises HubError: none such, no access, no such type, too little disk or memory, broken off.
    """
    with _one_line(name):
        try:
            info = HfApi().model_info(name.repo, revision=revision, files_metadata=True)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except (OSError, _HTTP_ERROR) as error:
            return _cached(name, revision, error)
        files = [
            HubFile(each.rfilename, each.size or 0, each.lfs.sha256, True)
            if each.lfs is not None
            else HubFile(each.rfilename, each.size or 0, each.blob_id or "")
            for each in info.siblings or ()
        ]
        choice = choose(name, files)
        folder = _folder(name.repo)
        missing = [each for each in choice.files if not _is_there(folder, str(info.sha), each)]
        if missing:
            _check_room(name, choice, missing, memory, gguf_choices(files))
            label = "" if choice.label is None else f"{choice.label}, "
            total = size(sum(each.size for each in missing))
            logger.info("%s: fetching %s%s into %s", name.repo, label, total, folder)
        if told is None and not sys.stderr.isatty():
            told = LogLines(name, missing)
        for each in missing:
            if each.is_large and each.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                _go_on(name, str(info.sha), folder, each, told)
        snapshot = snapshot_download(
            name.repo,
            revision=revision,
            allow_patterns=[glob.escape(each.path) for each in choice.files],
            tqdm_class=None if told is None else _NoBar,
        )
        return _place(choice, snapshot)


class LogLines:
    """Writes how far a download is, a line every ten seconds. ``clock``: in seconds."""

    def __init__(
        self, name: HubName, files: list[HubFile], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._clock, self._last = name, clock, clock()
        self._total = sum(each.size for each in files)
        self._done: dict[str, int] = {}

    def __call__(self, file: HubFile, done: int) -> None:
        self._done[file.path] = done
        if self._clock() - self._last >= _LOG_SECONDS:
            self._last = self._clock()
            done, total = sum(self._done.values()), self._total
            share = f"{size(done)} of {size(total)}"
            logger.info("%s: %s, %d %%", self._name, share, 100 * done // total)


def _cached(name: HubName, revision: str | None, reason: Exception) -> Path:
    """Returns where a model lies in the cache. ``reason``: why the hub was not asked. Raises HubError."""
    is_offline = isinstance(reason, OfflineModeIsEnabled)
    why = "HF_HUB_OFFLINE is set" if is_offline else f"the hub does not answer: {_said(reason)}"
    try:
        snapshot = Path(
            snapshot_download(
                name.repo, revision=revision, local_files_only=True, allow_patterns=""
            )
        )
    except LocalEntryNotFoundError:
        raise HubError(f"{name}: it is not in the cache, and {why}") from reason
    files = [
        HubFile(str(each.relative_to(snapshot)), each.stat().st_size)
        for each in snapshot.rglob("*")
        if each.is_file()
    ]
    try:
        choice = choose(name, files)
    except HubError as error:
        raise HubError(f"{error} (what the cache has; {why})") from reason
    if not is_offline:
        logger.warning("%s: served from the cache; %s", name, why)
    return _place(choice, snapshot)


def _check_room(
    name: HubName,
    choice: Choice,
    missing: list[HubFile],
    memory: int | None,
    others: list[Choice],
) -> None:
    """Raises HubError where the disk or the memory has no room for a model."""
    folder = _folder(name.repo)
    begun = sum(_size(_part(folder, each)) for each in missing)
    needed = sum(each.size for each in missing) - begun
    disk = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise HubError(
            f"{name}: {size(needed)} are to be fetched, and {disk} has {size(free)} left"
        )
    if memory is not None and choice.num_bytes > memory:
        fitting = [each for each in others if each.num_bytes < memory]
        raise HubError(
            f"{name}: {_called(choice)} needs {size(choice.num_bytes)} of memory, and "
            f"{size(memory)} are left" + (f"; {shown(fitting)} would fit" if fitting else "")
        )


def _called(choice: Choice) -> str:
    return choice.label or "it"


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
        if begun:
            logger.info("%s: going on at %s of %s", name, size(begun), size(file.size))
        options: dict[str, Any] = {} if told is None else {"tqdm_class": _watched(file, told)}
        try:
            with part.open("ab") as target:
                http_get(
                    hf_hub_url(name.repo, file.path, revision=sha),
                    target,
                    resume_size=begun,
                    headers=build_hf_headers(),
                    expected_size=file.size,
                    displayed_filename=file.path,
                    **options,
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


class _NoBar(tqdm):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]


def _watched(file: HubFile, told: Told) -> type:
    """Returns what the library takes for a bar's class."""

    class Watched:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            self._done = initial
            told(file, initial)

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            told(file, self._done)

        def __enter__(self) -> Watched:
            return self

        def __exit__(self, *_: object) -> None:
            told(file, self._done)

    return Watched


@contextmanager
def _one_line(name: HubName) -> Iterator[None]:
    try:
        yield
    except HubError:
        raise
    except GatedRepoError as error:
        raise HubError(
            f"{name}: it is gated: accept its terms on its page on the hub, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{name}: there is no such model on the hub, or HF_TOKEN does not open it"
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(f"{name}: there is no such revision of it on the hub") from error
    except (OSError, HFValidationError, _HTTP_ERROR) as error:
        raise HubError(f"{name}: {_said(error)}") from error


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _folder(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _place(choice: Choice, snapshot: str | Path) -> Path:
    folder = Path(snapshot)
    return folder if choice.label is None else folder / choice.files[0].path


def _is_there(folder: Path, sha: str, file: HubFile) -> bool:
    return (folder / "snapshots" / sha / file.path).exists() or (
        bool(file.blob) and (folder / "blobs" / file.blob).exists()
    )


def _part(folder: Path, file: HubFile) -> Path:
    """What has come of a large file; earlier versions of the library left it under the same name."""
    return folder / "blobs" / f"{file.blob}.incomplete"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
