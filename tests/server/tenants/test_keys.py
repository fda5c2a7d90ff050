"""API keys: what the file may say, that no refusal quotes a key, that it is read again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from engine.request.params import Tenant
from server.tenants.keys import NOBODY, KeysFile, keys_of, read_tenants

KEY = "sk-very-secret"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


def written(folder: Path, *tenants: Any, name: str = "keys.yaml") -> Path:
    file = folder / name
    file.write_text(json.dumps({"tenants": tenants}))  # JSON is YAML
    return file


def test_a_tenant_has_its_terms(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(
        f"""
        tenants:
          - name: team-a
            key: {KEY}
            requests_per_minute: 60
            tokens_per_minute: 1000
            max_concurrent_requests: 4
            max_tokens: 50
            priority: 3
            weight: 2.5
          - {{name: team-b, key_sha256: "{"0" * 64}"}}
        """
    )
    found = read_tenants(file)
    first, second = found[bytes.fromhex(DIGEST)], found[bytes(32)]
    assert first.tenant == Tenant("team-a", 2.5, 60, 1000, 4)
    assert (first.priority, first.max_tokens) == (3, 50)
    assert second.tenant == Tenant("team-b")
    assert (second.priority, second.max_tokens) == (0, None)


def test_tenants_share_a_salt_only_where_the_file_says_so(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"name": "a", "key": "ka"},
        {"name": "b", "key": "kb"},
        {"name": "c", "key": "kc", "cache_salt": "common"},
        {"name": "d", "key": "kd", "cache_salt": "common"},
        {"name": "e", "key": "ke", "cache_salt": "a"},
    )
    salts = {terms.tenant.name: terms.salt for terms in read_tenants(file).values()}
    assert salts["c"] == salts["d"]
    assert len(set(salts.values())) == 4


REFUSED: list[tuple[list[Any], str]] = [
    ([], "tenants: "),
    ([{"name": "a"}], "tenants.0.key: give either"),
    ([{"name": "a", "key": KEY, "key_sha256": DIGEST}], "tenants.0.key: give either"),
    ([{"name": "a", "key": ""}], "tenants.0.key: must be"),
    ([{"name": "a", "key": KEY + "é"}], "tenants.0.key: must be"),
    ([{"name": "a", "key": 12345}], "tenants.0.key: "),
    ([{"name": "a", "key_sha256": KEY}], "tenants.0.key_sha256: "),
    ([{"key": KEY}], "tenants.0.name: "),
    ([{"name": "a b", "key": KEY}], "tenants.0.name: "),
    ([{"name": "a\n", "key": KEY}], "tenants.0.name: "),
    ([{"name": "a", "key": KEY, "requests_per_minute": 0}], "tenants.0.requests_per_minute: "),
    ([{"name": "a", "key": KEY, "tokens_per_minute": 1.5}], "tenants.0.tokens_per_minute: "),
    ([{"name": "a", "key": KEY, "weight": 0}], "tenants.0.weight: "),
    ([{"name": "a", "key": KEY, "weight": float("inf")}], "tenants.0.weight: "),
    ([{"name": "a", "key": KEY, "rpm": 5}], "tenants.0.rpm: no such field"),
    ([{"name": "a", "key": KEY}, {"name": "a", "key": "k"}], "tenants.1.name: "),
    ([{"name": "a", "key": KEY}, {"name": "b", "key_sha256": DIGEST}], "tenants.1.key: "),
]
NO_LISTS = [
    *(f"tenants: [{{name: a, key: {KEY}", f"tenants:\n\t- {KEY}", f"- {KEY}", KEY, ""),
    *(f"tenants: *{KEY}", f"tenants: !{KEY} x"),
]
TWICE = [
    ("keys.yaml", f"tenants:\n- name: a\n  key: {KEY}\n  key: k\n", "line 4, column 3: "),
    ("keys.yaml", f"tenants: [{{name: a, key: {KEY}}}]\ntenants: []\n", "line 2, column 1: "),
    ("keys.json", f'{{"tenants": [{{"name": "a", "key": "{KEY}", "key": "k"}}]}}', ""),
]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("keys.yaml", json.dumps({"tenants": each}), message) for each, message in REFUSED),
        *(("keys.yaml", content, "") for content in NO_LISTS),
        ("keys.yaml", f"- {KEY}", "must be a mapping"),
        ("keys.yaml", f"tenants: [{KEY}]", "tenants.0: must be a mapping"),
        *((name, content, f"{place}a key is there twice") for name, content, place in TWICE),
    ],
)
def test_what_is_not_sound_is_refused_in_a_line_with_its_field_and_no_key(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ValueError, match="api-keys-file") as error:
        read_tenants(file)
    text = str(error.value)
    assert text.startswith(f"api-keys-file {file}: {message}")
    assert "\n" not in text
    assert KEY not in text


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


def test_one_key_is_everybodys_or_a_file_says_whose_they_are(tmp_path: Path) -> None:
    assert keys_of(None, None) is None
    find = keys_of(SecretStr("s3cret"), None)
    assert find is not None
    assert find(b"s3cret") is NOBODY
    for wrong in (b"", b"s3cre", b"s3cret ", "s3cré".encode()):
        assert find(wrong) is None
    file = str(World(tmp_path).file)
    assert keys_of(None, file) is not None
    with pytest.raises(ValueError, match="contradicts api-key"):
        keys_of(SecretStr("s3cret"), file)
