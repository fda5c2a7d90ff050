"""One request's walk through its grammar, from path to path."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.constraint import GrammarConstraint
from engine.grammar.trial_process import TrialProcess
from engine.grammar.vocabulary import Vocabulary
from server.errors import ApiError
from server.request.grammars import ResponseFormat, StructuredOutputs, grammar_of
from worlds.engine_harness import TINY_VOCAB
from worlds.grammar_world import EOS, json_grammar, random_schema, tiny_compiler, tiny_tokenizer
from worlds.random_grammars import random_constraint

PAIR = {
    "type": "object",
    "properties": {"id": {"enum": [1, 2]}, "name": {"type": "string", "maxLength": 3}},
    "required": ["id", "name"],
    "additionalProperties": False,
}


def ids(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer().encode(text))


def constraint(schema: object = PAIR) -> GrammarConstraint:
    return tiny_compiler().constraint(json_grammar(schema))  # type: ignore[arg-type]


def allowed(made: GrammarConstraint, path: tuple[int, ...] = ()) -> list[int] | None:
    mask = made.allowed(path)
    return None if mask is None else mask.nonzero()[0].tolist()


def test_what_is_forced_is_all_that_is_allowed() -> None:
    made = constraint()
    forced = ids('{"id": ')
    assert made.forced() == forced
    for at in range(len(forced)):
        assert allowed(made, forced[:at]) == [forced[at]]
    assert made.forced(forced) == ()
    assert allowed(made, forced) == sorted(ids("12"))


def test_a_path_is_judged_as_if_it_were_text() -> None:
    made = constraint()
    path = ids('{"id": 2, "name": "')
    assert made.accepts(path)
    before = allowed(made, path)
    made.append(path)
    assert allowed(made) == before
    assert not made.accepts(ids("nnnn"))
    assert allowed(made, ids("nnnn")) is None
    assert made.accepts(ids("ab"))


def test_only_the_end_is_allowed_after_the_end() -> None:
    made = constraint({"enum": [True]})
    made.append(ids("true"))
    assert allowed(made) == [EOS]
    assert made.forced() == ()
    assert not made.accepts((EOS,))


def test_tokens_that_the_grammar_forbids_cannot_be_taken_in() -> None:
    made = constraint()
    with pytest.raises(ValueError, match="does not allow token"):
        made.append(ids("{ab"))


def test_tokens_beyond_the_tokenizers_are_never_allowed() -> None:
    made = constraint({"type": "string"})
    made.append(ids('"'))
    mask = made.allowed(())
    assert mask is not None
    assert mask.shape == (TINY_VOCAB,)
    assert not mask[len(tiny_tokenizer()) :].any()


@pytest.mark.hypothesis
@given(st.integers(0, 10_000), st.data())
def test_a_mask_is_the_same_by_whatever_way_one_comes(seed: int, data: st.DataObject) -> None:
    """Paths visited in any order, some of them forbidden, against a walk of nothing but the path."""
    schema = random_schema(seed)
    walked = constraint(schema)
    text: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        wild = data.draw(
            st.lists(st.lists(st.integers(0, TINY_VOCAB - 1), max_size=3).map(tuple), max_size=3)
        )
        forced = walked.forced()
        paths = [*wild, *(forced[:at] for at in range(len(forced) + 1)), ()]
        for path in data.draw(st.permutations(paths)):
            fresh = constraint(schema)
            fresh.append(text)
            assert allowed(walked, path) == allowed(fresh, path)
            assert walked.accepts(path) == (allowed(fresh, path) is not None)
        possible = [each for each in allowed(walked) or [] if each != EOS]
        if not possible:
            return
        chosen = data.draw(st.sampled_from(possible))
        text.append(chosen)
        walked.append([chosen])


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_allowed_can_be_taken_in(seed: int) -> None:
    made = constraint(random_schema(seed))
    for first, second in product(allowed(made) or [], repeat=2):
        if EOS not in (first, second):
            assert made.accepts((first,))
            assert made.accepts((first, second)) == (second in (allowed(made, (first,)) or []))


DEAD_END = 'start: "a" | "b" "c" X | "n" "c"\nX: /a/ & /b/'


def test_a_text_that_its_grammar_leaves_no_way_on_may_end_and_is_cut() -> None:
    """It was an error, which also broke the request where only a draft came there."""
    made = tiny_compiler().constraint(DEAD_END)
    before = allowed(made)
    path = ids("bc")
    assert allowed(made, path) == [EOS]
    assert made.is_cut(path)
    assert made.forced(path) == ()
    assert allowed(made) == before
    assert not made.is_cut(())
    assert made.accepts(ids("n"))
    made.append(path)
    assert allowed(made) == [EOS]
    assert made.is_cut(())
    assert made.forced() == ()


def test_a_whole_text_is_not_cut() -> None:
    made = tiny_compiler().constraint(DEAD_END)
    made.append(ids("nc"))
    assert allowed(made) == [EOS]
    assert not made.is_cut(())


def test_forced_text_beyond_the_limits_is_cut_where_it_begins() -> None:
    """A mask allowed its first token, which was refused when it came."""
    made = tiny_compiler().constraint('start: "a" | "b" "n"{60000}')
    assert allowed(made, ids("b")) == [EOS]
    assert "Too many items" in made.is_cut(ids("b"))
    made.append(ids("b"))
    assert allowed(made) == [EOS]
    assert made.is_cut(())


def test_a_lexer_at_its_limits_is_replaced_for_all_that_share_it() -> None:
    """Copies of a compiled grammar share it; one request's error was everybody's."""
    compiler = GrammarCompiler(tiny_tokenizer(), TINY_VOCAB, (EOS,), fault_of=lambda _: "")
    first, second = (compiler.constraint("start: /[a-z]+/") for _ in range(2))
    first.append(ids("a"))
    broken = first._matcher
    while not broken.is_error():
        broken.consume_token(TINY_VOCAB + 1)
    assert allowed(first, ids("b")) == allowed(second, ids("b"))
    first.append(ids("bc"))
    assert allowed(first) == allowed(second, ids("ac"))


@pytest.mark.parametrize("seed", range(60))
def test_no_mask_allows_what_is_refused_when_it_comes(seed: int) -> None:
    """Random grammars, walked by chance, and paths as they would be as text."""
    made = random_walked(seed)
    if made is None:
        return
    walked, grammar = made
    rng = random.Random(seed)
    text: list[int] = []
    for _ in range(12):
        going_on = [each for each in allowed(walked) or [] if each != EOS]
        if not going_on:
            break
        chosen = rng.choice(going_on)
        ahead, cut = allowed(walked, (chosen,)), walked.is_cut((chosen,))
        walked.append([chosen])
        text.append(chosen)
        assert allowed(walked) == ahead
        assert bool(walked.is_cut(())) == bool(cut)
    fresh = tiny_compiler().constraint(grammar)
    fresh.append(text)
    assert allowed(fresh) == allowed(walked)


def random_walked(seed: int) -> tuple[GrammarConstraint, str] | None:
    """None where the grammar is refused at admission."""
    fields = random_constraint(seed)
    form, structured = fields.get("response_format"), fields.get("structured_outputs")
    try:
        grammar = grammar_of(
            None if form is None else ResponseFormat.model_validate(form),
            None if structured is None else StructuredOutputs.model_validate(structured),
        ).text
    except ApiError:
        return None
    if trials().fault_of(grammar):
        return None
    return tiny_compiler().constraint(grammar), grammar


@cache
def trials() -> TrialProcess:
    return TrialProcess(lambda: Vocabulary.of(tiny_tokenizer(), TINY_VOCAB, (EOS,)))


def test_texts_of_the_schema_are_accepted() -> None:
    made = constraint()
    path = ids(json.dumps({"id": 1, "name": "abc"}))
    assert all(made.accepts(path[:at]) for at in range(1, len(path) + 1))
    assert allowed(made, path) == [EOS]
