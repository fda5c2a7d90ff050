"""Takes the pictures of the terminal commands: ``python docs/pictures/terminal.py``.

Serves SmolLM2, continues a list with ``slipstream complete``, corrects a letter with ``slipstream chat``,
and writes ``complete.svg`` and ``chat.svg`` beside this file.
"""

from __future__ import annotations

import io
import re
import socket
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from engine.build import build_engine
from engine.config import EngineConfig
from engine.names import SMOLLM2
from server.app import build_app
from server.settings import Settings
from slipstream.cli import build_parser
from slipstream.client.display import TerminalScreen
from slipstream.client.flags import request_fields
from slipstream.client.session import find_service, finish, new_reply, request_reply

FOLDER = Path(__file__).parent
WIDTH = 96
HANG = 120.0
LETTER = """\
Dear Ms Novak,

Thank you for you're letter of 3 March. We has received your order, and it will be send on Monday. If \
you have any questions, please write to us at any time.

Yours sincerely,
Tom Baker
"""
LIST = """\
| country | capital |
| --- | --- |
| Spain | Madrid |
| Italy | Rome |
"""
EDIT = "Correct the grammar of this letter. Answer with the letter only."


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server on the loopback interface."""
    engine, tokenizer = build_engine(EngineConfig(SMOLLM2))
    app = build_app(engine, tokenizer, Settings(drain_seconds=1))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        deadline = time.monotonic() + HANG
        while not server.started:
            if time.monotonic() > deadline:
                raise TimeoutError("the server did not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(HANG)


def ask(arguments: Namespace, path: str, prompt: dict[str, Any], console: Console) -> None:
    """Prints a reply as on a terminal, into ``console``."""
    screen = TerminalScreen("auto", False, console)
    service = find_service(arguments)
    body = service.body({**request_fields(arguments), **prompt})
    reply = new_reply(service)
    request_reply(arguments, path, body, reply, screen)
    finish(reply, screen, False)


def picture_of_reply(
    url: str, command: str, path: str, prompt: dict[str, Any], target: Path
) -> None:
    words = command.partition(" <")[0].split()
    arguments = build_parser().parse_args([*words[1:], "--url", url])
    # The first run pays for what is set up once.
    ask(arguments, path, prompt, Console(file=io.StringIO(), width=WIDTH))
    # No terminal, so that only what stays is recorded, and not each state of the status line.
    console = Console(
        file=io.StringIO(), width=WIDTH, record=True, highlight=False, markup=False, emoji=False
    )
    console.print(Text(f"$ {command}", "bold"))
    ask(arguments, path, prompt, console)
    # A picture that loads nothing: without the fonts that rich would fetch.
    form = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title=words[1], code_format=form, unique_id=words[1])
    svg = svg.replace("Fira Code", "DejaVu Sans Mono")
    target.write_text("\n".join(map(str.rstrip, svg.splitlines())) + "\n", encoding="utf-8")


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    with serving() as address:
        picture_of_reply(
            address,
            "slipstream complete --max-tokens 30 --temperature 0 < table.md",
            "/v1/completions",
            {"prompt": LIST},
            FOLDER / "complete.svg",
        )
        picture_of_reply(
            address,
            "slipstream chat --message - --temperature 0 < letter.txt",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": f"{EDIT}\n\n{LETTER}"}]},
            FOLDER / "chat.svg",
        )
