"""Runs transformers' ``generate`` and the engine behind one small protocol.

The engine's core is driven synchronously, step after step: no server, no event loop, no threads.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from drafters.base import OptionValue
from engine.core import EngineCore
from engine.request.events import FinishInfo, TokenEvent
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.request.stats import StepStats

GAMMA_0 = "gamma 0"
TRANSFORMERS = "transformers"
LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0 is greedy."""

    name: str
    temperature: float = 0.0
    top_p: float = 1.0


SAMPLINGS = {
    "greedy": Sampling("greedy"),
    "sampled": Sampling("sampled", temperature=0.7, top_p=0.9),
    "hot": Sampling("hot", temperature=1.0),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A batch to complete: every prompt gets exactly so many of ``lengths``, end of text or not.

    ``expected``: empty, or a prediction of the output for every prompt. ``laps``: empty, or how often
    each prompt has come before; what is learned in one lap is not known in the next. ``num_running``
    fewer than the prompts: so many run at a time, and what finishes is followed by the next, as on a
    busy server. Those that begin together are then cut short by ever less, since they would also end
    together, and so would all that follow them.
    """

    prompts: tuple[tuple[int, ...], ...]
    num_new_tokens: int
    sampling: Sampling
    seed: int
    expected: tuple[tuple[int, ...], ...] = ()
    num_running: int | None = None
    laps: tuple[int, ...] = ()
    follow_ups: tuple[tuple[int, ...], ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest text that any prompt may become."""
        follow_ups = self.follow_ups or ((),) * len(self.prompts)
        return max(
            len(prompt) + self.num_new_tokens + (len(after) and len(after) + self.num_new_tokens)
            for prompt, after in zip(self.prompts, follow_ups, strict=True)
        )

    def second_turn(self, outputs: Sequence[tuple[int, ...]]) -> Job | None:
        """Returns the job that follows these answers, None where none does. An answer ends where the
        model itself ended its turn, with what the template ends it by."""
        if not any(self.follow_ups):
            return None
        laps = self.laps or (0,) * len(self.prompts)
        turns = [
            (prompt + _before(output, after[0]) + after, lap)
            for prompt, output, after, lap in zip(
                self.prompts, outputs, self.follow_ups, laps, strict=True
            )
            if after
        ]
        prompts, laps = zip(*turns, strict=True)
        return replace(self, prompts=prompts, laps=laps, expected=(), follow_ups=())

    @property
    def lengths(self) -> tuple[int, ...]:
        """The new tokens of each prompt: ``num_new_tokens`` unless it is among the first of a steady
        job."""
        first = self.num_running or 0
        if first >= len(self.prompts):
            first = 0
        begun = (-(-self.num_new_tokens * (at + 1) // first) for at in range(first))
        return (*begun, *[self.num_new_tokens] * (len(self.prompts) - first))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def _before(output: tuple[int, ...], end: int) -> tuple[int, ...]:
    return output[: output.index(end)] if end in output else output


@dataclass(frozen=True, slots=True)
class Account:
    """The engine's own account of a run. Seconds; sums over steps.

    ``baseline_seconds``, ``step_seconds``: all steps. The rest of the seconds: the
    ``num_decode_steps`` steps after every request had its first token, ``decode_baseline_seconds`` too.
    ``reply_baseline_seconds``, ``reply_step_seconds``: what replies tell of, each request's own sums.
    """

    num_request_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    baseline_seconds: float = 0.0
    step_seconds: float = 0.0
    num_decode_steps: int = 0
    decode_step_seconds: float = 0.0
    decode_baseline_seconds: float = 0.0
    reply_baseline_seconds: float = 0.0
    reply_step_seconds: float = 0.0
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One job done. ``decode_seconds`` and ``num_decode_tokens`` count from when every request had its
    first token. ``num_request_steps``: forwards times the requests in each. ``account``: ours
    only. ``joules``: what the processors used, None where they do not tell."""

    output_token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    decode_seconds: float
    num_decode_tokens: int
    num_request_steps: int
    account: Account | None = None
    joules: float | None = None

    def then(self, other: Run) -> Run:
        """Both as one: texts of the first, then those of the other, and sums."""
        accounts = [run.account for run in (self, other) if run.account is not None]
        return Run(
            output_token_ids=self.output_token_ids + other.output_token_ids,
            seconds=self.seconds + other.seconds,
            decode_seconds=self.decode_seconds + other.decode_seconds,
            num_decode_tokens=self.num_decode_tokens + other.num_decode_tokens,
            num_request_steps=self.num_request_steps + other.num_request_steps,
            account=Account(*map(sum, zip(*map(astuple, accounts), strict=True)))
            if accounts
            else None,
        )


Steps = Generator[float, None, Run]
"""A run that pauses after each step, of which it gives the seconds."""


def whole(steps: Steps) -> Run:
    """Goes through a run without pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            run: Run = end.value
            return run


class ContenderFailedError(Exception):
    """Why a contender cannot go on; the others can."""


class Contender(Protocol):
    """``run`` may raise whatever the library it wraps raises, which ends the bench, or
    ContenderFailedError, which ends only this one's part of it."""

    @property
    def name(self) -> str: ...
    @property
    def max_batch_size(self) -> int | None: ...
    def run(self, job: Job) -> Run: ...


class TransformersContender:
    """``generate`` on transformers' own attention; ``lookup_tokens`` switches its prompt look-up on, and
    ``assistant`` drafts for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        pad_token_id: int,
        lookup_tokens: int = 0,
        assistant: PreTrainedModel | None = None,
    ) -> None:
        # Whatever the model's own settings say about ending or sampling would win over None.
        model.generation_config = GenerationConfig(pad_token_id=pad_token_id)
        self._model = model
        self._pad_token_id = pad_token_id
        self._lookup_tokens = lookup_tokens
        self._assistant = assistant

    @property
    def name(self) -> str:
        return (
            f"{TRANSFORMERS} lookup {self._lookup_tokens}" if self._lookup_tokens else TRANSFORMERS
        )

    @property
    def max_batch_size(self) -> int | None:
        """Its look-up refuses more than one sequence."""
        return 1 if self._lookup_tokens else None

    def run(self, job: Job) -> Run:
        outputs, marks = self.complete(job)
        (first_seconds, first_num_tokens), end = marks[0], marks[-1][0]
        return Run(
            output_token_ids=outputs,
            seconds=end,
            decode_seconds=end - first_seconds,
            num_decode_tokens=job.num_tokens - first_num_tokens * len(job.prompts),
            num_request_steps=len(marks) * len(job.prompts),
        )

    def complete(self, job: Job) -> tuple[tuple[tuple[int, ...], ...], list[tuple[float, int]]]:
        """The outputs and, for every forward, the seconds since the start and each sequence's tokens
        by then; the last mark is when all was done."""
        input_ids, attention_mask = self._padded(job.prompts)
        clock = _GenerateClock(input_ids)
        torch.manual_seed(job.seed)
        start = time.perf_counter()
        generate: Any = self._model.generate
        with torch.inference_mode():
            generated = generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=self._config(job),
                stopping_criteria=StoppingCriteriaList([clock]),
                **({} if self._assistant is None else {"assistant_model": self._assistant}),
            )
        outputs = generated[:, input_ids.shape[1] :].tolist()
        end = time.perf_counter()
        if any(len(output) != job.num_new_tokens for output in outputs):
            raise RuntimeError("transformers did not write the number of tokens it was asked for")
        marks = [(seconds - start, num_tokens) for seconds, num_tokens in clock.marks]
        marks[-1] = (end - start, job.num_new_tokens)
        return tuple(tuple(output) for output in outputs), marks

    def _config(self, job: Job) -> GenerationConfig:
        config = GenerationConfig(
            max_new_tokens=job.num_new_tokens,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=self._pad_token_id,
            do_sample=job.sampling.temperature > 0,
            prompt_lookup_num_tokens=self._lookup_tokens or None,
        )
        if job.sampling.temperature > 0:
            config.temperature = job.sampling.temperature
            config.top_p = job.sampling.top_p
            config.top_k = 0  # unset it means 50
        return config

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """On the left, as ``generate`` wants it: ``[num_prompts, longest]``, twice."""
        longest = max(len(prompt) for prompt in prompts)
        ids = [[self._pad_token_id] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class _GenerateClock(StoppingCriteria):
    """Never stops anything: ``generate`` asks after every forward, so it counts and times them."""

    def __init__(self, prompts: torch.Tensor) -> None:
        self._device = prompts.device
        self._prompt_length = prompts.shape[1]
        self.marks: list[tuple[float, int]] = []

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: Any,  # noqa: ARG002
        **_: Any,
    ) -> torch.Tensor:
        if self._device.type == "cuda" and not self.marks:
            torch.cuda.synchronize(self._device)
        self.marks.append((time.perf_counter(), input_ids.shape[1] - self._prompt_length))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class EngineContender:
    """The engine with one way of speculating; all contenders share one core, as requests do.

    What drafters learn of texts serves one run only, since it comes under a ``cache_salt`` of its own;
    what ``auto`` and the gamma policies count over all requests stays. ``knows_prompts``: the prefix
    cache has the prompts before a run is timed.
    """

    def __init__(
        self,
        name: str,
        core: EngineCore,
        speculative: SpeculativeParams,
        *,
        knows_prompts: bool = False,
    ) -> None:
        self._name = name
        self._core = core
        self._speculative = speculative
        self._knows_prompts = knows_prompts
        self._num_runs = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def max_batch_size(self) -> int | None:
        return None

    def run(self, job: Job) -> Run:
        return whole(self._run(job))

    def _run(self, job: Job) -> Steps:
        self._num_runs += 1
        if self._knows_prompts:
            yield from self._complete("ahead", replace(job, num_new_tokens=1))
        return (yield from self._complete("run", job))

    def _complete(self, what: str, job: Job) -> Steps:
        recorder = _Recorder(job)
        requests = self._requests(what, job)
        waiting = deque(requests)
        while waiting or self._core.has_work:
            start = time.perf_counter()
            num_taken_up = len(requests) - len(waiting)
            room = recorder.num_running - (num_taken_up - recorder.num_finished)
            for _ in range(min(room, len(waiting))):
                self._core.submit(self._core.prepare(waiting.popleft()))
            result = self._core.step()
            seconds = time.perf_counter() - start
            recorder.take(result.events, result.stats, seconds, bool(waiting))
            yield seconds
        return recorder.run([request.request_id for request in requests])

    def _requests(self, what: str, job: Job) -> list[GenerationRequest]:
        nothing: tuple[tuple[int, ...], ...] = ((),) * len(job.prompts)
        laps = job.laps or (0,) * len(job.prompts)
        return [
            GenerationRequest(
                request_id=f"{self._name}/{self._num_runs}/{what}/{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    max_tokens=length,
                    temperature=job.sampling.temperature,
                    top_p=job.sampling.top_p,
                    ignore_eos=True,
                    seed=job.seed + index,
                ),
                speculative=self._speculative,
                cache_salt=f"{self._name}/{self._num_runs}/{lap}",
                prediction_token_ids=expected,
            )
            for index, (prompt, lap, length, expected) in enumerate(
                zip(job.prompts, laps, job.lengths, job.expected or nothing, strict=True)
            )
        ]


class SteppedContender(EngineContender):
    """With a core of its own, so that others may take steps between its own."""

    def steps(self, job: Job) -> Steps:
        return self._run(job)


class _Mark(NamedTuple):
    time: float
    num_steps: int
    num_tokens: int


def _more_prompts_seconds(steps: Sequence[StepStats], num_usual: float) -> float:
    """Returns what these steps would have taken longer with ``num_usual`` tokens of prompts. How many are
    read while so many tokens are written depends on which requests happen to end: with drafts, it was up
    to a third more, which is no fault of theirs. A step with prompts takes longer by these."""
    plain = [each.step_seconds for each in steps if not each.num_prompt_tokens]
    reading = [each for each in steps if each.num_prompt_tokens]
    if not plain or not reading:
        return 0.0
    seconds = sum(each.step_seconds for each in reading) - fmean(plain) * len(reading)
    num_read = sum(each.num_prompt_tokens for each in reading)
    return max(0.0, seconds) * (num_usual / num_read - 1)


class _Recorder:
    """Gathers what a run's steps tell. Decoding is timed while as many run as ever will: from when the
    first of them all had a token until the last prompt was taken up, or the end if all ran at once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.num_running = min(job.num_running or len(job.prompts), len(job.prompts))
        self._outputs: dict[str, list[int]] = {}
        self._finished: list[FinishInfo] = []
        self._steps: list[StepStats] = []
        self._marks: list[_Mark] = []
        self._seconds = 0.0

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def take(
        self, events: Sequence[object], stats: StepStats | None, seconds: float, more_wait: bool
    ) -> None:
        """``seconds``: of this step."""
        for event in events:
            if not isinstance(event, TokenEvent):
                raise RuntimeError(f"a request failed: {event}")
            self._outputs.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish is not None:
                self._finished.append(event.finish)
        if stats is not None:
            self._steps.append(stats)
        self._seconds += seconds
        all_at_once = self.num_running == len(self._job.prompts)
        if len(self._outputs) >= self.num_running and (
            len(self._marks) < 2 or all_at_once or more_wait
        ):
            num_tokens = sum(len(tokens) for tokens in self._outputs.values())
            mark = _Mark(self._seconds, len(self._steps), num_tokens)
            self._marks = [*self._marks[:1], mark]

    def run(self, request_ids: Sequence[str]) -> Run:
        outputs = tuple(tuple(self._outputs[request_id]) for request_id in request_ids)
        if tuple(map(len, outputs)) != self._job.lengths:
            raise RuntimeError("the engine did not write the number of tokens it was asked for")
        account = self._account()
        first, last = self._marks[0], self._marks[-1]
        num_tokens = last.num_tokens - first.num_tokens
        more = 0.0
        if self.num_running < len(self._job.prompts):
            num_read = sum(stats.num_prompt_tokens for stats in self._steps)
            usual = num_read / len(self._job.prompts) / self._job.num_new_tokens
            steps = self._steps[first.num_steps : last.num_steps]
            more = _more_prompts_seconds(steps, num_tokens * usual)
        return Run(
            output_token_ids=outputs,
            seconds=self._seconds,
            decode_seconds=last.time - first.time + more,
            num_decode_tokens=num_tokens,
            num_request_steps=account.num_request_steps,
            account=account,
        )

    def _account(self) -> Account:
        decode = self._steps[self._marks[0].num_steps : self._marks[-1].num_steps]
        told = [finish.speculative for finish in self._finished]
        counts = Account(
            num_request_steps=sum(stats.num_steps for stats in told),
            num_draft_tokens=sum(stats.num_draft_tokens for stats in told),
            num_accepted_tokens=sum(stats.num_accepted_tokens for stats in told),
            num_emitted_tokens=sum(stats.num_emitted_tokens for stats in told),
            reply_baseline_seconds=sum(stats.baseline_seconds for stats in told),
            reply_step_seconds=sum(stats.step_seconds for stats in told),
        )
        return replace(
            counts,
            baseline_seconds=sum(step.baseline_seconds for step in self._steps),
            step_seconds=sum(step.step_seconds for step in self._steps),
            num_decode_steps=len(decode),
            decode_step_seconds=sum(step.step_seconds for step in decode),
            decode_baseline_seconds=sum(step.baseline_seconds for step in decode),
            draft_seconds=sum(step.draft_seconds for step in decode),
            forward_seconds=sum(step.forward_seconds for step in decode),
            verify_seconds=sum(step.verify_seconds for step in decode),
            other_seconds=sum(step.other_seconds for step in decode),
        )


def parse_drafter(text: str, known: Sequence[str]) -> tuple[str, SpeculativeParams]:
    """``ngram`` drafts chains as its policy (goodput) grants, ``ngramx3`` trees of width 3; ``ngram:4``
    always has 4 tokens verified; ``stand+share`` and ``stand+max_contexts=4096`` set its options.

    Returns a name for tables and the parameters. Raises ValueError for what is not known.
    """
    spec, *settings = text.split("+")
    shaped, colon, gamma = spec.partition(":")
    found = re.fullmatch(r"(.+?)x(\d+)", shaped)
    drafter, width = (found[1], int(found[2])) if found else (shaped, 1)
    if drafter not in known or drafter == "none":
        usable = ", ".join(name for name in known if name != "none")
        raise ValueError(f"unknown drafter {drafter!r}; known: {usable}")
    if width < 1:
        raise ValueError(f"{text!r}: after the x comes a number of children per node")
    if colon and (not gamma.isdigit() or int(gamma) < 1):
        raise ValueError(f"{text!r}: after the colon comes a number of draft tokens")
    params = SpeculativeParams(
        draft_strategy=drafter, options=dict(_option(text, each) for each in settings)
    )
    if width > 1:
        params = replace(
            params,
            max_speculative_tokens=32,
            tree_strategy="tree",
            tree_width=width,
            tree_depth=16,
        )
    if colon:
        params = replace(
            params,
            adaptive_depth="fixed",
            num_speculative_tokens=int(gamma),
            max_speculative_tokens=16,
        )
    words = [drafter, "" if width == 1 else f"tree {width}", f"fixed {gamma}" if colon else ""]
    return " ".join(filter(None, [*words, *settings])), params


def _option(text: str, setting: str) -> tuple[str, OptionValue]:
    name, equals, value = setting.partition("=")
    if not equals:
        return name, True
    try:
        return name, json.loads(value)
    except ValueError:
        raise ValueError(f"{text!r}: {value!r} is no number, true, false or quoted text") from None
