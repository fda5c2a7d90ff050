"""EAGLE-3's network on the engine's attention, against a plain reading of the same facts: every row over
what it sees, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.drafting.published.eagle3_network import Eagle3Network
from engine.drafting.published.networks import place
from worlds.plain_heads import PlainEagle, plain_eagle
from worlds.published_eagle3 import FACTS, FORMS, Form, loaded
from worlds.published_rows import DraftStore, Rows

torch.set_num_threads(1)

CPU = torch.device("cpu")
BACKENDS = pytest.mark.parametrize("backend", ["sdpa", "paged"])


def placed(path: Path, form: Form) -> Eagle3Network:
    network = loaded(path, form)
    place(network, CPU, torch.float32)
    return network


class Line:
    """A text as the plain reading has it, with tokens drafted behind it: all in one piece."""

    def __init__(self, reading: PlainEagle, token_ids: list[int], states: torch.Tensor) -> None:
        self.reading = reading
        self.token_ids, self.features = list(token_ids), reading.fuse(states.double())

    def draft(self, token_id: int) -> None:
        """Adds a row that reads what the last one wrote."""
        written, _ = self.outputs()
        self.token_ids.append(token_id)
        self.features = torch.cat([self.features, written[-1:]])

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.reading.rows(self.token_ids, self.features)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


class Both:
    """A network on the engine's attention and its plain reading, for texts of random states."""

    def __init__(self, path: Path, form: Form, backend: str, num_texts: int = 1) -> None:
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

    def line(self, text: int, count: int) -> Line:
        tokens = self.token_ids[text, :count].tolist()
        return Line(self.reading, tokens, self.states[text, :count])

    def check(self, rows: Rows, line: Line) -> None:
        """The rows are the line's last ones."""
        features, logits = line.outputs()
        first = len(line.token_ids) - len(rows.token_ids)
        same(rows.outputs[0], features[first:])
        with torch.inference_mode():
            same(self.network.logits(rows.outputs[1]), logits[first:])


@BACKENDS
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_known_rows_in_chunks_are_those_of_the_whole_text(
    form: Form, backend: str, tmp_path: Path
) -> None:
    """Two texts beside each other, at other places in every step."""
    both = Both(tmp_path, form, backend, num_texts=2)
    for first, end in ((0, 5), (5, 11), (11, 12)):
        mine, other = both.known(0, first, end), both.known(1, max(0, first - 3), end - 3)
        both.store.step(mine, other)
        both.check(mine, both.line(0, end))
        both.check(other, both.line(1, end - 3))


@BACKENDS
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_later_rows_read_what_the_rows_before_them_wrote(
    form: Form, backend: str, tmp_path: Path
) -> None:
    both = Both(tmp_path, form, backend)
    rows, line = both.known(0, 0, 9), both.line(0, 9)
    both.store.step(rows)
    for step, token_id in enumerate([4, 33, 17]):
        features = rows.outputs[0][-1:]
        parents = range(-1, step)
        rows = Rows(both.store.texts[0], [token_id], features, parents, num_stored=step)
        both.store.step(rows)
        line.draft(token_id)
        both.check(rows, line)


@BACKENDS
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nodes_of_a_tree_read_and_see_their_own_branch(
    form: Form, backend: str, tmp_path: Path
) -> None:
    """Three levels; each node is compared with its branch as a text of its own."""
    both = Both(tmp_path, form, backend)
    known = both.known(0, 0, 9)
    both.store.step(known)
    token_ids, parents = [4, 33, 17, 4, 8, 21, 30], [-1, -1, 0, 0, 1, 4, 2]
    written: list[torch.Tensor] = []
    scored: list[torch.Tensor] = []
    for first, end in ((0, 2), (2, 5), (5, 7)):
        above = [
            written[each] if each >= 0 else known.outputs[0][-1] for each in parents[first:end]
        ]
        rows = Rows(
            both.store.texts[0], token_ids[first:end], torch.stack(above), parents[:end], first
        )
        both.store.step(rows)
        written += rows.outputs[0].unbind(0)
        with torch.inference_mode():
            scored += both.network.logits(rows.outputs[1]).unbind(0)
    for node in range(len(parents)):
        branch = [node]
        while parents[branch[0]] >= 0:
            branch.insert(0, parents[branch[0]])
        line = both.line(0, 9)
        for each in branch:
            line.draft(token_ids[each])
        features, logits = line.outputs()
        same(written[node], features[-1])
        same(scored[node], logits[-1])


@BACKENDS
def test_rows_of_the_mask_token_follow_the_known_ones_in_one_pass(
    backend: str, tmp_path: Path
) -> None:
    both = Both(tmp_path, FORMS["P-EAGLE"], backend)
    network = both.network
    assert (network.num_parallel, network.mask_token_id) == (4, 7)
    both.store.step(both.known(0, 0, 5))
    rows, line = both.known(0, 5, 9), both.line(0, 9)
    with torch.inference_mode():
        feature = network.mask_feature()
    rows.token_ids = [*rows.token_ids, 7, 7, 7]
    rows.features = torch.cat([rows.features, feature.expand(3, -1)])
    both.store.step(rows)
    line.token_ids += [7, 7, 7]
    line.features = torch.cat([line.features, both.reading.mask_feature().expand(3, -1)])
    both.check(rows, line)


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
