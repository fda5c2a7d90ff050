"""Parts of messages that are no text: known by their kind, so that their refusal says what of them the
model lacks, which only a translator knows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from server.errors import ApiError, refused

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

    def refusal(self, field: str, unserved: Collection[str]) -> ApiError:
        """Returns a 400 for a content at ``field``. ``unserved``: the model's parts besides text."""
        needed = _KINDS[self.kind]
        if needed == "file":
            reason = "files are not read here; send their text"
        elif needed in unserved:
            reason = f"this model's {needed} part is not served here, only its text half"
        elif unserved:
            reason = "only this model's text half is served here"
        else:
            reason = f"this model takes text only; it has no {needed} part"
        return refused(f"{field}.{self.index}", f": {self.kind!r}: {reason}", "unsupported_content")


def find_foreign_part(content: object) -> ForeignPart | None:
    """Returns the first part that is known and no text, of a content that nobody has checked."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _KINDS:
            return ForeignPart(kind, index)
    return None
