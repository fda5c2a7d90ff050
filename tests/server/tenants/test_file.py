"""The file of API keys: what it may say, and that no refusal quotes a key."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from engine.request.params import Tenant
from server.tenants.file import read_tenants

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


@pytest.mark.parametrize(("tenants", "message"), REFUSED)
def test_what_is_not_sound_is_refused_in_a_line_with_its_field(
    tmp_path: Path, tenants: list[Any], message: str
) -> None:
    file = written(tmp_path, *tenants)
    with pytest.raises(ValueError, match="api-keys-file") as error:
        read_tenants(file)
    text = str(error.value)
    assert text.startswith(f"api-keys-file {file}: {message}")
    assert "\n" not in text
    assert KEY not in text


@pytest.mark.parametrize(
    "content",
    [
        f"tenants: [{{name: a, key: {KEY}",
        f"tenants:\n\t- {KEY}",
        f"- {KEY}",
        KEY,
        "",
        f"tenants: *{KEY}",
        f"tenants: !{KEY} x",
    ],
)
def test_what_is_no_list_of_tenants_is_refused_without_being_quoted(
    tmp_path: Path, content: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match="api-keys-file") as error:
        read_tenants(file)
    assert "\n" not in str(error.value)
    assert KEY not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"api-keys-file .*nowhere\.yaml: No such file"):
        read_tenants(tmp_path / "nowhere.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"bytes\.yaml: is not UTF-8"):
        read_tenants(tmp_path / "bytes.yaml")
