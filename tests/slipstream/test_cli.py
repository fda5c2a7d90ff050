from __future__ import annotations

import pytest

from server.version import server_version
from slipstream.cli import main


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"slipstream {server_version()}\n"


def test_help_explains_flags_variables_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert done.value.code == 0
    for part in ("MODEL", "--speculative.draft-strategy", "SLIPSTREAM_", "--config", "examples:"):
        assert part in text
    assert "default: None" not in text


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([])
    assert done.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--port", "70000"], "port: "),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "max_num_batched_tokens"),
        (["--config", "no/such/file.yaml"], "cannot read"),
        (["--api-key", ""], "api-key: "),
        (["--api-key", "schlüssel"], "visible ASCII"),
        (["--api-key", "two words"], "visible ASCII"),
    ],
)
def test_bad_settings_are_explained_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert main(["serve", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("slipstream: ")
    assert part in err
    assert "Traceback" not in err
