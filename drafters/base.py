"""What guesses for a target, and what it is told afterwards: the base class of all drafters.

One drafter object per engine and name holds the states of all its requests, so that drafters with
a model of their own can batch. The engine thread is the only caller. Most drafters never see a
tensor: token ids, options, the verifier's noise and, where they ask for them, the target's top
tokens per verified row. What else a drafter asks of the engine stands in its ``DrafterNeeds``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from drafters.tree import EMPTY, DraftTree
from slipstream.options import DraftShape as DraftShape

OptionValue: TypeAlias = bool | int | float | str


Noise: TypeAlias = Callable[[int, Sequence[int]], Sequence[float]]
"""``noise(position, token_ids)``: Gumbel noise of tokens at an absolute position, one float each."""


def no_noise(position: int, token_ids: Sequence[int]) -> Sequence[float]:
    """Greedy: no token is favoured."""
    del position
    return [0.0] * len(token_ids)


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the request's tokens are sampled: ``argmax(logit / temperature + noise)`` among what top-k,
    top-p and min-p keep; ``temperature`` 0 is greedy (then ``noise`` is none).

    Under ``verification`` "match", ``noise`` is the verifier's own, so a drafter that samples with it
    agrees with the target more often than any that samples independently. Under other verifications
    it is a stream of the drafter's own, and a drafter that samples attaches the distributions it
    sampled from to the tree (``DraftTree.draft_probs``). ``key`` is the same noise for those who
    compute it over tensors.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    noise: Noise = no_noise
    key: int = 0
    verification: str = "match"


GREEDY = DraftSampling()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request's turn to draft.

    ``token_ids`` is the request's live list, prompt plus everything emitted (the last one is the
    anchor); read it, never keep or change it. ``max_nodes`` bounds the tree. ``num_computed_tokens``
    tokens have their keys and values in the target's store. ``block_table`` is live too; for drafters
    that need ``draft_slots`` it covers the slots of ``max_nodes`` nodes after the known tokens.
    ``tokens_per_second``: what the engine would write in this step without drafts, all requests
    together, so that a drafter can weigh its time; 0 where the request's policy does not.
    """

    request_id: str
    token_ids: Sequence[int]
    max_nodes: int
    shape: DraftShape
    sampling: DraftSampling = GREEDY
    num_computed_tokens: int = 0
    block_table: Sequence[int] = ()
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What the target said about one request in one step.

    Row 0 is the anchor, row ``i + 1`` is node ``i`` of ``tree`` (the part that was verified; empty
    at gamma 0). ``path`` holds the rows whose token was emitted, starting with row 0; the target's
    token at the last of them is the last of ``emitted_token_ids``, unless the run was trimmed by a
    stop. Where drafts are not verified by match, ``row_token_ids`` is -1 at rows off the path.
    ``top_token_ids[r]`` are the target's likeliest tokens at row ``r``, best first, zero-
    probability ones left out, if the drafter's ``num_top_tokens`` asked for them, and
    ``top_probs[r]`` their probabilities at temperature 1, before any truncation, for drafters
    that need ``top_probs``.
    """

    request_id: str
    token_ids: Sequence[int]
    tree: DraftTree
    row_token_ids: Sequence[int]
    path: Sequence[int]
    emitted_token_ids: Sequence[int]
    top_token_ids: Sequence[Sequence[int]] | None = None
    top_probs: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """The target's last hidden states (what its output head reads) of newly committed tokens.

    Row ``i`` belongs to the token at ``first_position + i``. The first call after admission starts
    where the cached prefix ended, one after preemption may start anew at a smaller position.
    """

    request_id: str
    first_position: int
    token_ids: Sequence[int]
    """The request's live list, as in ``Observation``."""
    hidden: Any  # [num_rows, hidden_size], the target's type and device


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter asks of the engine besides token ids.

    ``top_probs``: probabilities beside the top tokens. ``hidden_rows``: it reads the target's hidden
    states (``Drafter.observe_hidden``). ``draft_slots``: it writes keys and values, so slots for its
    nodes are leased before it proposes. ``all_or_nothing``: rows of a draft are of use only together
    (the Lookahead window), so a policy grants a draft whole or not at all (``whole_trees`` is the name
    of before). ``draft_model``: the engine makes it a model to draft with (``context.draft_model``):
    "small", the one of the setting draft_model; "quantized", a copy of the target or of the small one;
    "layers", some of the target's own.
    """

    top_probs: bool = False
    hidden_rows: bool = False
    draft_slots: bool = False
    all_or_nothing: bool = False
    draft_model: str = ""
    whole_trees: InitVar[bool] = False

    def __post_init__(self, whole_trees: bool) -> None:
        if whole_trees:
            object.__setattr__(self, "all_or_nothing", True)


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """A per-request option of a drafter: checked by the server, listed by ``GET /v1/drafters``."""

    name: str
    default: OptionValue
    description: str
    minimum: float | None = None
    maximum: float | None = None

    def check(self, value: object) -> OptionValue:
        """The value, if it fits. Raises ValueError naming the option otherwise."""
        kind = type(self.default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{self.name} must be {kind.__name__}, not {type(value).__name__}")
        assert isinstance(value, bool | int | float | str)
        if not isinstance(value, bool | str):
            if self.minimum is not None and value < self.minimum:
                raise ValueError(f"{self.name} must be at least {self.minimum:g}")
            if self.maximum is not None and value > self.maximum:
                raise ValueError(f"{self.name} must be at most {self.maximum:g}")
        return value


Options: TypeAlias = Mapping[str, OptionValue]


def in_order(low: str, high: str) -> Callable[[Options], str]:
    """A check of options together: one of them must not exceed the other."""
    return partial(_in_order, low, high)


def _in_order(low: str, high: str, options: Options) -> str:
    wrong = float(options[low]) > float(options[high])
    return f"{low} must not exceed {high}" if wrong else ""


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """The public face of a drafter. ``drafts_trees``: has several continuations to offer,
    within the width that a request names."""

    name: str
    description: str
    drafts_trees: bool
    options: tuple[DrafterOption, ...] = ()
    needs: DrafterNeeds = DrafterNeeds()
    cost: str = ""
    """What drafting costs, in words: for those who choose."""
    samples: bool = False
    """Can sample its tokens from a distribution of its own, which other verifications than "match"
    ask for."""
    takes_prediction: bool = False
    """Can use a text which the output is expected to repeat (``Drafter.predict``)."""
    check: Callable[[Options], str] | None = None
    """What is wrong with these options together; "" where nothing is. Where it can be pickled (a
    module's function), a server in front of the engine's process checks by itself; else the engine."""
    # The names of before, for drafters from outside.
    draws: InitVar[bool] = False
    takes_reference: InitVar[bool] = False

    def __post_init__(self, draws: bool, takes_reference: bool) -> None:
        if draws:
            object.__setattr__(self, "samples", True)
        if takes_reference:
            object.__setattr__(self, "takes_prediction", True)

    def defaults(self) -> dict[str, OptionValue]:
        return {option.name: option.default for option in self.options}

    def resolve(self, given: Mapping[str, Any]) -> dict[str, OptionValue]:
        """Defaults overlaid with checked values. Raises ValueError naming the offending option."""
        known = {option.name: option for option in self.options}
        unknown = sorted(set(given) - set(known))
        if unknown:
            have = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{self.name} has no option {unknown[0]!r}; it has: {have}")
        options = self.defaults()
        options |= {name: known[name].check(value) for name, value in given.items()}
        if self.check is not None and (fault := self.check(options)):
            raise ValueError(fault)
        return options


class DrafterUnavailableError(ValueError):
    """The drafter cannot work with this model and these settings; the message says why."""


class DrafterContext(Protocol):
    """What drafters may ask of the engine that they are built for. Raises DrafterUnavailableError where
    there is no such thing."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def drafter_settings(self) -> Mapping[str, Mapping[str, Any]]:
        """By drafter, those of its own settings that are not left at their defaults."""

    @property
    def encode(self) -> Callable[[str], Sequence[int]]:
        """The target's token ids of a text, without special tokens."""

    @property
    def draft_model(self) -> Callable[[str], Any]:
        """The ``DraftModel`` (``drafters.model.protocol``) that the engine made for a drafter."""

    @property
    def medusa_heads(self) -> Callable[[], Any]:
        """``PredictionHeads`` (``drafters.model.protocol``)."""

    @property
    def eagle_head(self) -> Callable[[], Any]:
        """A ``FeatureModel`` (``drafters.model.protocol``)."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that starts: ``token_ids``, its prompt, is live; ``options`` are complete and checked.

    ``cache_salt`` names the tenant: nothing learned under one cache_salt may draft under another.
    """

    request_id: str
    token_ids: Sequence[int]
    options: Options
    cache_salt: str


class Drafter:
    """A method of guessing. ``open`` .. ``close`` bracket a request's life, preemption included.

    Most drafters write ``start`` alone, which returns an object that knows one request and has
    ``propose(request) -> DraftTree``, ``observe(observation)`` and, if it wants to be told what the
    target rated likeliest, ``num_top_tokens``. Those who batch their requests write ``propose`` and
    ``observe`` themselves, over ``self._states``. A state that takes long to read a long prompt also has
    ``read_prompt(num_tokens) -> int``, which takes in up to so many more tokens of the request's text and
    says how many it was, and reads what is left by itself where it is asked for a draft before.
    """

    info: DrafterInfo
    _unread: frozenset[str] = frozenset()
    """Requests whose text is being read in slices."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    @classmethod
    def build(cls, context: DrafterContext, settings: Any) -> Drafter:  # noqa: ARG003
        """A drafter for an engine. ``settings``: of the type it was registered with. Raises
        DrafterUnavailableError where it cannot work."""
        return cls()

    def meet(self, drafters: Mapping[str, Drafter]) -> None:
        """Called once, when all drafters of the engine are built, itself among them: by name."""

    def start(self, request: NewRequest) -> Any:  # noqa: ARG002
        """What is known of a new request."""
        raise TypeError(f"{type(self).__name__} has neither a method start nor one of open")

    def finish(self, request_id: str, state: Any) -> None:
        """A request has ended, and this was known of it."""

    def open(
        self, request_id: str, token_ids: Sequence[int], options: Options, cache_salt: str
    ) -> None:
        """Start a request. Raises ValueError for options that do not fit and for a request that is
        already open."""
        if request_id in self._states:
            raise ValueError(f"request {request_id!r} is already open")
        new = NewRequest(request_id, token_ids, self.info.resolve(options), cache_salt)
        self._states[request_id] = self.start(new)

    def predict(self, request_id: str, prediction_token_ids: Sequence[int]) -> None:
        """Called once, right after ``open``, with a text which the output is expected to repeat for the
        most part, if the request comes with one."""
        refer = getattr(self, "refer", None)  # the name of before, for drafters from outside
        if refer is not None:
            refer(request_id, prediction_token_ids)

    def read_prompt(self, request_id: str, num_tokens: int) -> int:
        """Take in up to ``num_tokens`` more tokens of a request's text; how many it was.

        The engine announces it by asking for 0 after ``open``, and then calls it in every step until it
        was less than it asked for: so that no long prompt stops all requests. Until then the request
        gets empty drafts and learns from its text alone. Where nobody calls it, the first draft is made
        when all is read.
        """
        state = vars(self).get("_states", {}).get(request_id)
        read = getattr(state, "read_prompt", None)
        if read is None:
            return 0
        self._unread -= {request_id}
        num_read: int = read(num_tokens)
        if num_read == num_tokens:
            self._unread |= {request_id}
        return num_read

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree per request, at most ``max_nodes`` nodes each, possibly empty. Raises KeyError for a
        request that is not open."""
        states, unread = self._states, self._unread
        return [
            EMPTY if each.request_id in unread else states[each.request_id].propose(each)
            for each in requests
        ]

    def begin(
        self, requests: Sequence[DraftRequest], readback: Any
    ) -> Callable[[], list[DraftTree]]:
        """``propose`` in two parts, which is how the engine asks: what is to be read from a device is
        added to ``readback``, which is fetched once for all drafters before what is returned is called.
        For those who run a model; others propose at once."""
        del readback
        trees = self.propose(requests)
        return lambda: trees

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from verified rows. ``token_ids`` already ends with ``emitted_token_ids``. Raises
        KeyError for a request that is not open.

        What was written in steps for which a drafter was not asked comes when it is asked again or the
        request ends: all of it at once, as a chain that was verified and accepted, without top tokens.
        Drafters with ``hidden_rows``, ``draft_slots``, ``draft_model`` or ``all_or_nothing`` among their
        needs hear of every step.
        """
        for observation in observations:
            if observation.request_id not in self._unread:
                self._states[observation.request_id].observe(observation)

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Called after each step, before ``observe``, with every newly committed row of the requests,
        prompt chunks included, of drafters that need ``hidden_rows``. The tensors are the drafter's to
        keep."""

    def num_top_tokens(self, request_id: str) -> int:
        """How many of the target's top tokens per row ``observe`` wants for it; 0: none. Raises KeyError
        for a request that is not open."""
        num: int = getattr(self._states[request_id], "num_top_tokens", 0)
        return 0 if request_id in self._unread else num

    def close(self, request_id: str) -> None:
        """Forget the request; closing one that is not open does nothing (aborts may race)."""
        self._unread -= {request_id}
        if request_id in self._states:
            self.finish(request_id, self._states.pop(request_id))


HiddenDrafter = ReferenceDrafter = Drafter
"""Names of before, for drafters from outside."""

Factory: TypeAlias = Callable[[DrafterContext], Drafter]
_Kind = TypeVar("_Kind", bound=type[Drafter])


@dataclass(frozen=True, slots=True)
class Registered:
    """A kind of drafter, and the frozen dataclass of its settings, if it has any. Calling it builds
    one. ``part_of``: the name of a drafter that tries all that this one does."""

    kind: type[Drafter]
    settings: type | None = None
    part_of: str = ""

    all: ClassVar[dict[str, Registered]] = {}
    """By name, in the order of registration."""

    def __call__(self, context: DrafterContext) -> Drafter:
        settings = None
        if self.settings is not None:
            settings = self.settings(**context.drafter_settings.get(self.kind.info.name, {}))
        return self.kind.build(context, settings)


def drafter(
    name: str,
    summary: str,
    *,
    trees: bool = True,
    options: tuple[DrafterOption, ...] = (),
    check: Callable[[Options], str] | None = None,
    needs: DrafterNeeds = DrafterNeeds(),
    cost: str = "",
    samples: bool = False,
    takes_prediction: bool = False,
    settings: type | None = None,
    part_of: str = "",
) -> Callable[[_Kind], _Kind]:
    """Registers a class under a name; the arguments are those of ``DrafterInfo``.

    ``settings``: a frozen dataclass of what an operator may set, as ``--drafter.<name>.<field>``; all
    fields have defaults, and ``metadata={"description": ..}``. ``build`` gets an instance. ``part_of``
    as in ``Registered``. Raises ValueError for a name that is taken.
    """

    def register(kind: _Kind) -> _Kind:
        if name in Registered.all:
            raise ValueError(f"there are two drafters of the name {name!r}")
        assert settings is None or all("description" in each.metadata for each in fields(settings))
        kind.info = DrafterInfo(
            name, summary, trees, options, needs, cost, samples, takes_prediction, check
        )
        Registered.all[name] = Registered(kind, settings, part_of)
        return kind

    return register
