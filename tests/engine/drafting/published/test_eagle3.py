"""EAGLE-3's network on the engine's attention, against a plain reading of the same facts: every row over
what it sees, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.drafting.published.eagle3_network import Eagle3Network
from engine.drafting.published.networks import place
from worlds.plain_heads import plain_eagle
from worlds.published_eagle3 import FACTS, FORMS, Form, loaded
from worlds.published_rows import DraftStore, Rows

CPU = torch.device("cpu")


def placed(path: Path, form: Form) -> Eagle3Network:
    network = loaded(path, form)
    place(network, CPU, torch.float32)
    return network


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


class Both:
    """A network on the engine's attention and its plain reading, for texts of random states."""

    def __init__(self, path: Path, form: Form, backend: str, num_texts: int) -> None:
        self.network = placed(path, form)
        self.reading = plain_eagle(form, tuple(range(form.num_states)), torch.float64)
        self.store = DraftStore(self.network, backend, num_texts)
        generator = torch.Generator().manual_seed(3)
        width = form.num_states * FACTS.hidden_size
        self.token_ids = torch.randint(FACTS.vocab_size, (num_texts, 12), generator=generator)
        self.states = torch.randn(num_texts, 12, width, generator=generator)

    def known(self, text: int, first: int, end: int) -> Rows:
        """Returns rows of a text, whose features the network fuses."""
        with torch.inference_mode():
            features = self.network.fuse(self.states[text, first:end])
        return Rows(self.store.texts[text], self.token_ids[text, first:end].tolist(), features)

    def check(self, rows: Rows, text: int, end: int) -> None:
        """The rows are the last ones of a text that ends there."""
        states = self.reading.fuse(self.states[text, :end].double())
        features, logits = self.reading.rows(self.token_ids[text, :end].tolist(), states)
        first = end - len(rows.token_ids)
        same(rows.outputs[0], features[first:])
        with torch.inference_mode():
            same(self.network.logits(rows.outputs[1]), logits[first:])


@pytest.mark.parametrize("backend", ["sdpa", "paged"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_known_rows_in_chunks_are_those_of_the_whole_text(
    form: Form, backend: str, tmp_path: Path
) -> None:
    """Two texts beside each other, at other places in every step. ``test_head_drafts.py`` has the rows
    of drafts."""
    both = Both(tmp_path, form, backend, num_texts=2)
    for first, end in ((0, 5), (5, 11), (11, 12)):
        mine, other = both.known(0, first, end), both.known(1, max(0, first - 3), end - 3)
        both.store.step(mine, other)
        both.check(mine, 0, end)
        both.check(other, 1, end - 3)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_drafted_ids_are_the_target_s(form: Form, tmp_path: Path) -> None:
    found = loaded(tmp_path, form).token_map
    tensors = form.tensors()
    if "t2d" in tensors:
        assert found is not None
        assert found.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    else:
        assert found is None


def test_what_is_cast_to_16_bits_turns_as_before(tmp_path: Path) -> None:
    network = placed(tmp_path, FORMS["a norm of all"])
    turning = network.rotary_emb.inv_freq.clone()
    place(network, CPU, torch.bfloat16)
    assert {each.dtype for each in network.parameters()} == {torch.bfloat16}
    assert torch.equal(network.rotary_emb.inv_freq, turning)
    assert not any(each.requires_grad for each in network.parameters())
