"""``python -m bench.draft_cost``: what drafting itself costs, per request and step, without a model.

Held-out texts (``bench/data``), behind other held-out files that fill the prompt up to ``--context``
tokens, are replayed through every drafter that needs no model. The part of the target is played from
the text: what was written is accepted, and the tokens it might have written instead are made up, the
same ones after the same token, so that drafters which learn from them have as much to do as they
have when serving. CPU time on one core; memory is that of requests after their prompts, without text.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from statistics import mean, median
from time import thread_time
from typing import Any

from bench.workloads import CODE_FILE, DATA, EDITS_FILE
from drafters.base import (
    Drafter,
    DraftRequest,
    DraftShape,
    Observation,
)
from drafters.registry import build_drafters
from drafters.tree import DraftTree
from engine.model.loader import bundled_path, load_tokenizer
from slipstream.client.markdown import markdown_table
from slipstream.tools.replay.replay import accepted_path

FILES = {"edit": EDITS_FILE, "code": CODE_FILE}
MODEL_FREE = tuple(name for name in build_drafters() if name != "none")
TOP_PROBS = (0.7, 0.15, 0.06, 0.03, 0.02, 0.01, 0.01, 0.005, 0.005, 0.005)
WHOLE_TREE_NODES = 64
"""Budget of drafters whose rows are of use only together: the Lookahead window has some 50."""


@dataclass(frozen=True, slots=True)
class Text:
    """One request: ``reference`` is what a client could send as its prediction."""

    prompt: Sequence[int]
    completion: Sequence[int]
    reference: Sequence[int]


@dataclass(frozen=True, slots=True)
class Setting:
    """``width`` 1 is a chain of ``num_nodes``. ``keep_finished``: one drafter for all texts. ``at_once``:
    so many are open at a time and take their steps in turn."""

    num_nodes: int = 8
    width: int = 1
    keep_finished: bool = False
    at_once: int = 1


@dataclass(slots=True)
class DraftCost:
    """Microseconds of each step of all texts; bytes that the process grew by with each request that was
    opened and had its prompt read."""

    drafter: str
    workload: str
    num_tokens: int = 0
    draft: list[float] = field(default_factory=list)
    observe: list[float] = field(default_factory=list)
    opened_bytes: list[int] = field(default_factory=list)

    @property
    def both(self) -> list[float]:
        return [draft + seen for draft, seen in zip(self.draft, self.observe, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / len(self.draft)


class PlayedTarget:
    """A stand-in for the target at verified rows. ``usable``: the tokens it may emit."""

    def __init__(self, usable: Sequence[int]) -> None:
        self._usable = usable
        self._after: dict[int, list[int]] = {}

    def rivals(self, token_id: int) -> list[int]:
        """As many tokens as there are ``TOP_PROBS``, best first, the same at every call."""
        known = self._after.get(token_id)
        if known is None:
            drawn = random.Random(token_id).choices(self._usable, k=2 * len(TOP_PROBS))
            known = self._after[token_id] = list(dict.fromkeys(drawn))[: len(TOP_PROBS)]
        return known

    def observation(
        self,
        request_id: str,
        token_ids: Sequence[int],
        tree: DraftTree,
        path: Sequence[int],
        emitted: Sequence[int],
        num_top_tokens: int,
    ) -> Observation:
        """``token_ids`` already ends with ``emitted``."""
        anchor = token_ids[-len(emitted) - 1]
        said = dict(zip(path, emitted, strict=True))
        tops = []
        for row, token_id in enumerate((anchor, *tree.token_ids)):
            rivals = self.rivals(token_id)
            if row in said:
                rivals = [said[row], *(each for each in rivals if each != said[row])]
            tops.append(rivals)
        row_token_ids = [top[0] for top in tops]
        top_token_ids = top_probs = None
        if num_top_tokens:
            top_token_ids = [top[:num_top_tokens] for top in tops]
            top_probs = [TOP_PROBS[: len(top)] for top in top_token_ids]
        return Observation(
            request_id, token_ids, tree, row_token_ids, path, emitted, top_token_ids, top_probs
        )


def measure(name: str, workload: str, texts: Sequence[Text], setting: Setting) -> DraftCost:
    """Replay ``texts`` in turn, or several at once. Raises ValueError for an unknown drafter."""
    cost = DraftCost(name, workload)
    target = PlayedTarget(sorted({each for text in texts for each in text.prompt}))
    waiting = deque(enumerate(texts))
    open_requests: deque[_Request] = deque()
    drafter = None
    while waiting or open_requests:
        if drafter is None or not (setting.keep_finished or open_requests):
            drafter = build_drafters([name])[name]
        while waiting and len(open_requests) < setting.at_once:
            number, text = waiting.popleft()
            before = resident_bytes()
            open_requests.append(_Request(drafter, f"text {number}", text, target, setting, cost))
            cost.opened_bytes.append(resident_bytes() - before)
        request = open_requests.popleft()
        request.step()
        if request.is_over:
            drafter.close(request.request_id)
        else:
            open_requests.append(request)
    return cost


def resident_bytes() -> int:
    """Returns how much memory this process has."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


class _Request:
    """One text that is being written."""

    def __init__(
        self,
        drafter: Drafter,
        request_id: str,
        text: Text,
        target: PlayedTarget,
        setting: Setting,
        cost: DraftCost,
    ) -> None:
        self.request_id = request_id
        self._drafter, self._target, self._cost = drafter, target, cost
        self._width = setting.width
        self._token_ids, self._whole = list(text.prompt), [*text.prompt, *text.completion]
        is_whole = drafter.info.needs.all_or_nothing
        self._num_nodes = WHOLE_TREE_NODES if is_whole else setting.num_nodes
        drafter.open(request_id, self._token_ids, {}, "")
        drafter.predict(request_id, text.reference)
        drafter.read_prompt(request_id, len(self._token_ids) + 1)

    @property
    def is_over(self) -> bool:
        return len(self._token_ids) >= len(self._whole)

    def step(self) -> None:
        token_ids, whole, cost = self._token_ids, self._whole, self._cost
        left = min(self._num_nodes, len(whole) - len(token_ids) - 1)
        request = DraftRequest(self.request_id, token_ids, left, DraftShape(self._width, left))
        start = thread_time()
        (tree,) = self._drafter.propose([request])
        cost.draft.append((thread_time() - start) * 1e6)
        path = accepted_path(tree, whole, len(token_ids))
        emitted = whole[len(token_ids) : len(token_ids) + len(path)]
        token_ids += emitted
        num_top_tokens = self._drafter.num_top_tokens(self.request_id)
        seen = self._target.observation(
            self.request_id, token_ids, tree, path, emitted, num_top_tokens
        )
        start = thread_time()
        self._drafter.observe([seen])
        cost.observe.append((thread_time() - start) * 1e6)
        cost.num_tokens += len(emitted)


class HeldOut:
    """The held-out texts as tokens. ``tokenizer``: transformers', or one that encodes alike."""

    def __init__(self, tokenizer: Any, data: Path = DATA) -> None:
        self._tokenizer = tokenizer
        self._data = data

    def texts(self, workload: str, num_texts: int, num_context: int, first: int) -> list[Text]:
        """The file's first texts, again from the first where it has fewer. Completions keep their
        ``first`` tokens; prompts have ``num_context`` of them. Raises
        KeyError for an unknown workload."""
        texts = []
        filler = cycle(self._filler)
        for line in islice(cycle(self._lines(FILES[workload])), num_texts):
            asked = line["prompt"] if "prompt" in line else line["messages"][-1]["content"]
            prompt, completion = self._encoded(asked), self._encoded(line["completion"])
            reference = self._encoded(asked.partition("\n\n")[2])
            before: list[int] = []
            while len(before) + len(prompt) < num_context:
                before += next(each for each in filler if each != completion)
            kept = [*before, *prompt][-num_context:]
            if len(completion) > 1:
                texts.append(Text(kept, completion[:first], reference))
        return texts

    @cached_property
    def _filler(self) -> list[list[int]]:
        """The texts that prompts are filled up with: all files', none before itself."""
        lines = [line for name in FILES.values() for line in self._lines(name)]
        return [self._encoded(line["completion"]) for line in lines]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        with open(self._data / name, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def summary(cost: DraftCost) -> dict[str, Any]:
    """Figures of one drafter and workload: microseconds, steps, tokens per step."""
    both = sorted(cost.both)
    return {
        "drafter": cost.drafter,
        "workload": cost.workload,
        "draft_median": median(cost.draft),
        "observe_median": median(cost.observe),
        "median": median(both),
        "mean": mean(both),
        "p95": both[min(len(both) - 1, int(0.95 * len(both)))],
        "num_steps": len(both),
        "tokens_per_step": cost.tokens_per_step,
        "opened_kilobytes": mean(cost.opened_bytes) / 1e3,
    }


def markdown(summaries: Sequence[dict[str, Any]]) -> str:
    header = (
        "drafter",
        "text",
        "draft",
        "observe",
        "both",
        "mean",
        "p95",
        "tokens/step",
        "kB/request",
    )
    keys = ("draft_median", "observe_median", "median", "mean", "p95")
    rows = [
        [
            each["drafter"],
            each["workload"],
            *(f"{each[key]:.0f}" for key in keys),
            f"{each['tokens_per_step']:.2f}",
            f"{each['opened_kilobytes']:.0f}",
        ]
        for each in summaries
    ]
    return markdown_table([header, *rows], 1)


def run(
    names: Sequence[str], texts: dict[str, list[Text]], setting: Setting
) -> Iterator[dict[str, Any]]:
    for name in names:
        for workload, chosen in texts.items():
            yield summary(measure(name, workload, chosen, setting))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.draft_cost", description=__doc__)
    parser.add_argument("--drafters", nargs="+", choices=MODEL_FREE, default=MODEL_FREE)
    parser.add_argument("--workloads", nargs="+", choices=tuple(FILES), default=tuple(FILES))
    parser.add_argument("--context", type=int, default=4_000, help="tokens of every prompt")
    parser.add_argument("--texts", type=int, default=24, help="of each workload")
    parser.add_argument("--first", type=int, default=10_000, help="tokens kept of completions")
    parser.add_argument("--nodes", type=int, default=8, help="budget of a draft")
    parser.add_argument("--width", type=int, default=1, help="1: chains; more: trees")
    parser.add_argument(
        "--keep-finished", action="store_true", help="texts as one tenant's, one after the other"
    )
    parser.add_argument("--at-once", type=int, default=1, help="requests that are open at a time")
    parser.add_argument("--model", help="whose tokenizer reads texts; default: the bundled model")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    held_out = HeldOut(load_tokenizer(options.model or str(bundled_path("target"))))
    texts = {
        workload: held_out.texts(workload, options.texts, options.context, options.first)
        for workload in options.workloads
    }
    gc.collect()
    gc.freeze()  # as the server does: what is loaded by now is not looked through again
    setting = Setting(options.nodes, options.width, options.keep_finished, options.at_once)
    summaries = list(run(options.drafters, texts, setting))
    print(
        "Median microseconds of CPU time per request and step; mean and 95th percentile of both.\n"
    )
    print(markdown(summaries))
    if options.json is not None:
        settings = asdict(setting) | {"context": options.context, "texts": options.texts}
        options.json.write_text(json.dumps({"setting": settings, "figures": summaries}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
