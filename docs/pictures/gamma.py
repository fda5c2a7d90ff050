"""Gamma by goodput: tokens per second against gamma over a measured table of step costs.

``step_costs.json``: rows and seconds of steps of the scaled copy of the bundled model (0.4 B parameters,
bf16) on one core of an EPYC, as the engine's own cost model measured them at start.
"""

from __future__ import annotations

import json
from pathlib import Path

from docs.pictures.svg import Drawing
from engine.speculation.cost import CostModel

COSTS = Path(__file__).with_name("step_costs.json")
SURVIVAL = 0.8
"""Estimated probability that a draft token is accepted if the ones before it were."""
BATCHES = (1, 4, 16)
MOST = 12


def cost_model() -> CostModel:
    measured = json.loads(COSTS.read_text(encoding="utf-8"))
    return CostModel([(rows, 0, seconds) for rows, seconds in measured])


def goodput(cost: CostModel, num_requests: int, gamma: int) -> float:
    """Expected tokens per second of ``num_requests`` that each draft ``gamma`` tokens."""
    expected = sum(SURVIVAL**depth for depth in range(gamma + 1))
    return num_requests * expected / cost.step_seconds(num_requests * (gamma + 1), 0, 1)


def draw() -> str:
    cost = cost_model()
    picture = Drawing(760, 360, "Tokens per second by gamma, for three batch sizes")
    left, bottom, wide, high = 70, 300, 470, 230
    curves = {n: [goodput(cost, n, gamma) for gamma in range(MOST + 1)] for n in BATCHES}
    gains = {n: [value / curve[0] for value in curve] for n, curve in curves.items()}
    top = max(max(values) for values in gains.values()) * 1.08
    picture.text(20, 30, "tokens per second, against gamma 0", bold=True)

    def at(gamma: int, gain: float) -> tuple[float, float]:
        return left + gamma * wide / MOST, bottom - gain * high / top

    tick = 0.5
    while tick < top:
        y = at(0, tick)[1]
        picture.line([(left, y), (left + wide, y)], "line", 0.6)
        picture.text(left - 8, y + 4, f"{tick:g}", "faint", "end", size=12)
        tick += 0.5
    picture.line([(left, bottom - high), (left, bottom), (left + wide, bottom)])
    for gamma in range(0, MOST + 1, 2):
        picture.text(at(gamma, 0)[0], bottom + 18, str(gamma), "faint", "middle", size=12)
    picture.text(left + wide / 2, bottom + 40, "gamma of each request", "faint", "middle", size=12)
    for index, (num_requests, values) in enumerate(gains.items(), start=1):
        colour = f"curve{index}"
        picture.line([at(g, v) for g, v in enumerate(values)], colour, 2.5)
        best = max(range(MOST + 1), key=values.__getitem__)
        picture.dot(*at(best, values[best]), 6, colour)
        y = 90 + index * 46
        picture.dot(578, y - 5, 6, colour)
        picture.text(592, y, f"batch {num_requests}: gamma {best}", bold=True)
        picture.text(592, y + 18, f"{values[best]:.2f} times gamma 0", "faint", size=12)
    picture.text(565, 290, f"survival {SURVIVAL:g} per draft token,", "faint", size=12)
    picture.text(565, 306, "step costs as measured", "faint", size=12)
    return picture.render()
