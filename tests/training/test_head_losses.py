"""The loss of heads against the same in plain operations, and which rows learn from which tokens."""

from __future__ import annotations

import pytest
import torch

from training import head_losses
from training.head_losses import (
    STEP_DISCOUNT,
    Guesses,
    Rows,
    chosen_rows,
    distance,
    distilled,
    right,
)

LENGTHS, WIDTH, HIDDEN, VOCAB, NUM_STEPS = (9, 5, 7), 9, 6, 13, 3


def rows_of(most: int = 100) -> Rows:
    return chosen_rows([1, 0, 4], LENGTHS, most, torch.Generator().manual_seed(3))


def test_rows_learn_from_the_token_behind_the_one_they_guess_from() -> None:
    rows = rows_of()
    # Row i reads token i + 1, which has to be there.
    assert rows.at[rows.learns].tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5]
    for step in range(NUM_STEPS):
        learning, tokens = rows.of_step(step, WIDTH)
        wanted = [
            [text, row, row + 1 + step]
            for text, (first, length) in enumerate(zip((1, 0, 4), LENGTHS, strict=True))
            for row in range(first, length - 1)
            if row + 1 + step < length
        ]
        text, number = learning // rows.at.shape[1], learning % rows.at.shape[1]
        found = torch.stack((text, rows.at[text, number], tokens - text * WIDTH), dim=1)
        assert found.tolist() == wanted


def test_of_many_rows_some_are_chosen_by_chance() -> None:
    rows = rows_of(most=2)
    assert rows.at.shape == (3, 2)
    assert bool(rows.learns.all())
    assert all(first < second for first, second in rows.at.tolist())
    generator = torch.Generator().manual_seed(0)
    drawn = {tuple(chosen_rows([2], [9], 2, generator).at[0].tolist()) for _ in range(200)}
    assert len(drawn) == 15, "all pairs of six rows"


def test_a_text_without_rows_has_none() -> None:
    rows = chosen_rows([1, 4], [9, 5], 100, torch.Generator())
    learning, _ = rows.of_step(0, WIDTH)
    assert (learning // rows.at.shape[1]).tolist() == [0] * 7


@pytest.fixture(params=[(256, 1 << 22), (4, 1)], ids=["at once", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    least, numbers = request.param
    monkeypatch.setattr(head_losses, "_LEAST_ROWS", least)
    monkeypatch.setattr(head_losses, "_NUMBERS_AT_ONCE", {"cpu": numbers})


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read_by_step(rows: Rows) -> list[torch.Tensor]:
    return [
        drawn(step, len(rows.of_step(step, WIDTH)[0]), HIDDEN).requires_grad_()
        for step in range(NUM_STEPS)
    ]


@pytest.mark.usefixtures("parts")
def test_the_loss_and_its_gradients_are_those_of_plain_operations() -> None:
    rows = rows_of()
    normed, teacher = drawn(7, len(LENGTHS) * WIDTH, HIDDEN), drawn(8, VOCAB, HIDDEN)
    found = []
    for plain in (False, True):
        read, head = read_by_step(rows), drawn(9, VOCAB, HIDDEN).requires_grad_()
        if plain:
            loss = torch.zeros(())
            for step, each in enumerate(read):
                wanted = (normed[rows.of_step(step, WIDTH)[1]] @ teacher.T).softmax(-1)
                cross = torch.nn.functional.cross_entropy(each @ head.T, wanted)
                loss = loss + STEP_DISCOUNT**step * cross
        else:
            loss = distilled(Guesses.of(read, rows, WIDTH), head, normed, teacher)
        (loss * 3).backward()
        found.append([loss.detach(), head.grad, *(each.grad for each in read)])
    torch.testing.assert_close(found[0], found[1])


def test_a_frozen_head_gets_no_gradient() -> None:
    rows = rows_of()
    read, head = read_by_step(rows), drawn(9, VOCAB, HIDDEN)
    normed = drawn(7, len(LENGTHS) * WIDTH, HIDDEN)
    distilled(Guesses.of(read, rows, WIDTH), head, normed, head).backward()
    assert all(each.grad is not None and bool(each.grad.any()) for each in read)
    with torch.no_grad():
        again = distilled(Guesses.of(read, rows, WIDTH), head, normed, head)
    assert not again.requires_grad


@pytest.mark.usefixtures("parts")
def test_what_is_right_is_a_token_of_the_targets_whole_vocabulary() -> None:
    rows = rows_of()
    read, head = [each.detach() for each in read_by_step(rows)], drawn(9, 5, HIDDEN)
    likeliest = torch.arange(len(LENGTHS) * WIDTH) % VOCAB
    ids = torch.tensor([0, 3, 4, 7, 12])
    guesses = Guesses.of(read, rows, WIDTH)
    hits = right(guesses, head, likeliest, ids)
    wanted = [
        int((ids[(each @ head.T).argmax(-1)] == likeliest[rows.of_step(step, WIDTH)[1]]).sum())
        for step, each in enumerate(read)
    ]
    assert torch.bincount(guesses.steps[hits], minlength=NUM_STEPS).tolist() == wanted
    assert sum(wanted) > 0
    assert int(right(guesses, head, likeliest, None).sum()) != sum(wanted)


def test_the_distance_of_states_is_that_of_plain_operations() -> None:
    rows = rows_of()
    normed = drawn(7, len(LENGTHS) * WIDTH, HIDDEN) * 5
    read = [each.detach() * 4 for each in read_by_step(rows)]
    found = distance(Guesses.of(read, rows, WIDTH), normed)
    learnt = [normed[rows.of_step(step, WIDTH)[1]] for step in range(NUM_STEPS)]
    scale = torch.cat(learnt).square().mean().sqrt()
    wanted = sum(
        STEP_DISCOUNT**step * torch.nn.functional.smooth_l1_loss(each / scale, target / scale)
        for step, (each, target) in enumerate(zip(read, learnt, strict=True))
    )
    torch.testing.assert_close(found, wanted)
    same = Guesses.of(learnt, rows, WIDTH)
    assert float(distance(same, normed)) == 0.0
