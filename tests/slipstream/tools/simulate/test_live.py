"""Answers of real servers are read; the server here is the real one around a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slipstream.client.bench import builtin_prompts
from slipstream.client.errors import ClientError, RefusedError
from slipstream.tools.simulate.live import calibrate, measure
from slipstream.tools.simulate.live.servers import served
from slipstream.tools.simulate.live.streams import Address, Streamed
from slipstream.tools.simulate.routing import RoundRobin
from slipstream.tools.simulate.work import Arrivals
from worlds.live_server import live
from worlds.scripted_engine import ScriptedEngine

TEXTS = [measure.Text("edit", (1, 2), (3, 4, 5)), measure.Text("code", (6,), (7,))]


def streamed(start: float, *times: float, drafts: int = 0) -> Streamed:
    account = {"num_steps": len(times), "num_draft_tokens": drafts, "draft_ms": 2.0 * len(times)}
    return Streamed(start, times, (1,) * len(times), {"speculative": account})


async def test_a_stream_is_taken_apart_with_the_time_of_every_chunk() -> None:
    async with live(ScriptedEngine("abc")) as found:
        address = Address(found.address[1])
        body = {"prompt": "x", "max_tokens": 3, "speculative": {"return_drafted": True}}
        stream = await address.stream(body)
    # The script writes two tokens in its first step.
    assert stream.steps == (1, 1)
    assert stream.usage["completion_tokens"] == 3
    # Both may come in one piece, at one time.
    assert 0 < stream.first <= stream.whole
    assert list(stream.times) == sorted(stream.times)


async def test_a_refusal_and_a_closed_port_are_told_in_words() -> None:
    async with live(ScriptedEngine("abc")) as found:
        address = Address(found.address[1])
        with pytest.raises(ClientError, match=r"400 [^$]*max_tokens"):
            await address.stream({"prompt": "x", "max_tokens": -2})
        whole = await address.post({"prompt": "x", "max_tokens": 3})
        assert b'"usage"' in whole
    with pytest.raises(ClientError, match=f"port {address.port}"):
        await address.stream({"prompt": "x"})


async def test_texts_are_asked_for_in_tokens_and_counted_by_kind() -> None:
    async with live(ScriptedEngine("abcd")) as found:
        prompts = {"edit": builtin_prompts()[1::2][:2]}
        kinds, texts = await measure.measure_texts(Address(found.address[1]), prompts, 4)
    assert [text.kind for text in texts] == ["edit", "edit"]
    assert texts[0].completion_token_ids == tuple(b"abcd")
    assert kinds["edit"].lengths[0] == (len(texts[0].prompt_token_ids), 4)


async def test_a_kind_whose_answers_are_all_empty_is_refused() -> None:
    async with live(ScriptedEngine("")) as found:
        prompts = {"edit": builtin_prompts()[1:2]}
        with pytest.raises(ClientError, match="kind 'edit' have no answers"):
            await measure.measure_texts(Address(found.address[1]), prompts, 4)


def test_a_period_is_of_the_steps_in_which_all_were_written() -> None:
    first, second = (1.0, 2.0, 3.0, 4.0), (1.5, 2.5, 3.5, 4.5)
    period = measure._period([streamed(0.0, *times, drafts=8) for times in (first, second)])
    # From 1.5 to 4: three chunks of the first and two of the second.
    assert period.seconds == pytest.approx(2.5 / 2.5)
    assert period.rows == 2 * (1 + 2)
    assert period.draft_seconds == pytest.approx(0.002)


def test_acceptance_is_by_depth_where_the_depth_before_was_right() -> None:
    accounts: list[Mapping[str, Any]] = [
        {"num_steps": 10, "num_drafts": 8, "accepted_per_position": [6, 3]},
        {"num_steps": 10, "num_drafts": 2, "accepted_per_position": [2]},
    ]
    assert measure._acceptance(accounts) == (0.5, (0.8, pytest.approx(3 / 8)))
    none = {"num_steps": 3, "num_drafts": 0, "accepted_per_position": []}
    assert measure._acceptance([none]) == (0.0, ())


async def test_rounds_take_every_probe_in_turn_and_costs_their_medians(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine of which all is known: slower by a third in one round of three, which nobody notices."""
    asked, slowness = 0, 1.0

    async def stream(_: Address, body: Mapping[str, Any]) -> Streamed:
        nonlocal asked
        asked += 1
        gamma = body["speculative"].get("num_speculative_tokens", 0)
        num_prompt, num_steps = len(body["prompt"]), body["max_tokens"]
        step = slowness * (0.004 + 0.0001 * gamma + (0.001 if num_prompt == 1024 else 0.0))
        first = slowness * (0.006 + 0.0001 * (num_prompt - 2))
        times = [first + index * step for index in range(num_steps)]
        account = {"num_steps": num_steps, "num_draft_tokens": gamma * num_steps}
        account["draft_ms"] = 0.02 * slowness * num_steps
        return Streamed(0.0, tuple(times), (1,) * num_steps, {"speculative": account})

    monkeypatch.setattr(Address, "stream", stream)
    probes = measure.Probes(Address(1), [Address(2)])
    await probes.measure(1)
    per_round = asked // 2
    slowness = 4 / 3
    await probes.measure(1)
    slowness = 1.0
    await probes.measure(1)
    assert asked == 4 * per_round
    costs = probes.costs()
    steps = {(rows, context): seconds for rows, context, seconds, _ in costs.steps}
    assert steps[1, 0] == pytest.approx(0.004)
    assert steps[5, 0] == pytest.approx(0.0044 - 0.00002)
    assert steps[128, 0] == pytest.approx(0.004 + 0.0126)
    assert steps[1, 1024] == pytest.approx(0.005)
    assert costs.per_admission == pytest.approx(0.002)
    assert costs.drafting == pytest.approx(0.00002)
    # Requests side by side cost nothing more on this machine, and neighbours slow nobody down.
    assert costs.per_request == 0.0
    assert costs.with_neighbour == 1.0


class _Echo(Address):
    """Answers when it is told to."""

    async def stream(self, body: Mapping[str, Any]) -> Streamed:
        loop = asyncio.get_running_loop()
        sent.append((self.port, body["cache_salt"], body["max_tokens"]))
        return streamed(loop.time(), loop.time() + 1.0, loop.time() + 3.0)


sent: list[tuple[int, str, int]] = []


async def test_a_replay_sends_every_request_to_where_the_router_says() -> None:
    works = calibrate.of_texts(TEXTS, Arrivals(2000.0, 0.01, 2, seed=3), "load")
    assert {work.kind for work in works} == {"edit", "code"}
    sent.clear()
    router = RoundRobin(2)
    gone, found = await calibrate.replay([_Echo(0), _Echo(1)], works, router)
    assert [port for port, _, _ in sent] == [index % 2 for index in range(len(works))]
    asked = sorted((work.tenant, len(work.completion_token_ids)) for work in works)
    assert sorted((salt, most) for _, salt, most in sent) == asked
    assert sorted((work.tenant, len(work.completion_token_ids)) for work in gone) == asked
    # Never before its time; and in the order in which they went out.
    assert [work.at for work in gone] == sorted(work.at for work in gone)
    assert all(at.at >= work.at for at, work in zip(gone, works, strict=True))
    assert len(found.first) == len(found.whole) == len(works)
    assert all(whole > first >= 1.0 for first, whole in zip(found.first, found.whole, strict=True))
    assert found.num_refused == 0


async def test_a_replay_tells_what_the_host_gave_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 0 100 0 0 0 50 7 7\ncpu0 1 1\n")

    class Host(Address):
        async def stream(self, body: Mapping[str, Any]) -> Streamed:
            del body
            stat.write_text("cpu  150 0 10 100 0 0 0 90 9 9\ncpu0 1 1\n")
            return streamed(0.0, 1.0)

    monkeypatch.setattr(calibrate, "_STAT", stat)
    works = calibrate.of_texts(TEXTS, Arrivals(2000.0, 0.01, 2, seed=3), "load")
    _, found = await calibrate.replay([Host(0)], works, RoundRobin(1))
    assert found.stolen == pytest.approx(0.4)
    monkeypatch.setattr(calibrate, "_STAT", tmp_path / "none")
    _, found = await calibrate.replay([_Echo(0)], works, RoundRobin(1))
    assert found.stolen == 0.0


class _Full(Address):
    async def stream(self, body: Mapping[str, Any]) -> Streamed:
        del body
        raise RefusedError("too much to do", self.port)


async def test_a_full_replica_is_counted_and_a_broken_one_ends_the_run() -> None:
    works = calibrate.of_texts(TEXTS, Arrivals(2000.0, 0.01, 2, seed=3), "load")
    gone, found = await calibrate.replay([_Full(429), _Echo(1)], works, RoundRobin(2))
    assert len(gone) == len(works)
    assert found.num_refused == len(works) - len(works) // 2
    assert len(found.whole) == len(works) // 2
    with pytest.raises(RefusedError, match="too much"):
        await calibrate.replay([_Full(500), _Echo(1)], works, RoundRobin(2))


def test_the_table_names_load_difference_and_the_noise_of_measuring() -> None:
    figures = [
        calibrate.Figure("tokens per second", (99.0, 101.0), 93.0),
        calibrate.Figure("whole answer, p99 (ms)", (8.0, 12.0), 11.0),
        calibrate.Figure("refused", (0.0, 0.0), 0.0),
    ]
    comparison = calibrate.Comparison(0.5, 4.0, figures, stolen=(0.0, 0.07))
    said = calibrate.table([comparison])
    assert "50% (4.0/s), 7% stolen |" in said
    assert "-7.0%" in said
    difference, spread = calibrate.largest([comparison])
    assert difference == pytest.approx(0.1)
    assert spread == pytest.approx(0.4)


async def test_a_server_that_does_not_come_up_is_told_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="no-such-flag"):
        async with served([8449], ["--no-such-flag"], tmp_path):
            pass
