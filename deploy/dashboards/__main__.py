"""Writes the dashboards' JSON, or with ``--check`` says whether the committed JSON is current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model

from deploy.dashboards.fleet import fleet
from deploy.dashboards.serving import serving
from deploy.dashboards.speculation import speculation

TARGET = Path(__file__).resolve().parents[1] / "grafana" / "dashboards"
DASHBOARDS = {"speculation": speculation, "serving": serving, "fleet": fleet}


def as_json(dashboard: Dashboard) -> str:
    """Returns the JSON for Grafana's file provider, in an order that does not vary."""
    built = dashboard.build()
    # Grafana numbers panels itself where it has to, but links and alerts need lasting numbers.
    for number, panel in enumerate(_all_panels(built), start=1):
        panel.id_val = number
    return JSONEncoder(sort_keys=True, indent=2).encode(built) + "\n"


def _all_panels(built: model.Dashboard) -> Iterator[model.Panel | model.RowPanel]:
    """Rows come before what is folded into them."""
    for panel in built.panels or []:
        yield panel
        if isinstance(panel, model.RowPanel):
            yield from panel.panels


def stale_files(folder: Path) -> list[str]:
    """Names of files in ``folder`` that differ from what the code makes, or should not be there."""
    wanted = {f"{name}.json": as_json(make()) for name, make in DASHBOARDS.items()}
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in wanted | found if wanted.get(name) != found.get(name))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file is stale")
    if parser.parse_args(arguments).check:
        stale = stale_files(TARGET)
        for name in stale:
            sys.stderr.write(f"{name} is stale: run python -m deploy.dashboards\n")
        return 1 if stale else 0
    for name, make in DASHBOARDS.items():
        (TARGET / f"{name}.json").write_text(as_json(make()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
