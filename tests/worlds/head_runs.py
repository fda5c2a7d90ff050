"""A head in an engine whose target is a script: every draft is compared with a plain reading of the
head's facts, whatever the engine did before it.

The script's hidden states follow from the text, and it often says what was drafted, so that drafts are
accepted in part. Slots hold whole texts: a row behind another text than its own fails at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Protocol

import torch

from drafters.base import Drafter, DraftRequest, DraftSampling
from drafters.model.feature_drafter import FeatureDrafter
from drafters.model.protocol import Candidates, DraftRows, Levels
from drafters.tree import ROOT, DraftTree
from engine.attention.backend import AttentionNeeds, build_attention
from engine.batch import ForwardOutput, InputBatch, slot_of
from engine.drafting.block_model import BlockHead
from engine.drafting.draft_model import DraftLimits
from engine.drafting.head_model import ChainHead
from engine.drafting.published.networks import place
from engine.request.params import GenerationRequest, SamplingParams
from worlds.engine_harness import Driver, Setup, build_core, drafting, request

CPU = torch.device("cpu")
Text = tuple[int, ...]


@dataclass(frozen=True)
class Said:
    """``logits`` of one row, ``[draft_vocab]``; ``accepted``: what the head says of its first token."""

    logits: torch.Tensor
    accepted: float | None = None


class Reading(Protocol):
    """The facts of a head as a plain program. ``ids``: the target's of each column of logits. A parallel
    head says at once what may stand at each position: of a path only the length is asked for."""

    ids: torch.Tensor
    layers: tuple[int, ...]
    most_depth: int | None

    @property
    def is_parallel(self) -> bool: ...

    def after(self, text: Text, path: Text, states: torch.Tensor, num_slots: int) -> Said:
        """Returns what may follow ``path`` behind ``text``, whose last token has no states yet:
        ``states`` ``[len(text) - 1, sum of sizes]``. ``num_slots``: those that the block may take, from
        that of the text's last token on."""

    def num_positions(self, num_slots: int) -> int:
        """Returns of how many positions a parallel head says something."""


class ScriptedStates:
    """``[size]`` by layer and text: each follows from all of the text's tokens."""

    def __init__(self, size: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(31)
        self.size = size
        self._tokens = torch.randn(vocab_size, size, generator=generator)
        self._turn = torch.randn(size, size, generator=generator) / size**0.5
        self._found: dict[Text, torch.Tensor] = {(): torch.zeros(size)}

    def rows(self, text: Text, layers: Sequence[int]) -> torch.Tensor:
        """``[len(text), len(layers) * size]``"""
        inner = torch.stack([self._inner(text[: end + 1]) for end in range(len(text))])
        return torch.cat([inner @ _mixed(layer, self.size) for layer in layers], dim=1)

    def last(self, text: Text, layer: int) -> torch.Tensor:
        state: torch.Tensor = self._inner(text) @ _mixed(layer, self.size)
        return state

    def _inner(self, text: Text) -> torch.Tensor:
        start = len(text)
        while text[:start] not in self._found:
            start -= 1
        for end in range(start + 1, len(text) + 1):
            above = self._found[text[: end - 1]]
            self._found[text[:end]] = torch.tanh(self._turn @ above + self._tokens[text[end - 1]])
        return self._found[text]


@cache
def _mixed(layer: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(700 + layer)
    drawn: torch.Tensor = torch.randn(size, size, generator=generator) * (1.5 / size**0.5)
    return drawn


class AgreeingRunner:
    """Satisfies ``engine.core.Runner``. What follows a text is settled when its first row is asked: often
    its first drafted child, at times the second, else something of its own."""

    def __init__(self, states: ScriptedStates, vocab_size: int, setup: Setup) -> None:
        self._states, self._vocab_size, self._size = states, vocab_size, setup.block_size
        self._slots: list[Text] = [()] * (setup.num_blocks * setup.block_size)
        self._settled: dict[Text, int] = {}

    def forward(self, batch: InputBatch) -> ForwardOutput:
        texts: list[Text] = []
        drafted: dict[Text, list[int]] = {}
        for rows in batch.requests:
            start = len(texts)
            above = self._text_at(rows.block_table, rows.base - 1) if rows.base else ()
            assert len(above) == rows.base, "a slot holds another position's row"
            for index in range(rows.num_rows):
                node = index - rows.num_known
                if node >= 0:
                    above = texts[start + rows.num_known + rows.parents[node]]
                token_id = batch.token_ids[start + index]
                if node >= 0:
                    drafted.setdefault(above, []).append(token_id)
                above = (*above, token_id)
                texts.append(above)
        for slot, text in zip(batch.slot_mapping, texts, strict=True):
            self._slots[slot] = text
        asked = [texts[row] for row in batch.logits_indices]
        logits = torch.zeros(len(asked), self._vocab_size)
        for row, text in enumerate(asked):
            logits[row, self._next(text, drafted.get(text, []))] = 60.0
        hidden = [
            torch.stack([self._states.last(text, layer) for text in texts])
            for layer in batch.hidden_layers
        ]
        return ForwardOutput(logits, tuple(hidden))

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        found = [self._slots[slot] for slot in source_slots]
        for slot, text in zip(target_slots, found, strict=True):
            self._slots[slot] = text

    def _text_at(self, table: Sequence[int], position: int) -> Text:
        return self._slots[slot_of(table, position, self._size)]

    def _next(self, text: Text, drafted: Sequence[int]) -> int:
        if text not in self._settled:
            luck = hash(text[-5:]) % 16
            token = hash(text[-3:]) % self._vocab_size
            if drafted and luck < 10:
                token = drafted[0]
            elif len(drafted) > 1 and luck < 13:
                token = drafted[1]
            self._settled[text] = token
        return self._settled[text]


class OwnOpinion:
    """In the place of a drafter's calibration, so that a draft follows from the text alone."""

    mean = 0.5

    def acceptance(self, feature: int, confidence: float) -> float:
        del feature
        return confidence

    def learn(self, tree: DraftTree, path: Sequence[int]) -> None:
        pass


@dataclass
class Draft:
    """A draft that was asked for, and what its head said: by the path from the anchor."""

    ask: DraftRequest
    text: Text
    said: dict[Text, Candidates]
    run: list[Text]
    """The paths of the nodes that were run, in their slots' order."""


class HeadWorld(Driver):
    """``rests``: whether a request is not asked for a draft in a step, by its name and the number of
    tokens known."""

    def __init__(
        self,
        kind: type[FeatureDrafter],
        network: Any,
        reading: Reading,
        hidden_size: int,
        vocab_size: int,
        setup: Setup = Setup(prefill_chunk=5),  # noqa: B008  (frozen)
        backend: str = "sdpa",
        rests: Callable[[str, int], bool] = lambda *_: False,
    ) -> None:
        place(network, CPU, torch.float32)
        determinism: Any = "exact" if backend == "paged" else "fast"
        shapes = network.shapes
        needs = AttentionNeeds(determinism, CPU, torch.float32, setup.block_size, shapes)
        attention = build_attention(needs, setup.num_blocks, backend)
        limits = DraftLimits(vocab_size, setup.max_model_len, setup.max_num_batched_tokens)
        head = BlockHead if hasattr(network, "block_size") else ChainHead
        self.model: Any = head(network, attention, limits)
        self.name = kind.info.name
        self.drafter = kind(self.model)
        self.drafter._calibration = OwnOpinion()  # type: ignore[assignment]
        self.reading, self._rests = reading, rests
        self.states = ScriptedStates(hidden_size, vocab_size)
        self.drafts: dict[str, Draft] = {}
        self.num_drafts: Counter[str] = Counter()
        """Drafts that had a node, by request."""
        self.num_checked: Counter[str] = Counter()
        self.num_idle_rows: Counter[str] = Counter()
        """Rows of known tokens that were run though nothing was drafted with them."""
        self.lengths: dict[str, list[int]] = {}
        """How long a text was when it drafted, by request."""
        self.most_nodes = 0
        self.fewest_positions = 1000
        """The fewest positions of which a parallel head said something."""
        self.fewest_slots = 1000
        """From the anchor's on, where something was drafted."""
        self.num_together = 0
        """The most requests that drafted in one step."""
        self._watch()
        runner = AgreeingRunner(self.states, vocab_size, setup)
        drafters: dict[str, Drafter] = {self.name: self.drafter}
        super().__init__(build_core(runner, vocab_size, setup.but(drafters=drafters)))

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        num_tokens: int = 7,
        width: int = 1,
        max_tokens: int = 14,
        temperature: float = 0.0,
    ) -> GenerationRequest:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5)
        wanted = drafting(self.name, num_tokens=num_tokens, width=width, min_confidence=0.0)
        return request(name, prompt, sampling, wanted)

    def text(self, each: GenerationRequest) -> list[int]:
        return [*each.prompt_token_ids, *self.token_ids[each.request_id]]

    def finished(self, *requests: GenerationRequest) -> HeadWorld:
        """Runs them, and asserts that nothing failed, and that drafts were accepted in part."""
        self.run(*requests)
        assert self.core.speculation.num_failures == 0
        found = [self.finishes[each.request_id].speculative for each in requests]
        assert sum(stats.num_failed_drafts for stats in found) == 0
        num_accepted = sum(stats.num_accepted_tokens for stats in found)
        assert 0 < num_accepted < sum(stats.num_draft_tokens for stats in found)
        return self

    def num_cached(self, name: str) -> int:
        return self.finishes[name].num_cached_tokens

    # What is watched

    def _watch(self) -> None:
        begin, begin_levels = self.drafter.begin, self.model.begin

        def begin_drafts(
            requests: Sequence[DraftRequest], readback: Any
        ) -> Callable[[], list[DraftTree]]:
            asks = [self._rested(each) for each in requests]
            self.drafts = {
                each.request_id: Draft(each, tuple(each.token_ids), {}, []) for each in asks
            }
            finish = begin(asks, readback)

            def finished() -> list[DraftTree]:
                trees = finish()
                for each, tree in zip(asks, trees, strict=True):
                    self._check_tree(self.drafts[each.request_id], tree)
                self.num_together = max(self.num_together, sum(map(bool, map(len, trees))))
                return trees

            return finished

        def begin_rows(
            levels: Sequence[Sequence[DraftRows]], readback: Any
        ) -> Callable[[], Levels]:
            pending = begin_levels(levels, readback)

            def finish() -> Levels:
                found: Levels = pending()
                chosen: dict[str, int] = {}
                """Tokens of chains whose later rows were run before the host knew them."""
                for level, candidates in zip(levels, found.candidates, strict=True):
                    for rows, each in zip(level, candidates, strict=True):
                        name = rows.ask.request_id
                        is_later = level is not levels[0]
                        self._note(
                            replace(rows, token_ids=[chosen[name]]) if is_later else rows, each
                        )
                        if each:
                            chosen[name] = each[-1].token_ids[0]
                return found

            return finish

        self.drafter.begin = begin_drafts  # type: ignore[method-assign]
        self.model.begin = begin_rows

    def _rested(self, ask: DraftRequest) -> DraftRequest:
        is_resting = self._rests(ask.request_id, len(ask.token_ids))
        return replace(ask, max_nodes=0) if is_resting else ask

    def _note(self, rows: DraftRows, found: Sequence[Candidates]) -> None:
        name = rows.ask.request_id
        if not rows.num_scored:
            assert not found
            self.num_idle_rows[name] += len(rows.token_ids)
            return
        draft = self.drafts[name]
        paths = self._paths(draft, rows)
        num_slots = len(rows.ask.block_table) * self.model.block_size - len(draft.text) + 1
        self.fewest_slots = min(self.fewest_slots, num_slots)
        if self.reading.is_parallel:
            count = min(self.reading.num_positions(num_slots), rows.ask.depth)
            paths = [(0,) * at for at in range(count)]
            self.fewest_positions = min(self.fewest_positions, count)
        for path, each in zip(paths, found, strict=True):
            self._check(draft, path, each, rows.num_candidates, num_slots)
            draft.said[path] = each

    def _paths(self, draft: Draft, rows: DraftRows) -> list[Text]:
        """The paths of scored rows; those of drafted ones are noted."""
        if rows.base < len(draft.text):
            assert list(rows.token_ids) == list(draft.text[rows.base :])
            return [()]
        assert rows.first - len(draft.text) == len(draft.run), "a row has another slot"
        for index, token_id in enumerate(rows.token_ids, len(draft.run)):
            parent = rows.parents[index] if rows.parents else index - 1
            draft.run.append((*(() if parent == ROOT else draft.run[parent]), token_id))
        return draft.run[-rows.num_scored :]

    # What is compared

    def _check(
        self, draft: Draft, path: Text, found: Candidates, count: int, num_slots: int
    ) -> None:
        reading = self.reading
        states = self.states.rows(draft.text[:-1], reading.layers)
        said = reading.after(draft.text, path, states, num_slots)
        shares = _shares(said, reading.ids, draft.ask.sampling, len(draft.text) + len(path))
        best = shares.sort(descending=True).values[: min(count, len(shares))]
        columns = {int(token): at for at, token in enumerate(reading.ids)}
        own = shares[[columns[token] for token in found.token_ids]]
        assert len(set(found.token_ids)) == len(best)
        # The very tokens, but for two that are equally likely by all that float32 can tell.
        torch.testing.assert_close(own, best, atol=1e-5, rtol=0)
        tolerance = 1e-4
        if said.accepted is not None:
            rest = 1 - own[0]
            others = own[1:] / rest * (1 - said.accepted)
            own = torch.cat([torch.tensor([said.accepted]), others])
            tolerance += 1e-6 / float(rest)  # what is left of 1 is known to that much
        torch.testing.assert_close(torch.tensor(found.confidences), own, atol=tolerance, rtol=0)
        self.num_checked[draft.ask.request_id] += 1

    def _check_tree(self, draft: Draft, tree: DraftTree) -> None:
        if not draft.said:
            assert not len(tree)
            return
        paths: list[Text] = []
        for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append((*(() if parent == ROOT else paths[parent]), token_id))
        if self.reading.is_parallel:
            expected = best_product(draft)
        else:
            expected = grown_tree(draft, self.reading.most_depth)
        assert set(paths) == expected
        assert len(paths) == len(expected)
        self.most_nodes = max(self.most_nodes, len(paths))
        if paths:
            self.num_drafts[draft.ask.request_id] += 1
            self.lengths.setdefault(draft.ask.request_id, []).append(len(draft.text))


def _shares(said: Said, ids: torch.Tensor, sampling: DraftSampling, position: int) -> torch.Tensor:
    """Returns what the head gives to each column: with the verifier's noise, how clearly it wins."""
    if sampling.temperature == 0:
        return said.logits.softmax(0)
    scores = (said.logits / sampling.temperature).log_softmax(0)
    return (scores + torch.tensor(sampling.noise(position, ids.tolist()))).softmax(0)


def _weighed(said: Candidates, above: float, count: int) -> list[tuple[int, float]]:
    """Tokens that may follow a path, and the chance that each is reached, no better than its elder's."""
    found, most = [], 1.0
    for token, sure in list(zip(said.token_ids, said.confidences, strict=True))[:count]:
        most = min(most, sure)
        found.append((token, above * most))
    return found


def best_product(draft: Draft) -> set[Text]:
    """The likeliest paths where positions are guessed apart from each other: all of them are tried."""
    shape, levels = draft.ask.shape, list(draft.said.values())[: draft.ask.depth]
    ranked = [_weighed(level, 1.0, shape.width) for level in levels]
    weights = {
        tuple(token for token, _ in path): torch.tensor([sure for _, sure in path]).double().prod()
        for depth in range(1, len(ranked) + 1)
        for path in product(*ranked[:depth])
    }
    return _heaviest(weights, draft.ask.max_nodes)


def grown_tree(draft: Draft, most_depth: int | None) -> set[Text]:
    """EAGLE-2: the best nodes of each level are run, the best of all are kept. A node that nothing was
    said of was not run though it should have been."""
    ask = draft.ask
    depth = ask.shape.depth if most_depth is None else min(ask.shape.depth, most_depth)
    width = min(ask.shape.width, ask.max_nodes)
    weights: dict[Text, float] = {}
    run: list[Text] = []
    frontier: list[Text] = [()]
    for level in range(1, depth + 1):
        newest: dict[Text, float] = {}
        for path in frontier:
            above = weights.get(path, 1.0)
            for token, weight in _weighed(draft.said[path], above, width):
                newest[(*path, token)] = weight
        weights |= newest
        room = ask.max_nodes - 1 - len(run)
        if level == depth or room <= 0:
            break
        # What a node that is hardly kept leads to is not: it would weigh less.
        lightest = sorted([0.0] * ask.max_nodes + [*weights.values()])[-ask.max_nodes]
        able = [path for path in newest if newest[path] > lightest]
        frontier = sorted(able, key=lambda path: -newest[path])[: min(width, room)]
        run += frontier
    assert set(run) == set(draft.run)
    return _heaviest(weights, ask.max_nodes)


def _heaviest(weights: Mapping[Text, Any], count: int) -> set[Text]:
    return set(sorted(weights, key=lambda path: -float(weights[path]))[:count])


def prompt_of(seed: int, count: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(vocab_size, (count,), generator=generator).tolist()
    return found
