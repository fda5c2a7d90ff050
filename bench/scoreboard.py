"""The scoreboard: ``python -m bench.scoreboard RESULTS.json --name NAME --title TITLE``.

Keeps what ``bench.peers --output`` wrote, as far as the page shows it, under NAME in ``docs/scoreboard``,
and writes the page and README's table anew; without RESULTS only that. ``docs.generate`` writes the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers.report import plain_of
from slipstream.client.markdown import markdown_table

KEPT = Path(__file__).resolve().parents[1] / "docs" / "scoreboard"
_OF_RESULTS = ("taken_at", "commit", "machine", "unavailable")
_TELLING = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
"""Instructions that products are fast by."""
_OF_CELLS = ("workload", "batch_size", "sampling", "num_new_tokens", "num_rounds")
_OF_ARMS = ("name", "speculates", "over_http", "tokens_per_second", "same_as_plain")


class Shown(NamedTuple):
    """An arm in a cell. ``same_as_plain``: the share of texts that are its own without drafts."""

    name: str
    speculates: bool
    over_http: bool
    tokens_per_second: float
    same_as_plain: float | None


def keep(results: Path, name: str, title: str, folder: Path = KEPT) -> None:
    """Keeps an entry of the page. Raises OSError, ValueError and KeyError for what are no results."""
    found = json.loads(results.read_text(encoding="utf-8"))
    cells = [
        {key: cell[key] for key in _OF_CELLS}
        | {"arms": [{key: arm[key] for key in _OF_ARMS} for arm in cell["arms"]]}
        for cell in found["cells"]
    ]
    entry = {"title": title} | {key: found[key] for key in _OF_RESULTS}
    entry |= {key: found["settings"][key] for key in ("command", "reference")}
    told = (fact for facts in found["workers"].values() for fact in facts.items())
    entry["versions"] = {name: value for name, value in told if _is_version(value)}
    entry["cells"] = cells
    folder.mkdir(exist_ok=True)
    text = json.dumps(entry, indent=1) + "\n"
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def entries(folder: Path = KEPT) -> list[dict[str, Any]]:
    """All that is kept, by title, the newest of a title first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    newest = sorted(found, key=lambda entry: str(entry["taken_at"]), reverse=True)
    return sorted(newest, key=lambda entry: str(entry["title"]))


def page(folder: Path = KEPT) -> str:
    """Returns every entry with its machine, date, versions and, where it is first run, its command."""
    found = entries(folder)
    commands = [entry["command"] for entry in found]
    return "\n\n".join(
        _section(entry, commands.index(entry["command"]) < index)
        for index, entry in enumerate(found)
    )


def newest_tables(folder: Path = KEPT) -> str:
    """The newest entry of each title, without its command."""
    by_title: dict[str, dict[str, Any]] = {}
    for entry in entries(folder):
        by_title.setdefault(entry["title"], entry)
    return "\n\n".join(
        f"{title}, {_where(entry)}:\n\n{entry_table(entry)}" for title, entry in by_title.items()
    )


def _section(entry: dict[str, Any], is_repeated: bool) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in entry["versions"].items())
    instructions = [name for name in entry["machine"]["isa"].split() if name in _TELLING]
    cell = entry["cells"][0]
    parts = [
        f"## {entry['title']}, {entry['machine']['processor']}, {entry['taken_at'][:10]}",
        f"{entry['machine']['num_threads']} cores, {cell['num_new_tokens']} new tokens, medians of "
        f"{cell['num_rounds']} rounds; commit `{entry['commit']}`, {versions}. Instructions: "
        f"{', '.join(instructions)}.",
        "By the command above." if is_repeated else f"```sh\n{entry['command']}\n```",
        entry_table(entry),
    ]
    parts += [f"Not measured: {name}: {why}" for name, why in entry["unavailable"].items()]
    return "\n\n".join(parts)


def _is_version(value: Any) -> bool:
    return isinstance(value, str) and value[:1].isdigit()


def _where(entry: dict[str, Any]) -> str:
    return f"on {entry['machine']['num_threads']} cores of an {entry['machine']['processor']}"


def entry_table(entry: dict[str, Any]) -> str:
    """A row for each arm without drafts and one for the best of its speculations; ratios to the
    reference."""
    cells = [[Shown(**arm) for arm in cell["arms"]] for cell in entry["cells"]]
    columns = [
        f"*{cell['workload']}*, {cell['batch_size']}"
        + ("" if cell["sampling"]["temperature"] == 0 else f", {cell['sampling']['name']}")
        for cell in entry["cells"]
    ]
    names = dict.fromkeys(arm.name for arms in cells for arm in arms if not arm.speculates)
    rows = []
    for name in names:
        alone = [_named(name, arms) for arms in cells]
        best = [_best_of(name, arms) for arms in cells]
        against = [_named(entry["reference"], arms) for arms in cells]
        rows.append([name, *map(_said, alone, against), ""])
        if any(best):
            equal = [arm.same_as_plain for arm in best if arm and arm.same_as_plain is not None]
            said = [_said(arm, base, name) for arm, base in zip(best, against, strict=True)]
            rows.append(["its best speculation", *said, f"{min(equal):.0%}" if equal else "-"])
    header = ["requests at once", *columns, "texts as without drafts"]
    return markdown_table([header, *rows], 1)


def _named(name: str, arms: Sequence[Shown]) -> Shown | None:
    return next((arm for arm in arms if arm.name == name), None)


def _best_of(name: str, arms: Sequence[Shown]) -> Shown | None:
    mine = [arm for arm in arms if arm.speculates and plain_of(arm, arms) == _named(name, arms)]
    return max(mine, key=lambda arm: arm.tokens_per_second, default=None)


def _said(arm: Shown | None, reference: Shown | None, plain: str = "") -> str:
    """Its speed over the reference's, and what drafts, where that is not ``plain``'s own name; the
    reference itself in tokens per second."""
    if arm is None:
        return "-"
    if reference is None or arm == reference:
        return f"{arm.tokens_per_second:.0f} tok/s"
    before, _, after = plain.partition("plain")
    how = arm.name[len(before) : len(arm.name) - len(after)] if plain else ""
    return f"{arm.tokens_per_second / reference.tokens_per_second:.2f}x {how}".strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scoreboard", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, help="what bench.peers --output wrote")
    parser.add_argument("--name", help="of the file that keeps them")
    parser.add_argument("--title", help="of the entry: what model, in which bits")
    options = parser.parse_args(arguments)
    if options.results is not None:
        if not (options.name and options.title):
            parser.error("RESULTS need a --name and a --title")
        keep(options.results, options.name, options.title)
    import_module("docs.generate").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
