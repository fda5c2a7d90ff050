"""The interface of drafters: what they declare, what they are asked and told, and their base class.

A drafter that needs no model is one file with two classes (docs/extend.md has a whole one): a subclass
of ``RequestState``, which proposes drafts for one request and learns from what the target wrote, and a
subclass of ``Drafter``, registered with ``@drafter``, whose ``start`` makes such a state.

There is one ``Drafter`` object per engine and name, which holds the states of all its requests, so that
drafters with a model can batch. Only the engine's thread calls it. Token ids, options, the verifier's
noise and the target's top tokens come as plain Python; a drafter that needs more of the engine says so
in its ``DrafterNeeds``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias, TypeVar

from drafters.options import DraftShape as DraftShape
from drafters.tree import EMPTY, FORCED, DraftTree, chain

OptionValue: TypeAlias = bool | int | float | str
Options: TypeAlias = Mapping[str, OptionValue]
_LARGEST = 1e308
"""An integer may be larger than any float, and cannot be asked whether it is finite."""


class OptionError(ValueError):
    """A value that an option cannot have. ``names``: of the options at fault."""

    def __init__(self, message: str, *names: str) -> None:
        super().__init__(message)
        self.names = names


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """An option that each request may set; its type is that of ``default``. Numbers lie within
    ``minimum``..``maximum``, where these are given."""

    name: str
    default: OptionValue
    description: str
    minimum: float | None = None
    maximum: float | None = None

    def check(self, value: object) -> OptionValue:
        """Returns the value, an int as a float where that is the option's type. Raises OptionError if it
        does not fit."""
        kind = type(self.default)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not abs(value) < _LARGEST:
                raise self._fault("be a finite number")
            value = float(value)
        if type(value) is not kind:
            raise self._fault(f"be {kind.__name__}, not {type(value).__name__}")
        assert isinstance(value, bool | int | float | str)
        if not isinstance(value, bool | str):
            if self.minimum is not None and value < self.minimum:
                raise self._fault(f"be at least {self.minimum:g}")
            if self.maximum is not None and value > self.maximum:
                raise self._fault(f"be at most {self.maximum:g}")
        return value

    def _fault(self, must: str) -> OptionError:
        return OptionError(f"{self.name} must {must}", self.name)


def in_order(low: str, high: str, options: Options) -> OptionError | None:
    """A ``DrafterInfo.check``, as ``partial(in_order, low, high)``: the first option must not exceed the
    second."""
    wrong = float(options[low]) > float(options[high])
    return OptionError(f"{low} must not exceed {high}", low, high) if wrong else None


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """The services that a drafter asks of the engine besides token ids.

    ``top_probs``: probabilities beside the target's top tokens.
    ``hidden_rows``: the target's hidden states (``Drafter.observe_hidden``), those of
    ``Drafter.hidden_layers``.
    ``draft_slots``: slots for keys and values of its nodes, leased before it proposes.
    ``all_or_nothing``: a policy grants a draft whole or not at all, since its rows are of use only
    together (the Lookahead window).
    ``draft_model``: the kind of model that the engine makes for it (``DrafterContext.draft_model``):
    "draft", one that the setting draft names, which is a model or trained heads; "quantized", a copy
    of the target or of a small model; "layers", some of the target's own layers.
    """

    top_probs: bool = False
    hidden_rows: bool = False
    draft_slots: bool = False
    all_or_nothing: bool = False
    draft_model: str = ""


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """The public description of a drafter.

    ``drafts_trees``: it can offer several continuations, within the width that a request names.
    ``cost``: the price of its drafts, in words, for those who choose.
    ``samples``: it can sample from a distribution of its own, as verifications other than "match" need.
    ``takes_prediction``: it can use a text that the output is expected to repeat (``Drafter.predict``).
    ``check`` is given all options together and returns what is wrong with them, or None. Where it can be
    pickled, a server in front of the engine's process calls it; otherwise the engine does.
    """

    name: str
    description: str
    drafts_trees: bool = True
    options: tuple[DrafterOption, ...] = ()
    needs: DrafterNeeds = DrafterNeeds()
    cost: str = ""
    samples: bool = False
    takes_prediction: bool = False
    check: Callable[[Options], OptionError | None] | None = None

    def defaults(self) -> dict[str, OptionValue]:
        """Returns the default of every option."""
        return {option.name: option.default for option in self.options}

    def resolve(self, given: Mapping[str, Any]) -> dict[str, OptionValue]:
        """Checks a request's options and returns them with the defaults of those left out. Raises
        OptionError."""
        known = {option.name: option for option in self.options}
        for unknown in sorted(set(given) - set(known)):
            have = ", ".join(sorted(known)) or "none"
            raise OptionError(f"{self.name} has no option {unknown!r}; it has: {have}", unknown)
        options = self.defaults()
        options |= {name: known[name].check(value) for name, value in given.items()}
        if self.check is not None and (fault := self.check(options)):
            raise fault
        return options


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that starts. ``token_ids``, its prompt, is the request's live list: read it, never keep
    or change it. ``options`` are complete. ``cache_salt`` names the tenant: nothing learned under one
    may draft under another."""

    request_id: str
    token_ids: Sequence[int]
    options: Options
    cache_salt: str


Noise: TypeAlias = Callable[[int, Sequence[int]], Sequence[float]]
"""``noise(position, token_ids)``: Gumbel noise of tokens at an absolute position, one float each."""


def no_noise(position: int, token_ids: Sequence[int]) -> Sequence[float]:
    """The noise of greedy requests, which favours no token."""
    del position
    return [0.0] * len(token_ids)


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """The sampling of the request's tokens: ``argmax(logit / temperature + noise)`` among what top-k,
    top-p and min-p keep; ``temperature`` 0 is greedy (then ``noise`` is ``no_noise``).

    Under ``verification`` "match", ``noise`` is the verifier's own, so a drafter that samples with it
    agrees with the target more often than any that samples independently. Under other verifications
    it is a stream of the drafter's own, and a drafter that samples attaches the distributions it
    sampled from to the tree (``DraftTree.draft_probs``). ``key`` is the same noise for drafters that
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


_CAUTION = 0.7


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request that is to be drafted for in this step.

    ``token_ids`` is its live list, the prompt and everything emitted; the last one is the anchor, under
    which the draft hangs. ``max_nodes`` bounds the tree. The first ``num_computed_tokens`` tokens have
    their keys and values in the target's store. ``block_table`` is live, too; for drafters that need
    ``draft_slots`` it covers ``max_nodes`` slots after the known tokens. ``tokens_per_second`` is what
    the engine would write in this step without drafts, all requests together, so that a drafter can
    weigh its time; 0 where the request's policy weighs none. ``row_prices[n]``: as far as is known, a
    node beside n others that is less likely to be accepted will not be verified; the last holds for
    more. A drafter that knows its survivals may leave out all nodes below ``least_survival`` but the
    likeliest.
    """

    request_id: str
    token_ids: Sequence[int]
    max_nodes: int
    shape: DraftShape
    sampling: DraftSampling = GREEDY
    num_computed_tokens: int = 0
    block_table: Sequence[int] = ()
    tokens_per_second: float = 0.0
    row_prices: Sequence[float] = ()

    def row_price(self, num_others: int) -> float:
        """Returns the price of a node beside so many; 0: any is verified."""
        prices = self.row_prices
        return prices[min(num_others, len(prices) - 1)] if prices else 0.0

    @property
    def least_survival(self) -> float:
        """The survival below which a node is useless in any case: what drafting takes, and who drafts
        besides, may still change prices."""
        return _CAUTION * self.row_price(0)

    @property
    def depth(self) -> int:
        """The most tokens that can stand one below the other."""
        return min(self.max_nodes, self.shape.depth)


@dataclass(frozen=True, slots=True)
class Observation:
    """The target's word on one request in one step.

    ``token_ids`` is the request's live list and already ends with ``emitted_token_ids``. ``tree`` is the
    part of the draft that was verified, empty at gamma 0. Row 0 is the anchor, row ``i + 1`` is node
    ``i`` of ``tree``. ``path`` holds the rows whose token was emitted, starting with row 0; the target's
    token at the last of them is the last one emitted, unless a stop trimmed the run.

    ``row_token_ids``: the target's token at every row; where drafts are not verified by "match", -1 at
    rows off the path. ``top_token_ids[r]``: the likeliest tokens at row ``r``, best first, without those
    of probability zero, as many as ``num_top_tokens`` asked for. ``top_logits[r]``: their logits as the
    target gave them, before any truncation; ``top_probs[r]``: what probabilities these are, for drafters
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
    top_logits: Sequence[Sequence[float]] | None = None

    @property
    def accepted_token_ids(self) -> Sequence[int]:
        """Returns the tokens that were drafted and emitted."""
        return self.emitted_token_ids[: len(self.path) - 1]

    @classmethod
    def of_missed(cls, request_id: str, text: Sequence[int], num_missed: int) -> Observation:
        """The last tokens of a text, at least one, for who was not told of their steps: as one long draft
        that was accepted."""
        missed = text[-num_missed:]
        tree = chain(missed[:-1], FORCED)
        return cls(request_id, text, tree, missed, range(num_missed), missed)


NORMED = -1
"""In the place of a layer's number: the target's hidden states behind its final norm."""


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """The target's hidden states of newly committed tokens, of the layers that the drafter reads.

    Row ``i`` belongs to the token at ``first_position + i``. The first call after admission starts
    where the cached prefix ended; one after preemption may start anew at a smaller position.
    ``token_ids`` is the request's live list, and ``block_table``, live as well, has the blocks that hold
    these tokens.
    """

    request_id: str
    first_position: int
    token_ids: Sequence[int]
    hidden: tuple[Any, ...]
    """Tensors ``[num_rows, hidden_size]`` of the target's type and device, one for each of
    ``Drafter.hidden_layers``, in their order. They are parts of larger ones: who keeps a few of the rows
    copies them."""
    block_table: Sequence[int]


class DrafterUnavailableError(ValueError):
    """The drafter cannot work with this model and these settings; the message says why."""


class DrafterContext:
    """The engine that a drafter is built for, as far as it lends something to drafters.

    ``drafter_settings``: by drafter, those of its own settings that are not left at their defaults.
    ``encode`` gives the target's token ids of a text, without special tokens; ``draft_model`` what was
    made for the drafter of a name to draft with, of the protocol in ``drafters.model.protocol`` that its
    method asks for. What the engine does not lend raises DrafterUnavailableError.
    """

    encode: Callable[[str], Sequence[int]]
    draft_model: Callable[[str], Any]

    def __init__(
        self,
        vocab_size: int = 0,
        drafter_settings: Mapping[str, Mapping[str, Any]] | None = None,
        **lent: Callable[..., Any],
    ) -> None:
        self.vocab_size = vocab_size
        self.drafter_settings = drafter_settings or {}
        self.__dict__.update(lent)

    def __getattr__(self, name: str) -> Any:
        raise DrafterUnavailableError(f"needs {name.replace('_', ' ')}, and there is none here")


class RequestState:
    """A drafter's knowledge of one request. This one drafts nothing and learns nothing."""

    num_top_tokens: int = 0
    """The number of the target's likeliest tokens per row that ``observe`` is to be given."""
    is_reading: bool = False
    """Set by ``Drafter`` while the prompt is read in slices: nothing else is called meanwhile."""

    def propose(self, request: DraftRequest) -> DraftTree:  # noqa: ARG002
        """Returns a tree of at most ``request.max_nodes`` nodes within ``request.shape``, both at least
        1, and ``EMPTY`` if there is no guess."""
        return EMPTY

    def observe(self, observation: Observation) -> None:
        """Learns from one step of the request."""


class ReadingState(RequestState, ABC):
    """A state that takes long to read a long prompt, and so reads it in slices. A draft that is wanted
    before reads what is left by itself."""

    @abstractmethod
    def read_prompt(self, num_tokens: int) -> int:
        """Reads up to ``num_tokens`` more tokens of the request's text and returns how many it was."""


class TextReader(ReadingState):
    """A state over a request's live text, read up to some token. Subclasses call ``_read_rest`` before
    they use what was read."""

    def __init__(self, token_ids: Sequence[int], first: int = 0, wants: bool = True) -> None:
        """``first``: the first token that is read. ``wants``: whether anything is read at all."""
        self._token_ids = token_ids
        self._num_read = first
        self._num_to_read = len(token_ids) if wants else 0

    @abstractmethod
    def _read(self, start: int, end: int) -> None:
        """Takes in the tokens ``start`` .. ``end - 1`` of the text; those before were read."""

    def read_prompt(self, num_tokens: int) -> int:
        start = self._num_read
        if not self._num_to_read:
            return 0
        end = min(start + num_tokens, len(self._token_ids))
        self._read(start, end)
        self._num_read = end
        return end - start

    def _read_rest(self) -> None:
        if self._num_read < self._num_to_read:
            self.read_prompt(self._num_to_read - self._num_read)


class Drafter:
    """A method of guessing. ``open`` and ``close`` bracket a request's life, preemption included.

    Most drafters write ``start`` alone and leave the rest to the state that it returns. Drafters that
    batch their requests write ``propose`` and ``observe`` themselves, over ``self._states``. A subclass
    with an ``__init__`` of its own calls this one's.
    """

    info: DrafterInfo
    settings: ClassVar[type | None] = None
    """The frozen dataclass of what an operator may set, as ``--drafter.<name>.<field>``. Its fields have
    defaults, and a ``description`` in their metadata."""
    auto_width: int = 4
    """The width of the trees that it drafts best, where requests leave the shape to the engine."""
    row_worth: float = 0.0
    """The tokens that a node's row brings later, accepted or not, since the drafter learns from what the
    target found likely there. So where rows cost less than that, they are verified however unlikely."""
    initial_acceptance: Sequence[float] = ()
    """How likely, by feature, a node is believed to be accepted, once its parent is, before any was
    judged. Features beyond these: as likely as not."""
    most_recomputed: float = math.inf
    """The most tokens of a cached prefix that the engine computes again where ``num_usable_tokens`` says
    so. Of a request with more it takes the whole prefix, and the drafter has to do without."""
    num_slots: int = 0
    """With ``draft_slots`` among its needs: the slots that it wants however little it is to draft."""
    hidden_layers: Sequence[int] = (NORMED,)
    """The target's hidden states that a drafter with ``hidden_rows`` among its needs reads; fixed once
    it is built. ``k`` is what enters the target's layer ``k``, before any norm, and for a target of N
    layers N is what leaves the last; ``NORMED`` is what its output head reads."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    @classmethod
    def build(cls, context: DrafterContext) -> Drafter:  # noqa: ARG003
        """Returns a drafter for an engine. Raises DrafterUnavailableError where it cannot work."""
        return cls()

    @classmethod
    def settings_in(cls, context: DrafterContext) -> Any:
        """Returns an instance of the class's ``settings``, for ``build``."""
        assert cls.settings is not None, f"{cls.info.name} has no settings"
        return cls.settings(**context.drafter_settings.get(cls.info.name, {}))

    def meet(self, drafters: Mapping[str, Drafter]) -> None:
        """Called once, when all drafters of the engine are built, with all of them by name."""

    def companions(self, has_prediction: bool) -> Sequence[Drafter]:  # noqa: ARG002
        """Returns the drafters that the engine asks besides for a request that names this one, which has
        drafted at once by then, where that is expected to pay: all their drafts become one tree.
        ``has_prediction``: the request comes with one (``predict``)."""
        return ()

    def start(self, request: NewRequest) -> RequestState:  # noqa: ARG002
        """Returns the state of a new request."""
        return RequestState()

    def finish(self, request_id: str, state: Any) -> None:
        """Called with the state of a request that has ended."""

    def open(
        self, request_id: str, token_ids: Sequence[int], options: Options, cache_salt: str
    ) -> None:
        """Starts a request. ``options`` that were left out get their defaults; those given have passed
        ``DrafterInfo.resolve``. Raises ValueError for a request that is already open, and TypeError where
        ``start`` returns no ``RequestState``."""
        if request_id in self._states:
            raise ValueError(f"request {request_id!r} is already open")
        complete = self.info.defaults() | dict(options)
        state = self.start(NewRequest(request_id, token_ids, complete, cache_salt))
        if not isinstance(state, RequestState):
            raise TypeError(f"start returned {type(state).__name__}, which is no RequestState")
        self._states[request_id] = state

    def copies(self, request_id: str, num_tokens: int) -> tuple[int, int] | None:  # noqa: ARG002
        """Returns the shortest and longest match of a request whose chains copy, while its text has at
        most ``num_tokens``, what followed the longest, then most recent, earlier occurrence of the text's
        last tokens: a device can do so by itself. None: they are made otherwise."""
        return None

    def copied(self, token_ids: Sequence[int], match_length: int) -> DraftTree:
        """Returns the chain that it would have proposed, where ``copies`` says how, of tokens that were
        copied after a match of so many."""
        raise NotImplementedError

    def predict(self, request_id: str, prediction_token_ids: Sequence[int]) -> None:
        """Called once, right after ``open``, if the request comes with a text that the output is expected
        to repeat for the most part."""

    def read_prompt(self, request_id: str, num_tokens: int) -> int:
        """Reads up to ``num_tokens`` more tokens of a request's text and returns how many it was.

        The engine asks for 0 after ``open``, and then in every step for some until it was fewer than it
        asked for, so that no long prompt stops all requests. Until then the request gets empty drafts
        and observes nothing: it reads what was emitted meanwhile, too. If this is never called, the
        first draft is made when all is read.
        """
        state = self._states.get(request_id)
        if not isinstance(state, ReadingState):
            return 0
        state.is_reading = False  # nobody waits for one that fails to read
        num_read = state.read_prompt(num_tokens)
        state.is_reading = num_read == num_tokens
        return num_read

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Returns a tree per request, at most ``max_nodes`` nodes each, possibly empty. Raises KeyError
        for a request that is not open."""
        trees = []
        for each in requests:
            state = self._states[each.request_id]
            is_asked = each.depth > 0 and not state.is_reading
            trees.append(state.propose(each) if is_asked else EMPTY)
        return trees

    def begin(
        self, requests: Sequence[DraftRequest], readback: Any
    ) -> Callable[[], list[DraftTree]]:
        """``propose`` in two parts, which is how the engine asks. A drafter that runs a model adds its
        results to ``readback``, which is fetched once for all drafters, and returns a function that
        makes the trees of them. Others propose at once."""
        del readback
        trees = self.propose(requests)
        return lambda: trees

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learns from verified rows. Raises KeyError for a request that is not open.

        Steps for which a drafter was not asked come when it is asked again or the request ends: all at
        once, as a chain that was verified and accepted, of features ``FORCED`` and without top tokens.
        Drafters with ``all_or_nothing`` among their needs observe every step.
        """
        for observation in observations:
            state = self._states[observation.request_id]
            if not state.is_reading:
                state.observe(observation)

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Gets every newly committed row, prompt chunks included, for drafters that need
        ``hidden_rows``: of several steps at once, a request's together, before the drafter is asked or a
        request leaves its blocks, whatever ``observe`` has told since."""

    def num_usable_tokens(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],  # noqa: ARG002
        cache_salt: str,  # noqa: ARG002
    ) -> int:
        """Returns how many tokens of a cached prefix, from the first on, are of use: all by default.

        Called before a request starts, and before it goes on after a preemption, if the prefix cache has
        its first tokens in these blocks. Where a drafter lacks something that only the target's forward
        gives, the engine computes the rest of the prefix again.
        """
        return len(token_ids)

    def leave_blocks(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> None:
        """Called before a request gives back its blocks, since it ends or is preempted; both lists are
        live. A drafter that keeps rows of its own under their ids may write into them until ``settle`` is
        over."""

    def settle(self) -> None:
        """Called after ``leave_blocks``, once for all requests that have left, before drafters are asked
        for anybody else who has their blocks."""

    def num_top_tokens(self, request_id: str) -> int:
        """Returns how many of the target's top tokens per row ``observe`` is to be given for a request.
        Raises KeyError for one that is not open."""
        state: RequestState = self._states[request_id]
        return 0 if state.is_reading else state.num_top_tokens

    def close(self, request_id: str) -> None:
        """Forgets the request; closing one that is not open does nothing, since aborts may race."""
        if request_id in self._states:
            self.finish(request_id, self._states.pop(request_id))


def hidden_layers_of(drafters: Iterable[Drafter]) -> tuple[int, ...]:
    """Returns all layers of whose hidden states these drafters read, in ascending order."""
    reading = (each for each in drafters if each.info.needs.hidden_rows)
    return tuple(sorted({layer for each in reading for layer in each.hidden_layers}))


_Kind = TypeVar("_Kind", bound=type[Drafter])
REGISTERED: dict[str, type[Drafter]] = {}
"""The drafters of the core by name, in the order of registration."""


def drafter(kind: _Kind) -> _Kind:
    """Registers a class under the name in its ``info``. Raises ValueError for a name that is taken and
    for a setting without a description."""
    name, settings = kind.info.name, kind.settings
    if name in REGISTERED:
        raise ValueError(f"there are two drafters of the name {name!r}")
    if settings is not None and not all("description" in f.metadata for f in fields(settings)):
        raise ValueError(f"drafter {name!r} has a setting without a description")
    REGISTERED[name] = kind
    return kind
