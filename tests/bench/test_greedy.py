"""Where texts part, on texts made up and on a tiny file."""

from __future__ import annotations

import pytest
import torch

from bench.peers.greedy import Choice, Text, compare, llama_choices, markdown, our_texts
from bench.peers.model_files import dequantised, model_files
from bench.peers.place import Place
from engine.model.loader import load_tokenizer
from worlds.tiny_bench_model import save_tiny_model

PROMPTS = [[5, 6, 7, 8], [30, 31, 32], [100, 200, 300]]
NUM_NEW = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    cache = tmp_path_factory.mktemp("cache")
    folder = save_tiny_model(tmp_path_factory.mktemp("source") / "tiny")
    target, _, gguf = model_files(str(folder), None, "q8_0", cache, num_threads=1)
    return Place(cache, target, None, num_threads=1, max_running=1, max_tokens=128, gguf=gguf)


@pytest.fixture(scope="module")
def ours(place: Place) -> list[Text]:
    settings = {"dtype": "float32", "quantize_activations": False}
    return our_texts(place.gguf, place, PROMPTS, NUM_NEW, settings)


def test_our_texts_are_what_the_weights_write_and_margins_are_those_of_the_two_likeliest(
    place: Place, ours: list[Text]
) -> None:
    model = dequantised(place.gguf, torch.float32)
    for prompt, text in zip(PROMPTS, ours, strict=True):
        ids = list(prompt)
        for choice in text:
            with torch.inference_mode():
                values, tokens = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).topk(2)
            assert (choice.token_id, choice.second) == tuple(tokens.tolist())
            assert choice.margin == pytest.approx(float(values[0] - values[1]), abs=0.02)
            ids.append(choice.token_id)
        assert len(text) == NUM_NEW


def test_the_first_difference_is_found_and_what_the_weights_say_there(
    place: Place, ours: list[Text]
) -> None:
    second = ours[1][3].second
    swapped = Choice(second, ours[1][3].token_id, 0.25)
    theirs = [ours[0], [*ours[1][:3], swapped, *ours[2][4:]], ours[2][:2]]
    (found,) = compare(place.gguf, PROMPTS, theirs, ours)
    assert (found.prompt, found.position) == (1, 3)
    assert (found.theirs, found.ours) == (swapped, ours[1][3])
    assert found.exact.token_id == ours[1][3].token_id
    table = markdown(load_tokenizer(str(place.target)), theirs, ours, [found])
    assert table.startswith("2 of 3 texts are equal to their end.")
    assert "| 1 | 3 | `" in table
    assert "1 are each other's second; in float32 0 are llama.cpp's and 1 slipstream's" in table
    assert "0.250 (llama.cpp)" in table


def test_texts_that_are_equal_need_no_table(place: Place, ours: list[Text]) -> None:
    assert compare(place.gguf, PROMPTS, ours, ours) == []
    told = markdown(load_tokenizer(str(place.target)), ours, ours, [])
    assert told == "3 of 3 texts are equal to their end."


def test_tokens_without_probabilities_have_no_margin() -> None:
    likely = [
        {"id": each, "top_logprobs": [{"id": each, "logprob": -0.5}, {"id": 9, "logprob": -2.0}]}
        for each in (4, 6)
    ]
    found = llama_choices([4, 5, 6], likely)
    assert found == [Choice(4, 9, 1.5), Choice(5, None, None), Choice(6, 9, 1.5)]
