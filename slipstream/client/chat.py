"""``slipstream chat``: a conversation, each reply with the account of its drafts."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from slipstream.client.complete import INTERRUPTED
from slipstream.client.display import Screen, choose_screen
from slipstream.client.errors import ClientError, FlagError
from slipstream.client.flags import request_fields
from slipstream.client.session import (
    Service,
    find_service,
    finish,
    new_reply,
    read_text,
    request_reply,
)

PROMPT = "you> "
HELP = (
    "/reset            forget the conversation",
    "/history          show it",
    "/save FILE        write it to a file, as one line of JSON",
    "/load FILE        go on with one that was saved",
    "/drafter          list the server's drafters",
    "/drafter NAME     draft with another one from here on",
    "/help             this list",
    "/quit             leave; so does Ctrl-D",
    "//...             a message that begins with a slash",
    "A line that ends with a backslash goes on in the next. Ctrl-C stops a reply.",
)
Outcome = Literal["go on", "stopped", "leave"]
"""``stopped``: the person broke the reply off."""


def run(arguments: Namespace) -> int:
    """Returns the exit status. Raises ClientError and FlagError for what no conversation survives."""
    text = None if arguments.message is None else read_text(arguments.message)
    screen = choose_screen(arguments)
    with screen.waiting("the server"):
        service = find_service(arguments)
    chat = Chat(arguments, screen, service)
    if text is not None:
        return chat.answer_once(text)
    return chat.talk() if sys.stdin.isatty() else chat.answer_lines()


class Chat:
    """The history and what is asked for with every turn."""

    def __init__(self, arguments: Namespace, screen: Screen, service: Service) -> None:
        """Raises FlagError for flags that contradict each other or mean nothing to the server."""
        self._arguments = arguments
        self._screen = screen
        self._service = service
        self._fields = request_fields(arguments)
        service.body(self._fields)
        system = arguments.system
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def answer_once(self, text: str) -> int:
        return INTERRUPTED if self._reply(text) == "stopped" else 0

    def answer_lines(self) -> int:
        """A message or a command per line of standard input. The first failure ends it: later lines
        would answer to a conversation that did not happen."""
        try:
            lines = (line.rstrip("\r\n") for line in sys.stdin)
            for line in lines:
                text = _joined(line, lambda: next(lines, ""))
                if not text.strip():
                    continue
                outcome = self._take(text)
                if outcome != "go on":
                    return INTERRUPTED if outcome == "stopped" else 0
        except UnicodeDecodeError as error:
            raise FlagError("standard input is not valid UTF-8") from error
        return 0

    def talk(self) -> int:
        """Talks with a person. Failures are shown, and the person decides."""
        # Importing it gives `input` its line editing and history.
        import readline  # noqa: F401

        self._screen.note("/help lists the commands; Ctrl-C stops a reply, Ctrl-D ends")
        while True:
            try:
                text = _read_message()
                if text.strip() and self._take(text) == "leave":
                    return 0
            except KeyboardInterrupt:
                self._screen.note("\nCtrl-D or /quit ends")
            except EOFError:
                self._screen.note("")
                return 0
            except (ClientError, FlagError) as error:
                self._screen.note(f"error: {error}")

    def _take(self, text: str) -> Outcome:
        """A command or a message."""
        if not text.startswith("/"):
            return self._reply(text)
        if text.startswith("//"):
            return self._reply(text[1:])
        return self._command(text.split(maxsplit=1))

    def _command(self, words: list[str]) -> Outcome:
        match [word.strip() for word in words]:
            case ["/exit" | "/quit"]:
                return "leave"
            case ["/reset"]:
                self.messages = list(self._opening)
                self._screen.note("the conversation is forgotten")
            case ["/history"]:
                for message in self.messages:
                    self._screen.note(f"{message['role']}: {message['content']}")
            case ["/save", name]:
                write_transcript(Path(name).expanduser(), self.messages)
                self._screen.note(f"{len(self.messages)} messages are in {name}")
            case ["/load", name]:
                self.messages = read_transcript(Path(name).expanduser())
                self._screen.note(f"going on after {len(self.messages)} messages")
            case ["/drafter"]:
                self._list_drafters()
            case ["/drafter", name]:
                self._choose_drafter(name)
            case ["/help"]:
                for line in HELP:
                    self._screen.note(line)
            case given:
                raise FlagError(f"there is no command {' '.join(given)!r}; /help lists them")
        return "go on"

    def _reply(self, text: str) -> Outcome:
        """Ask, show, remember. A failure takes the message back, so that it can be sent again."""
        asked = [*self.messages, {"role": "user", "content": text}]
        body = self._service.body({**self._fields, "messages": asked})
        reply = new_reply(self._service)
        outcome: Outcome = "go on"
        try:
            request_reply(self._arguments, "/v1/chat/completions", body, reply, self._screen)
        except KeyboardInterrupt:
            outcome = "stopped"
        if reply.text or outcome == "go on":
            self.messages = [*asked, {"role": "assistant", "content": reply.text}]
        finish(reply, self._screen, self._arguments.json)
        return outcome

    def _list_drafters(self) -> None:
        speculative = self._fields.get("speculative", {})
        current = speculative.get("draft_strategy", self._service.default_drafter)
        for name, description in self._service.descriptions().items():
            self._screen.note(f"{'*' if name == current else ' '} {name}: {description}")

    def _choose_drafter(self, name: str) -> None:
        known = self._service.drafters
        if name not in known:
            raise FlagError(f"this server has no drafter {name!r}; it has: {', '.join(known)}")
        # Depth, shape and options were meant for the drafter that is left: `none` takes no depth, and
        # options differ.
        given = self._fields.get("speculative", {})
        kept = {key: value for key, value in given.items() if key == "return_drafted"}
        dropped = set(given) - set(kept) - {"draft_strategy"}
        self._fields["speculative"] = kept | {"draft_strategy": name}
        self._screen.note(
            f"drafting with {name}"
            + (f", without the {', '.join(sorted(dropped))} given at start" if dropped else "")
        )


def _read_message() -> str:
    """Raises EOFError and KeyboardInterrupt as ``input`` does."""
    return _joined(input(PROMPT), lambda: input("...> "))


def _joined(line: str, read: Callable[[], str]) -> str:
    """A line and those that it goes on in."""
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read())
    return "\n".join(lines)


_KEYS = {"role", "content"}


def write_transcript(path: Path, messages: Sequence[dict[str, str]]) -> None:
    """Raises FlagError where ``path`` cannot be written."""
    try:
        path.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    except OSError as error:
        raise FlagError(f"cannot write {path}: {error.strerror}") from error


def read_transcript(path: Path) -> list[dict[str, str]]:
    """Raises FlagError for what ``write_transcript`` has not written."""
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise TypeError
    except OSError as error:
        raise FlagError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FlagError(f"{path} holds no conversation saved by /save") from error
    return messages


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == _KEYS
        and all(isinstance(each, str) for each in value.values())
    )
