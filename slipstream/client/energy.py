"""Reads the energy used by this machine's processors, where it is exposed (RAPL).

After https://docs.kernel.org/power/powercap/powercap.html: each package counts microjoules, and
restarts at its ``max_energy_range_uj``. Many systems let only root read them, and virtual machines have
none.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/class/powercap")


class EnergyMeter:
    """Adds up what all packages count. ``read`` has to be called before a counter has gone round twice:
    every few minutes."""

    def __init__(self, root: Path = _ROOT) -> None:
        try:
            zones = [each for each in root.glob("*-rapl:*") if _text(each, "name")[:7] == "package"]
            self._zones = {each: int(_text(each, "max_energy_range_uj")) for each in zones}
            self._last = self._counts()
        except OSError:
            self._zones = {}
        self._total = 0

    def read(self) -> float | None:
        """Returns joules since the meter was made; None where the machine does not tell."""
        if not self._zones:
            return None
        counts = self._counts()
        for before, now, most in zip(self._last, counts, self._zones.values(), strict=True):
            self._total += now - before if now >= before else now - before + most
        self._last = counts
        return self._total / 1e6

    def _counts(self) -> list[int]:
        return [int(_text(zone, "energy_uj")) for zone in self._zones]


def _text(zone: Path, name: str) -> str:
    return (zone / name).read_text(encoding="ascii").strip()
