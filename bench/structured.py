"""``python -m bench.structured``: what a grammar costs a step, and what drafting its forced tokens saves.

Tool calls of random functions are written under their grammar, greedy and sampled, by gamma 0 and by
drafters, in one engine and turn by turn. Forwards do not hang on the machine; the grammar's share of a
step's time is measured inside the steps that it is a share of.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.machine import describe_machine
from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.grammar.constraint import GrammarConstraint
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.sampling.processors.grammar import Grammar
from engine.speculation import manager
from slipstream.client.markdown import markdown_table

GAMMA_0 = "none"
TEMPERATURES = (0.0, 0.7)
_VERBS = ("get", "set", "list", "create", "update", "delete", "search", "send")
_THINGS = (
    "weather",
    "calendar_event",
    "order",
    "invoice",
    "user_profile",
    "message",
    "file",
    "route",
)
_FIELDS: dict[str, dict[str, Any]] = {
    "location": {"type": "string", "maxLength": 24},
    "customer_name": {"type": "string", "maxLength": 16},
    "unit": {"enum": ["celsius", "fahrenheit"]},
    "status": {"enum": ["open", "closed", "pending", "cancelled"]},
    "quantity": {"type": "integer", "minimum": 1, "maximum": 500},
    "date": {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"},
    "include_details": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
}


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call: the prompt asks for it, and the grammar holds the output to it."""

    prompt: str
    schema: dict[str, Any]


def random_call(rng: random.Random) -> Call:
    """Draws a call with two to five arguments, all of them required."""
    name = f"{rng.choice(_VERBS)}_{rng.choice(_THINGS)}"
    names = rng.sample(sorted(_FIELDS), rng.randint(2, 5))
    arguments = {
        "type": "object",
        "properties": {each: _FIELDS[each] for each in names},
        "required": names,
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    prompt = f"Call the function {name} with {', '.join(names)}:\n{json.dumps(arguments)}\n"
    return Call(prompt, schema)


@dataclass(slots=True)
class Account:
    """One drafter's runs at one temperature."""

    drafter: str
    temperature: float
    texts: list[tuple[int, ...]] = field(default_factory=list)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0
    grammar_seconds: float = 0.0


class GrammarClock:
    """Seconds spent on grammars: masks, forced tokens, what is left of proposals, and editing logits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        start, self._depth = perf_counter(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += perf_counter() - start


def timed(constraint: GrammarConstraint, clock: GrammarClock) -> GrammarConstraint:
    """The same constraint, whose work is measured."""
    for name in ("append", "allowed", "accepts", "forced"):
        setattr(constraint, name, timed_call(getattr(constraint, name), clock))
    return constraint


def timed_call(method: Callable[..., Any], clock: GrammarClock) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with clock.measure():
            return method(*arguments)

    return call


class Bench:
    """An engine whose grammars are timed, as are those of all others in this process from then on."""

    def __init__(self, config: EngineConfig, max_tokens: int) -> None:
        engine, self._tokenizer = build_engine(config)
        self.core: EngineCore = engine.core
        self.clock = GrammarClock()
        self._max_tokens = max_tokens
        processors = {Grammar: "process", manager: "constrain"}
        for owner, name in processors.items():
            setattr(owner, name, timed_call(getattr(owner, name), self.clock))
        constrain = self.core.limits.constrain
        assert constrain is not None
        self.core.limits = replace(
            self.core.limits, constrain=lambda *grammar: timed(constrain(*grammar), self.clock)
        )

    def run(self, call: Call, seed: int, account: Account) -> None:
        """Write one call."""
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(call.schema),
            overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
        )
        request = GenerationRequest(
            "call",
            tuple(self._tokenizer.encode(call.prompt)),
            SamplingParams(
                max_tokens=self._max_tokens,
                temperature=account.temperature,
                seed=seed,
                grammar=grammar,
            ),
            SpeculativeParams(draft_strategy=account.drafter),
        )
        self.core.submit(self.core.prepare(request))
        text: list[int] = []
        start, before = perf_counter(), self.clock.seconds
        while self.core.has_work:
            for event in self.core.step().events:
                text += getattr(event, "token_ids", ())
                finish = getattr(event, "finish", None)
                if finish is not None:
                    account.num_steps += finish.speculative.num_steps
                    account.num_drafted += finish.speculative.num_draft_tokens
                    account.num_accepted += finish.speculative.num_accepted_tokens
        account.seconds += perf_counter() - start
        account.grammar_seconds += self.clock.seconds - before
        account.texts.append(tuple(text))


def compare(bench: Bench, drafters: Sequence[str], num_calls: int) -> list[Account]:
    """All drafters on the same calls, turn by turn, after one call each to warm up."""
    rng = random.Random(0)
    calls = [random_call(rng) for _ in range(num_calls)]
    names = [GAMMA_0, *drafters]
    for name in names:
        bench.run(random_call(rng), 0, Account(name, 0.7))
    accounts = [Account(name, each) for each in TEMPERATURES for name in names]
    for seed, call in enumerate(calls):
        for account in accounts:
            bench.run(call, seed, account)
    return accounts


def rows_of(accounts: Sequence[Account]) -> list[list[str]]:
    """Returns the table's rows, one per account."""
    plain = {each.temperature: each for each in accounts if each.drafter == GAMMA_0}
    rows = []
    for each in accounts:
        base = plain[each.temperature]
        num_equal = sum(ours == theirs for ours, theirs in zip(each.texts, base.texts, strict=True))
        accepted = f"{each.num_accepted / each.num_drafted:.0%}" if each.num_drafted else "-"
        rows.append(
            [
                f"{each.temperature:g}",
                each.drafter,
                str(each.num_steps),
                f"{1 - each.num_steps / base.num_steps:.0%}",
                accepted,
                f"{base.seconds / each.seconds:.2f}x",
                f"{each.grammar_seconds / each.seconds:.1%}",
                f"{num_equal}/{len(each.texts)}",
            ]
        )
    return rows


HEADERS = (
    "temperature",
    "drafter",
    "forwards",
    "fewer",
    "accepted",
    "speed",
    "grammar's share",
    "equal texts",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ends with 1 if a draft changed a text."""
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    parser.add_argument("--model", help="smollm2, a folder or a file; default: the bundled model")
    parser.add_argument("--quantization", choices=["int8", "int4", "none"], help="as the engine's")
    parser.add_argument("--drafters", nargs="+", default=["grammar", "ngram", "suffix", "auto"])
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--output", type=Path, help="write the figures to this file, as JSON")
    options = parser.parse_args(arguments)
    config = EngineConfig(model=options.model, quantization=options.quantization)
    accounts = compare(Bench(config, options.max_tokens), options.drafters, options.calls)
    rows = rows_of(accounts)
    sys.stdout.write(markdown_table([HEADERS, *rows], 1) + "\n")
    if options.output:
        machine = describe_machine(torch.device("cpu"))
        figures = [dict(zip(HEADERS, row, strict=True)) for row in rows]
        options.output.write_text(json.dumps([machine, figures], indent=1))
    plain = {each.temperature: each.texts for each in accounts if each.drafter == GAMMA_0}
    return int(any(each.texts != plain[each.temperature] for each in accounts))


if __name__ == "__main__":
    sys.exit(main())
