"""Texts that a model writes itself, by the engine: what heads are trained on.

Every line of the file that it writes is one text: ``ids`` of the prompt and of the reply, of which the
first ``num_prompt`` are the prompt's, with its ``kind`` and the reply's ``temperature``. A run that is
started again goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from engine.build import build_engine
from engine.config import EngineConfig
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from training.prompts import OWN_SHARE, GivenPrompts, Prompt, PromptMaker, read_prompts
from training.samples import load_units

_TEMPERATURES = (0.0, 0.0, 0.7, 0.8, 1.0)
_MOST_PROMPT_TOKENS = 640
_FOLLOW_UPS = 0.15
"""The share of replies after which a conversation goes on."""
_MARK = "\x00"


@dataclass
class Writer:
    """Asks the engine for texts, ``at_once`` at a time, until the file has ``num_tokens`` of replies."""

    engine: Any
    tokenizer: Any
    prompts: PromptMaker
    rng: random.Random
    file: TextIO
    new_tokens: int
    num_tokens: int
    num_done: int = 0
    num_asked: int = 0

    def leave_out_long(self) -> None:
        """Raises ValueError where none of the prompts that were given is left."""
        if isinstance(self.prompts, GivenPrompts):
            num = self.prompts.keep(lambda each: _can_be_asked(self._prompt_ids(each)))
            print(f"prompts without tokens, or with over {_MOST_PROMPT_TOKENS}: {num} left out")

    async def run(self, at_once: int) -> None:
        began = time.monotonic()
        told = asyncio.create_task(self._tell(began, self.num_done))
        await asyncio.gather(*(self._write_on() for _ in range(at_once)))
        told.cancel()

    async def _tell(self, began: float, before: int) -> None:
        while True:
            await asyncio.sleep(30)
            rate = (self.num_done - before) / (time.monotonic() - began)
            print(f"{self.num_done} tokens, {rate:.0f} a second", flush=True)

    async def _write_on(self) -> None:
        while self.num_done < self.num_tokens:
            if self.rng.random() < self.prompts.own_share and self.tokenizer.chat_template:
                prompt = await self._own_request()
            else:
                prompt = self.prompts.draw()
            await self._answer(prompt)

    async def _own_request(self) -> Prompt:
        """Returns a request that the model makes up behind the opening of a user's turn."""
        before, after = self._chat([{"role": "user", "content": _MARK}]).split(_MARK)
        end = self._ids(after)[0]
        written = await self._generate(self._ids(before), 1.0, 160, (end,))
        text = self.tokenizer.decode(written, skip_special_tokens=True).strip()
        return Prompt("own", [{"role": "user", "content": text or "Hello!"}])

    async def _answer(self, prompt: Prompt) -> None:
        ids = self._prompt_ids(prompt)
        if not _can_be_asked(ids):
            return
        temperature = self.rng.choice(_TEMPERATURES)
        written = await self._generate(ids, temperature, self.new_tokens)
        if len(written) < 8:
            return
        row = {"kind": prompt.kind, "temperature": temperature, "num_prompt": len(ids)}
        self.file.write(json.dumps(row | {"ids": [*ids, *written]}) + "\n")
        self.num_done += len(written)
        reply = self.tokenizer.decode(written, skip_special_tokens=True)
        if len(reply) > 300 and prompt.kind in ("chat", "own"):
            self.prompts.texts.append(reply)
        if prompt.messages and self.rng.random() < _FOLLOW_UPS:
            await self._answer(self.prompts.follow_up(prompt.messages, reply))

    async def _generate(
        self, ids: list[int], temperature: float, most: int, stops: tuple[int, ...] = ()
    ) -> list[int]:
        self.num_asked += 1
        request = GenerationRequest(
            request_id=f"text-{self.num_asked}",
            prompt_token_ids=tuple(ids),
            sampling=SamplingParams(
                max_tokens=most,
                temperature=temperature,
                seed=self.rng.randrange(1 << 31),
                stop_token_ids=stops,
            ),
            speculative=SpeculativeParams(draft_strategy="none"),
        )
        written: list[int] = []
        async for event in self.engine.generate(request):
            written += event.token_ids
        return written

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return self._ids(self._chat(prompt.messages) if prompt.messages else prompt.text)

    def _chat(self, messages: list[dict[str, str]]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _can_be_asked(ids: list[int]) -> bool:
    return 0 < len(ids) <= _MOST_PROMPT_TOKENS


def make_prompts(args: argparse.Namespace, rng: random.Random) -> PromptMaker:
    if args.prompts is not None:
        return GivenPrompts(rng, read_prompts(args.prompts), args.held_out)
    name = "heldout.jsonl" if args.held_out else "train.jsonl"
    return PromptMaker(rng, load_units(args.corpus / name), args.held_out, args.own_share)


def whole_lines(path: Path) -> list[str]:
    """Returns the texts of a file that a run goes on with; it loses the one in whose middle the last run
    was killed."""
    if not path.exists():
        return []
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    return path.read_text().splitlines()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="as `slipstream serve` takes it")
    parser.add_argument("--out", type=Path, required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", type=Path, help="folder of training.corpus: prompts of ours")
    source.add_argument("--prompts", type=Path, help="JSON lines with prompt or messages: yours")
    parser.add_argument("--held-out", action="store_true", help="prompts that are kept aside")
    parser.add_argument(
        "--own-share",
        type=float,
        help=f"of prompts that the model thinks of itself, beside those of --corpus ({OWN_SHARE})",
    )
    parser.add_argument("--tokens", type=int, required=True, help="of replies")
    parser.add_argument("--new-tokens", type=int, default=320, help="most of a reply")
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    if args.own_share is None:
        args.own_share = OWN_SHARE
    elif args.prompts is not None:
        parser.error("--own-share is for --corpus: with --prompts all are yours")
    if not 0 <= args.own_share <= 1:
        parser.error("--own-share must be from 0 to 1")
    config = EngineConfig(
        model=args.model,
        drafters=("none",),
        max_num_seqs=args.at_once,
        max_num_batched_tokens=max(512, args.at_once),
    )
    lines = whole_lines(args.out)
    rng = random.Random(f"{args.seed} {len(lines)}")
    prompts = make_prompts(args, rng)
    done = [json.loads(line) for line in lines]
    num_done = sum(len(row["ids"]) - row["num_prompt"] for row in done)
    engine, tokenizer = build_engine(config)

    async def run() -> None:
        with open(args.out, "a") as file:
            writer = Writer(
                engine, tokenizer, prompts, rng, file, args.new_tokens, args.tokens, num_done
            )
            writer.leave_out_long()
            await engine.start()
            await writer.run(args.at_once)
        await engine.stop()

    asyncio.run(run())


if __name__ == "__main__":
    main()
