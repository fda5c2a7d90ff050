"""Measures what HTTP adds to the engine alone, and how a hostile body delays another client's tokens.

    python -m bench.serving_cost [--model smollm2] [--batch 1 8 16] [--tokens 128] [--rounds 3]

The engine alone: requests submitted to a core that is stepped on the main thread of a process of its
own, with the libraries that the server preloads. Over HTTP: the same requests, streamed from ``slipstream
serve`` over loopback. Both run in turns, and neither drafts; what counts is tokens per second from the
first token of all to the last, medians of the rounds. The client is ``bench.raw_client``: on the same
machine every microsecond of a client would be taken from the engine and look like the server's.

What the process in front of the engine costs is read off its own CPU time, as Linux counts it: that of
streams of one token for a request, of what all further tokens add for a chunk. The same two figures are
taken of chats. Part of them is other processes' doing: beside an engine that computes on all cores the
same code takes up to three times as long as alone, since its data and instructions have left the caches.
How long the first token of a short prompt takes is shown for a client that is alone, in steps beside that
of the engine alone.

Then one client streams while another sends bodies of 7.9 MB: JSON that is nothing but small objects,
texts to tokenize, and token ids. Shown is how long the first client waits for a token, without and with
them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.raw_client import COMPLETIONS, events, post, read_all, token_times
from engine.process.launch import child_environment
from engine.process.preload import preload_environment

SIZE = 7_900_000
PLAIN = {"draft_strategy": "none"}
CHATS = "/v1/chat/completions"
FIRST_PROMPT = 16
FIRST_ROUNDS = 30


def prompts(count: int, num_tokens: int) -> list[list[int]]:
    """Different from the first token on, so that nothing comes from the prefix cache."""
    return [
        [300 + (7 * place + 13 * row) % 200 for place in range(num_tokens)] for row in range(count)
    ]


# --- the engine alone ---


def step_alone(control: Connection, model: str | None, max_num_seqs: int) -> None:
    """In a process of its own: answer (batch, prompt tokens, tokens) with tokens per second, and the
    seconds until all had their first."""
    from engine.build import build_engine
    from engine.config import EngineConfig
    from engine.request.params import GenerationRequest, SamplingParams

    engine, _ = build_engine(EngineConfig(model=model, max_num_seqs=max_num_seqs))
    core, number = engine.core, 0
    control.send("ready")
    while (asked := control.recv()) is not None:
        batch, num_prompt, num_tokens = asked
        for row in prompts(batch, num_prompt):
            number += 1
            sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            request = GenerationRequest(f"r{number}", tuple(row), sampling, cache_salt=f"{number}")
            core.submit(core.prepare(request))
        begin, times = time.perf_counter(), list[float]()
        seen: set[str] = set()
        while core.has_work:
            for event in core.step().events:
                seen.add(event.request_id)
                times += [time.perf_counter()] * (len(seen) == batch)
        control.send((len(times) / (times[-1] - times[0]), times[0] - begin))


@contextmanager
def alone(model: str | None, max_num_seqs: int) -> Iterator[Connection]:
    ours, theirs = Pipe()
    code = (
        "from multiprocessing.connection import Connection as C; import bench.serving_cost as b; "
        f"b.step_alone(C({theirs.fileno()}), {model!r}, {max_num_seqs})"
    )
    environment = child_environment() | preload_environment()
    process = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment
    )
    try:
        assert ours.recv() == "ready"
        yield ours
    finally:
        process.kill()
        process.wait()


# --- over HTTP ---


@contextmanager
def served(model: str | None, max_num_seqs: int, flags: list[str]) -> Iterator[tuple[str, int]]:
    """The address of a server, and the process that speaks HTTP there."""
    command = [sys.executable, "-m", "slipstream.cli", "serve", model or "bundled"]
    command += ["--port", "0", "--max-num-seqs", str(max_num_seqs), "--log-level", "info", *flags]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log, env=child_environment())
        said = Path(log.name).read_text
        try:
            while not (found := re.search(r"running on (http\S+:\d+)", said())):
                if process.poll() is not None:
                    raise SystemExit(said())
                time.sleep(0.1)
            yield found[1], process.pid
        finally:
            process.terminate()
            process.wait()


def body(prompt: Any, num_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": os.urandom(8).hex(),
        "speculative": PLAIN,
    }


def chat_body(number: int, num_tokens: int) -> dict[str, Any]:
    found = body("", num_tokens)
    del found["prompt"]
    say = f"What do you know of the number {number}, and of the sea? Answer at length."
    return {**found, "messages": [{"role": "user", "content": say}]}


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in tasks) / 1e9


def price(url: str, pid: int, kind: str, batch: int, num_tokens: int) -> tuple[float, float]:
    """Microseconds of the server's CPU per chunk, and per request with a single one."""

    def spent(num_tokens: int) -> float:
        if kind == "chats":
            path, bodies = CHATS, [chat_body(each, num_tokens) for each in range(batch)]
        else:
            path, bodies = COMPLETIONS, [body(row, num_tokens) for row in prompts(batch, 16)]
        before = cpu_seconds(pid)
        token_times(url, bodies, path)
        return cpu_seconds(pid) - before

    one, all_of_them = spent(1), spent(num_tokens)
    return 1e6 * (all_of_them - one) / batch / (num_tokens - 1), 1e6 * one / batch


def first_token_seconds(url: str, num_prompt: int) -> float:
    content = json.dumps(body(prompts(1, num_prompt)[0], 2)).encode()
    begin = time.perf_counter()
    (reply,) = read_all([post(url + COMPLETIONS, content)])
    return events(reply)[0][0] - begin


def over_http(url: str, batch: int, num_prompt: int, num_tokens: int) -> float:
    found = token_times(url, [body(row, num_tokens) for row in prompts(batch, num_prompt)])
    start = max(times[0] for times in found)
    end = max(times[-1] for times in found)
    return sum(each >= start for times in found for each in times) / (end - start)


# --- hostile bodies ---


def hostile() -> dict[str, bytes]:
    ids = [1 + place % 400 for place in range(SIZE // 5)]
    return {
        "objects": json.dumps({"prompt": [{}] * (SIZE // 4)}).encode(),
        "texts": json.dumps(
            {"prompt": ["def f(x): return x * 2\n" * 80] * (SIZE // 1930)}
        ).encode(),
        "ids": json.dumps({"prompt": ids}).encode(),
    }


def waits(url: str, num_tokens: int) -> dict[str, list[float]]:
    """Seconds between two tokens of a stream, in order of size, by what else was sent meanwhile."""
    found = {}
    with ThreadPoolExecutor(1) as pool:
        for name, content in {"nothing": b"", **hostile()}.items():
            reading = pool.submit(token_times, url, [body([5, 6, 7], num_tokens)])
            time.sleep(0.5)
            if content:
                answer = send_apart(url, content)
                assert answer == 400, answer
            (times,) = reading.result()
            gaps = (after - each for each, after in zip(times, times[1:], strict=False))
            found[name] = sorted(gaps)
    return found


def send_apart(url: str, content: bytes) -> int:
    """The status of the answer to a body, which a process of the lowest priority sends."""
    code = (
        "import sys; from bench.raw_client import post, read_all, status; "
        "(reply,) = read_all([post(sys.argv[1], sys.stdin.buffer.read())]); print(status(reply))"
    )
    command = ["nice", "-n", "19", sys.executable, "-c", code, f"{url}/v1/completions"]
    said = subprocess.run(command, input=content, stdout=subprocess.PIPE, check=True)
    return int(said.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="folder or name; default: the bundled model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-alone", action="store_true", help="only hostile bodies")
    parser.add_argument("--flag", action="append", default=[], help="of the server, as --flag=--x")
    options = parser.parse_args()
    most = max(options.batch)
    model = options.model
    if model and Path(model).exists():
        model = str(Path(model).resolve())
    with served(model, most, options.flag) as (url, pid):
        if not options.skip_alone:
            compare(url, pid, model, most, options)
        for name, found in waits(url, 4 * options.tokens).items():
            shown = (found[len(found) // 2], found[-len(found) // 100], found[-1])
            median, high, longest = (round(1000 * each) for each in shown)
            print(f"beside {name}: median {median} ms, 99 % under {high}, longest {longest}")


def compare(url: str, pid: int, model: str | None, most: int, options: argparse.Namespace) -> None:
    with alone(model, most) as control:
        for batch in options.batch:
            asked = (batch, options.prompt_tokens, options.tokens)
            rates: tuple[list[float], list[float]] = ([], [])
            prices: dict[str, list[tuple[float, float]]] = {"completions": [], "chats": []}
            for _ in range(options.rounds):
                control.send(asked)
                rates[0].append(control.recv()[0])
                rates[1].append(over_http(url, *asked))
                for kind, found in prices.items():
                    found.append(price(url, pid, kind, batch, options.tokens))
            engine, http = map(statistics.median, rates)
            print(
                f"{batch} at once: {engine:.1f} tokens/s alone, {http:.1f} over HTTP, "
                f"ratio {http / engine:.3f}",
                flush=True,
            )
            for kind, found in prices.items():
                chunk, request = map(statistics.median, zip(*found, strict=True))
                print(f"  {kind}: {chunk:.0f} us of CPU a chunk, {request:.0f} us a request")
            if batch == 1:
                show_first(url, control, 1 / engine)


def show_first(url: str, control: Connection, step_seconds: float) -> None:
    """How much later the first token of a short prompt comes over HTTP, in steps."""
    alone_seconds, http_seconds = [], []
    for _ in range(FIRST_ROUNDS):
        control.send((1, FIRST_PROMPT, 2))
        alone_seconds.append(control.recv()[1])
        http_seconds.append(first_token_seconds(url, FIRST_PROMPT))
    bare, http = statistics.median(alone_seconds), statistics.median(http_seconds)
    print(
        f"  first token of {FIRST_PROMPT}: {1000 * bare:.2f} ms alone, {1000 * http:.2f} ms over "
        f"HTTP, {(http - bare) / step_seconds:.2f} steps more",
        flush=True,
    )


if __name__ == "__main__":
    main()
