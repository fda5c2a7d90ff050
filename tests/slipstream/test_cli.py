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
        (["--config", "."], "cannot read the settings file .: Is a directory"),
        (["--speculative.adaptive-depth", "x"], "speculative.adaptive-depth: "),
        (["--api-keys-file", "no/such.yaml"], "api-keys-file no/such.yaml: No such file"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
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
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--apikey", "x"], "there is no flag --apikey; did you mean --api-key?"),
        (["serve", "--api_key=s3cret"], "there is no flag --api_key; did you mean --api-key?"),
        (["serve", "--draft-strategy", "x"], "did you mean --speculative.draft-strategy?"),
        (["serve", "--max-num-s", "3"], "did you mean --max-num-seqs?"),
        (["serve", "--colour"], "there is no flag --colour"),
        (["chat", "b"], "one argument too many: b"),
        (["serve", "--port"], "--port: expected one argument"),
        (["bench", "--round", "3"], "did you mean --rounds?"),
        (["serv"], "invalid choice: 'serv'"),
    ],
)
def test_bad_flags_are_explained_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    """A flag may not be shortened either: what it means would change with the next one added."""
    with pytest.raises(SystemExit) as done:
        main(arguments)
    err = capsys.readouterr().err
    assert done.value.code == 2
    assert part in err
    assert err.count("\n") == 1
    assert "s3cret" not in err


def test_a_variable_that_is_no_setting_ends_the_start_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_APIKEY", "s3cret")
    assert main(["serve", "bundled", "--port", "0"]) == 2
    assert capsys.readouterr().err == (
        "slipstream: variable SLIPSTREAM_APIKEY: no such setting; did you mean SLIPSTREAM_API_KEY?\n"
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["bundled", "bundled"], "two models or adapters are called 'slipstream-bundled'"),
        (
            ["bundled", "--port", "0", "bundled_hybrid", "--api-workers", "2"],
            "api_workers: not where",
        ),
        (["bundled", "--keep-alive", "5m", "--no-engine-process"], "engine_process: not where"),
        (["bundled", "--keep-alive", "soon"], "keep-alive: must be seconds, or a duration as 90s"),
        (["bundled", "nowhere/at/all.gguf", "--port", "0"], "nowhere/at/all.gguf"),
        (["bundled", "--models", "models.yaml"], "leave out those of the command line"),
        (["--models", "none.yaml"], "cannot read the models file none.yaml: No such file"),
    ],
)
def test_what_rules_out_several_models_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert main(["serve", *arguments]) == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.splitlines()[-1].startswith("slipstream: ")
