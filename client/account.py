"""What a reply's speculation came to, in lines of text: while it runs, and at its end."""

from __future__ import annotations

from typing import Any

from client.stream import Reply

UNTOLD = "this server does not tell which tokens were drafted"


def status_line(reply: Reply, now: float) -> str:
    """The newest gamma, and acceptance, tokens per step and tokens per second so far."""
    parts = []
    if reply.gamma is not None:
        parts.append(f"gamma {reply.gamma:.0f}")
    if reply.acceptance_rate is not None:
        parts.append(f"accepted {reply.acceptance_rate:.0%}")
    if reply.tokens_per_step is not None:
        parts.append(f"{reply.tokens_per_step:.2f} tokens/step")
    speed = _tokens_per_second(reply, now)
    if speed is not None:
        parts.append(f"{speed:.0f} {_unit(reply)}/s")
    if reply.first_token_time is None:
        return f"waiting for the first token, {now - reply.started:.0f} s"
    return "  ".join([*parts, f"{reply.num_tokens} {_unit(reply)}"])


def _unit(reply: Reply) -> str:
    return "chunks" if reply.counts_pieces else "tokens"


def _tokens_per_second(reply: Reply, now: float) -> float | None:
    """After the first piece: the prompt's time is not the text's."""
    if reply.first_token_time is None or now <= reply.first_token_time:
        return None
    num_tokens = reply.num_tokens - reply.num_first_tokens
    return num_tokens / (now - reply.first_token_time) if num_tokens > 0 else None


def summary(reply: Reply) -> list[str]:
    """The server's account of a finished reply; of one that was broken off, what is known here."""
    lines = [_ending(reply)]
    account = reply.speculative
    if not reply.tells_drafts:
        return [*lines, UNTOLD]
    if account is None:
        return [*lines, status_line(reply, reply.last_token_time or reply.started)]
    lines.append(_speculation(account))
    histogram = account["acceptance_histogram"]
    if account["num_draft_tokens"]:
        counted = [f"{count} x {number}" for number, count in enumerate(histogram) if count]
        lines.append(f"steps x accepted drafts: {', '.join(counted)}")
    return lines


def _ending(reply: Reply) -> str:
    why = {"stop": "ended", "length": "cut at the limit of tokens", None: "broken off"}
    count = f"{reply.num_tokens} {_unit(reply)}"
    parts = [f"{count}, {why.get(reply.finish_reason, reply.finish_reason)}"]
    if reply.time_to_first_token is not None and reply.last_token_time is not None:
        parts.append(f"first after {reply.time_to_first_token:.2f} s")
        parts.append(f"all after {reply.latency:.2f} s")
        speed = _tokens_per_second(reply, reply.last_token_time)
        if speed is not None:
            parts.append(f"{speed:.0f} {_unit(reply)}/s")
    if reply.seed is not None:
        parts.append(f"seed {reply.seed}")
    return "; ".join(parts)


def _speculation(account: dict[str, Any]) -> str:
    steps = f"{account['num_steps']} steps"
    if account["tokens_per_step"] is not None:
        steps += f" of {account['tokens_per_step']:.2f} tokens"
    if not account["num_draft_tokens"]:
        return f"{account['drafter']}: {steps}, nothing drafted"
    parts = [
        f"{account['drafter']}: {steps}",
        f"{account['num_accepted_tokens']} of {account['num_draft_tokens']} drafts accepted "
        f"({account['acceptance_rate']:.1%})",
        f"mean gamma {account['mean_gamma']:.2f}",
    ]
    if account["estimated_speedup"] is not None:
        parts.append(f"estimated speed-up {account['estimated_speedup']:.2f}x")
    return ", ".join(parts)
