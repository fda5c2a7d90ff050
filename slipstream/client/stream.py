"""A streamed reply, chunk by chunk, and the running account of it.

A chunk stands for one step of the target, or for several whose text was held back. With
``return_drafted`` it names its tokens, says which were accepted drafts, and how many drafts the
steps verified; so gamma and acceptance are known while the text is still being written. Other
servers of OpenAI's API send bare text; there the usage at the end says how many tokens it was.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from slipstream.client.errors import ClientError


@dataclass(frozen=True, slots=True)
class Token:
    """``text``: what it added to the reply; ``drafted``: an accepted draft."""

    token_id: int
    text: str
    drafted: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk. ``usage`` comes with the last one, which has no tokens."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    num_steps: int = 0
    num_draft_tokens: int = 0
    finish_reason: str | None = None
    seed: int | None = None
    fingerprint: str | None = None
    usage: dict[str, Any] | None = None


DONE = "[DONE]"
# Of a reply whose pace means something.
_FEWEST_TIMED_TOKENS = 4
_SHORTEST_TIMED = 0.02
"""Seconds."""


def parse_event(data: str) -> Piece:
    """An event's data as a piece. Raises ClientError for an error event, and for what is no chunk of
    OpenAI's API."""
    try:
        chunk = json.loads(data)
        if chunk.get("error"):
            raise ClientError(explain(chunk))
        common = {
            "seed": chunk.get("seed"),
            "fingerprint": chunk.get("system_fingerprint"),
            "usage": chunk.get("usage"),
        }
        if not chunk["choices"]:
            return Piece(**common)
        (choice,) = chunk["choices"]
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        if not isinstance(text, str | None):
            raise TypeError(text)
        tokens = tuple(
            Token(token["id"], token["text"], token["drafted"])
            for token in choice.get("tokens") or ()
        )
        return Piece(
            # Some servers cut a character in two, of which no half can be written anywhere.
            text=(text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
            tokens=tokens,
            num_steps=choice.get("num_steps") or 0,
            num_draft_tokens=choice.get("num_draft_tokens") or 0,
            finish_reason=choice.get("finish_reason"),
            **common,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClientError(
            "the answer is not in the form of OpenAI's completions; check --url"
        ) from error


def explain(answer: Any) -> str:
    """The words of an error's body: ``{"error": {"message"}}`` as OpenAI has it, or what others write
    in its place."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail")
        param = error.get("param")
        if isinstance(message, str) and param and str(param) not in message:
            return f"{param}: {message}"
        error = message
    if isinstance(error, str) and error:
        return error
    return "the server failed without saying why" if error is None else json.dumps(error)


@dataclass(slots=True)
class Reply:
    """Everything that has arrived of one reply. Times are readings of one clock, in seconds.

    ``tells_drafts``: whether the server says which tokens were drafted; ``group``: what kind of prompt
    it answers, where a bench tells kinds apart.
    """

    started: float
    tells_drafts: bool = True
    group: str = ""
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    num_steps: int = 0
    num_draft_tokens: int = 0
    gamma: float | None = None
    """Drafts per step in the newest piece."""
    num_first_tokens: int = 0
    """Tokens of the first piece: they say nothing about the time between tokens."""
    num_bare_pieces: int = 0
    """Pieces with text whose tokens the server does not name."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    finish_reason: str | None = None
    seed: int | None = None
    fingerprint: str | None = None
    usage: dict[str, Any] | None = None

    def add(self, piece: Piece, now: float) -> None:
        """Account for the next piece, which came at ``now``."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.num_steps += piece.num_steps
        self.num_draft_tokens += piece.num_draft_tokens
        if piece.num_steps:
            self.gamma = piece.num_draft_tokens / piece.num_steps
        if piece.tokens or piece.text:
            if self.first_token_time is None:
                self.first_token_time = now
                self.num_first_tokens = max(1, len(piece.tokens))
            self.last_token_time = now
            self.num_bare_pieces += not piece.tokens
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.seed = self.seed if piece.seed is None else piece.seed
        self.fingerprint = piece.fingerprint or self.fingerprint
        self.usage = piece.usage or self.usage

    @property
    def num_tokens(self) -> int:
        """Tokens named by the server, or else counted by it; until it has counted them, pieces."""
        if self.tokens:
            return len(self.tokens)
        counted: int | None = (self.usage or {}).get("completion_tokens")
        return self.num_bare_pieces if counted is None else counted

    @property
    def counts_pieces(self) -> bool:
        """Whether ``num_tokens`` is, so far, a number of pieces."""
        return not self.tokens and bool(self.num_bare_pieces) and self.usage is None

    @property
    def num_accepted_tokens(self) -> int:
        return sum(token.drafted for token in self.tokens)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / verified drafts; None where none was verified."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def tokens_per_step(self) -> float | None:
        return len(self.tokens) / self.num_steps if self.num_steps else None

    @property
    def latency(self) -> float | None:
        """Seconds from the request to the last token."""
        return None if self.last_token_time is None else self.last_token_time - self.started

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.started

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds between tokens after the first piece; None where too few came for that."""
        return None if self.last_token_time is None else self.pace(self.last_token_time)

    def pace(self, now: float) -> float | None:
        """Seconds per token after the first piece, whose time is the prompt's. None where there are too
        few tokens or too little time: what one read brings has no time between it."""
        num_tokens = self.num_tokens - self.num_first_tokens
        if self.first_token_time is None or num_tokens < _FEWEST_TIMED_TOKENS:
            return None
        seconds = now - self.first_token_time
        return seconds / num_tokens if seconds >= _SHORTEST_TIMED else None

    @property
    def speculative(self) -> dict[str, Any] | None:
        """The server's own account, once it has come."""
        account: dict[str, Any] | None = (self.usage or {}).get("speculative")
        return account

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "seed": self.seed,
            "finish_reason": self.finish_reason,
            "time_to_first_token_seconds": self.time_to_first_token,
            "time_per_output_token_seconds": self.time_per_output_token,
            "tells_drafts": self.tells_drafts,
            "tokens": [
                {"id": token.token_id, "text": token.text, "drafted": token.drafted}
                for token in self.tokens
            ],
            "usage": self.usage,
        }
