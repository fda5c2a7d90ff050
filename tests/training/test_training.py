"""Fast checks of the data side of training; no model is trained here."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from training import corpus, edits, evaluate, export, names, operations, samples, train
from training.tokenizer import SPECIAL_TOKENS, encode, save_tokenizer, train_tokenizer

CODE = '''# settings helper
class Loader:
    """Loads settings."""

    def __init__(self, folder, retries=3):
        self.folder = folder
        self.retries = retries

    def load(self, name):
        # look in the folder first
        path = self.folder / name
        if not path.exists():
            raise FileNotFoundError("no such settings")
        return path.read_text()
'''

OTHER = """def total(prices, tax):
    result = 0
    for price in prices:
        result += price * 100
    print('sum of prices')
    return result + tax
"""


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([CODE, OTHER] * 3, 512), folder)
    return AutoTokenizer.from_pretrained(folder)


def test_tokenizer_round_trips_and_has_one_id_per_special_token(tok) -> None:
    for text in (CODE, OTHER, "x\t=  1  # \u00e9\u4e16\n\n\n", " leading", "trailing   "):
        assert tok.decode(encode(tok, text)) == text
    assert len(set(tok.convert_tokens_to_ids(SPECIAL_TOKENS))) == len(SPECIAL_TOKENS)


def test_a_prompt_ending_in_a_newline_or_indentation_is_a_token_prefix(tok) -> None:
    whole = encode(tok, OTHER)
    for cut in ("def total(prices, tax):\n", "def total(prices, tax):\n    "):
        ids = encode(tok, cut)
        assert whole[: len(ids)] == ids


def test_edits_are_chats_whose_every_answer_is_weighted_as_one(tok) -> None:
    roles = tok.convert_tokens_to_ids(["<|system|>", "<|user|>", "<|assistant|>"])
    allowed = dict.fromkeys(roles, {samples.USER_WEIGHT})
    allowed[roles[-1]] = {samples.ANSWER_WEIGHT, samples.CHANGED_WEIGHT}
    for seed in range(40):
        mix = samples.Mix(1, 900, seed % 2 / 2, 0)
        sample = samples.edit_sample(tok, random.Random(seed), [CODE, OTHER], mix)
        text = tok.decode(sample.ids)
        found = re.findall(r"<\|(system|user|assistant)\|>(.*?)<\|eos\|>", text, re.S)
        messages = [{"role": role, "content": content} for role, content in found]
        assert {"user", "assistant"} <= {role for role, _ in found}
        assert seed % 2 or tok.apply_chat_template(messages, tokenize=False) == text
        role = None
        for token, weight in list(zip(sample.ids, sample.weights, strict=True))[1:]:
            role = token if token in roles else role
            assert weight in ({0.0} if token in roles else allowed[role])
    prompt = tok.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|assistant|>")
    assert len(samples.code_sample(tok, CODE).ids) > 10


@pytest.mark.parametrize("kind", sorted(edits.KINDS))
def test_every_edit_kind_changes_what_it_says(kind: str) -> None:
    maker = edits.KINDS[kind][0]
    cases = [(seed, text) for seed in range(20) for text in (CODE, OTHER)]
    results = [maker(random.Random(seed), text) for seed, text in cases]
    assert results == [maker(random.Random(seed), text) for seed, text in cases]
    made = [r for r in results if r is not None]
    assert made, "the operation never applied"
    for say, after in made:
        assert say.strip()
        if kind == "repeat":
            assert after in (CODE, OTHER)
        elif kind != "add_first_line":
            assert after not in (CODE, OTHER) or kind == "replace_number"


def test_renaming_is_whole_word_and_leaves_the_rest_alone() -> None:
    assert names.replace_word("a ab a_b (a) a.b", "a", "zz") == "zz ab a_b (zz) zz.b"
    say, after = operations.rename_class(random.Random(1), CODE) or ("", "")
    new = after.split("class ")[1].split(":")[0]
    assert new in say
    assert after.replace(new, "Loader") == CODE


def test_scrambled_code_still_compiles_with_the_same_shape() -> None:
    for seed in range(20):
        text = names.scramble(random.Random(seed), CODE, 1.0)
        compile(text, "scrambled", "exec")
        assert text.count("\n") == CODE.count("\n")
        assert "Loader" not in text


def test_held_out_split_goes_by_file_and_is_a_small_share() -> None:
    names = [f"package/module_{i}.py" for i in range(4000)]
    held = [n for n in names if corpus.is_held_out(n)]
    assert 0.01 < len(held) / len(names) < 0.05
    assert held == [n for n in names if corpus.is_held_out(n)]


def test_units_are_clean_and_docstrings_are_cut_short() -> None:
    table = "TABLE = [" + "1, " * 400 + "]"
    first = (
        'def first(a):\n    """Say.\n\n    More.\n    """\n    value = a + 1\n    return value\n'
    )
    method = "    def method_{}(self, value):\n        self.value = value\n        return value\n\n"
    big = "class Big:\n" + "".join(method.format(i) for i in range(60))
    source = "\n\n".join(['"""Module."""\nimport os', table, first, OTHER, big])
    units = list(corpus.units_of(source))
    assert any(u.startswith("def first(a):\n") and '"""Say."""' in u for u in units)
    assert OTHER in units
    assert any(u.startswith("def method_7(self, value):\n    self") for u in units)
    for unit in units:
        compile(unit, "unit", "exec")
        assert len(unit) <= corpus.MAX_CHARS
        assert "TABLE" not in unit


@pytest.mark.parametrize(
    ("line", "licence"),
    [
        ("License-Expression: MIT", "MIT"),
        ("Classifier: License :: OSI Approved :: BSD License", "BSD License"),
        ("License-Expression: GPL-3.0-or-later", None),
        ("License-Expression: MIT AND LGPL-2.1-only", None),
        ("Summary: nothing declared", None),
    ],
)
def test_licence_filter_takes_only_clearly_permissive_packages(
    tmp_path: Path, line: str, licence: str | None
) -> None:
    (tmp_path / "METADATA").write_text(f"Name: p\nVersion: 1.0\n{line}\n")
    assert corpus.licence_of(corpus.metadata.PathDistribution(tmp_path)) == licence


def test_bench_files_come_from_held_out_files_only() -> None:
    folder = Path(__file__).resolve().parents[2] / "bench" / "data"
    for name, keys in (("code", {"prompt", "completion"}), ("edits", {"messages", "completion"})):
        path = folder / f"heldout_{name}.jsonl"
        assert path.stat().st_size < 400_000
        for line in path.read_text().splitlines():
            row = json.loads(line)
            assert keys <= row.keys()
            assert corpus.is_held_out(row["source"].split(": ", 1)[1])


def test_groups_have_similar_lengths_and_padding_carries_no_weight() -> None:
    lengths = [5, 70, 33, 64, 6, 200, 31, 90, 12, 8]
    docs = [samples.Sample([1] * n, [0.0] + [1.0] * (n - 1), False) for n in lengths]
    groups = list(samples.group(docs, random.Random(0), 256, keep_rest=True))
    assert sorted(len(s.ids) for part in groups for s in part) == sorted(lengths)
    for part in groups:
        ids, weights = samples.pad(part)
        assert (ids.shape[1] - 1) % 32 == 0
        assert weights.sum() == sum(len(s.ids) - 1 for s in part)


def test_code_that_repeats_itself_is_not_plain() -> None:
    assert samples.is_plain(OTHER)
    assert not samples.is_plain("def f(a):\n" + "    a.append(nothing)\n" * 9)
    assert not samples.is_plain("def method(self, value):\n    return value\n")


def test_what_an_edit_changes_weighs_more_than_what_it_copies() -> None:
    copied, changed = samples.ANSWER_WEIGHT, samples.CHANGED_WEIGHT
    before = [10, 11, 12, 13, 14, 15]
    assert samples.answer_weights(before, before) == [copied] * 6
    replaced = samples.answer_weights(before, [10, 11, 20, 21, 13, 14, 15])
    assert replaced == [copied, copied, changed, changed, changed, copied, copied]
    dropped = samples.answer_weights(before, [10, 11, 14, 15])
    assert dropped == [copied, copied, changed, copied]
    appended = samples.answer_weights(before, [*before, 16])
    assert appended == [copied] * 6 + [changed]


def test_a_completion_repeats_when_its_end_has_a_short_period() -> None:
    words = list(range(100, 220))
    for end in ([1, 2, 3] * 10, words[:15] * 2):
        assert evaluate.repeats(words[:90] + end)
    assert not evaluate.repeats(words)
    assert not evaluate.repeats(words[:90] + words[:16] + words[:14])
    assert not evaluate.repeats(words[:50] + [7] * 30), "it ended by itself"


def test_the_draft_learns_least_loss_where_it_equals_its_teacher() -> None:
    teacher = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 3.0]]).log_softmax(-1)
    same = train.soft_losses(teacher, teacher)
    other = train.soft_losses(teacher.roll(1, dims=1), teacher)
    assert torch.allclose(same, -(teacher.exp() * teacher).sum(-1))
    assert (other > same).all()
    ids = torch.tensor([[0, 2, 1]])
    assert train.token_losses(teacher, ids).tolist() == [-teacher[0, 2], -teacher[1, 1]]


def test_a_decay_is_planned_anew_when_the_file_changes(tmp_path: Path) -> None:
    asked = tmp_path / "decay"
    planned = train.Decay(start=100.0, length=50.0)
    assert planned.replan(asked, 80.0) is planned, "nothing was asked for"
    assert [planned.at(second) for second in (0.0, 100.0, 125.0, 150.0, 200.0)] == [1, 1, 0.5, 0, 0]
    asked.write_text("2\n")
    first = planned.replan(asked, 10.0)
    assert (first.at(10.0), first.at(70.0), first.end) == (1.0, 0.5, 130.0)
    assert first.replan(asked, 70.0) is first, "the same file asks only once"
    asked.write_text("10")
    longer = first.replan(asked, 70.0)
    assert (longer.at(70.0), longer.at(370.0), longer.end) == (0.5, 0.25, 670.0)
    asked.write_text("0")
    over = longer.replan(asked, 80.0)
    assert (over.at(80.0), over.at(90.0), over.end) == (0.0, 0.0, 80.0)


def test_a_run_that_goes_on_has_the_minutes_that_it_is_told(tmp_path: Path) -> None:
    before = train.Decay.planned(600.0)
    assert train.Decay.planned(600.0, asdict(before)) == before
    assert train.Decay.planned(1200.0, asdict(before)).end == 1200.0
    (tmp_path / "decay").write_text("3")
    asked = before.replan(tmp_path / "decay", 100.0)
    assert train.Decay.planned(1200.0, asdict(asked)) == asked


def test_a_card_shows_what_was_measured_and_nothing_else() -> None:
    table = export.measurements({"code_loss": 2.1, "code_agree": 0.723})
    assert table.splitlines() == [
        "| loss per token, code | 2.100 |",
        "| same most likely token as the target, code | 72 % |",
    ]


def test_stutter_repeats_a_part_and_gives_the_copies_no_weight() -> None:
    ids = [0, *range(10, 20), 9, *range(20, 30), 9, *range(30, 40), 9, 1]
    plain = samples.Sample(ids, [0.0] + [1.0] * (len(ids) - 1), False)
    for seed in range(50):
        made = samples.stutter(random.Random(seed), plain, 9)
        assert len(made.ids) == len(made.weights) > len(ids)
        kept = [i for i, w in zip(made.ids, made.weights, strict=True) if w]
        assert kept == ids[1:]
