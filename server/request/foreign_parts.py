"""Parts of messages that are no text: known by their kind, so that their refusal says what of them the
model lacks, which only a translator knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from server.errors import refused
from server.request.body import Body

_KINDS = {
    "image": "vision",
    "image_url": "vision",
    "input_image": "vision",
    "video": "vision",
    "video_url": "vision",
    "input_video": "vision",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "file": "file",
    "input_file": "file",
}
"""Types of parts, and what of a model reads them; nothing reads files here."""


@dataclass(frozen=True, slots=True)
class ForeignPart:
    """The first part of a content that is no text, at this index. A part's other fields are not kept."""

    kind: str
    index: int


def refuse_foreign_parts(value: object, field: str, unserved: Collection[str]) -> None:
    """Raises ApiError 400 for the first content within the value of ``field`` that is not text alone.
    ``unserved``: the model's parts besides text."""
    if isinstance(value, ForeignPart):
        reason = f": {value.kind!r}: {_reason(_KINDS[value.kind], unserved)}"
        raise refused(f"{field}.{value.index}", reason, "unsupported_content")
    within: Iterable[tuple[Any, Any]] = value if isinstance(value, Body) else ()
    for name, each in enumerate(value) if isinstance(value, list) else within:
        refuse_foreign_parts(each, f"{field}.{name}", unserved)


def _reason(needed: str, unserved: Collection[str]) -> str:
    if needed == "file":
        return "files are not read here; send their text"
    if needed in unserved:
        return f"this model's {needed} part is not served here, only its text half"
    if unserved:
        return "only this model's text half is served here"
    return f"this model takes text only; it has no {needed} part"


def find_foreign_part(content: object) -> ForeignPart | None:
    """Returns the first part that is known and no text, of a content that nobody has checked."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _KINDS:
            return ForeignPart(kind, index)
    return None
