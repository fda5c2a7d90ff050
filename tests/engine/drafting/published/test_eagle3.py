"""EAGLE-3's network on the engine's attention, against a plain reading of the same facts: every row over
what it sees, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.drafting.published.eagle3 import read
from engine.drafting.published.eagle3_network import Eagle3Network
from engine.drafting.published.folder import DraftFolder
from engine.drafting.published.networks import place
from worlds.published_eagle3 import FACTS, FORMS, Form, written
from worlds.published_rows import DraftStore, Rows

torch.set_num_threads(1)

CPU = torch.device("cpu")
BACKENDS = pytest.mark.parametrize("backend", ["sdpa", "paged"])
Tensors = dict[str, torch.Tensor]


def target_ends() -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and output head of the target, ``[vocab_size, hidden_size]``."""
    generator = torch.Generator().manual_seed(9)
    size = (FACTS.vocab_size, FACTS.hidden_size)
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


def loaded(path: Path, form: Form) -> Eagle3Network:
    network = read(DraftFolder.open(written(path, form)), FACTS)
    embedding, head = target_ends()
    linear = nn.Linear(FACTS.hidden_size, FACTS.vocab_size, bias=False)
    linear.weight = nn.Parameter(head)
    network.bind(nn.Embedding.from_pretrained(embedding), linear)
    place(network, CPU, torch.float32)
    return network


# --- the plain reading ---


def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class Reading:
    """``tensors``: of the file, by its own names."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.tensors = {
            name: each if name in ("d2t", "t2d") else each.double()
            for name, each in form.tensors().items()
        }
        self.embedding, self.head = (each.double() for each in target_ends())
        self.embedding = self.tensors.get("embed_tokens.weight", self.embedding)
        self.head = self.tensors.get("lm_head.weight", self.head)
        config = form.config()
        self.norms_output = config.get("norm_output", False)
        self.norms_residual = config.get("norm_before_residual", form.method is not None)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        states = states.double()
        if "input_norm" in self.form.norms:
            states = norm(states, self.tensors["input_norm.weight"])
        elif self.form.norms:
            size = FACTS.hidden_size
            parts = [states[:, size * i : size * (i + 1)] for i in range(self.form.num_states)]
            weights = [self.tensors[f"{name}.weight"] for name in self.form.norms]
            states = torch.cat([norm(p, w) for p, w in zip(parts, weights, strict=True)], 1)
        return states @ self.tensors["fc.weight"].T + self.tensors.get("fc.bias", 0.0)

    def rows(
        self,
        token_ids: list[int],
        features: torch.Tensor,  # [num_rows, hidden_size]
        positions: list[int],
        seen: torch.Tensor,  # [num_rows, num_rows] bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the features that the next rows read, and logits."""
        hidden = features.double()
        for index in range(self.form.num_layers):
            prefix = self.form.prefix if index == 0 else f"layers.{index}."
            own = {
                name.removeprefix(prefix): each
                for name, each in self.tensors.items()
                if name.startswith(prefix)
            }
            residual = hidden
            if index == 0:
                tokens = norm(self.embedding[token_ids], own["input_layernorm.weight"])
                states = norm(hidden, own["hidden_norm.weight"])
                residual = states if self.norms_residual else hidden
                read = torch.cat([tokens, states], 1)
            else:
                read = norm(hidden, own["input_layernorm.weight"])
            hidden = residual + self.attention(own, read, positions, seen)
            read = norm(hidden, own["post_attention_layernorm.weight"])
            gate = read @ own["mlp.gate_proj.weight"].T
            gated = gate * torch.sigmoid(gate) * (read @ own["mlp.up_proj.weight"].T)
            hidden = hidden + gated @ own["mlp.down_proj.weight"].T
        normed = norm(hidden, self.tensors["norm.weight"])
        return normed if self.norms_output else hidden, normed @ self.head.T

    def attention(
        self, own: Tensors, read: torch.Tensor, positions: list[int], seen: torch.Tensor
    ) -> torch.Tensor:
        dim = self.form.head_dim

        def heads(name: str) -> torch.Tensor:
            flat = read @ own[f"self_attn.{name}_proj.weight"].T
            flat = flat + own.get(f"self_attn.{name}_proj.bias", 0.0)
            parted = flat.view(len(read), -1, dim)
            if f"self_attn.{name}_norm.weight" in own:
                parted = norm(parted, own[f"self_attn.{name}_norm.weight"])
            return parted

        query, key, value = heads("q"), heads("k"), heads("v")
        query, key = self.turned(query, positions), self.turned(key, positions)
        outputs = []
        for head in range(4):
            scores = query[:, head] @ key[:, head // 2].T / dim**0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(1)
            outputs.append(weights @ value[:, head // 2])
        flat = torch.cat(outputs, 1) @ own["self_attn.o_proj.weight"].T
        return flat + own.get("self_attn.o_proj.bias", 0.0)

    def turned(self, rows: torch.Tensor, positions: list[int]) -> torch.Tensor:
        """Turns dimension i and i + dim / 2 as the coordinates of one plane."""
        config = self.form.layer or {}
        theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
        factor = (config.get("rope_scaling") or {}).get("factor", 1.0)
        half = self.form.head_dim // 2
        turned = torch.empty_like(rows)
        for plane in range(half):
            angles = torch.tensor(positions).double() / factor * theta ** (-plane / half)
            x, y = rows[:, :, plane], rows[:, :, plane + half]
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            turned[:, :, plane] = x * cos - y * sin
            turned[:, :, plane + half] = y * cos + x * sin
        return turned


class Line:
    """A text as the plain reading has it, with tokens drafted behind it: all in one piece."""

    def __init__(self, reading: Reading, token_ids: list[int], states: torch.Tensor) -> None:
        self.reading = reading
        self.token_ids, self.features = list(token_ids), reading.fuse(states)

    def draft(self, token_id: int) -> None:
        """Adds a row that reads what the last one wrote."""
        written, _ = self.outputs()
        self.token_ids.append(token_id)
        self.features = torch.cat([self.features, written[-1:]])

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(self.token_ids)
        seen = torch.ones(count, count).tril().bool()
        return self.reading.rows(self.token_ids, self.features, list(range(count)), seen)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


class Both:
    """A network on the engine's attention and its plain reading, for texts of random states."""

    def __init__(self, path: Path, form: Form, backend: str, num_texts: int = 1) -> None:
        self.network = loaded(path, form)
        self.reading = Reading(form)
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
    mask = both.reading.tensors["mask_hidden"].reshape(1, -1)
    with torch.inference_mode():
        feature = network.mask_feature()
    rows.token_ids = [*rows.token_ids, 7, 7, 7]
    rows.features = torch.cat([rows.features, feature.expand(3, -1)])
    both.store.step(rows)
    line.token_ids += [7, 7, 7]
    line.features = torch.cat([line.features, both.reading.fuse(mask).expand(3, -1)])
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
    network = loaded(tmp_path, FORMS["a norm of all"])
    turning = network.rotary_emb.inv_freq.clone()
    place(network, CPU, torch.bfloat16)
    assert {each.dtype for each in network.parameters()} == {torch.bfloat16}
    assert torch.equal(network.rotary_emb.inv_freq, turning)
    assert not any(each.requires_grad for each in network.parameters())
