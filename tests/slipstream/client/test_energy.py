"""Counters of processors, which go round."""

from __future__ import annotations

from pathlib import Path

from slipstream.client.energy import EnergyMeter


def write_zone(root: Path, name: str, zone: str, count: int) -> Path:
    path = root / name
    path.mkdir(exist_ok=True)
    (path / "name").write_text(zone + "\n")
    (path / "energy_uj").write_text(f"{count}\n")
    (path / "max_energy_range_uj").write_text("10000000\n")
    return path


def test_all_packages_are_added_up_and_counters_go_round(tmp_path: Path) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000)
    write_zone(tmp_path, "intel-rapl:1", "package-1", 0)
    part = write_zone(tmp_path, "intel-rapl:0:0", "core", 0)
    meter = EnergyMeter(tmp_path)
    assert meter.read() == 0.0
    write_zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    write_zone(tmp_path, "intel-rapl:1", "package-1", 500_000)
    (part / "energy_uj").write_text("7\n")
    assert meter.read() == 2.5
    write_zone(tmp_path, "intel-rapl:1", "package-1", 1_500_000)
    assert meter.read() == 3.5


def test_a_machine_that_does_not_tell_has_no_figure(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path / "nowhere").read() is None
    zone = write_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (zone / "energy_uj").unlink()
    assert EnergyMeter(tmp_path).read() is None
