"""``slipstream prove`` in its usual length against a real server: with nothing wrong it ends with 0, and
each fault that is put into one function of the engine is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from drafters.tree import DraftTree
from engine.sampling import sampler
from engine.sampling.processor import Path as DraftPath
from engine.sampling.processors.penalties import Penalties
from engine.verification import match, verify
from kvpool.store import KVStore
from slipstream.cli import main
from worlds.engine_servers import Served

pytestmark = pytest.mark.slow

Fault = Callable[[pytest.MonkeyPatch], None]


def prove(url: str, folder: Path) -> tuple[int, Mapping[str, Any]]:
    file = folder / "proof.json"
    status = main(["prove", url, "--json", str(file)])
    return status, json.loads(file.read_text())


def test_a_sound_server_keeps_what_it_promises(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, proof = prove(served.url, tmp_path)
    assert status == 0, proof["not_kept"]
    assert proof["is_exact"]
    assert proof["num_equal"] == proof["num_compared"] > 150
    assert proof["not_answered"] == {}
    assert proof["draws"]
    drafters = {each["drafter"] for each in proof["requests"] if each["num_accepted_tokens"]}
    assert len(drafters) > 3
    count = proof["num_compared"]
    assert f"**{count} of {count} texts equal**" in capsys.readouterr().out


def last_draft_stands(patch: pytest.MonkeyPatch) -> None:
    """A draft at the end of an accepted path stands, whatever the target says of it."""
    sound = match._accepted_path

    def accept(tree: DraftTree, row_token_ids: Sequence[int]) -> list[int]:
        path = sound(tree, row_token_ids)
        below = [node + 1 for node, parent in enumerate(tree.parents) if parent + 1 == path[-1]]
        return [*path, below[0]] if len(path) > 2 and below else path

    def verify_wrongly(request: Any, row_token_ids: Sequence[int]) -> Any:
        path = accept(request.draft, row_token_ids)
        said = list(row_token_ids)
        for row, below in zip(path, path[1:], strict=False):
            said[row] = request.draft.token_ids[below - 1]
        return match.trimmed(request.sampling, tuple(said), path)

    patch.setattr(verify, "verify", verify_wrongly)


def penalty_forgets_the_second_draft(patch: pytest.MonkeyPatch) -> None:
    sound = Penalties.process

    def process(self: Penalties, logits: Tensor, paths: Sequence[DraftPath]) -> None:
        sound(self, logits, [path[:1] + path[2:] for path in paths])

    patch.setattr(Penalties, "process", process)


def rows_share_a_draw(patch: pytest.MonkeyPatch) -> None:
    """The first draft's row has the noise of the anchor's."""
    sound = sampler.sampled_tokens

    def sampled(logits: Tensor, keys: Any, positions: Any, params: Any) -> Tensor:
        shared = positions.copy()
        follows = (keys[1:] == keys[:-1]) & (positions[1:] == positions[:-1] + 1)
        shared[1:][follows] = positions[:-1][follows]
        return sound(logits, keys, shared, params)

    patch.setattr(sampler, "sampled_tokens", sampled)


def drawn_drafts_always_stand(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "_accepts", lambda _: lambda *_: True)


def a_row_is_not_moved(patch: pytest.MonkeyPatch) -> None:
    sound = KVStore.move

    def move(self: KVStore, source: Tensor, target: Tensor) -> None:
        sound(self, source[1:], target[1:])

    patch.setattr(KVStore, "move", move)


@pytest.mark.parametrize(
    "fault",
    [
        last_draft_stands,
        penalty_forgets_the_second_draft,
        rows_share_a_draw,
        drawn_drafts_always_stand,
        a_row_is_not_moved,
    ],
)
def test_a_fault_is_found(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    fault(monkeypatch)
    status, proof = prove(served.url, tmp_path)
    assert status == 1
    assert proof["not_kept"]
