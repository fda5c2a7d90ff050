"""Draws all pictures of the documentation anew: ``python -m docs.pictures.draw``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.pictures import blocks, gamma, one_step, tree_mask

PICTURES: dict[str, Callable[[], str]] = {
    "one_step.svg": one_step.draw,
    "tree_mask.svg": tree_mask.draw,
    "gamma.svg": gamma.draw,
    "blocks.svg": blocks.draw,
}


def main() -> None:
    for name, make in PICTURES.items():
        Path(__file__).with_name(name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
