"""One step: what the ngram drafter proposes for a short text, what the target says, what stands."""

from __future__ import annotations

from docs.pictures.svg import Drawing
from drafters.base import DraftRequest, DraftShape
from drafters.registry import build_drafters

WORDS = "rows = load ( path ) ; total = sum ( rows ) ; cells = load ( path ) ; names = load ("
TEXT, TARGET = WORDS.split()[:18], WORDS.split()[18:]
GAMMA = 5


def proposal() -> list[str]:
    """Returns ``ngram``'s draft after the text; a word is a token."""
    words = sorted({*TEXT, *TARGET})
    ids = [words.index(word) for word in TEXT]
    drafter = build_drafters(["ngram"])["ngram"]
    drafter.open("picture", ids, {}, "")
    (tree,) = drafter.propose([DraftRequest("picture", ids, GAMMA, DraftShape())])
    return [words[token_id] for token_id in tree.token_ids]


def num_accepted(drafts: list[str]) -> int:
    """How many drafts equal the target's own tokens, from the first on."""
    pairs = zip(drafts, TARGET, strict=False)
    return next(
        (i for i, (draft, own) in enumerate(pairs) if draft != own), min(len(drafts), len(TARGET))
    )


def draw() -> str:
    drafts = proposal()
    accepted = num_accepted(drafts)
    picture = Drawing(760, 330, "One step of drafting and verifying")
    left, top, step, width = 150, 54, 84, 74

    def row(y: float, label: str, note: str) -> None:
        picture.text(20, y + 15, label, bold=True)
        picture.text(20, y + 33, note, "faint", size=12)

    picture.text(20, 30, f"… {' '.join(TEXT[-5:])}", "faint", mono=True)
    row(top, "1  draft", "ngram copies")
    picture.box(left, top, width, 40, "plain", TEXT[-1], mono=True)
    for i, word in enumerate(drafts):
        picture.box(left + (i + 1) * step, top, width, 40, "draft", word, mono=True)
    row(top + 70, "2  verify", "one forward")
    for i in range(len(drafts) + 1):
        x = left + i * step
        picture.line([(x + width / 2, top + 42), (x + width / 2, top + 68)])
        reached = i <= accepted
        said = TARGET[i] if reached else "·"
        fill = ("good" if i < accepted else "own") if reached else "plain"
        picture.box(x, top + 70, width, 40, fill, said, mono=True)
    picture.text(left, top + 134, "the target's own token after each row", "faint", size=12)
    row(top + 156, "3  accept", "what agrees")
    for i, word in enumerate(drafts):
        x = left + (i + 1) * step
        fill = "good" if i < accepted else "bad"
        mark = "✓" if i < accepted else "✗"
        picture.box(x, top + 156, width, 40, fill, f"{word} {mark}", mono=True)
    row(top + 220, "4  emit", f"{accepted + 1} tokens")
    for i in range(accepted + 1):
        fill = "good" if i < accepted else "own"
        picture.box(left + i * step, top + 220, width, 40, fill, TARGET[i], mono=True)
    picture.text(
        left + (accepted + 1) * step,
        top + 245,
        f"{accepted} drafts and the target's own token",
        "faint",
        size=12,
    )
    return picture.render()
