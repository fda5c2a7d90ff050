"""Runs the target: one forward over a step's flat rows. Knows nothing of requests or sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from engine.attention.backend import AttentionBackend, AttentionPlan, attending
from engine.batch import (
    Choices,
    ForwardOutput,
    InputBatch,
    InputBuffers,
    InputTensors,
    RequestRows,
    build_batch,
    settle,
)
from engine.capture.replays import GraphSizes, make_replays
from engine.kernels import Renews
from engine.kernels.triton.choice_ops import can_choose, choose_rows
from engine.model.adapted import AdaptedLayers
from engine.model.decoder import kept_states
from engine.request.errors import UnsupportedModelError
from engine.states.plan import ModelStates, StatePlan
from engine.states.seam import answering
from engine.states.work import state_work
from engine.transfer import Stopwatch, upload
from kvpool.state_slots import StateRows


class StepPlan(NamedTuple):
    """A step's plans: of attention, and of operations with a state where there are such."""

    attention: AttentionPlan
    states: StatePlan | None

    def _part(self, key: Hashable) -> Renews:
        """Keys of states are tuples that begin with their name."""
        of_states = isinstance(key, tuple) and key[0] == "states"
        return cast(Renews, self.states if of_states else self.attention)

    def renewed(self, key: Hashable) -> tuple[int, int]:
        """See ``Renews``."""
        return self._part(key).renewed(key)

    def wants_team(self, key: Hashable) -> bool:
        """See ``Renews``."""
        return self._part(key).wants_team(key)

    def keep(self) -> Callable[[], None]:
        """See ``Renews``."""
        return (lambda: None) if self.states is None else self.states.keep()


_EXPECTED_LOGITS = 128
"""Rows of most steps that sample."""
_PROBED_ROWS = 13
"""Experts are not layers for all rows: of so many, no expert is chosen by all and by all again."""


class ModelRunner:
    """A model on the engine's attention and the store that holds its keys and values. ``can_capture``:
    nothing in its forward waits for other processes, so that forwards may be recorded."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: AttentionBackend,
        max_num_rows: int = 256,
        graphs: GraphSizes | None = None,
        can_capture: bool = True,
        states: ModelStates | None = None,
    ) -> None:
        """``graphs``: what may be captured where the device has graphs; None: nothing. ``states``: of a
        model whose layers keep some."""
        self.model = model
        self.states = states
        self.attention = attention
        self.store = attention.store
        self.device = model.device
        self._buffers = InputBuffers(self.device, max_num_rows)
        can_capture = can_capture and (states is None or states.can_capture)
        self._replays = make_replays(
            self._planned, attention, graphs, max_num_rows, can_capture, states
        )
        self._chooses = False
        self.adapted: AdaptedLayers | None = None
        """Gives rows their adapters; None: no batch may have any."""

    @torch.inference_mode()
    def forward(self, batch: InputBatch) -> ForwardOutput:
        """Runs a step. Keys and values of all rows are in the store afterwards; on a GPU in stream
        order: the forward is only launched."""
        if batch.moved is not None and not self.attention.can_move(batch):
            batch = settle(batch, self.store.block_size)
        watch = Stopwatch(self.device) if self.device.type == "cuda" else None
        if self._chooses and batch.choices is None:  # a graph chooses in every step
            batch.choices = Choices.of_none(len(batch.logits_indices))
        padded = self._replays.pad(batch)
        inputs, plan = self._plan(padded)
        run = self._forward_of(padded, inputs, plan)
        output = self._replays.forward(padded, plan, run)
        num_logits = len(batch.logits_indices)
        places = map(padded.hidden_layers.index, batch.hidden_layers)
        output = output._replace(
            logits=output.logits[:num_logits],
            tokens=None if output.tokens is None else output.tokens[:num_logits],
            hidden=tuple(output.hidden[place][: batch.num_rows] for place in places),
        )
        return output if watch is None else output._replace(seconds=watch.stop())

    @torch.inference_mode()
    def prepare(self, hidden_layers: tuple[int, ...] = (), chooses: bool = False) -> None:
        """Captures what is captured at start. Once, while the store is unused. ``hidden_layers``: whose
        hidden states steps will ask for, where they ask for any. ``chooses``: steps will have choices.
        Raises UnsupportedModelError where the model has no such states."""
        self._chooses = chooses and can_choose(self.device)
        if hidden_layers:
            self._check_hidden(hidden_layers)

        self._replays.prepare(hidden_layers)

    def _planned(self, batch: InputBatch) -> Callable[[], ForwardOutput]:
        """Plans a batch that is captured, and returns its forward."""
        if self._chooses:
            batch.choices = Choices.of_none(batch.num_rows)
        return self._forward_of(batch, *self._plan(batch))

    def _forward_of(
        self, batch: InputBatch, inputs: InputTensors, plan: StepPlan
    ) -> Callable[[], ForwardOutput]:
        run = partial(self._run, inputs, plan, batch.hidden_layers)
        if not batch.is_adapted:
            return run
        assert self.adapted is not None, "nothing gives rows their adapters"
        return partial(self.adapted.run, batch, inputs, run)

    def _check_hidden(self, layers: tuple[int, ...]) -> None:
        """A step that asks for what there is not would fail, and so would every one after it."""
        with kept_states(self.model, layers):
            pass  # ranks cannot be called back from a forward that raises
        num_rows = min(2, self.store.num_slots)
        batch = replace(self._sample_batch((num_rows, 0, 1), seed=0), hidden_layers=layers)
        wanted = batch.num_rows, self.model.config.hidden_size
        for layer, states in zip(layers, self.forward(batch).hidden, strict=True):
            if states.shape != wanted:
                raise UnsupportedModelError(
                    f"hidden states of layer {layer} of {type(self.model).__name__} are not one vector "
                    f"of {wanted[1]} numbers for each token"
                )

    @torch.inference_mode()
    def serve_adapters(self) -> AdaptedLayers:
        """Finds the layers that adapters may change, and gives rows their adapters in these from now on.
        Once, while the store is unused, and when layers have the form that they keep."""
        num_rows = min(_PROBED_ROWS, self.store.num_slots)
        generator = torch.Generator().manual_seed(0)
        embeddings: Any = self.model.get_input_embeddings()
        vocab_size: int = embeddings.num_embeddings

        def probe() -> None:
            ids = torch.randint(vocab_size, (num_rows,), generator=generator).tolist()
            blocks = range(-(-num_rows // self.store.block_size))
            rows = RequestRows(ids, num_rows, 0, (), blocks, num_logits=1)
            inputs, plan = self._plan(build_batch([rows], self.store.block_size))
            self._run(inputs, plan, ())

        self.adapted = AdaptedLayers(self.model, probe, num_rows)
        return self.adapted

    def _plan(self, batch: InputBatch) -> tuple[InputTensors, StepPlan]:
        inputs = self._buffers.fill(batch)
        states = None
        if self.states is not None:
            states = self.states.plan(state_work(batch.requests), batch.bucket)
        return inputs, StepPlan(self.attention.plan(batch, inputs), states)

    def _run(
        self, inputs: InputTensors, plan: StepPlan, hidden_layers: tuple[int, ...]
    ) -> ForwardOutput:
        """Logits of at least one row."""
        with (
            kept_states(self.model, hidden_layers) as kept,
            attending(plan.attention),
            answering(plan.states),
        ):
            output = self.model(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=inputs.logits_indices,
            )
        logits, tokens = output.logits[0], None
        if len(inputs.temperatures) and can_choose(self.device):
            how = inputs.noise_keys, inputs.noise_positions, inputs.temperatures
            tokens = choose_rows(logits[: len(how[0])], *how)
        hidden = tuple(kept[layer] for layer in hidden_layers)
        return ForwardOutput(logits, hidden, tokens=tokens)

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        """Copies accepted rows to their committed slots, all layers at once."""
        if source_slots:
            slots = upload([source_slots, target_slots], self.device)
            self.store.move(slots[0], slots[1])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_step(self, num_rows: int, num_kv_tokens: int, num_requests: int = 1) -> float:
        """Returns the seconds of one forward of ``num_requests`` requests with ``num_rows`` rows after
        ``num_kv_tokens`` tokens between them, in equal shares; for the cost model. Overwrites the
        store's first blocks: only while it is unused."""
        shape = num_rows, num_kv_tokens, num_requests
        self._settle(shape)
        batch = self._sample_batch(shape, seed=0)
        self.synchronize()
        start = time.perf_counter()
        self.forward(batch)
        self.synchronize()
        return time.perf_counter() - start

    def expect(self, num_rows: int) -> None:
        """Lets forwards of up to so many rows be run again without the interpreter from the first, where
        fewer rows were timed before. Stores nothing."""
        self._replays.pad(self._sample_batch((num_rows, 0, 1), 0, _EXPECTED_LOGITS))

    def _settle(self, shape: tuple[int, int, int]) -> None:
        """Runs forwards of that shape until they take as long as they will."""
        for seed in count():
            batch = self._sample_batch(shape, seed)
            if self._replays.is_settled(batch):
                return
            self.forward(batch)

    def _sample_batch(
        self, shape: tuple[int, int, int], seed: int, most_logits: int = 64
    ) -> InputBatch:
        """Rows of any tokens, which reach experts as those of texts do, and keys and values of whatever
        lies in the store."""
        num_rows, num_kv_tokens, num_requests = shape
        block_size = self.store.block_size
        rows, base = num_rows // num_requests, num_kv_tokens // num_requests
        num_blocks = -(-(base + rows) // block_size)
        embeddings: Any = self.model.get_input_embeddings()
        drawn = torch.randint(
            embeddings.num_embeddings,
            (num_requests, rows),
            generator=torch.Generator().manual_seed(seed),
        ).tolist()
        requests = [
            RequestRows(
                token_ids=token_ids,
                num_known=rows,
                base=base,
                parents=(),
                block_table=range(first, first + num_blocks),
                num_logits=min(rows, most_logits),
                states=self._sample_states(first // num_blocks),
            )
            for first, token_ids in zip(
                range(0, num_requests * num_blocks, num_blocks), drawn, strict=True
            )
        ]
        batch = build_batch(requests, block_size)
        if self._chooses:
            asked = Choices.of_none(len(batch.logits_indices))
            batch.choices = asked._replace(temperatures=[0.0] * len(asked.keys))
        return batch

    def _sample_states(self, number: int) -> StateRows | None:
        """Returns a slot to begin from, whatever it holds, and to leave the state in."""
        if self.states is None:
            return None
        seat = number % self.states.store.num_slots
        return StateRows(source=seat, target=seat)
