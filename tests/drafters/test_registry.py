"""The registry, and what every drafter in it promises."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drafters import registry
from drafters.auto import AutoDrafter
from drafters.base import (
    REGISTERED,
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterUnavailableError,
    DraftShape,
)
from drafters.registry import (
    DrafterPluginError,
    build_drafters,
    draft_methods,
    drafter_names,
    find_plugins,
)
from drafters.tree import EMPTY
from worlds.plugin_site import SOUND, install
from worlds.simulated_target import ask, tell

TEXT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
FREE = tuple(build_drafters())
"""Drafters that need no model."""
COPIERS = ("ngram", "nasd_one_level", "nasd", "prediction")


def test_builds_every_drafter_under_its_own_name():
    drafters = build_drafters()
    assert set(drafters) <= set(drafter_names())  # those that need a model have none here
    assert {"none", "ngram", "nasd_one_level", "nasd", "prediction"} <= set(drafters)
    for name, drafter in drafters.items():
        assert isinstance(drafter, Drafter)
        assert drafter.info.name == name
        assert drafter.info.description
        assert all(option.description for option in drafter.info.options)
        assert drafter.info.resolve({}) == drafter.info.defaults()
        with pytest.raises(ValueError, match="bogus"):
            drafter.info.resolve({"bogus": 1})
        assert build_drafters([name])[name] is not drafter


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'sufix'; known: none, .*suffix"):
        build_drafters(["sufix"])


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("@drafter", True),
        ("@drafter  # of the core", True),
        ("@base.drafter", True),
        ("@drafters.base.drafter", True),
        ("@drafters_of", False),
        ("    @drafter", False),
        ("# @drafter", False),
    ],
)
def test_files_are_found_however_the_decorator_is_written(line, is_found, monkeypatch, tmp_path):
    (tmp_path / "some_drafter.py").write_text(f"import base\n{line}\nclass Some: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry._registers("some_drafter") is is_found


@pytest.mark.parametrize("name", FREE)
def test_a_request_lives_from_open_to_close(name):
    drafter = build_drafters([name])[name]
    drafter.open("r", TEXT, {}, "tenant")
    if drafter.info.takes_prediction:
        drafter.predict("r", [3, 4, 1, 2])
    with pytest.raises(ValueError, match="already open"):
        drafter.open("r", TEXT, {}, "")
    for max_nodes, shape in ((0, (1, 4)), (0, (2, 4)), (4, (1, 0)), (4, (2, 0))):
        assert ask(drafter, TEXT, max_nodes, DraftShape(*shape)) == EMPTY, "there was no room"
    tree = ask(drafter, TEXT, 4)
    if name in COPIERS:
        assert list(tree.token_ids) == [3, 4, 1, 2]
    num_top = drafter.num_top_tokens("r")
    assert num_top >= 0
    tell(drafter, [*TEXT, 3], 1, [[3] * min(num_top, 1)], [[1.0] * min(num_top, 1)])
    drafter.close("r")
    drafter.close("r")


@pytest.mark.parametrize("name", FREE)
def test_the_live_text_is_neither_kept_nor_changed(name):
    drafter = build_drafters([name])[name]
    token_ids = list(TEXT)
    drafter.open("r", token_ids, {}, "")
    before = ask(drafter, list(TEXT), 6)
    assert token_ids == TEXT
    token_ids.clear()
    assert list(ask(drafter, list(TEXT), 6).token_ids) == list(before.token_ids)


def test_a_start_that_returns_no_state_is_refused():
    class Stateless(Drafter):
        info = DrafterInfo("stateless", "Forgets.")

        def start(self, request):
            del request

    with pytest.raises(TypeError, match="start returned NoneType, which is no RequestState"):
        Stateless().open("r", TEXT, {}, "")


def test_several_drafters_of_one_class_each_ask_for_their_own_model():
    lent = []

    class Model:
        block_size = 4
        first_row = 0
        num_slots = 0
        runs_ahead = False

    def draft_model(name):
        lent.append((name, Model()))
        return lent[-1][1]

    drafts = {"left": "small_model", "right": "small_model", "head": "medusa"}
    built = build_drafters(list(drafts), DrafterContext(draft_model=draft_model), {}, drafts)
    assert [name for name, _ in lent] == list(built) == list(drafts)
    for name, drafter in built.items():
        assert drafter.info == replace(REGISTERED[drafts[name]].info, name=name)
        assert isinstance(drafter, REGISTERED[drafts[name]])
    assert built["left"]._model is lent[0][1]
    assert built["right"]._model is lent[1][1]
    assert REGISTERED["small_model"].info.name == "small_model"
    auto = AutoDrafter()
    auto.meet(built)
    assert list(auto.companions(False)) == [built["head"]], "those with a model join nobody"


def test_a_draft_takes_the_place_of_its_method_or_stands_beside_it(caplog):
    caplog.set_level(logging.INFO, "drafters.registry")
    context = DrafterContext(draft_model=lambda name: {"medusa": 1, "second": 2}[name])
    with pytest.raises(KeyError):  # the engine's answer would be a DrafterUnavailableError
        build_drafters(["eagle3"], context, None, {"medusa": "medusa"})
    built = build_drafters(
        ["medusa", "second"], context, None, {"medusa": "medusa", "second": "medusa"}
    )
    assert [each._heads for each in built.values()] == [1, 2]
    assert set(draft_methods()) >= {"small_model", "medusa", "eagle3"}
    with pytest.raises(ValueError, match="unknown drafter 'second'"):
        build_drafters(["second"], context, None, {"medusa": "medusa"})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return folder


@pytest.fixture(autouse=True)
def _forget_modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refusal(site: Path, source: str, name: str = "fives") -> str:
    """Returns the error that building the drafter of this source ends in."""
    install(site, "some-plugin", {name: "some_plugin:make"}, source)
    with pytest.raises(DrafterPluginError) as refused:
        build_drafters(None, DrafterContext(), find_plugins())
    message = str(refused.value)
    assert message.startswith(
        f"drafter plugin of some-plugin 1.0 (entry point {name} = some_plugin:make) "
    )
    return message.partition(") ")[2]


def test_without_plugins_there_is_the_core():
    assert find_plugins([]) == {}
    assert list(build_drafters(None, None, {})) == list(build_drafters())


def test_a_plugin_is_built_beside_the_core_and_drafts(site, caplog):
    install(site, "some-plugin", {"fives": "some_plugin:make"}, SOUND)
    caplog.set_level(logging.INFO, "drafters.registry")
    drafters = build_drafters(None, DrafterContext(), find_plugins())
    assert list(drafters) == [*build_drafters(), "fives"]
    fives = drafters["fives"]
    fives.open("r", [1, 2], {}, "")
    assert list(ask(fives, [1, 2], 3).token_ids) == [5] * 3
    assert "fives comes from some-plugin 1.0" in caplog.text
    assert list(build_drafters(["fives", "none"], None, find_plugins())) == ["fives", "none"]


def test_the_factory_gets_the_engines_context(site):
    source = SOUND.replace("def make(context):\n", "def make(context):\n    seen.append(context)\n")
    install(site, "some-plugin", {"fives": "some_plugin:make"}, "seen = []\n" + source)
    context = DrafterContext(vocab_size=77)
    build_drafters(["fives"], context, find_plugins())
    assert sys.modules["some_plugin"].seen == [context]


def test_what_is_not_chosen_is_not_even_imported(site):
    install(site, "bad-plugin", {"bad": "bad_plugin:make"}, "raise RuntimeError('imported')")
    install(site, "some-plugin", {"fives": "some_plugin:make"}, SOUND)
    assert "fives" in build_drafters(None, None, find_plugins(["fives"]))
    assert "bad" not in build_drafters(None, None, find_plugins([]))
    # Named drafters are built, others are left alone, plugins as well as core.
    assert list(build_drafters(["fives"], None, find_plugins())) == ["fives"]
    assert "bad_plugin" not in sys.modules


def test_a_chosen_name_that_nobody_registers_is_refused_with_those_there_are(site):
    install(site, "some-plugin", {"fives": "some_plugin:make"}, SOUND)
    with pytest.raises(DrafterPluginError, match=r"drafter_plugins names 'sixes'.*: fives$"):
        find_plugins(["sixes"])


def test_a_name_of_the_core_is_refused_unless_left_out(site):
    install(site, "some-plugin", {"ngram": "some_plugin:make"}, SOUND)
    expected = (
        r"some-plugin 1\.0 \(entry point ngram = some_plugin:make\) .* a drafter of the core; "
        "uninstall it, or leave it out of drafter_plugins"
    )
    with pytest.raises(DrafterPluginError, match=expected):
        find_plugins()
    with pytest.raises(DrafterPluginError, match=expected):
        find_plugins(["ngram"])
    assert find_plugins([]) == {}


def test_two_plugins_of_one_name_are_refused_and_both_named(site):
    install(site, "one-plugin", {"fives": "one_plugin:make"}, SOUND)
    install(site, "two-plugin", {"fives": "two_plugin:make", "twos": "two_plugin:make"}, SOUND)
    with pytest.raises(DrafterPluginError, match=r"two-plugin 1\.0 .* one of one-plugin 1\.0"):
        find_plugins()
    assert list(find_plugins(["twos"])) == ["twos"]


@pytest.mark.parametrize("name", ["Fives", "5s", "my-drafter", "x" * 65])
def test_a_name_that_requests_could_not_carry_is_refused(site, name):
    install(site, "some-plugin", {name: "some_plugin:make"}, SOUND)
    with pytest.raises(DrafterPluginError, match="has a name that is not lower-case"):
        find_plugins()


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("import no_such_module", "cannot be imported: ModuleNotFoundError: No module named 'no_s"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("", "cannot be imported: AttributeError"),
        ("make = 3", "is not a factory but of type int"),
        ("def make(context):\n    raise KeyError('book')", "cannot build its drafter: KeyError"),
        ("def make():\n    pass", "cannot build its drafter: TypeError"),
        ("def make(context):\n    return 3", "returns int, which is no drafters.base.Drafter"),
        (SOUND.replace("info =", "other ="), "returns Fives, which has no DrafterInfo as its info"),
        (SOUND.replace('"fives", ', '"sixes", '), "a drafter that is named 'sixes' in its info"),
    ],
)
def test_a_broken_plugin_is_refused_with_its_fault(site, source, part):
    assert part in refusal(site, source)


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ("options=(DrafterOption('a', 1, 'x'),) * 2", "lists an option twice"),
        (
            "options=(DrafterOption('a', 1, 'x', 2, 3),)",
            "default does not fit: a must be at least 2",
        ),
    ],
)
def test_what_a_drafter_says_of_itself_must_hold(site, extra, part):
    source = SOUND.replace("drafts_trees=False", f"drafts_trees=False, {extra}")
    assert part in refusal(site, source)


def test_a_plugin_that_cannot_work_here_is_left_out_unless_it_is_named(site, caplog):
    source = "def make(context):\n    return context.draft_model('fives')\n"
    install(site, "some-plugin", {"fives": "some_plugin:make"}, source)
    assert "fives" not in build_drafters(None, DrafterContext(), find_plugins())
    assert "some-plugin 1.0" in caplog.text
    with pytest.raises(DrafterUnavailableError, match="'fives' cannot be used: needs draft model"):
        build_drafters(["fives"], DrafterContext(), find_plugins())
