"""From the text of a grammar to constraints."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import Vocabulary
from engine.request.errors import RequestError
from worlds.engine_harness import TINY_VOCAB
from worlds.grammar_world import (
    EOS,
    json_grammar,
    letter_tokenizer,
    random_schema,
    tiny_tokenizer,
)


def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer(), TINY_VOCAB, (EOS,))


def test_a_grammar_that_cannot_be_used_is_refused_with_the_reason() -> None:
    grammar = LLMatcher.grammar_from_regex("a(b")
    with pytest.raises(RequestError, match="regex") as caught:
        compiler().constraint(grammar)
    assert caught.value.param == "grammar"


def test_without_a_fast_tokenizer_there_are_no_grammars() -> None:
    with pytest.raises(RequestError, match="tokenizer is not a fast one"):
        GrammarCompiler(object(), TINY_VOCAB, (EOS,)).constraint('start: "a"')


def test_of_a_tokenizer_whose_tokens_bytes_are_not_known_no_grammar_is_blamed() -> None:
    unknown = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=unknown, eos_token="<eos>")
    with pytest.raises(RequestError, match="with this model's tokenizer"):
        GrammarCompiler(tokenizer, 2, (EOS,)).constraint('start: "a"')


def test_without_a_token_that_ends_a_text_there_are_no_grammars() -> None:
    with pytest.raises(RequestError, match="end-of-sequence"):
        GrammarCompiler(tiny_tokenizer(), TINY_VOCAB, ()).constraint('start: "a"')


def test_what_the_first_grammar_would_wait_for_is_built_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``prepare`` builds it, nothing more is built then, and a grammar that does not fit raises in the
    request."""
    num_built = []
    build = Vocabulary.build
    monkeypatch.setattr(Vocabulary, "build", lambda own: num_built.append(1) or build(own))
    made = GrammarCompiler(tiny_tokenizer(), TINY_VOCAB, (EOS,), fault_of=lambda _: "")
    made.prepare()
    assert len(num_built) == 1
    made.constraint('start: "a"')
    assert len(num_built) == 1
    unfit = GrammarCompiler(object(), TINY_VOCAB, (EOS,))
    unfit.prepare()
    with pytest.raises(RequestError, match="tokenizer is not a fast one"):
        unfit.constraint('start: "a"')


def _pieces(letters: str) -> PreTrainedTokenizerFast:
    """As SentencePiece makes them: pieces with scores, and bytes for what no piece has."""
    scores = [("<unk>", 0.0), ("<eos>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    made = Tokenizer(models.Unigram([*scores, *((each, -1.0) for each in letters)], 0, True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="<unk>")


@pytest.mark.parametrize("make", [letter_tokenizer, _pieces])
def test_text_that_spells_a_special_token_is_written_as_text(
    make: Callable[[str], PreTrainedTokenizerFast],
) -> None:
    tokenizer = make("<eos>ab")
    ids = tokenizer.get_vocab()
    made = GrammarCompiler(tokenizer, len(tokenizer), (ids["<eos>"],))
    forced = made.constraint('start: "a<eos>b"').forced()
    assert list(forced) == [ids[each] for each in "a<eos>b"]
    # A grammar that means the token spells it outside of strings.
    after = made.constraint('start: "b" <eos> "a"  // and no "<eos>" of text')
    assert list(after.forced()) == [ids[each] for each in ("b", "<eos>", "a")]


def test_any_token_that_ends_a_text_may_end_it() -> None:
    """The tokenizer has 59 tokens: one of the three is none of them."""
    made = GrammarCompiler(tiny_tokenizer(), TINY_VOCAB, (EOS, 7, 63)).constraint('start: "a"')
    made.append(tiny_tokenizer().encode("a"))
    mask = made.allowed(())
    assert mask is not None
    assert mask.nonzero()[0].tolist() == [EOS, 7]


def test_more_grammars_than_are_kept_compile_anew() -> None:
    made = compiler()
    for seed in range(70):
        made.constraint(json_grammar(random_schema(seed)))
    again = made.constraint(json_grammar(random_schema(0)))
    assert again.forced() == compiler().constraint(json_grammar(random_schema(0))).forced()


def test_threads_may_ask_at_once() -> None:
    made, found = compiler(), []

    def ask(seed: int) -> None:
        found.append((seed % 3, made.constraint(json_grammar(random_schema(seed % 3))).forced()))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert len(dict(found)) == len(set(found)) == 3
