"""One answer on its way from a replica to the client, and what becomes of it when the replica is gone."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json
from starlette.types import Message, Scope, Send

# These bring the shapes of their errors.
import server.apis.anthropic.reply
import server.apis.ollama.reply  # noqa: F401
from deploy.ray.exchange import ReplicaLostError
from engine.request.errors import EngineDeadError
from server.apis.openai.reply import DONE
from server.errors import ApiError, shutting_down, to_api_error
from server.reply.writers import as_json, event

# By these, in whatever shape, a replica says that another one has to do it: its engine has died, or it
# ends.
_ELSEWHERE = (to_api_error(EngineDeadError("")).message, shutting_down().message)
_STREAMS = (b"text/event-stream", b"application/x-ndjson")
_COMMENT = b":"
_ERRORS = (b'data: {"error":', b"event: error\n", b"event: response.failed\n", b'{"error":')


class Answer:
    """Passes a replica's messages on to ``send``. Until something of the answer itself has been written,
    another replica's may take its place: a stream's head and comments commit to nothing. ``is_lost``:
    whether a stream that had begun was cut short, by this ingress or by the replica itself."""

    def __init__(self, send: Send, scope: Scope) -> None:
        """``scope``: the request's."""
        self._send = send
        self._scope = scope
        self._head: Message | None = None
        self._is_head_sent = False
        self._is_stream = False
        self._num_events = 0
        self.is_lost = False

    @property
    def has_begun(self) -> bool:
        """Whether the client has seen a part of the answer, so that it cannot be begun anew."""
        return self._num_events > 0 or (self._is_head_sent and not self._is_stream)

    async def take(self, message: Message) -> None:
        """A message of a replica. Raises ReplicaLostError where it says that it cannot answer and the
        answer has not begun."""
        if message["type"] == "http.response.start":
            # Serve adds it, the same.
            headers = [each for each in message["headers"] if each[0] != b"x-request-id"]
            self._head = {**message, "headers": headers}
            if not self._is_head_sent and _is_stream(message):
                self._is_stream = True
                await self._send_head()
        elif self._head is not None:
            await self._take_body(message)

    async def fail(self, error: ApiError) -> None:
        """The end of an answer that no replica gives."""
        if self._is_stream:
            self.is_lost = self.has_begun
            await self._send_event(error.body_at(self._scope))
        elif not self._is_head_sent:
            await self._respond(error)
        # Else a whole reply was cut off, which its length tells.

    async def _take_body(self, message: Message) -> None:
        assert self._head is not None
        body = message.get("body", b"")
        if not self.has_begun:
            if _says_elsewhere(self._head["status"], body):
                raise ReplicaLostError
            if self._is_stream and not _is_stream(self._head):
                # The replica that was asked next refused: the client has seen a status already.
                await self._send_event(from_json(body))
                self._head = None
                return
        elif self._is_stream and _says_elsewhere(self._head["status"], body):
            self.is_lost = True
        if not self._is_head_sent:
            await self._send_head()
        if body and not body.startswith(_COMMENT):
            self._num_events += body.count(b"\n\n") or 1
        await self._send(message)

    async def _send_head(self) -> None:
        assert self._head is not None
        self._is_head_sent = True
        await self._send(self._head)

    async def _send_event(self, error: Any) -> None:
        if self._scope["path"] == "/v1/responses":
            fields = {**error["error"], "type": "error", "sequence_number": self._num_events}
            content = event(fields, "error")
        elif isinstance(error["error"], str):  # in Ollama's
            content = as_json(error) + b"\n"
        elif error.get("type") == "error":  # in Anthropic's shape
            content = event(error, "error")
        else:
            content = event(error) + DONE
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def _respond(self, error: ApiError) -> None:
        found = error.response(self._scope)
        head = {"type": "http.response.start", "status": found.status_code}
        await self._send({**head, "headers": found.raw_headers})
        await self._send({"type": "http.response.body", "body": found.body, "more_body": False})


def _is_stream(head: Message) -> bool:
    kind = next((value for name, value in head["headers"] if name == b"content-type"), b"")
    return bool(head["status"] == 200 and kind.startswith(_STREAMS))


def _says_elsewhere(status: int, body: bytes) -> bool:
    if status != 503 and not body.startswith(_ERRORS):
        return False
    try:
        found = from_json(body[body.find(b"{") :].partition(b"\n")[0])
        error = found.get("response", found)["error"]
        return (error if isinstance(error, str) else error["message"]) in _ELSEWHERE
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
