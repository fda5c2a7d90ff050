from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.model.loader import BUNDLED
from engine.tokenizer import load_tokenizer
from worlds.engine_servers import Served, engine_served
from worlds.two_ranks import saved_model


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """The bundled model behind a real uvicorn on a loopback port, for all tests that only talk to it."""
    torch.manual_seed(0)
    with engine_served(EngineConfig(max_num_seqs=8, check_integrity=True)) as found:
        yield found


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some kilobytes, with the bundled one's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    load_tokenizer(str(BUNDLED / "target")).save_pretrained(folder)
    saved_model("llama", folder, vocab_size=4096)
    return folder
