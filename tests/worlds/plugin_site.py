"""Makes folders for ``sys.path`` in which a distribution seems to be installed."""

from __future__ import annotations

from pathlib import Path

from drafters.registry import GROUP


def install(site: Path, dist: str, entry_points: dict[str, str], source: str = "") -> None:
    """A distribution with these drafters, and a module of its name with that source."""
    module = dist.replace("-", "_")
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    (site / f"{module}.py").write_text(source)


SOUND = """
from drafters.base import Drafter, DrafterInfo, DrafterOption, RequestState
from drafters.tree import chain

class Fives(Drafter):
    info = DrafterInfo("fives", "Always fives.", drafts_trees=False)
    def start(self, request):
        return State()

class State(RequestState):
    def propose(self, request):
        return chain([5] * min(request.max_nodes, request.shape.depth))

def make(context):
    return Fives()
"""
