"""A server with one more file in ``engine/sampling/processors``: run as a process of its own, since what
is registered stays so. ``python -m worlds.processor_visit FOLDER`` writes what it found as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

import engine.sampling.processors
from engine.request.params import SamplingParams, SpeculativeParams, VerificationName

NAME = "no_repeat_ngram_size"
SIZE = 3


def visit() -> dict[str, Any]:
    # What is imported here builds the request schema.
    from worlds.drawing_drafter import DrawingDrafter
    from worlds.engine_harness import Driver, Setup, drafting, request
    from worlds.scripted_target import ScriptedTarget

    target = ScriptedTarget(16, habit=16, sharpness=1.2)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1]
    uniform = [[1 / 16] * 16] * 16

    def texts(
        further: dict[str, int], temperature: float, *drafts: SpeculativeParams, **world: Any
    ) -> list[Any]:
        sampling = SamplingParams(40, temperature, seed=7, further=further)
        setup = Setup(**world)
        asked = [request(f"r{i}", prompt, sampling, each) for i, each in enumerate(drafts)]
        driver = Driver(target.core(setup)).run(*asked)
        accepted = [
            driver.finishes[each.request_id].speculative.num_accepted_tokens for each in asked
        ]
        return [[driver.token_ids[each.request_id] for each in asked], accepted]

    def verified(name: VerificationName) -> SpeculativeParams:
        return replace(drafting("drawing", num_tokens=2), verification=name)

    match = (
        drafting("none"),
        drafting("ngram", num_tokens=6, ngram_min=1),
        drafting("nasd", width=3),
    )
    drawing = {"drawing": DrawingDrafter(uniform, [1, 1])}
    return {
        "prompt": prompt,
        "greedy": texts({NAME: SIZE}, 0.0, *match),
        "sampled": texts({NAME: SIZE}, 1.0, *match),
        "without": texts({}, 0.0, match[0]),
        "in_distribution": texts(
            {NAME: SIZE}, 1.0, verified("rejection"), verified("block"), drafters=drawing
        ),
        **asyncio.run(served()),
    }


async def served() -> dict[str, Any]:
    from worlds.request_bodies import ENDPOINTS
    from worlds.scripted_engine import ScriptedEngine
    from worlds.serving import serve

    scripted = ScriptedEngine("hello")
    found: dict[str, Any] = {"statuses": [], "refusals": []}
    async with serve(scripted) as client:
        for path, (_, body, *_) in ENDPOINTS.items():
            # These take their authors' fields.
            if path in ("/responses", "/messages"):
                continue
            reply = await client.post(path, json=body | {NAME: SIZE})
            found["statuses"].append(reply.status_code)
            for bad in (-1, 33, "x"):
                reply = await client.post(path, json=body | {NAME: bad})
                found["refusals"].append([reply.status_code, reply.json()["error"]["param"]])
        schemas = (await client.get("http://test/openapi.json")).json()["components"]["schemas"]
    found["further"] = [dict(each.sampling.further) for each in scripted.requests]
    found["schemas"] = [schemas[f"{n}Request"]["properties"][NAME] for n in ("Completion", "Chat")]
    return found


if __name__ == "__main__":
    engine.sampling.processors.__path__.append(sys.argv[1])
    sys.stdout.write(json.dumps(visit()))
