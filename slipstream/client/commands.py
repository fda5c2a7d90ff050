"""The parsers of ``slipstream complete``, ``chat``, ``bench``, ``prove`` and ``warm``. What does the
work, and the libraries that it needs, are imported when a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.client.errors import ClientError, FlagError, missing_library
from slipstream.client.flags import add_connection, add_field, add_request, add_speculative
from slipstream.client.spec_bench import IDS

DEFAULT_COMPLETION_TOKENS = 256
_EXTRAS = {"httpx": "client", "rich": "client", "tqdm": "client", "matplotlib": "plot"}
_INTERRUPTED = 130
_MARK_HELP = (
    "how accepted drafts are marked: auto underlines them on a terminal and leaves piped text as it "
    "is; brackets; none (default: auto)"
)

_COMPLETE = """Continue a prompt and show which tokens were drafted.

On a terminal accepted drafts are underlined, and a line below the text shows gamma (the drafts
checked in the newest step), the share accepted, tokens per step and per second. Into a pipe goes
the bare text; the account of the drafts goes to standard error. Servers other than Slipstream work
too, but do not tell what they drafted."""
_COMPLETE_EXAMPLES = """examples:
  slipstream complete "def fibonacci(n):"
  slipstream complete --max-tokens 64 --temperature 0 < prompt.txt
  slipstream complete "import " --drafter nasd --tree tree --gamma 8
  slipstream complete "import " --drafter none --json"""
_CHAT = """Talk to the model. Standard input that is no terminal is read line by line, a message per
line; with --message one message is answered."""
_CHAT_EXAMPLES = """examples:
  slipstream chat
  slipstream chat --system "Answer in one line." --drafter suffix
  slipstream chat --message - --temperature 0 < edit.txt

in the conversation:
  /reset  /history  /save FILE  /load FILE  /drafter [NAME]  /help  /quit
  Ctrl-C: stop the reply  Ctrl-D: leave"""
_BENCH = """Measure what drafting gains on a running server: the same prompts, seeds and limits with
and without it, in turns. A server other than Slipstream is measured as it is.

Each drafter is an arm; `none` (plain decoding) is always one and is what the others are compared with.
In every round every arm sends all prompts, --concurrency at a time, and the order of arms rotates.
Each arm and round has a cache salt of its own, so no arm finds prompts cached, or texts learned, that
another one sent. Texts are compared with those of `none`; the bench stops if the server is restarted
while it runs."""
_BENCH_EXAMPLES = """examples:
  slipstream bench
  slipstream bench --drafters ngram,suffix,stand --concurrency 8 --requests 32
  slipstream bench --prompts requests.jsonl --json out.json --plot out.png
  slipstream bench --spec-bench question.jsonl --per-category 2 --concurrency 1

requests.jsonl has one object per line: {"prompt": "..."} or {"messages": [...]}."""

_PROVE = """Prove that a server writes the same texts whatever is drafted and whoever else is there.

Texts are written once without drafts and alone, then again: by every drafter that the server offers, in
chains, trees and under every policy, alone and in company, with prompts cached and not; greedy and
sampled with seeds; free, under a schema, with stop strings, penalties and biases, with
log-probabilities. Texts drawn by rejection are tested by chi-squared against the log-probabilities that
the server reports, falsely accused once in a million runs.

Another server of OpenAI's API is compared with itself, alone and in company, or with --against.

Exit status: 0; 1 if a promise of /v1/models (determinism: exact, exact_verified) or a distribution was
not kept; 2 if nothing could be proven."""
_PROVE_EXAMPLES = """examples:
  slipstream prove
  slipstream prove http://127.0.0.1:8000 --requests 10000 --json proof.json --markdown proof.md
  slipstream prove http://127.0.0.1:8080 --against http://127.0.0.1:8081"""

_WARM = """Teach a fresh server, or replica, what was written before: the lines of a log are sent as
prompts that already have their completions. The server caches the texts and, where the drafter is
`suffix`, drafts from them for later requests with the same API key and cache salt. No text changes
for it.

LOG is what `slipstream replay` reads: {"prompt": ..., "completion": ...}, both texts or both token ids,
or "messages" in place of "prompt"; and "cache_salt". The newest line is the last."""
_WARM_EXAMPLES = """examples:
  slipstream warm requests.jsonl
  SLIPSTREAM_API_KEY=... slipstream warm requests.jsonl --url http://10.0.0.7:8000 --last 200"""


def add_client_commands(commands: Any) -> None:
    """Add the subcommands to ``commands``, what ``ArgumentParser.add_subparsers`` returned."""
    complete = _add(
        commands, "complete", "continue a prompt, drafts marked", _COMPLETE, _COMPLETE_EXAMPLES
    )
    complete.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the text; - reads standard input, as does leaving it out where something is piped in",
    )
    _add_display(complete)
    add_connection(complete)
    add_request(complete, DEFAULT_COMPLETION_TOKENS)

    chat = _add(commands, "chat", "talk to the model, drafts marked", _CHAT, _CHAT_EXAMPLES)
    chat.add_argument("--message", metavar="TEXT", help="answer this and leave; - reads stdin")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    _add_display(chat)
    add_connection(chat)
    add_request(chat, None)

    bench = _add(commands, "bench", "measure drafting on a running server", _BENCH, _BENCH_EXAMPLES)
    _add_bench(bench)
    add_connection(bench)
    add_speculative(bench).add_argument(
        "--drafters",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="arms beside none, apart by spaces or commas (default: the server's default)",
    )

    prove = _add(commands, "prove", "prove that drafts change no text", _PROVE, _PROVE_EXAMPLES)
    _add_prove(prove)
    add_connection(prove)

    warm = _add(commands, "warm", "teach a server from a log", _WARM, _WARM_EXAMPLES)
    warm.add_argument("log", metavar="LOG", type=Path, help="JSON lines")
    warm.add_argument(
        "--last", type=_count, default=512, metavar="N", help="lines, from its end (default: 512)"
    )
    warm.add_argument("--concurrency", type=_count, default=4, metavar="N", help="default: 4")
    warm.add_argument(
        "--drafter", default="suffix", metavar="NAME", help="which is to learn (default: suffix)"
    )
    add_connection(warm)


def _add(
    commands: Any, name: str, summary: str, description: str, examples: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_runner(name))
    return parser


def _add_display(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mark", choices=("auto", "brackets", "none"), default="auto", help=_MARK_HELP
    )
    parser.add_argument("--quiet", action="store_true", help="leave the account out")
    parser.add_argument(
        "--no-color", action="store_true", help="as does the variable NO_COLOR; underlines stay"
    )
    parser.add_argument(
        "--json", action="store_true", help="print each reply as one line of JSON, once it is whole"
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines (default: built-in prompts)"
    )
    parser.add_argument(
        "--spec-bench",
        type=Path,
        metavar="FILE",
        help="ask the questions of a file in Spec-Bench's form, all turns, and tell its groups apart",
    )
    parser.add_argument("--ids", choices=IDS, help="of its questions (default: all)")
    parser.add_argument(
        "--per-category", type=_count, metavar="N", help="of its questions (default: all)"
    )
    parser.add_argument("--concurrency", type=_count, default=4, metavar="N", help="default: 4")
    parser.add_argument(
        "--requests",
        type=_count,
        metavar="N",
        help="requests per arm and round; prompts come round again (default: one per prompt)",
    )
    parser.add_argument("--rounds", type=_count, default=2, metavar="N", help="default: 2")
    parser.add_argument("--max-tokens", type=_count, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default: 0")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the first prompt; then counted up"
    )
    add_field(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw them (.png; needs matplotlib)"
    )


def _add_prove(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", nargs="?", metavar="URL", help="goes before --url")
    parser.add_argument(
        "--against", metavar="URL2", help="a server that writes the texts to compare with"
    )
    parser.add_argument(
        "--requests",
        type=_count,
        default=200,
        metavar="N",
        help="texts that are compared or tested, beside those to compare with (default: 200)",
    )
    parser.add_argument(
        "--concurrency", type=_count, default=8, metavar="N", help="the company (default: 8)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the choice of requests (default: 0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each request there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report there")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _runner(name: str) -> Callable[[argparse.Namespace], int]:
    """Runs ``client.<name>``; failures become one line and a status: 2 for a request that
    cannot be made, 1 for one that went wrong."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            status: int = import_module(f"slipstream.client.{name}").run(arguments)
        except ModuleNotFoundError as error:
            message = missing_library(error, _EXTRAS)
            if message is None:
                raise
            return _complain(message, 2)
        except FlagError as error:
            return _complain(str(error), 2)
        except ClientError as error:
            return _complain(str(error), 1)
        except KeyboardInterrupt:
            return _complain("interrupted", _INTERRUPTED)
        except BrokenPipeError:
            # The reader has left, as `head` does. Nothing may be flushed into the pipe at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return status

    return run


def _complain(message: str, status: int) -> int:
    sys.stderr.write(f"slipstream: {message}\n")
    return status
