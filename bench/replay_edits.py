"""``python -m bench.replay_edits``: look-up drafters on real edits, side by side with Arctic's.

An edit is a file of one release of a package as the prompt and the same file of a later release as
the completion. Folders are what ``pip install --no-deps --target FOLDER`` makes of either release.
Nothing runs a model; see docs/replay.md. ArcticInference's ``SuffixDecodingCache`` takes part where
it is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.progress import progress_bar
from drafters.base import Drafter, DrafterInfo, DraftRequest, Observation, OptionValue
from drafters.tree import EMPTY, DraftTree
from engine.model.loader import bundled_path, load_tokenizer
from slipstream.tools.replay.cost import StepCost
from slipstream.tools.replay.log import LogLine, read_log
from slipstream.tools.replay.replay import ReplayCase, ReplayResult, build_replayable, replay
from slipstream.tools.replay.report import table

OURS = ("ngram", "suffix")
ARCTIC = "arctic"
ARCTIC_OFFSET = "arctic, offset 8"
ARCTIC_WHOLE = "arctic, whole budget"
ARCTIC_LIMITS: dict[str, dict[str, float]] = {
    ARCTIC: {},  # max_spec_factor 1, max_spec_offset 0, min_token_prob 0.1
    ARCTIC_OFFSET: {"max_spec_offset": 8.0},
    ARCTIC_WHOLE: {"max_spec_factor": 1e6, "max_spec_offset": 1e6, "min_token_prob": 1e-4},
}
"""The options of ``speculate`` beyond the budget. By default a draft is no longer than the match and
tokens below a probability of 0.1 are left out; the others draft more on short matches."""
UNLIMITED = -1
TREE_WIDTH = 8
MIN_TOKENS, MAX_TOKENS = 500, 3_000
MIN_SIMILARITY = 0.5
SEED = 1


class ArcticDrafter(Drafter):
    """ArcticInference's suffix decoding as a drafter, under one of ``ARCTIC_LIMITS``.

    ``keep_finished`` is its global tree of the outputs of all requests, without a limit.
    """

    def __init__(self, limits: Mapping[str, float], keep_finished: bool) -> None:
        super().__init__()
        self.info = DrafterInfo(ARCTIC, "")
        self._numpy = import_module("numpy")
        decoding = import_module("arctic_inference.suffix_decoding")
        num_kept = UNLIMITED if keep_finished else 0
        self._cache = decoding.SuffixDecodingCache(max_cached_requests=num_kept)
        self._limits = limits

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        cache_salt: str,
    ) -> None:
        del options, cache_salt
        self._cache.start_request(request_id, self._array(token_ids))

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._propose(request) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        for each in observations:
            emitted = self._array(each.emitted_token_ids)
            self._cache.add_active_response(each.request_id, emitted)

    def num_top_tokens(self, request_id: str) -> int:  # noqa: ARG002
        return 0

    def close(self, request_id: str) -> None:
        self._cache.stop_request(request_id)

    def _propose(self, request: DraftRequest) -> DraftTree:
        if request.max_nodes < 1:
            return EMPTY
        draft = self._cache.speculate(
            request.request_id,
            self._array(request.token_ids[-self._cache.max_tree_depth :]),
            max_spec_tokens=request.max_nodes,
            use_tree_spec=request.shape.width > 1,
            **self._limits,
        )
        return DraftTree(draft.token_ids, draft.parents, [0] * len(draft.token_ids))

    def _array(self, token_ids: Sequence[int]) -> Any:
        return self._numpy.array(token_ids, dtype=self._numpy.int32)


def build(name: str, keep_finished: bool = False) -> Drafter:
    if name in ARCTIC_LIMITS:
        return ArcticDrafter(ARCTIC_LIMITS[name], keep_finished)
    return build_replayable(name)


def changed_files(before: Path, after: Path) -> Iterator[tuple[str, str, str]]:
    """(path, old text, new text) of Python files that are in both folders, changed but not
    rewritten, packages in turn so that a few files of each come first."""
    by_package: dict[str, list[Path]] = {}
    for path in sorted(before.rglob("*.py")):
        relative = path.relative_to(before)
        if (after / relative).is_file():
            by_package.setdefault(relative.parts[0], []).append(relative)
    rng = random.Random(SEED)
    for paths in by_package.values():
        rng.shuffle(paths)
    while by_package:
        for package in list(by_package):
            found = _next_change(by_package[package], before, after)
            if found is None:
                del by_package[package]
            else:
                yield found


def _next_change(paths: list[Path], before: Path, after: Path) -> tuple[str, str, str] | None:
    while paths:
        path = paths.pop()
        old, new = ((folder / path).read_text("utf-8", "replace") for folder in (before, after))
        if old == new or not 2_000 <= len(new) <= 16_000:
            continue
        if SequenceMatcher(None, old.splitlines(), new.splitlines()).ratio() >= MIN_SIMILARITY:
            return path.as_posix(), old, new
    return None


def edit_lines(before: Path, after: Path, tokenizer: Any, max_files: int) -> list[LogLine]:
    """Up to ``max_files`` edits of 500 to 3000 tokens."""
    lines: list[LogLine] = []
    for _, old, new in changed_files(before, after):
        prompt, completion = (
            tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in (old, new)
        )
        sizes = len(prompt), len(completion)
        if min(sizes) >= MIN_TOKENS and max(sizes) <= MAX_TOKENS:
            lines.append(LogLine(len(lines) + 1, prompt, completion))
        if len(lines) == max_files:
            break
    return lines


def compare(
    lines: Sequence[LogLine], budgets: Sequence[int], keep_finished: bool = False
) -> list[ReplayResult]:
    """Every contender, chain and tree, at every budget; each line by itself, or after all lines
    before it, as one tenant's requests."""
    names = list(OURS)
    try:
        ArcticDrafter(ARCTIC_LIMITS[ARCTIC], keep_finished)
        names += ARCTIC_LIMITS
    except ImportError:
        print("arctic-inference is not installed: left out\n")
    cases = [
        ReplayCase(name, width, budget)
        for budget in budgets
        for name in names
        for width in (1, TREE_WIDTH)
    ]
    results = []
    build_case = partial(build, keep_finished=keep_finished)
    with progress_bar(len(cases)) as bar:
        for case in cases:
            bar.step(f"{case.drafter} {case.shape} {case.num_nodes}")
            isolate = not keep_finished
            results.append(replay(case, lines, StepCost(), isolate=isolate, build=build_case))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay_edits", description=__doc__)
    parser.add_argument("--before", type=Path, help="folder with the older releases")
    parser.add_argument("--after", type=Path, help="folder with the later ones")
    parser.add_argument("--log", type=Path, help="replay this log instead (docs/replay.md)")
    parser.add_argument("--model", help="whose tokenizer reads texts; default: the bundled model")
    parser.add_argument("--max-files", type=int, default=64)
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument(
        "--keep-finished", action="store_true", help="draft from the edits before, too"
    )
    parser.add_argument("--write", type=Path, help="write the edits there, as a log of token ids")
    options = parser.parse_args(arguments)
    folders = [options.before, options.after]
    if (options.log is None and None in folders) or (options.log and any(folders)):
        parser.error("give either --log, or --before and --after")
    tokenizer: Any = load_tokenizer(options.model or str(bundled_path("target")))
    if options.log is not None:
        lines = read_log(options.log, lambda: tokenizer)
    else:
        lines = edit_lines(options.before, options.after, tokenizer, options.max_files)
    if not lines:
        parser.error("no file changed between --before and --after in a way that fits")
    if options.write is not None:
        write_log(options.write, lines)
    num_tokens = sum(len(line.completion_token_ids) for line in lines)
    print(f"{len(lines)} edits, {num_tokens} tokens to write\n")
    print(table(compare(lines, options.budgets, options.keep_finished)))
    return 0


def write_log(path: Path, lines: Sequence[LogLine]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            fields = {
                "prompt": list(line.prompt_token_ids),
                "completion": list(line.completion_token_ids),
            }
            file.write(json.dumps(fields) + "\n")


if __name__ == "__main__":
    sys.exit(main())
