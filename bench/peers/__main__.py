"""``python -m bench.peers``: other servers and this one, on the same prompts, in turns.

Every peer gets an environment of its own and the same model in its own format, and runs as a worker that
stands still while others are timed. What cannot be had or fails is named with its reason, and takes
nothing from the others: results are written as they come.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from transformers import AutoConfig

from bench.peers.comparison import CellJobs, compare
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.model_files import find_heads, model_files
from bench.peers.openvino_genai import OpenVino
from bench.peers.options import SAMPLINGS, Options, parse_options
from bench.peers.place import Peer, PeerUnavailableError, Place
from bench.peers.report import check_picture
from bench.peers.slipstream_engine import Slipstream
from bench.peers.transformers_generate import Transformers
from bench.peers.vllm_cpu import VllmCpu
from bench.runner import Cell, make_jobs
from bench.workloads import PromptSource, load_prompts
from engine.model.loader import load_tokenizer
from engine.request.errors import UnsupportedModelError

ALL_PEERS: tuple[Peer, ...] = (Slipstream(), OpenVino(), VllmCpu(), LlamaCpp(), Transformers())
_DRAFT_ROOM = 64


def main(arguments: Sequence[str] | None = None, peers: Sequence[Peer] = ALL_PEERS) -> int:
    """1 if nothing could be measured."""
    about = (__doc__ or "").partition(": ")[2]
    options = parse_options(arguments, [peer.name for peer in peers], about)
    if options.output is not None:
        try:
            check_picture()
        except ImportError:
            sys.exit("--output needs matplotlib: pip install -e '.[plot]'")
    wanted = [peer for peer in peers if peer.name in options.peers]
    cache = options.cache.resolve()
    try:
        target, draft, gguf = model_files(
            options.model, options.draft_model, options.gguf, cache, options.num_threads
        )
        heads = find_heads(options.model, options.heads)
    except (OSError, ValueError, UnsupportedModelError, PeerUnavailableError) as error:
        sys.exit(str(error))
    cells = make_cells(options, str(target))
    longest = max(job.longest for _, jobs in cells for job in jobs)
    place = Place(
        cache=cache,
        target=target.resolve(),
        draft=None if draft is None else draft.resolve(),
        num_threads=options.num_threads,
        max_running=max(options.concurrency),
        # Whole blocks of any peer's size, with room for drafts past the end.
        max_tokens=-(-(longest + _DRAFT_ROOM) // 128) * 128,
        gguf=None if gguf is None else gguf.resolve(),
        settings=options.engine,
        heads=heads,
    )
    if options.list_only:
        for peer in wanted:
            names = [arm.name for plan in peer.plans(place) for arm in plan.arms]
            print("\n  ".join([f"{peer.name}: {peer.what}", *names]))
        return 0
    # Workers are ended by what ends a with-statement, which a signal alone does not.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        results = compare(wanted, place, cells, options)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0 if options.prepare_only or any(figures.arms for figures in results.cells) else 1


def make_cells(options: Options, target: str) -> CellJobs:
    """Every workload at every concurrency under every sampling, with the same prompts for all."""
    tokenizer = load_tokenizer(target)
    config = AutoConfig.from_pretrained(target)
    room = config.max_position_embeddings - options.num_new_tokens - _DRAFT_ROOM
    source = PromptSource(
        *(tokenizer, config.vocab_size, room, options.data),
        *(options.questions, options.num_new_tokens),
    )
    cells = []
    for workload in options.workloads:
        for size in options.concurrency:
            prompts = load_prompts(workload, source, options.num_prompts, size)
            for name in options.samplings:
                cell = Cell(workload, size, SAMPLINGS[name])
                cells.append((cell, make_jobs(cell, prompts, options.num_new_tokens)))
    return cells


if __name__ == "__main__":
    sys.exit(main())
