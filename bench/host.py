"""Times a step around a forward that costs nothing: the host's part, which a fast device waits for.

    taskset -c 0 python -m bench.host [--model smollm2] [--batch 1 8 32 64] [--drafters none ngram auto]

The engine is the real one; in place of the model stands a function from each row's token to the next one.
*Repeating* texts go round in circles of 48 tokens, and drafts are always chains of four, which drafters
that copy get right; of the others no text says the same twice, so that drafters come to rest. Shown are
the microseconds of a step, medians, less what the stand-in took, and a request's tokens in it. Choosing
among all of the vocabulary is among them, and reading so many logits takes longer than all the rest with
many requests: with ``--chosen`` the stand-in does it, as the graphs of a GPU do.

``--device-ms 1.5``: the stand-in is a device that takes so long and on which the next forward may be
launched meanwhile; shown is also how long it was idle between two forwards, with the engine running ahead
and without.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from bench.machine import describe_machine
from bench.models import load_bench_model
from engine.batch import ForwardOutput, InputBatch
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, SpeculativeParams
from slipstream.client.markdown import markdown_table

_CIRCLE = 48
_FIRST = 300
_WARM_TOKENS = 96
_STRIDE = 7919
"""A prime that divides no vocabulary: steps of it meet every token once."""
_PROMPT = 96
_NUM_DRAFTS = 4
_SPUN = 0.0002
"""Seconds that are not slept, since sleeps end late."""


class FreeRunner:
    """A ``Runner`` whose logits name one token for each row, by the row's own token."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        repeats: bool,
        max_rows: int,
        device_seconds: float = 0.0,
        chooses: bool = False,
    ) -> None:
        """``device_seconds``: a device takes so long for a forward, while the host goes on, and tells
        nothing of it before. ``chooses``: it also says which token is the likeliest of each row."""
        self._vocab_size, self._repeats = vocab_size, repeats
        generator = torch.Generator().manual_seed(1)
        self._logits = torch.randn(max_rows, vocab_size, generator=generator)
        self._hidden = torch.randn(max_rows, hidden_size, generator=generator)
        self._set: tuple[list[int], list[int]] = ([], [])
        self.seconds = 0.0
        self._device_seconds, self._ready = device_seconds, 0.0
        self._chooses = chooses
        self.idle: list[float] = []
        """Seconds that the device waited before each forward."""

    def after(self, token_id: int) -> int:
        if self._repeats:
            return _FIRST + (token_id - _FIRST + 1) % _CIRCLE
        return (token_id + _STRIDE) % self._vocab_size

    def forward(self, batch: InputBatch) -> ForwardOutput:
        began = time.perf_counter()
        if self._set[0]:
            self._logits[self._set] = 0.0
        count = len(batch.logits_indices)
        token_ids = batch.token_ids if batch.chosen is None else batch.chosen.tolist()
        tokens = [self.after(token_ids[row]) for row in batch.logits_indices]
        self._set = list(range(count)), tokens
        if count:
            self._logits[self._set] = 30.0
        hidden = tuple(self._hidden[: batch.num_rows] for _ in batch.hidden_layers)
        chosen = torch.tensor(tokens) if self._chooses and count else None
        ended = time.perf_counter()
        self.seconds += ended - began
        if not self._device_seconds:
            return ForwardOutput(self._logits[:count], hidden, tokens=chosen)
        self.idle.append(max(0.0, began - self._ready))
        self._ready = ready = max(began, self._ready) + self._device_seconds
        return ForwardOutput(self._logits[:count], hidden, lambda: self._wait(ready), tokens=chosen)

    def _wait(self, ready: float) -> float:
        while (left := ready - time.perf_counter()) > 0:
            if left > _SPUN:
                time.sleep(left - _SPUN)
        return self._device_seconds

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Found:
    """Microseconds of a step, a request's tokens in it, and microseconds that a device waited."""

    step: float
    tokens: float
    idle: float = 0.0


def measure(
    core: EngineCore,
    hidden_size: int,
    drafter: str,
    batch: int,
    repeats: bool,
    num_tokens: int,
    device_seconds: float = 0.0,
    chooses: bool = False,
) -> Found:
    """Steps ``batch`` requests until each has written ``num_tokens`` more than it takes to settle."""
    vocab_size = core.limits.vocab_size
    runner = FreeRunner(vocab_size, hidden_size, repeats, 512, device_seconds, chooses)
    core.runner = runner
    wanted = PLAIN
    if drafter != "none":
        options = core.speculation.drafters[drafter].info.defaults()
        wanted = SpeculativeParams(draft_strategy=drafter, options=options)
        if repeats:  # beside a forward that costs nothing no draft would pay
            wanted = replace(
                wanted,
                adaptive_depth="fixed",
                num_speculative_tokens=_NUM_DRAFTS,
                tree_strategy="linear",
            )
    for row in range(batch):
        ids = [_FIRST + row if repeats else row * 97]
        while len(ids) < _PROMPT:
            ids.append(runner.after(ids[-1]))
        most = _WARM_TOKENS + num_tokens
        sampling = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        name = f"{drafter} {batch} {row}"
        request = GenerationRequest(name, tuple(ids), sampling, wanted, cache_salt=name)
        core.submit(core.prepare(request))
    times: list[float] = []
    written = [0]
    while core.has_work:
        before, began = runner.seconds, time.perf_counter()
        result = core.step()
        taken = time.perf_counter() - began - (runner.seconds - before)
        if any(each.finish for each in result.events if hasattr(each, "finish")):
            core.abort_all()
            core.take_result()
            break
        times.append(taken)
        written.append(written[-1] + sum(len(each.token_ids) for each in result.events))
    first = next(at for at, num in enumerate(written) if num >= _WARM_TOKENS * batch)
    kept, idle = times[first:], runner.idle[first:-1] or [0.0]
    tokens = (written[-1] - written[first]) / len(kept) / batch
    return Found(statistics.median(kept) * 1e6, tokens, statistics.median(idle) * 1e6)


def measure_all(
    core: EngineCore, hidden_size: int, args: argparse.Namespace, device_seconds: float
) -> None:
    """Prints the tables of one device, or of a forward that takes none."""
    cells = list(product([False, True], args.drafters, args.batch))
    found: dict[Any, list[Found]] = {cell: [] for cell in cells}
    for _ in range(args.rounds):
        for repeats, drafter, batch in cells:
            given = drafter, batch, repeats, args.tokens, device_seconds, args.chosen
            found[repeats, drafter, batch].append(measure(core, hidden_size, *given))
    head = "us of a step / tokens" + (" / us of them idle" if device_seconds else "")
    for repeats in (False, True):
        rows = []
        for drafter in args.drafters:
            own = [_median(found[repeats, drafter, batch]) for batch in args.batch]
            rows.append([drafter, *(_said(each, device_seconds) for each in own)])
        print("repeating texts" if repeats else "texts that never repeat")
        print(markdown_table([[head, *map(str, args.batch)], *rows], 1), "\n")


def _median(found: Sequence[Found]) -> Found:
    columns = zip(*((each.step, each.tokens, each.idle) for each in found), strict=True)
    return Found(*map(statistics.median, columns))


def _said(found: Found, device_seconds: float) -> str:
    said = f"{found.step:.0f} / {found.tokens:.1f}"
    return f"{said} / {found.idle:.0f}" if device_seconds else said


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--drafters", nargs="+", default=["none", "ngram", "suffix", "auto"])
    parser.add_argument("--draft", action="append", default=[], help="as `slipstream serve`")
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chosen", action="store_true", help="tokens come with the forward")
    parser.add_argument("--device-ms", type=float, help="of a device's forwards: is it idle?")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    config = EngineConfig(max_num_seqs=max(args.batch), draft=tuple(args.draft))
    core = load_bench_model(args.model, config, False).core
    hidden_size = int(core.runner.model.config.hidden_size)  # type: ignore[attr-defined]
    machine = describe_machine(torch.device("cpu"))
    how = "compiled" if machine["compiled"] else "as it is"
    vocabulary = f"{args.model}'s vocabulary of {core.limits.vocab_size}"
    print(f"{machine['processor']}; the step {how}; {vocabulary}\n")
    gc.freeze()
    if args.device_ms is None:
        measure_all(core, hidden_size, args, 0.0)
        return
    for runs_ahead in (False, True):
        core.runs_ahead = runs_ahead
        if runs_ahead:
            core.cost.observe_overhead(0.0, is_hidden=True)
        print("running ahead" if runs_ahead else "waiting for the host", end=", ")
        measure_all(core, hidden_size, args, args.device_ms / 1000)


if __name__ == "__main__":
    main()
