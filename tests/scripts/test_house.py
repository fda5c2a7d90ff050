"""scripts/house.py: which arrows run up, and how long chains are."""

from __future__ import annotations

import ast
from pathlib import Path

from scripts.house import docstrings, functions, gathered, heights, rising, room_in_package

BUILDING = {"roof": {"wall", "base"}, "wall": {"base"}, "base": set(), "shed": {"base"}}


def test_where_all_arrows_run_down_each_floor_is_one_above_what_it_needs() -> None:
    assert rising(BUILDING) == set()
    assert heights(BUILDING) == {"roof": 3, "wall": 2, "base": 1, "shed": 2}


def test_of_a_circle_as_few_arrows_as_can_be_run_up() -> None:
    graph = BUILDING | {"base": {"wall"}, "shed": {"wall", "base"}}
    assert len(rising(graph)) == 1
    # Three rooms know the hall, which knows one of them.
    hall = {"hall": {"a"}, "a": {"hall", "b"}, "b": {"hall", "c"}, "c": {"hall"}}
    assert rising(hall) == {("hall", "a")}
    assert heights(hall) == {"hall": 1, "c": 2, "b": 3, "a": 4}


def test_files_are_gathered_into_rooms() -> None:
    files = {"p": set(), "p.core": {"p.parts.one"}, "p.parts.one": {"p.parts.two"}}
    files["p.parts.two"] = {"p.core"}
    rooms = {module: room for module in files if (room := room_in_package(module))}
    assert gathered(files, rooms) == {"core": {"parts"}, "parts": {"core"}}


def test_functions_are_as_long_as_their_text() -> None:
    path = Path(__file__)
    lengths = dict(functions([path]))
    assert lengths["tests/scripts/test_house.py:test_files_are_gathered_into_rooms"] == 5
    assert ast.get_docstring(ast.parse(path.read_text("utf-8"))) in docstrings([path])
