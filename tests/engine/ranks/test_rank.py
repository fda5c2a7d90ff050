"""Which rank a process is, by its environment."""

from __future__ import annotations

import pytest

from engine.ranks.rank import Rank, rank_here


def test_what_torchrun_says_is_read() -> None:
    rank = Rank(3, 4, 1, 2)
    assert rank_here(4, rank.environment()) == rank


def test_another_launchers_least_is_enough() -> None:
    assert rank_here(2, {"RANK": "1", "WORLD_SIZE": "2"}) == Rank(1, 2, 1, 2)


@pytest.mark.parametrize("said", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_one_process_is_no_rank(said: dict[str, str]) -> None:
    assert rank_here(2, said) is None


def test_whoever_needs_no_ranks_takes_no_notice_of_the_environment() -> None:
    assert rank_here(1, {"RANK": "1", "WORLD_SIZE": "2"}) is None


def test_another_number_of_processes_is_refused() -> None:
    with pytest.raises(
        ValueError, match="tensor_parallel_size is 2, but 4 processes were launched"
    ):
        rank_here(2, Rank(0, 4, 0, 4).environment())
