"""A second rank, in a process that follows one engine after another, and engines whose first rank is the
test's own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.batch import ForwardOutput, InputBatch
from engine.build import build_engine, build_engine_for, follow_engine
from engine.config import EngineConfig
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.process.launch import child_environment
from engine.process.threaded import AsyncEngine
from engine.ranks.group import LeadingRunner, join_ranks
from engine.ranks.rank import STORE, Rank
from worlds.tiny_models import tiny_model

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def saved_model(name: str, folder: Path, **changes: Any) -> str:
    """A folder with the tiny model of that architecture."""
    tiny_model(name, **changes).save_pretrained(folder)
    return str(folder)


def build(config: EngineConfig) -> AsyncEngine:
    """The first rank's engine; of a folder without a tokenizer, too."""
    if config.model is None:
        return build_engine(config)[0]
    ranks = join_ranks(config)
    assert ranks is not None
    model = load_model(config.model, ranks.device, config.dtype, num_ranks=ranks.place.size)
    return build_engine_for(model, None, config, ranks=ranks)


class SecondRank:
    """``shared`` may be asked for again and again, as long as nothing broke it. ``logits``: of every
    forward for the last engine that it followed to the end, in digests."""

    def __init__(self) -> None:
        self.logits: list[str] = []
        ours, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "worlds.two_ranks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=child_environment(),
            )
        self._control: Connection = ours
        # A rank opens its group's file once more when it leaves, perhaps after the first has left, and
        # ends its process where it is not there: files stay until the process has ended.
        self._stores = TemporaryDirectory(prefix="ranks-")
        self._num_groups = 0

    @contextmanager
    def beside(self, config: EngineConfig, of_second: EngineConfig | None = None) -> Iterator[None]:
        """This process is the first rank and may join, while the second follows an engine of the same
        configuration, or of its own."""
        self._num_groups += 1
        common = {STORE: f"{self._stores.name}/{self._num_groups}", **_LOOPBACK}
        before = dict(os.environ)
        os.environ.update(common | Rank(0, 2, 0, 2).environment())
        self._control.send((common | Rank(1, 2, 1, 2).environment(), of_second or config))
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(before)

    def outcome(self) -> str:
        """How following the last engine ended: "" as it should."""
        found: str
        found, self.logits = self._control.recv()
        return found

    @contextmanager
    def shared(self, config: EngineConfig) -> Iterator[AsyncEngine]:
        """An engine whose model the two ranks share."""
        with self.beside(config):
            engine = build(config)
            yield engine
            runner = engine.core.runner
            assert isinstance(runner, LeadingRunner)
            runner.ranks.leave()
        assert self.outcome() == ""

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._control.close()
        self._stores.cleanup()


@contextmanager
def kept_logits(kind: type[ModelRunner]) -> Iterator[list[str]]:
    """Digests of the logits that forwards of such runners return meanwhile, bit by bit."""
    digests: list[str] = []
    plain = kind.forward

    def forward(runner: Any, batch: InputBatch) -> ForwardOutput:
        output = plain(runner, batch)
        digests.append(sha256(output.logits.contiguous().numpy().tobytes()).hexdigest())
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", forward)
        yield digests


def main() -> None:
    torch.set_num_threads(1)
    control = Connection(int(sys.argv[1]))
    while True:
        environment, config = control.recv()
        os.environ.update(environment)
        outcome = ""
        with kept_logits(ModelRunner) as logits:
            try:
                follow_engine(config)
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
        if dist.is_initialized():
            dist.destroy_process_group()
        control.send((outcome, logits))


if __name__ == "__main__":
    main()
