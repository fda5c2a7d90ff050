"""The Dockerfile, followed in a folder: its first stage is built and its last one started, with the
machine's Python instead of the image's and without root."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from worlds.deploy_tools import ROOT

Step = tuple[str, str]
# How pip reaches its index from here; no build of an image would know it otherwise.
_KEPT = re.compile(r"PIP_\w+|\w+_proxy|SSL_CERT_\w+", re.IGNORECASE)


def stages() -> list[list[Step]]:
    """(instruction, rest) of each stage after its FROM; comments dropped, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    found: list[list[Step]] = []
    for line in text.replace("\\\n", "").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            found.append([])
        elif word and found:
            found[-1].append((word, rest.strip()))
    return found


@dataclass
class Container:
    """A stage on its way. ``root`` stands for ``/``, of which only ``paths`` are used."""

    root: Path
    paths: tuple[str, ...] = ("/opt/slipstream", "/src", "/models")
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()

    def __post_init__(self) -> None:
        # A stand-in, for a virtual environment finds its library by where its Python's link leads.
        base = self.root / "base" / "python"
        base.parent.mkdir(parents=True, exist_ok=True)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        real = Path(sys.base_prefix, "bin", f"python{version}")
        base.write_text(f'#!/bin/sh\nexec "{real}" "$@"\n')
        base.chmod(0o755)
        # Below a file nothing can be written, not even by root: the home of a read-only container.
        home = self.root / "file"
        home.touch()
        self.environment |= {name: os.environ[name] for name in os.environ if _KEPT.fullmatch(name)}
        self.environment |= {"PATH": f"{base.parent}:{os.defpath}", "HOME": str(home / "home")}
        self.folder = self.root

    def placed(self, text: str) -> str:
        """``text`` with the image's paths turned into those below ``root``."""
        for path in self.paths:
            text = re.sub(rf"(?<![\w/.]){re.escape(path)}\b", f"{self.root}{path}", text)
        return text

    def follow(self, steps: list[Step], arguments: dict[str, str]) -> None:
        """All that a build does but RUN in a stage that has to be root's."""
        for word, rest in steps:
            if word == "ARG":
                name, given, default = rest.partition("=")
                if name in arguments or given:
                    self.environment[name] = arguments.get(name, default.strip('"'))
            elif word == "ENV":
                pairs = (pair.partition("=") for pair in shlex.split(rest))
                known = self.environment.copy()
                for name, _, value in pairs:
                    value = Template(self.placed(value)).substitute(known)
                    self.environment[name] = value
            elif word == "WORKDIR":
                self.folder = Path(self.placed(rest))
                self.folder.mkdir(parents=True, exist_ok=True)
            elif word == "COPY":
                *sources, target = rest.split()
                self._copy(sources, self.folder / target)
            elif word == "RUN":
                self.run(["/bin/sh", "-c", self.placed(rest)])
            else:
                raise ValueError(f"no step of a build stage: {word}")

    def _copy(self, sources: list[str], target: Path) -> None:
        for source in sources:
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, target, ignore=ignored)
            else:
                shutil.copy(ROOT / source, target)

    def run(self, command: list[str]) -> str:
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout
