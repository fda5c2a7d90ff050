"""Where peers live: a folder that git ignores, with an environment per peer and the model in each one's
format. What is there is kept; ``rm -r`` it to start over.

Imports the standard library only, as the files of the peers do on top: they run in their peers'
environments too, as workers.
"""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ROOT / ".peers"
_OUTPUT_TAIL = 600
_INSTALLED = "installed.txt"


@dataclass(frozen=True, slots=True)
class Arm:
    """A way of running that is measured under a name of its own.

    ``options`` go with every run to the worker; ``speculates`` keeps plain and drafting arms apart in
    tables.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    speculates: bool = False
    over_http: bool = False
    max_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A process to start and what it is told to load. ``python`` runs ``module``'s ``serve``."""

    name: str
    python: Path
    module: str
    load: Mapping[str, Any]
    arms: tuple[Arm, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    load_seconds: float = 300.0


class PeerUnavailableError(Exception):
    """Why a peer cannot be measured here."""


@dataclass(frozen=True, slots=True)
class Place:
    """``num_threads``: what every peer is told to use; ``max_running``: most requests at once;
    ``draft``: None where there is no draft model for the target; ``gguf``: the file that ``target`` was
    dequantised from, None where there is none; ``settings``: of this server, for arms of their own;
    ``heads``: its drafts that are trained heads, by name."""

    cache: Path
    target: Path
    draft: Path | None
    num_threads: int
    max_running: int
    max_tokens: int
    gguf: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    heads: Mapping[str, Path] = field(default_factory=dict)

    def python(self, peer: str) -> Path:
        return self.folder(peer) / "venv" / "bin" / "python"

    def folder(self, peer: str) -> Path:
        return self.cache / peer

    def export(self, peer: str, checkpoint: Path, kind: str) -> Path:
        """Where a peer keeps a checkpoint in its own format, beside those of other models."""
        return self.folder(peer) / f"{distinct_name(checkpoint)}-{kind}"


def distinct_name(path: Path) -> str:
    """A file's or folder's name, with what tells it from others of the name elsewhere."""
    digest = blake2b(str(path).encode(), digest_size=4).hexdigest()
    return f"{path.name}-{digest}"


class Peer(ABC):
    """One rival. ``requirements``: what pip installs for it, in an environment of its own; none of
    it: it runs in ours. ``unwanted``: what they bring that is taken out again.

    ``prepare`` builds and exports what ``plans`` needs, once; ``own_bench`` is what the peer's own bench
    program prints, None where it has none. Both may raise PeerUnavailableError.
    """

    name: str
    what: str
    requirements: Sequence[str] = ()
    unwanted: Sequence[str] = ()

    def prepare(self, place: Place) -> None:  # noqa: B027
        """Nothing to do for who loads the checkpoint as it is."""

    @abstractmethod
    def plans(self, place: Place) -> list[WorkerPlan]:
        """The workers to start, and their arms."""

    def own_bench(
        self,
        place: Place,  # noqa: ARG002
        concurrency: Sequence[int],  # noqa: ARG002
        num_new: int,  # noqa: ARG002
    ) -> str | None:
        return None


def make_environment(peer: Peer, place: Place) -> None:
    """Once per peer and list of requirements. torch is held at the version we run, so that a build for
    CPUs stays one. Raises PeerUnavailableError."""
    if not peer.requirements:
        return
    folder = place.folder(peer.name)
    wanted = "\n".join([*peer.requirements, *(f"not {name}" for name in peer.unwanted)])
    stamp = folder / _INSTALLED
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={version('torch').partition('+')[0]}\n", encoding="utf-8")
    python = str(place.python(peer.name))
    call([sys.executable, "-m", "venv", str(folder / "venv")])
    pip = [python, "-m", "pip"]
    call([*pip, "install", "--quiet", "-c", str(constraints), *peer.requirements])
    if peer.unwanted:
        call([*pip, "uninstall", "--quiet", "--yes", *peer.unwanted])
    stamp.write_text(wanted, encoding="utf-8")


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """``make`` fills a folder beside it, which then takes its name: half of one is never taken for a
    whole. Returns ``folder``."""
    if not folder.is_dir():
        partial = folder.with_name(folder.name + ".partial")
        call(["rm", "-rf", str(partial)])
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(folder)
    return folder


def call(command: Sequence[str], environ: Mapping[str, str] | None = None, **options: Any) -> str:
    """Returns a command's output. Raises PeerUnavailableError with the end of it if it fails."""
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=environ, **options
        )
    except OSError as error:
        raise PeerUnavailableError(f"{command[0]}: {error}") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-_OUTPUT_TAIL:]
        raise PeerUnavailableError(f"{' '.join(command[:4])} .. failed: {words}")
    return str(done.stdout)
