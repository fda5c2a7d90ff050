"""Which files of a repository are meant."""

from __future__ import annotations

import pytest

from engine.hub.choice import Choice, HubError, HubFile, choose
from engine.hub.name import HubName


def of(**sizes: int) -> list[HubFile]:
    """GGUF files of these types and megabytes."""
    return [HubFile(f"a-{label}.gguf", size * 1_000_000) for label, size in sizes.items()]


def chosen(files: list[HubFile], quant: str | None = None) -> list[str]:
    return [each.path for each in choose(HubName("org/repo", quant), files).files]


def test_unnamed_it_is_q4_k_m_else_the_fewest_bits_from_four_on() -> None:
    assert chosen(of(Q2_K=2, Q4_K_M=5, IQ4_XS=4)) == ["a-Q4_K_M.gguf"]
    assert chosen(of(Q2_K=2, Q8_0=9, Q5_K_M=6, IQ4_XS=4)) == ["a-IQ4_XS.gguf"]
    assert chosen(of(BF16=16, Q8_0=9)) == ["a-Q8_0.gguf"]
    # One alone is no choice.
    assert chosen(of(Q2_K=2)) == ["a-Q2_K.gguf"]


def test_fewer_bits_are_named_or_not_had() -> None:
    with pytest.raises(HubError, match=r"org/repo: name one of IQ1_S \(1 MB\), Q2_K \(2 MB\)$"):
        choose(HubName("org/repo"), of(Q2_K=2, IQ1_S=1))


def test_a_named_type_is_found_in_any_case_and_without_its_prefix() -> None:
    files = of(**{"Q4_K_M": 5, "UD-Q4_K_XL": 6, "Q4_K_XL": 7, "UD-Q2_K_XL": 2})
    assert chosen(files, "q4_k_m") == ["a-Q4_K_M.gguf"]
    assert chosen(files, "Q4_K_XL") == ["a-Q4_K_XL.gguf"]
    assert chosen(files, "ud-q4_k_xl") == ["a-UD-Q4_K_XL.gguf"]
    assert chosen(files, "Q2_K_XL") == ["a-UD-Q2_K_XL.gguf"]
    assert chosen(files, "a-Q4_K_M.gguf") == ["a-Q4_K_M.gguf"]


def test_a_type_that_is_not_there_is_answered_by_those_that_are() -> None:
    there = r"org/repo:Q9: there is no Q9 in it; there are Q4_K_M \(5 MB\), Q8_0 \(1.5 GB\)$"
    with pytest.raises(HubError, match=there):
        choose(HubName("org/repo", "Q9"), of(Q8_0=1500, Q4_K_M=5))
    with pytest.raises(HubError, match="no GGUF files"):
        choose(HubName("org/repo", "Q9"), [HubFile("model.safetensors", 9)])
    with pytest.raises(HubError, match="neither GGUF files nor"):
        choose(HubName("org/repo"), [HubFile("README.md", 9)])


def test_split_files_come_together_and_in_order() -> None:
    parts = [HubFile(f"Q8_0/a-Q8_0-0000{number}-of-00003.gguf", 3) for number in (2, 1, 3)]
    assert chosen(parts) == sorted(each.path for each in parts)
    assert choose(HubName("org/repo"), parts).num_bytes == 9
    # One that lacks a part is none.
    assert chosen([*parts[:2], *of(BF16=16)]) == ["a-BF16.gguf"]


def test_parts_for_images_are_no_models() -> None:
    files = [HubFile("mmproj-F16.gguf", 1), HubFile("a.imatrix.gguf", 1), *of(BF16=16)]
    assert chosen(files) == ["a-BF16.gguf"]


def test_a_second_model_of_a_type_is_called_as_its_file() -> None:
    files = [*of(Q8_0=9), HubFile("draft/b-Q8_0.gguf", 1)]
    assert chosen(files, "Q8_0") == ["a-Q8_0.gguf"]
    assert chosen(files, "b-q8_0") == ["draft/b-Q8_0.gguf"]


def test_safetensors_come_first_without_what_transformers_does_not_read() -> None:
    wanted = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "additional_chat_templates/rag.jinja",
    ]
    left = [
        "README.md",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/config.json",
        "pytorch_model.bin",
    ]
    files = [HubFile(path, 1) for path in (*wanted, *left)]
    assert sorted(chosen([*files, *of(Q4_K_M=5)])) == sorted(wanted)
    assert chosen([*files, *of(Q4_K_M=5)], "Q4_K_M") == ["a-Q4_K_M.gguf"]


def test_older_weights_are_taken_where_there_are_no_others() -> None:
    files = [HubFile("pytorch_model.bin", 5), HubFile("config.json", 1), HubFile("flax.msgpack", 5)]
    found = choose(HubName("org/repo"), files)
    assert found == Choice((files[0], files[1]), None)
