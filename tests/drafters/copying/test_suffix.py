"""The suffix drafter: what it finds, how it finds back after edits, what it keeps and forgets."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DraftShape
from drafters.copying import alignment as suffix_alignment
from drafters.copying.alignment import Alignment, Desk
from drafters.copying.suffix import SuffixDrafter
from drafters.copying.suffix_index import Histories, TenantHistory
from drafters.copying.weights import MAX_MATCH_LENGTH, WEIGHTS, Place
from worlds.simulated_target import (
    ask,
    check_tree,
    children_of,
    decode,
    draft_after,
    propose_once,
    tell,
)

CHAIN = DraftShape(1, 64)
TREE = DraftShape(4, 64)
SMALL_TEXTS = st.lists(st.integers(0, 3), max_size=60)


def target_of(output, num_prompt_tokens):
    """A target that writes ``output`` after the prompt, then -1 for ever."""

    def target(token_ids):
        done = len(token_ids) - num_prompt_tokens
        return output[done] if done < len(output) else 10_000 + done

    return target


def steps_for(output, prompt):
    """Steps that ``output`` takes."""
    target = target_of(output, len(prompt))
    run = decode(SuffixDrafter(), prompt, target, len(output), max_nodes=16, shape=TREE)
    return len(run.num_emitted)


# --- the alignment ---


@given(SMALL_TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
def test_any_text_is_followed_in_any_pieces(prompt, output, size):
    alignment = Alignment(list(prompt), None, Desk())
    text = list(prompt)
    for start in range(0, len(output), size):
        text += output[start : start + size]
        alignment.extend(text)
        tree = alignment.draft(9, 3, 5)
        check_tree(tree, 9, DraftShape(3, 5))
        assert set(tree.token_ids) <= set(text)
        copied = alignment.position
        assert copied is None or 0 <= copied <= len(text)
    assert alignment.token_ids == text


@given(SMALL_TEXTS, SMALL_TEXTS, st.sampled_from([1, 4]))
def test_every_node_stands_somewhere_after_what_is_before_it(prompt, output, width):
    # Without corrections and unmatched places a draft says nothing that was not said before.
    text = [*prompt, *output, 9]
    alignment = Alignment(list(text), None, Desk())
    tree = alignment.draft(12, width, 12)
    assert len(tree) == 0  # 9 is new
    text.append(text[0])
    alignment.extend(text)
    tree = alignment.draft(12, width, 12)
    tree.validate()
    pairs = {*zip(text, text[1:], strict=False)}
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        before = text[-1] if parent < 0 else tree.token_ids[parent]
        assert (before, token_id) in pairs or before == text[-1]


def test_long_texts_are_indexed_in_part(monkeypatch):
    monkeypatch.setattr(suffix_alignment, "MAX_INDEXED_TOKENS", 1_000)
    rng = random.Random(0)
    text = [rng.randrange(50_000) for _ in range(3_000)]
    alignment = Alignment(text[:100], None, Desk())
    alignment.extend(text)
    alignment.extend([*text, *text[-400:-300]])
    assert alignment.position == len(text) - 300
    alignment.extend([*text, *text[-400:-300], *text[:100]])
    assert alignment.position is None


# --- edits ---

SOURCE = list(range(100, 300))
HEAD, TAIL = SOURCE[:100], SOURCE[100:]


@pytest.mark.parametrize(
    "text",
    [[*HEAD, 1, *TAIL], [*HEAD, 1, *TAIL[1:]], [*HEAD, *TAIL[3:]]],
    ids=["insertion", "replacement", "deletion"],
)
def test_one_step_after_a_change_the_draft_goes_on(text):
    # One step ends at the change itself, which nothing can foresee; trees try all ways to go on.
    assert steps_for(text, SOURCE) <= steps_for(SOURCE, SOURCE) + 2


def test_a_token_that_was_put_in_needs_no_match_to_go_on():
    prompt = [*SOURCE, 5]
    text = [*prompt, *SOURCE[:50], 1]  # 1 was never seen
    chain = propose_after(prompt, text, CHAIN, 8)
    tree = propose_after(prompt, text, TREE, 16)
    # Inserted: on with 150; put in place of 150: on with 151. A tree can have both.
    assert {150, 151} <= set(children_of(tree))
    assert list(chain.token_ids) in (list(range(150, 158)), list(range(151, 159)))


def propose_after(prompt, text, shape, max_nodes):
    return draft_after(SuffixDrafter(), prompt, text[len(prompt) :], max_nodes, shape)


def test_after_a_deletion_the_nearest_place_ahead_is_tried_before_others():
    # Token 9 stands in many places; what was deleted ends just before the nearest one ahead.
    source = [9, 50, 9, 51, *range(100, 130), 60, 61, 9, 62, 63, 64, 65, 9, 52]
    prompt = [*source, 5]
    text = [*prompt, *range(100, 130), 9]
    assert list(propose_after(prompt, text, CHAIN, 4).token_ids) == [62, 63, 64, 65]


def test_copying_returns_to_where_it_left_for_another_place():
    # A block from elsewhere is put in between; afterwards the first copy goes on.
    first, second = list(range(100, 160)), list(range(200, 230))
    prompt = [*first, *second, 5]
    text = [*prompt, *first[:30], *second, 1]
    assert 130 in children_of(propose_after(prompt, text, DraftShape(8, 64), 24))


BLANK, ROLE = 7, 8


def edit_of(first, tag):
    """(prompt, output) of an edit whose instruction is ``tag``; the output is the text itself."""
    text = list(range(first, first + 40))
    return [9, tag, tag + 1, BLANK, *text, ROLE], text


def begin(drafter, prompt, output, cache_salt="a", options=None):
    """Writes ``output`` in one step, and returns what was drafted before."""
    drafter.open("r", prompt, options or {}, cache_salt)
    known = list(prompt)
    tree = ask(drafter, known, 4, CHAIN)
    known += output
    tell(drafter, known, len(output))
    drafter.close("r")
    return list(tree.token_ids)


def test_an_output_is_expected_to_begin_where_others_of_the_tenant_began():
    drafter = SuffixDrafter()
    assert begin(drafter, *edit_of(1_000, 20)) == []
    assert begin(drafter, *edit_of(2_000, 30)) == [2_000, 2_001, 2_002, 2_003]
    assert begin(drafter, *edit_of(3_000, 40), cache_salt="b") == []
    assert begin(drafter, *edit_of(4_000, 50), options={"use_history": False}) == []


def test_an_output_that_copied_itself_says_nothing_of_where_others_begin() -> None:
    history = TenantHistory()
    for position in (4, 5, 9):  # behind a prompt of three tokens
        history.note_beginning([1, 2, 3], position)
    assert history.beginning([1, 2, 3]) == 0


def test_where_most_outputs_begin_with_something_new_nothing_is_expected():
    history = TenantHistory()
    history.note_beginning([3, BLANK, 4], 2)
    assert history.beginning([1, BLANK, 2]) == 2
    assert history.beginning([1, 2]) == 0
    for _ in range(2):
        history.note_beginning([3, BLANK, 4], 0)
    assert history.beginning([1, BLANK, 2]) == 0
    for token_id in range(1_000):
        history.note_beginning([token_id, 5_000], 1)
    assert len(history._beginnings) < 100


def test_as_many_tokens_lead_to_a_beginning_as_nothing_before_it_has():
    history = TenantHistory()
    history.note_beginning([BLANK, 1, BLANK, BLANK, 2, BLANK, BLANK], 4)
    assert history.beginning([BLANK, 5, BLANK, 5, BLANK, BLANK, 6]) == 6
    history = TenantHistory()
    history.note_beginning([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], 9)  # what is before it came before
    assert history.beginning([1, 2, 3, 4, 5]) == 0
    # Bytes of several tokens are not taken for one.
    history.note_beginning([256, 9], 1)
    history.note_beginning([256, 9], 1)
    assert history.beginning([1, 65_536, 1]) == 0
    assert history.beginning([1, 65_536, 256, 1]) == 3


def test_a_new_name_is_looked_for_in_the_instruction():
    # Its first token, 50, has newer occurrences, all with another one after it.
    text = [*range(100, 130), 60, *range(130, 160)]
    elsewhere = [token for at in range(12) for token in (50, 1_000 + at)]
    prompt = [60, 40, 50, 51, 52, 41, BLANK, *text, *range(5_000, 5_300), *elsewhere, ROLE]
    tree = propose_after(prompt, [*prompt, *range(100, 130), 50], TREE, 8)
    assert list(tree.token_ids)[:2] == [51, 52]


# --- chains and trees ---


def test_continuations_seen_more_often_are_drafted_first():
    prompt = [1, 2, 7, 0, 1, 2, 8, 0, 1, 2, 8, 0, 1, 2, 8, 5, 1, 2]
    assert propose_once(SuffixDrafter(), prompt, 1).token_ids[0] == 8
    tree = propose_once(SuffixDrafter(), prompt, 6, TREE)
    assert {7, 8} <= set(tree.token_ids)


def test_longer_matches_never_weigh_less():
    for place in Place:
        weights = WEIGHTS[place]
        assert len(weights) == MAX_MATCH_LENGTH + 1
        assert weights[0] == 0.0
        assert list(weights) == sorted(weights)


# --- history ---


def after(history, token_id):
    """Returns the tokens that follow this one in a tenant's texts, as far as these are indexed."""
    found = []
    for text in (history.young, history.old):
        places = text.find([token_id], 8, 8)
        found += [text.token_ids[at] for at in places if at < len(text)]
    return found


def finish(drafter, token_ids, cache_salt, request_id="done", options=None):
    drafter.open(request_id, token_ids, options or {}, cache_salt)
    drafter.close(request_id)


def draft_of(drafter, token_ids, cache_salt, options=None):
    drafter.open("new", token_ids, options or {}, cache_salt)
    tree = ask(drafter, token_ids, 4, CHAIN, request_id="new")
    drafter.close("new")
    return list(tree.token_ids)


def test_a_tenants_finished_requests_are_copied_from():
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3, 4, 5, 6, 7], "a")
    assert draft_of(drafter, [9, 2, 3], "a") == [4, 5, 6, 7]


def test_a_request_may_stay_out_of_the_history():
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3, 4, 5, 6, 7], "a", options={"use_history": False})
    assert draft_of(drafter, [9, 2, 3], "a") == []
    finish(drafter, [1, 2, 3, 4, 5, 6, 7], "a")
    assert draft_of(drafter, [9, 2, 3], "a", {"use_history": False}) == []
    assert draft_of(drafter, [9, 2, 3], "a") == [4, 5, 6, 7]


def test_a_draft_ends_where_the_text_it_copies_ends():
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3, 4, 5], "a")
    finish(drafter, [6, 7, 8], "a")
    assert draft_of(drafter, [2, 3], "a") == [4, 5]
    assert draft_of(drafter, [4, 5], "a") == []


def test_the_oldest_texts_make_room():
    history = TenantHistory(max_tokens=200)
    for start in range(0, 1_000, 40):
        history.add(list(range(start, start + 40)))
        history.advance(1_000)
        assert len(history) <= 200
    assert after(history, 990) == [991]
    assert after(history, 10) == []


def test_waiting_texts_are_bounded_too():
    history = TenantHistory(max_tokens=200)
    for start in range(0, 1_000, 40):
        history.add(list(range(start, start + 40)))
    history.add(list(range(5_000, 6_000)))
    assert len(history) <= 100
    history.advance(10_000)
    assert after(history, 5_950) == [5_951]
    assert after(history, 5_850) == []


def test_texts_are_indexed_a_little_at_a_time():
    history = TenantHistory()
    history.add(list(range(1_000)))
    history.advance(300)
    assert after(history, 298) == [299]
    assert after(history, 299) == []
    history.advance(1)
    assert after(history, 299) == [300]


def test_who_copies_from_a_forgotten_text_is_lost_but_goes_on():
    drafter = SuffixDrafter()
    drafter._histories._by_salt["a"] = history = TenantHistory(100)
    finish(drafter, list(range(40)), "a")
    text = [99, *range(10, 30)]
    drafter.open("r", text, {}, "a")
    assert list(ask(drafter, text, 4, CHAIN).token_ids) == [30, 31, 32, 33]
    for start in range(1_000, 1_200, 40):
        history.add(list(range(start, start + 40)))
        history.advance(1_000)
    assert list(ask(drafter, text, 4, CHAIN).token_ids) == []
    tell(drafter, [*text, 30])


def test_the_tenant_seen_longest_ago_is_forgotten():
    histories = Histories(max_tenants=2)
    first = histories.of("a")
    histories.of("b")
    assert histories.of("a") is first
    histories.of("c")
    assert len(histories) == 2
    assert histories.of("a") is first
    first.add([1])
    histories.of("b")
    histories.of("c")
    assert len(histories.of("a")) == 0


def test_all_tenants_together_are_bounded():
    histories = Histories(max_tenants=99, max_tokens=100)
    for cache_salt in "abcde":
        histories.of(cache_salt).add(list(range(39)))  # 40 with what separates texts
    assert len(histories) == 3  # the newest came when two fitted
    histories.of("e")
    assert list(histories._by_salt) == ["d", "e"]


def test_a_step_indexes_a_bounded_part_of_what_waits():
    histories = Histories()
    for cache_salt in "ab":
        histories.of(cache_salt).add(list(range(1_000)))
    histories.advance()
    indexed = [
        len(histories.of(cache_salt)) - histories.of(cache_salt)._num_waiting for cache_salt in "ab"
    ]
    assert 0 < sum(indexed) < 500
