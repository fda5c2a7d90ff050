from __future__ import annotations

import pytest

from server.version import server_version
from worlds.commands import Run


def test_version_help_and_usage_are_shown(run: Run) -> None:
    """Help explains flags, variables and files."""
    named = ("MODEL", "--speculative.draft-strategy", "SLIPSTREAM_", "--config", "examples:")
    for arguments, code, parts in (
        (["--version"], 0, (f"slipstream {server_version()}\n",)),
        (["serve", "--help"], 0, named),
        ([], 2, ("COMMAND",)),
    ):
        shown = run(*arguments, status=code)[code > 0]
        assert [part for part in parts if part not in shown] == []
        assert "default: None" not in shown


def refusal(run: Run, *arguments: str) -> str:
    """Returns what a server says that does not start, whose last line is the reason."""
    err = run("serve", *arguments, status=2).err
    assert err.splitlines()[-1].startswith("slipstream: ")
    return err


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
def test_bad_settings_are_explained_in_one_line(run: Run, arguments: list[str], part: str) -> None:
    err = refusal(run, *arguments)
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
def test_bad_flags_are_explained_in_one_line(run: Run, arguments: list[str], part: str) -> None:
    """A flag may not be shortened either: what it means would change with the next one added."""
    err = run(*arguments, status=2).err
    assert part in err
    assert err.count("\n") == 1
    assert "s3cret" not in err


def test_a_variable_that_is_no_setting_ends_the_start_in_one_line(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("SLIPSTREAM_APIKEY", "s3cret")
    told = "variable SLIPSTREAM_APIKEY: no such setting; did you mean SLIPSTREAM_API_KEY?"
    assert refusal(run, "bundled", "--port", "0") == f"slipstream: {told}\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["bundled", "bundled"], "two models or adapters are called 'slipstream-bundled'"),
        (["bundled", "bundled_hybrid", "--api-workers", "2"], "api_workers: not where"),
        (["bundled", "--keep-alive", "5m", "--no-engine-process"], "engine_process: not where"),
        (["bundled", "--keep-alive", "soon"], "keep-alive: must be seconds, or a duration as 90s"),
        (["bundled", "nowhere/at/all.gguf", "--port", "0"], "nowhere/at/all.gguf"),
        (["bundled", "--models", "models.yaml"], "leave out those of the command line"),
        (["--models", "none.yaml"], "cannot read the models file none.yaml: No such file"),
    ],
)
def test_what_rules_out_several_models_is_said_in_one_line(
    run: Run, arguments: list[str], part: str
) -> None:
    assert part in refusal(run, *arguments)
