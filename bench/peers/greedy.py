"""``python -m bench.peers.greedy``: one GGUF file's greedy tokens, by llama.cpp and by this engine.

Both complete the same prompts, as token ids, one at a time and without drafts. Where two texts part,
a table shows each side's choice and its margin, the log-probability of its likeliest token less that of
the second: a small one is a near-tie, which any rounding decides. Then the file's weights choose there
in float32, without rounded inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bench.models import core_of
from bench.options import positive
from bench.peers.http_worker import Server
from bench.peers.llama_cpp import LlamaCpp, server_command
from bench.peers.model_files import dequantised, model_files
from bench.peers.options import add_engine, add_model
from bench.peers.place import DEFAULT, PeerUnavailableError, Place, make_environment
from bench.workloads import PromptSource, load_prompts, workload_names
from engine.build import build_engine
from engine.config import EngineConfig
from engine.model.loader import load_tokenizer
from engine.request.errors import UnsupportedModelError
from engine.request.events import TokenEvent
from engine.request.params import GenerationRequest, SamplingParams

_LONGEST_PROMPT = 512
_SHOWN = 12


class Choice(NamedTuple):
    """A token that was written. ``margin``: log-probability of the likeliest less that of ``second``.
    None: not told."""

    token_id: int
    second: int | None
    margin: float | None


Text = list[Choice]


class Difference(NamedTuple):
    """Where two texts part. ``exact``: what the file's weights choose there in float32."""

    prompt: int
    position: int
    theirs: Choice
    ours: Choice
    exact: Choice


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    cache = args.cache.resolve()
    try:
        models = model_files(args.model, None, args.gguf, cache, args.threads)
        if models.gguf is None:
            sys.exit(f"{args.model} is no GGUF file: --gguf makes one of it")
        place = Place(
            cache=cache,
            target=models.target,
            draft=None,
            num_threads=args.threads,
            max_running=1,
            max_tokens=-(-(_LONGEST_PROMPT + args.new_tokens) // 128) * 128,
            gguf=models.gguf,
        )
        peer = LlamaCpp()
        make_environment(peer, place)
        peer.prepare(place)
    except (OSError, UnsupportedModelError, PeerUnavailableError) as error:
        sys.exit(str(error))
    tokenizer = load_tokenizer(str(models.target))
    try:
        prompts = _prompts(tokenizer, args.workload, args.prompts)
    except ValueError as error:  # no chat template
        sys.exit(str(error))
    theirs = llama_texts(place, prompts, args.new_tokens)
    ours = our_texts(models.gguf, place, prompts, args.new_tokens, dict(args.engine))
    differences = compare(models.gguf, prompts, theirs, ours)
    print(markdown(tokenizer, theirs, ours, differences))
    if args.output is not None:
        found = {
            "settings": {name: str(value) for name, value in vars(args).items()},
            "llama.cpp": theirs,
            "slipstream": ours,
            "differences": [each._asdict() for each in differences],
        }
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").partition(": ")[2]
    parser = argparse.ArgumentParser(prog="python -m bench.peers.greedy", description=about)
    add_model(parser, default="smollm2")
    add_engine(parser, "settings of this engine, as EngineConfig calls them")
    parser.add_argument("--workload", nargs="+", choices=workload_names(), default=["chat", "code"])
    parser.add_argument("--prompts", type=positive, default=20, help="of all workloads (20)")
    parser.add_argument("--new-tokens", type=positive, default=64, help="tokens of each (64)")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads (2)")
    parser.add_argument("--cache", type=Path, default=DEFAULT, help="as of bench.peers (.peers)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all choices as JSON")
    return parser


def _prompts(
    tokenizer: PreTrainedTokenizerBase, workloads: Sequence[str], count: int
) -> list[list[int]]:
    """As many of each workload, but for the remainder."""
    source = PromptSource(tokenizer, len(tokenizer), _LONGEST_PROMPT)
    share = -(-count // len(workloads))
    found = [each for name in workloads for each in load_prompts(name, source, share)]
    return [list(prompt.token_ids) for prompt in found[:count]]


def llama_texts(place: Place, prompts: Sequence[list[int]], num_new: int) -> list[Text]:
    """Texts end where llama.cpp ends them. Raises RuntimeError where its server does not start."""
    assert place.gguf is not None
    server = Server(server_command(place, place.gguf), "/health")
    try:
        return [_llama_text(server.url, prompt, num_new) for prompt in prompts]
    finally:
        server.close()


def _llama_text(url: str, prompt: list[int], num_new: int) -> Text:
    body = {
        "prompt": prompt,
        "n_predict": num_new,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "cache_prompt": False,
        "n_probs": 2,
        "return_tokens": True,
    }
    request = urllib.request.Request(
        url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        found = json.load(reply)
    return llama_choices(found["tokens"], found["completion_probabilities"])


def llama_choices(tokens: Sequence[int], likely: Sequence[dict[str, Any]]) -> Text:
    """Its list of probabilities leaves out tokens that end within a character."""
    text: Text = []
    left = list(reversed(likely))
    for token_id in tokens:
        if left and left[-1]["id"] == token_id:
            top = left.pop()["top_logprobs"]
            text.append(_choice(token_id, [(each["id"], each["logprob"]) for each in top]))
        else:
            text.append(Choice(token_id, None, None))
    return text


def our_texts(
    gguf: Path,
    place: Place,
    prompts: Sequence[list[int]],
    num_new: int,
    settings: dict[str, Any],
) -> list[Text]:
    """Texts go on after their end. Raises as ``build_engine``."""
    usual: dict[str, Any] = {
        "drafters": ("none",),
        "max_num_seqs": 1,
        "max_model_len": place.max_tokens,
        "num_threads": place.num_threads,
        "enable_prefix_cache": False,
    }
    engine, _ = build_engine(EngineConfig(model=str(gguf), **usual | settings))
    core = core_of(engine)
    sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, logprobs=2)
    texts = []
    for at, prompt in enumerate(prompts):
        core.submit(core.prepare(GenerationRequest(str(at), tuple(prompt), sampling)))
        text: Text = []
        while core.has_work:
            for event in core.step().events:
                if not isinstance(event, TokenEvent):
                    raise RuntimeError(f"a request failed: {event}")
                text += [_choice(each.token_id, each.top) for each in event.logprobs or ()]
        texts.append(text)
    return texts


def _choice(token_id: int, top: Sequence[tuple[int, float]]) -> Choice:
    (first, best), (second, next_best) = top[:2]
    return Choice(token_id, first if second == token_id else second, best - next_best)


def compare(
    gguf: Path, prompts: Sequence[list[int]], theirs: Sequence[Text], ours: Sequence[Text]
) -> list[Difference]:
    """The first difference of each pair of texts, as far as the shorter goes."""
    parting = {
        at: position
        for at, pair in enumerate(zip(theirs, ours, strict=True))
        if (position := _parting(*pair)) is not None
    }
    if not parting:
        return []
    model = dequantised(gguf, torch.float32)
    found = []
    for at, position in parting.items():
        written = [choice.token_id for choice in ours[at][:position]]
        with torch.inference_mode():
            logits = model(torch.tensor([prompts[at] + written])).logits[0, -1]
        values, ids = logits.log_softmax(-1).topk(2)
        exact = _choice(int(ids[0]), list(zip(ids.tolist(), values.tolist(), strict=True)))
        found.append(Difference(at, position, theirs[at][position], ours[at][position], exact))
    return found


def _parting(theirs: Text, ours: Text) -> int | None:
    pairs = enumerate(zip(theirs, ours, strict=False))
    return next((at for at, (one, other) in pairs if one.token_id != other.token_id), None)


def markdown(
    tokenizer: PreTrainedTokenizerBase,
    theirs: Sequence[Text],
    ours: Sequence[Text],
    differences: Sequence[Difference],
) -> str:
    num_equal = len(theirs) - len(differences)
    lines = [f"{num_equal} of {len(theirs)} texts are equal to their end."]
    if not differences:
        return lines[0]

    def shown(choice: Choice) -> str:
        piece = repr(tokenizer.decode([choice.token_id]))[1:-1][:_SHOWN]
        margin = "?" if choice.margin is None else f"{choice.margin:.3f}"
        return f"`{piece.replace('`', '').replace('|', '')}` {margin}"

    lines += [
        "Each side's token where texts part first, and its margin in nats:",
        "",
        "| prompt | position | llama.cpp | slipstream | float32 |",
        "| ---: | ---: | --- | --- | --- |",
    ]
    for each in differences:
        cells = (each.theirs, each.ours, each.exact)
        lines.append(
            f"| {each.prompt} | {each.position} | {' | '.join(shown(cell) for cell in cells)} |"
        )
    swapped = sum(
        (each.theirs.token_id, each.ours.token_id) == (each.ours.second, each.theirs.second)
        for each in differences
    )
    with_us, with_them = (
        sum(getattr(each, side).token_id == each.exact.token_id for each in differences)
        for side in ("ours", "theirs")
    )
    before = [
        choice.margin
        for at, text in enumerate(ours)
        for choice in text[: _position(at, differences)]
    ]
    lines += [
        "",
        f"Of these {len(differences)} pairs of choices {swapped} are each other's second; in float32 "
        f"{with_them} are llama.cpp's and {with_us} slipstream's. Median margins: "
        f"{_median(each.theirs.margin for each in differences)} (llama.cpp) and "
        f"{_median(each.ours.margin for each in differences)} (slipstream), "
        f"{_median(before)} where texts are equal.",
    ]
    return "\n".join(lines)


def _position(prompt: int, differences: Sequence[Difference]) -> int | None:
    return next((each.position for each in differences if each.prompt == prompt), None)


def _median(margins: Iterable[float | None]) -> str:
    found = [margin for margin in margins if margin is not None]
    return f"{median(found):.3f}" if found else "none"


if __name__ == "__main__":
    sys.exit(main())
