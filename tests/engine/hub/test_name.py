"""Names on the hub are told from paths, and are found in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.hub.name import HubName, bits_of, called, label_of, parse_name

NAMED = {
    **dict.fromkeys(
        (
            "org/some-repo.v1",
            "hf.co/org/some-repo.v1",
            "huggingface.co/org/some-repo.v1",
            "https://huggingface.co/org/some-repo.v1",
            "https://huggingface.co/org/some-repo.v1/",
            "https://huggingface.co/org/some-repo.v1/tree/main",
            "https://hf.co/org/some-repo.v1",
        ),
        HubName("org/some-repo.v1"),
    ),
    # A type or a file.
    "org/repo:Q4_K_M": HubName("org/repo", "Q4_K_M"),
    "hf.co/org/repo:ud-q4_k_xl": HubName("org/repo", "ud-q4_k_xl"),
    "https://huggingface.co/org/repo:Q8_0": HubName("org/repo", "Q8_0"),
    **dict.fromkeys(
        (
            "https://huggingface.co/org/repo/blob/main/sub/a-Q8_0.gguf",
            "https://huggingface.co/org/repo/resolve/main/a-Q8_0.gguf?download=true",
            "org/repo:a-Q8_0.gguf",
        ),
        HubName("org/repo", "a-Q8_0.gguf"),
    ),
}
PATHS = (
    *("model", "a/b/c", "/org/repo", "./org/repo", "../repo", "~/models", "models/a.gguf"),
    *("org/re--po", "org/..", "org/" + "a" * 100, "org/repo:", "org/repo:a b", ""),
)


@pytest.mark.parametrize("spelled", [*NAMED, *PATHS])
def test_a_model_is_meant_by_its_name_or_address_and_all_else_is_a_path(spelled: str) -> None:
    assert parse_name(spelled) == NAMED.get(spelled)


def test_what_is_there_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_name("org/repo") == HubName("org/repo")
    (tmp_path / "org" / "repo").mkdir(parents=True)
    assert parse_name("org/repo") is None
    assert parse_name("hf.co/org/repo") == HubName("org/repo")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://example.com/org/repo", "is not org/repo"),
        ("hf.co/org", "is not org/repo"),
        ("https://huggingface.co/datasets/org/repo", "is not org/repo"),
        ("https://huggingface.co/org/repo/tree/v2", "--revision"),
    ],
)
def test_an_address_of_something_else_is_refused(address: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_name(address)


@pytest.mark.parametrize(
    ("file", "label", "bits"),
    [
        ("SmolLM2-135M-Instruct-Q4_K_M.gguf", "Q4_K_M", 4),
        ("a-UD-Q4_K_XL.gguf", "UD-Q4_K_XL", 4),
        ("a.i1-IQ3_XXS.gguf", "IQ3_XXS", 3),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4", 4),
        ("BF16/a-BF16-00001-of-00003.gguf", "BF16", 16),
        ("Q3-8B-Q8_0.gguf", "Q8_0", 8),
        ("a-TQ1_0.gguf", "TQ1_0", 1),
        ("tiny.gguf", "tiny", 0),
        ("Qwen3-4B.gguf", "Qwen3-4B", 0),
    ],
)
def test_types_are_read_off_files_names(file: str, label: str, bits: int) -> None:
    assert label_of(file) == label
    assert bits_of(label) == bits


def test_what_lies_in_the_cache_is_called_as_on_the_hub() -> None:
    folder = "/home/a/.cache/huggingface/hub/models--org--re-po/snapshots/0123"
    assert called(folder) == "org/re-po"
    assert called(f"{folder}/UD/a-UD-Q4_K_XL-00001-of-00002.gguf") == "org/re-po:UD-Q4_K_XL"
    assert called("/models/a-Q4_K_M.gguf") == "/models/a-Q4_K_M.gguf"
    assert called("models--org--repo") == "models--org--repo"
