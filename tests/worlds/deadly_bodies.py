"""Work on bodies that ends the process which does it, for servers that read large ones elsewhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from server.apis.openai.request import CompletionRequest
from server.request.large_bodies import LargeBody


def body(prompt: str) -> LargeBody:
    return LargeBody(CompletionRequest, b'{"prompt": "%b"}' % prompt.encode())


class Translator:
    """Stands for the real one; ``home`` is the server's process."""

    def __init__(self, fails_to_begin: bool = False) -> None:
        self.resolver: Any = None
        self.adapters: tuple[str, ...] = ()
        self.home = os.getpid()
        self.fails_to_begin = fails_to_begin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if self.fails_to_begin:
            raise RuntimeError("there is no such tokenizer here")

    @property
    def is_at_home(self) -> bool:
        return self.home == os.getpid()


def read(translator: Translator, request: Any) -> tuple[str, bool]:
    """The prompt, and whether it was read at home. One that is a folder says there that it has begun and
    waits for ever, the first time; "deadly" ends any process but the server's."""
    (prompt,) = request.prompt
    if prompt == "deadly":
        assert not translator.is_at_home
        os.kill(os.getpid(), signal.SIGKILL)
    folder = Path(prompt)
    if folder.is_dir() and not (folder / "begun").exists():
        (folder / "begun").touch()
        signal.pause()
    return prompt, translator.is_at_home
