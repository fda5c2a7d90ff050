"""Write the benchmark prompts, all drawn from files that training never reads.

Two files of JSON lines: code prefixes with their real continuation, and edit requests with
the exact right answer.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from training.edits import make_edit, user_content
from training.samples import load_rows
from training.tokenizer import encode

PREFIX_TOKENS = (128, 256)
EDIT_TOKENS = (150, 450)


def code_lines(tok: Any, rows: list[dict[str, str]], count: int) -> list[dict[str, Any]]:
    """Cut held-out units at a line end into a prefix and its continuation, one per file."""
    out: list[dict[str, Any]] = []
    used: set[str] = set()
    for row in rows:
        lines = row["text"].splitlines(keepends=True)
        cuts = []
        for i in range(1, len(lines)):
            size = len(encode(tok, "".join(lines[:i])))
            if not lines[i].strip():
                continue  # a blank line shares a token with the line end before it
            if PREFIX_TOKENS[0] <= size <= PREFIX_TOKENS[1]:
                cuts.append(i)
        if not cuts or row["path"] in used:
            continue
        cut = cuts[len(cuts) // 2]
        completion = "".join(lines[cut:])
        if len(encode(tok, completion)) >= 48:
            used.add(row["path"])
            out.append(
                {
                    "prompt": "".join(lines[:cut]),
                    "completion": completion,
                    "source": f"{row['package']}: {row['path']}",
                }
            )
        if len(out) == count:
            break
    return out


def edit_lines(
    tok: Any, rows: list[dict[str, str]], rng: random.Random, count: int
) -> list[dict[str, Any]]:
    """Make edit requests over short held-out files, at most one per file."""
    files: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        files.setdefault(row["path"], []).append(row)
    out: list[dict[str, Any]] = []
    for path, members in files.items():
        text, size = "", 0
        for row in members:
            joined = f"{text}\n\n{row['text']}" if text else row["text"]
            joined_size = len(encode(tok, joined))
            if joined_size <= EDIT_TOKENS[1]:
                text, size = joined, joined_size
        if size < EDIT_TOKENS[0]:
            continue
        edit = make_edit(rng, text)
        out.append(
            {
                "messages": [{"role": "user", "content": user_content(rng, edit, plain=True)}],
                "completion": edit.after.strip("\n"),
                "kind": edit.kind,
                "source": f"{members[0]['package']}: {path}",
            }
        )
        if len(out) == count:
            break
    return out


def unlike_training(
    rows: list[dict[str, str]], training: list[dict[str, str]]
) -> list[dict[str, str]]:
    """Drop held-out units most of whose longer lines also occur in some training unit.

    Packages borrow files from one another, so a file can be held out under one path while
    a near copy of it was trained on under another.
    """
    known = {line.strip() for row in training for line in row["text"].splitlines()}

    def share(text: str) -> float:
        lines = [ln.strip() for ln in text.splitlines() if len(ln.strip()) > 20]
        return sum(ln in known for ln in lines) / max(1, len(lines))

    return [row for row in rows if share(row["text"]) < 0.4]


def main() -> None:
    """Write heldout_code.jsonl and heldout_edits.jsonl."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64)
    args = parser.parse_args()
    tok = AutoTokenizer.from_pretrained(args.tokenizer)
    rng = random.Random(2024)
    rows = unlike_training(
        load_rows(args.corpus / "heldout.jsonl"), load_rows(args.corpus / "train.jsonl")
    )
    rng.shuffle(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, lines in (
        ("code", code_lines(tok, rows, args.count)),
        ("edits", edit_lines(tok, rows, rng, args.count)),
    ):
        with open(args.out / f"heldout_{name}.jsonl", "w") as handle:
            for line in lines:
                handle.write(json.dumps(line) + "\n")
        print(f"{name}: {len(lines)} lines")


if __name__ == "__main__":
    main()
