"""Training heads for a model that counts in circles of eight, and reading them as the engine does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.drafting.facts import target_facts, weights_fingerprint
from engine.drafting.published import eagle3, medusa
from engine.drafting.published.folder import DraftFolder, DraftRefusedError
from training import heads
from training.target_states import Target
from worlds.counting_target import NUM_USED, VOCAB, counting_model, written_texts

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    counting_model().save_pretrained(path)
    written_texts(path / "texts.jsonl", 160)
    return path


def arguments(folder: Path, kind: str, out: Path, max_steps: int, **more: object) -> list[str]:
    given = {
        "model": folder,
        "texts": folder / "texts.jsonl",
        "kind": kind,
        "out": out,
        "max_steps": max_steps,
        # Steps end the run, and the learning rate follows them: nothing depends on time.
        "minutes": 100_000,
        "rows": 512,
        "num_steps": 3,
        "lr": 0.01,
        **more,
    }
    return [part for name, value in given.items() for part in (_option(name), str(value))]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "eagle3": (240, {"draft_vocab_size": NUM_USED}),
    "p_eagle": (90, {"draft_vocab_size": NUM_USED, "num_layers": 2, "positions": 6}),
    "medusa": (200, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn_what_the_target_says_and_are_read(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    max_steps, more = KINDS[kind]
    before = heads.main(arguments(folder, kind, tmp_path / "begun", 0, **more))
    after = heads.main(arguments(folder, kind, tmp_path, max_steps, **more))
    assert len(before) == len(after) == 3
    assert max(before) < 0.3
    assert min(after) > 0.8
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_training_steps"] == max_steps
    assert config["held_out_top1"] == pytest.approx(after, abs=1e-4)

    facts = target_facts(counting_model())
    read: Any = medusa.read if kind == "medusa" else eagle3.read
    network = read(DraftFolder.open(tmp_path), facts)
    assert (network.token_map is None) == (kind == "medusa")
    if kind == "p_eagle":
        assert network.num_parallel == 3
        assert network.mask_token_id == VOCAB - 1, "no text has it"
        assert len(network.layers) == 2
    other = target_facts(counting_model(seed=1))
    with pytest.raises(DraftRefusedError, match="trained for other weights"):
        read(DraftFolder.open(tmp_path), other)


class StoppedError(Exception):
    pass


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path / "state.pt", weights_only=True)["heads"]


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # Ten steps are more than an epoch; a save after every one of them.
    more: dict[str, Any] = {"rows": 300, "positions": 5, "save_every": 0, "draft_vocab_size": 150}
    heads.main(arguments(folder, kind, tmp_path / "whole", 10, **more))

    learn = heads.Trainer._learn

    def stops(self: heads.Trainer, group: list[int]) -> None:
        if self.step == 7:
            raise StoppedError
        learn(self, group)

    def refuses(*_: object) -> None:
        raise AssertionError("the states of a text are read again")

    again = arguments(folder, kind, tmp_path / "parts", 10, **more)
    with monkeypatch.context() as patched:
        patched.setattr(heads.Trainer, "_learn", stops)
        with pytest.raises(StoppedError):
            heads.main(again)
    assert torch.load(tmp_path / "parts" / "state.pt", weights_only=True)["step"] == 7
    with monkeypatch.context() as patched:
        patched.setattr(Target, "states", refuses)
        heads.main(again)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_is_read_stays_whole_while_it_is_written_anew(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    heads.main(arguments(folder, kind, tmp_path, 1))
    names = ("config.json", "model.safetensors")
    before = [(tmp_path / name).read_bytes() for name in names]
    with (tmp_path / names[0]).open("rb") as config, (tmp_path / names[1]).open("rb") as weights:
        heads.main(arguments(folder, kind, tmp_path, 2))
        assert [config.read(), weights.read()] == before
    assert all(
        (tmp_path / name).read_bytes() != old for name, old in zip(names, before, strict=True)
    )


def test_states_that_are_not_kept_say_the_same(folder: Path, tmp_path: Path) -> None:
    heads.main(arguments(folder, "eagle3", tmp_path / "kept", 2))
    heads.main([*arguments(folder, "eagle3", tmp_path / "read", 2), "--no-cache-states"])
    torch.testing.assert_close(weights(tmp_path / "kept"), weights(tmp_path / "read"))
    assert (tmp_path / "kept" / "states.bin").exists()
    assert not (tmp_path / "read" / "states.bin").exists()


def test_a_run_keeps_its_vocabulary_when_texts_are_added(folder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = (folder / "texts.jsonl").read_text().splitlines()
    texts.write_text("\n".join(lines[:60]))
    out = tmp_path / "out"

    def run(max_steps: int) -> torch.Tensor:
        given = {"texts": texts, "draft_vocab_size": 40, "num_held_out": 6}
        heads.main(arguments(folder, "eagle3", out, max_steps, **given))
        facts = target_facts(counting_model())
        ids = eagle3.read(DraftFolder.open(out), facts).token_map
        assert ids is not None
        return ids

    first = run(1)
    texts.write_text("\n".join(lines))
    torch.testing.assert_close(run(2), first)


def test_texts_that_are_kept_aside_may_have_a_file(folder: Path, tmp_path: Path) -> None:
    held = written_texts(tmp_path / "held.jsonl", 5, seed=9)
    args = heads.parse(arguments(folder, "eagle3", tmp_path, 1, held_out=held, num_held_out=3))
    texts, num_held = heads.read_texts(args, VOCAB)
    assert (num_held, len(texts)) == (3, 163)
    args.held_out = None
    args.num_held_out = 48
    texts, num_held = heads.read_texts(args, VOCAB)
    assert (num_held, len(texts)) == (16, 160), "no more than a tenth"
    args.num_held_out = 0
    with pytest.raises(ValueError, match="too few"):
        heads.read_texts(args, VOCAB)


def test_the_distance_of_states_counts_where_it_has_a_weight(folder: Path, tmp_path: Path) -> None:
    for weight in (0, 3, 6):
        out = tmp_path / str(weight)
        heads.main(arguments(folder, "eagle3", out, 3, state_weight=weight))
    without, some, more = (weights(tmp_path / str(weight)) for weight in (0, 3, 6))
    for first, second in ((without, some), (some, more)):
        assert any(not first[name].equal(second[name]) for name in first)


def test_a_run_may_begin_with_heads_that_were_trained_before(folder: Path, tmp_path: Path) -> None:
    more = {"draft_vocab_size": NUM_USED}
    before = heads.main(arguments(folder, "eagle3", tmp_path / "first", 160, **more))
    given = {"init": tmp_path / "first", "texts": folder / "texts.jsonl"}
    begun = heads.main(arguments(folder, "eagle3", tmp_path / "second", 0, **given))
    assert begun == pytest.approx(before, abs=1e-6)
    assert max(before) > 0.3, "as it is not without training"
    with pytest.raises(ValueError, match=r"(?s)--init: .*Missing key"):
        heads.main(arguments(folder, "eagle3", tmp_path / "third", 0, num_layers=2, **given))
    with pytest.raises(DraftRefusedError, match="it is not of the method p_eagle"):
        heads.main(arguments(folder, "p_eagle", tmp_path / "fourth", 0, **given))


def test_another_run_in_the_folder_is_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    heads.main(arguments(folder, "eagle3", tmp_path, 1))
    with pytest.raises(ValueError, match="holds a run with kind eagle3, not p_eagle"):
        heads.main(arguments(folder, "p_eagle", tmp_path, 1))
    with pytest.raises(ValueError, match="holds a run with num_layers 1, not 2"):
        heads.main(arguments(folder, "eagle3", tmp_path, 1, num_layers=2))
    other = tmp_path / "other"
    counting_model(seed=1).save_pretrained(other)
    given = arguments(folder, "eagle3", tmp_path, 1)
    with pytest.raises(ValueError, match="holds a run with target"):
        heads.main(["--model", str(other), *given[2:]])


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "p_eagle", "num_steps": 1},
        {"kind": "medusa", "draft_vocab_size": 8},
        {"kind": "medusa", "init": "heads"},
        {"kind": "eagle3", "init": "heads", "draft_vocab_size": 8},
        {"kind": "eagle3", "num_layers": 0},
        {"kind": "eagle"},
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    given = {"kind": "eagle3", **wrong}
    with pytest.raises(SystemExit):
        heads.parse(arguments(tmp_path, given.pop("kind"), tmp_path, 1, **given))


def test_a_fingerprint_is_of_values_not_of_their_type() -> None:
    model = counting_model()
    fingerprint = weights_fingerprint(model)
    assert weights_fingerprint(model.to(torch.bfloat16)) == fingerprint
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    assert weights_fingerprint(model) != fingerprint


def test_what_was_learnt_is_not_kept_aside_when_texts_are_added(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = (folder / "texts.jsonl").read_text().splitlines()
    kept_aside: list[int] = []
    train = heads.Trainer.train

    def noting(self: heads.Trainer) -> list[float]:
        kept_aside.append(self.num_held)
        return train(self)

    monkeypatch.setattr(heads.Trainer, "train", noting)
    for number in (60, 160):
        texts.write_text("\n".join(lines[:number]))
        heads.main(arguments(folder, "eagle3", tmp_path / "out", number // 60, texts=texts))
    assert kept_aside == [6, 6]
