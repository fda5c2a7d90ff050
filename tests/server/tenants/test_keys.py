"""Which keys are known, and that a file is read again when it changes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from pydantic import SecretStr

from server.tenants.keys import NOBODY, KeysFile, keys_of


class World:
    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.file = folder / "keys.yaml"
        self.num_writes = 0
        self.write("tenants: [{name: a, key: first}]")
        self.keys = KeysFile(self.file, clock=lambda: self.now)

    def write(self, text: str) -> None:
        """As those do who take care: all of it at once."""
        self.num_writes += 1
        new = self.file.with_suffix(".new")
        new.write_text(text)
        os.utime(new, (self.num_writes, self.num_writes))
        new.replace(self.file)

    def name_of(self, key: str) -> str | None:
        terms = self.keys.find(key.encode())
        return terms and terms.tenant.name


def test_a_changed_file_counts_within_a_second(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert (world.name_of("first"), world.name_of("second")) == ("a", None)
    world.write("tenants: [{name: a, key: second}]")
    world.now = 0.9
    assert (world.name_of("first"), world.name_of("second")) == ("a", None)
    world.now = 1.0
    assert (world.name_of("first"), world.name_of("second")) == (None, "a")


def test_a_file_that_broke_leaves_the_tenants_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    world.write("tenants: [{name: a, key: second, weight: none}]")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            world.now += 1
            assert world.name_of("first") == "a"
    (record,) = caplog.records  # said once
    assert "tenants.0.weight" in record.message
    assert "second" not in record.message
    world.file.unlink()
    world.now += 1
    assert world.name_of("first") == "a"
    world.write("tenants: [{name: a, key: third}]")
    world.now += 1
    assert (world.name_of("first"), world.name_of("third")) == (None, "a")


def test_one_key_is_everybodys(tmp_path: Path) -> None:
    del tmp_path
    find = keys_of(SecretStr("s3cret"), None)
    assert find is not None
    assert find(b"s3cret") is NOBODY
    for wrong in (b"", b"s3cre", b"s3cret ", "s3cré".encode()):
        assert find(wrong) is None


def test_no_key_is_needed_where_there_is_none() -> None:
    assert keys_of(None, None) is None


def test_one_key_and_a_file_contradict_each_other(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert keys_of(None, str(world.file)) is not None
    with pytest.raises(ValueError, match="contradicts api-key"):
        keys_of(SecretStr("s3cret"), str(world.file))
