"""The setting ``draft``: what its entries are called, and what is found where they point."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.drafting.drafts import (
    Draft,
    NamedDraft,
    find_drafts,
    is_wanted,
    parse_draft,
    with_bundled_drafts,
)
from engine.names import BUNDLED
from worlds.gguf_files import write_gguf
from worlds.plugin_site import SOUND, install
from worlds.trained_heads import BLOCK_CONFIGS, EAGLE3_FORMS, write_heads

FOLDERS = {"small_model": "draft", "medusa": "medusa"}
"""The folders of the bundled target's own drafts."""


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("/a/folder", None, "/a/folder"),
        ("org/model", None, "org/model"),
        ("mtp", None, "mtp"),
        ("fast_2=/a/folder", "fast_2", "/a/folder"),
        ("fast=a=b", "fast", "a=b"),
        ("./a=b", None, "./a=b"),
        ("/models/a=b/c", None, "/models/a=b/c"),
        ("eagle3=mtp", "eagle3", "mtp"),
    ],
)
def test_what_stands_before_the_sign_is_a_name_unless_it_is_part_of_a_path(
    text: str, name: str | None, path: str
) -> None:
    assert parse_draft(text) == NamedDraft(name, path)


@pytest.mark.parametrize("name", ["", "Fast", "2nd", "my-draft", "x" * 65])
def test_names_are_those_that_drafters_can_have(name: str) -> None:
    with pytest.raises(ValueError, match=f"the name '{name}' is not lower-case letters"):
        parse_draft(f"{name}=/x")


@pytest.mark.parametrize("text", ["", "fast="])
def test_an_entry_has_a_path(text: str) -> None:
    with pytest.raises(ValueError, match="names no path"):
        parse_draft(text)


@pytest.fixture
def heads(tmp_path: Path) -> dict[str, Path]:
    return write_heads(tmp_path)


def config(*draft: str, drafters: tuple[str, ...] | None = None) -> EngineConfig:
    return EngineConfig("some/model", draft=draft, drafters=drafters)


@pytest.mark.parametrize(("method", "folder"), FOLDERS.items())
def test_the_method_is_what_is_found_in_the_folder(method: str, folder: str) -> None:
    path = str(BUNDLED / folder)
    assert find_drafts(config(path)) == {method: Draft(method, path, method)}
    assert find_drafts(config(f"{method}={path}")) == find_drafts(config(path))
    assert find_drafts(config(f"mine={path}")) == {"mine": Draft("mine", path, method)}


@pytest.mark.parametrize("name", [*EAGLE3_FORMS, *BLOCK_CONFIGS, "medusa"])
def test_every_published_form_is_known(heads: dict[str, Path], name: str) -> None:
    (found,) = find_drafts(config(str(heads[name]))).values()
    assert (
        found.method == name.partition("_reduced")[0].partition("_qwen3")[0].partition("_plain")[0]
    )


def test_what_is_no_folder_of_heads_is_a_model(tmp_path: Path) -> None:
    assert find_drafts(config("org/model"))["small_model"].path == "org/model"
    assert find_drafts(config(str(tmp_path)))["small_model"].method == "small_model"
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert find_drafts(config(str(tmp_path)))["small_model"].method == "small_model"
    write_gguf(tmp_path / "second.gguf")
    with pytest.raises(ValueError, match="holds 2 GGUF files"):
        find_drafts(config(str(tmp_path)))
    for file in tmp_path.glob("*.gguf"):
        file.unlink()
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    for content in ("{}", '{"kind": ["medusa"]}', '{"model_type": ["medusa"]}'):
        (tmp_path / "config.json").write_text(content)
        assert find_drafts(config(str(tmp_path)))["small_model"].method == "small_model"


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"^{tmp_path}: .*config.json") as refused:
        find_drafts(config(str(tmp_path)))
    assert "\n" not in str(refused.value)


def test_several_drafts_of_one_method_have_names_of_their_own() -> None:
    found = find_drafts(config("/a", "fast=/b", f"tuned={BUNDLED / 'medusa'}"))
    assert [(each.name, each.method) for each in found.values()] == [
        ("small_model", "small_model"),
        ("fast", "small_model"),
        ("tuned", "medusa"),
    ]
    assert list(found) == [each.name for each in found.values()]
    for draft in (("/a", "/b"), ("fast=/a", "fast=/b"), ("/a", "small_model=/b")):
        with pytest.raises(ValueError, match="two are called (fast|small_model); name one"):
            find_drafts(config(*draft))


def test_a_name_of_another_drafter_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ngram", "auto", "none", "medusa", "quantized"):
        with pytest.raises(
            ValueError, match=f"draft {name}: a drafter has that name, and /a is of"
        ):
            find_drafts(config(f"{name}=/a"))
    assert find_drafts(config("fives=/a"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    install(tmp_path, "some-plugin", {"fives": "some_plugin:make"}, SOUND)
    with pytest.raises(ValueError, match="draft fives: a drafter has that name"):
        find_drafts(config("fives=/a"))


def test_a_method_without_a_drafter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.drafting.drafts.draft_methods", lambda: ("small_model",))
    said = "draft mine: there is no drafter for mtp here, as which mtp was .* are: small_model$"
    with pytest.raises(ValueError, match=said):
        find_drafts(config("mine=mtp"))


def test_a_draft_that_would_not_be_loaded_is_refused() -> None:
    assert find_drafts(config("fast=/a", drafters=("none", "fast")))
    with pytest.raises(ValueError, match="draft fast is set, but drafters leaves out fast"):
        find_drafts(config("fast=/a", drafters=("none", "small_model")))
    both = "draft small_model is set, but drafters leaves out small_model and quantized"
    with pytest.raises(ValueError, match=both):
        find_drafts(config("/a", drafters=("none", "quantized")))
    copying = EngineConfig(
        "m", draft=("/a",), drafters=("quantized",), quantized="int8", quantized_model="draft"
    )
    assert list(find_drafts(copying)) == ["small_model"]
    assert not is_wanted(copying, "medusa")


def test_the_bundled_target_has_its_own_drafts_unless_others_have_their_names() -> None:
    own = find_drafts(with_bundled_drafts(EngineConfig()))
    assert {name: each.path for name, each in own.items()} == {
        name: str(BUNDLED / folder) for name, folder in FOLDERS.items()
    }
    assert all(each.is_bundled for each in own.values())
    mixed = find_drafts(with_bundled_drafts(EngineConfig(draft=("/a", "fast=/b"))))
    assert list(mixed) == ["small_model", "fast", *list(FOLDERS)[1:]]
    assert [name for name in mixed if mixed[name].is_bundled] == list(FOLDERS)[1:]
    few = with_bundled_drafts(EngineConfig(drafters=("none", "medusa")))
    assert list(find_drafts(few)) == ["medusa"]
    assert with_bundled_drafts(config("/a")) == config("/a")


def test_a_folder_is_known_by_what_it_holds_not_by_its_name(
    tmp_path: Path, heads: dict[str, Path]
) -> None:
    folder = heads["medusa"].rename(tmp_path / "an eagle3 head")
    assert list(find_drafts(config(str(folder)))) == ["medusa"]
