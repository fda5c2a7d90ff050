from __future__ import annotations

import json
import math
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from drafters.registry import drafter_settings
from engine.config import EngineConfig
from server.serve import check, serve
from server.setting_names import OTHER_VARIABLES, unknown_variables
from server.settings import (
    Settings,
    add_flags,
    load_settings,
    settings_of_models,
    with_drafters,
)


def load(*arguments: str) -> Settings:
    parser = ArgumentParser()
    flags = add_flags(parser)
    return load_settings(flags, parser.parse_args(arguments))


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "slipstream.yaml"
    path.write_text(
        "port: 1111\nmax-num-seqs: 11\nmodel: from-file\n"
        "speculative: {draft_strategy: nasd, num_speculative_tokens: 3}\n"
    )
    return path


def test_a_flag_beats_a_variable_and_a_variable_beats_the_file(
    monkeypatch: pytest.MonkeyPatch, yaml_file: Path
) -> None:
    config = ("--config", str(yaml_file))
    assert load(*config).port == 1111
    monkeypatch.setenv("SLIPSTREAM_PORT", "2222")
    assert load(*config).port == 2222
    assert load(*config, "--port", "3333").port == 3333
    assert load(*config).max_num_seqs == 11
    assert load().max_num_seqs == EngineConfig().max_num_seqs
    assert (load().model, load("some/model").model) == (None, "some/model")


def test_sources_meet_inside_the_speculative_defaults(
    monkeypatch: pytest.MonkeyPatch, yaml_file: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_SPECULATIVE__NUM_SPECULATIVE_TOKENS", "4")
    settings = load("--config", str(yaml_file), "--speculative.adaptive-depth", "false")
    assert settings.speculative.draft_strategy == "nasd"
    assert settings.speculative.num_speculative_tokens == 4
    assert settings.speculative.adaptive_depth is False


def test_the_file_can_be_named_by_a_variable_and_be_toml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "slipstream.toml"
    path.write_text("port = 1234\n[speculative-caps]\nmax_speculative_tokens = 5\n")
    monkeypatch.setenv("SLIPSTREAM_CONFIG", str(path))
    assert load().port == 1234
    assert load().speculative_caps.max_speculative_tokens == 5


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--port", "70000"), "port"),
        (("--port", "x"), "port"),
        (("--speculative.adaptive-depth", "sometimes"), "adaptive_depth"),
        (("--speculative.num-speculative-tokens", "-1"), "num_speculative_tokens"),
        (("--kv-memory-fraction", "0"), "kv_memory_fraction"),
        (("--min-draft-agreement", "1.5"), "min_draft_agreement"),
        (("--cors-origins", "https://a.example/"), "cors_origins"),
        (("--sampling.top-p", "1.5"), "top_p"),
        (("",), "model: "),
        *(
            ((f"--{name.replace('_', '-')}", value), name)
            for name in ("drain_seconds", "step_timeout", "kv_memory_fraction")
            for value in ("nan", "inf")
        ),
        *(
            (("--device", device), "device: .* is none of cpu, cuda and cuda:N")
            for device in ("tpu", "cuda:x", "CPU", "", "mps")
        ),
    ],
)
def test_a_bad_value_is_an_error_that_names_it(arguments: Sequence[str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        load(*arguments).engine_config()


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.yaml", "prot: 1\n", "prot: no such setting; did you mean port?"),
        ("a.yaml", "speculative: {draft_stratgy: x}\n", "speculative.draft_stratgy: no such setting; "
         "did you mean speculative.draft_strategy?"),
        ("a.yaml", "draft_strategy: x\n", "did you mean speculative.draft_strategy?"),
        ("a.yaml", "- a\n", "does not hold a mapping"),
        ("a.yaml", "drafter: {ngram: {x: 1}}\n", "drafter.ngram: no such setting"),
        ("a.yaml", "drafter: {auto: {heads: x}}\n", "did you mean drafter.auto.head?"),
        ("a.toml", "[speculative_caps]\nx = 1\n", "speculative_caps.x: no such setting"),
        ("a.json", '{"speculative": {"x": 1}}', "speculative.x: no such setting"),
        ("a.yaml", "max-num-seqs: 1\nmax_num_seqs: 2\n", "max_num_seqs is there in two spellings"),
        ("a.yaml", "config: b.yaml\n", "config: a file names no other"),
        # What test_documents.py says is found by these as well.
        ("a.yaml", "speculative:\n  tree_width: 1\n  tree_width: 2\n", "line 3, column 3: the key"),
        ("a.toml", "port = \n", "at line 1, column 8"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_in_a_line_with_its_name_and_the_place(
    tmp_path: Path, name: str, text: str, fault: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(fault)) as error:
        load("--config", str(path))
    assert f"settings file {path}" in str(error.value)
    assert "\n" not in str(error.value)


def test_all_that_a_file_names_wrongly_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "slipstream.yaml"
    path.write_text("prot: 1\nspeculative: {colour: red}\n")
    with pytest.raises(ValueError, match=r"prot") as error:
        load("--config", str(path))
    assert len(str(error.value).splitlines()) == 2


def test_a_file_may_spell_nested_names_as_flags_do(tmp_path: Path) -> None:
    path = tmp_path / "slipstream.yaml"
    path.write_text("speculative: {draft-strategy: nasd, options: {max-x: 1}}\n")
    found = load("--config", str(path)).speculative
    assert found.draft_strategy == "nasd"
    assert found.options == {"max-x": 1}, "a drafter's own options are none of our names"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SLIPSTREAM_APIKEY", "SLIPSTREAM_API_KEY"),
        ("slipstream_apikey", "SLIPSTREAM_API_KEY"),
        ("SLIPSTREAM_API_KEY_FILE", "SLIPSTREAM_API_KEYS_FILE"),
        ("SLIPSTREAM_SPECULATIVE__DRAFTSTRATEGY", "SLIPSTREAM_SPECULATIVE__DRAFT_STRATEGY"),
        ("SLIPSTREAM_SPECULATIVE_DRAFT_STRATEGY", "SLIPSTREAM_SPECULATIVE__DRAFT_STRATEGY"),
        ("SLIPSTREAM_DRAFT_STRATEGY", "SLIPSTREAM_SPECULATIVE__DRAFT_STRATEGY"),
        ("SLIPSTREAM_DRAFTER__AUTO__HEADS", "SLIPSTREAM_DRAFTER__AUTO__HEAD"),
        ("SLIPSTREAM_PORT__X", "SLIPSTREAM_PORT"),
        ("SLIPSTREAM_DRAFTER__NGRAM__X", None),
        ("SLIPSTREAM_SPECULATIVE__X", None),
        ("SLIPSTREAM_COLOUR", None),
        ("SLIPSTREAM_", None),
    ],
)
def test_a_variable_that_only_looks_like_a_setting_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str | None
) -> None:
    """SLIPSTREAM_APIKEY served an open server without a word."""
    monkeypatch.setenv(name, "x")
    with pytest.raises(ValueError, match="no such setting") as error:
        load("m", "--port", "1")
    hint = f"; did you mean {meant}?" if meant else ""
    if meant or "SPECULATIVE" not in name:
        assert str(error.value) == f"variable {name.upper()}: no such setting{hint}"


def test_variables_that_are_settings_or_somebody_elses_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*OTHER_VARIABLES, "SLIPSTREAMER_X", "MY_SLIPSTREAM_X"):
        monkeypatch.setenv(name, "x")
    # A setting that takes names of its own.
    monkeypatch.setenv("SLIPSTREAM_SPECULATIVE__OPTIONS__MAX_MATCH", "6")
    assert (load().speculative.options or {}).keys() == {"max_match"}


def test_links_to_services_of_kubernetes_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    links = dict.fromkeys(("SERVICE_HOST", "PORT_8000_TCP_ADDR"), "10.0.0.9")
    links |= dict.fromkeys(("SERVICE_PORT", "SERVICE_PORT_HTTP"), "8000")
    links |= dict.fromkeys(("PORT", "PORT_8000_TCP"), "tcp://10.0.0.9:8000")
    links["PORT_8000_TCP_PROTO"] = "tcp"
    for name, value in links.items():
        monkeypatch.setenv(f"SLIPSTREAM_GATEWAY_{name}", value)
    assert load().port == 8000
    monkeypatch.delenv("SLIPSTREAM_GATEWAY_SERVICE_HOST")
    with pytest.raises(ValueError, match="variable SLIPSTREAM_GATEWAY_PORT: no such setting"):
        load()


def test_every_variable_with_the_prefix_in_the_project_is_a_setting_or_listed() -> None:
    root = Path(__file__).resolve().parents[2]
    places = [root / "Dockerfile", *(root / "deploy").rglob("*.y*ml")]
    for package in ("server", "engine", "drafters", "slipstream", "bench", "examples", "training"):
        places += (root / package).rglob("*.py")
    texts = " ".join(place.read_text() for place in places)
    found = {*re.findall(r"\bSLIPSTREAM_[A-Z][A-Z_]*[A-Z]", texts)}
    assert {"SLIPSTREAM_URL", "SLIPSTREAM_RANKS_STORE", "SLIPSTREAM_CORES"} <= found
    assert unknown_variables(with_drafters(drafter_settings()), found) == []


@pytest.mark.parametrize("value", ['{"x": 1}', '{"x"'])
def test_an_object_in_a_variable_is_held_to_the_settings(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SLIPSTREAM_SPECULATIVE", value)
    told = r"speculative\.x: no such|variable SLIPSTREAM_SPECULATIVE"
    with pytest.raises(ValueError, match=told):
        load()


def refused_before_anything_is_loaded(settings: Settings) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        check(settings, settings.engine_config())
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"drafters": ["none", "ngran"]}, "drafters: there is no drafter 'ngran', did you mean ngram?"),
        ({"speculative": {"draft_strategy": "sufix"}}, "speculative.draft_strategy: there is no drafter "
         "'sufix', did you mean suffix?"),
        ({"drafters": ["none", "ngram"], "speculative": {"draft_strategy": "suffix"}},
         "speculative.draft_strategy: there is no drafter 'suffix'; there are: none, ngram"),
        ({"speculative_caps": {"draft_strategies": ["ngram", "x"]}},
         "speculative_caps.draft_strategies: there is no drafter 'x'"),
        ({"drafter_plugins": ["x"]}, "drafter_plugins names 'x'"),
        ({"draft": ["ngram=/x"]}, "draft ngram: a drafter has that name"),
        ({"draft": ["fast=/x"], "drafters": ["none"]}, "draft fast is set, but drafters leaves out fast"),
        ({"draft": ["=/x"]}, "draft '=/x': "),
        ({"draft": ["a=/x", "a=/y"]}, "draft: two are called a"),
    ],
)  # fmt: skip
def test_names_that_no_drafter_can_have_are_refused_before_anything_is_loaded(
    given: dict[str, Any], fault: str
) -> None:
    assert refused_before_anything_is_loaded(Settings(**given)).startswith(fault)


def test_a_drafter_of_a_tenant_is_one_that_can_be(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("tenants: [{name: a, key: k, drafters: [ngram, fast, ngrm]}]\n")
    settings = Settings(api_keys_file=str(path), draft=["fast=/x"])
    fault = refused_before_anything_is_loaded(settings)
    assert fault == f"api-keys-file {path}: tenants.0.drafters.2: there is no such drafter"


def test_names_that_can_be_pass() -> None:
    strategies = ["suffix", "fast"]
    for given in ({}, {"draft": ["fast=/x"], "speculative_caps": {"draft_strategies": strategies}}):
        settings = Settings(model="bundled", **given)
        check(settings, settings.engine_config())


DRAFTS = ["fast=/my models/x", "/heads"]
ORIGINS = ["https://a.example:8443", "*", "null"]


@pytest.mark.parametrize(
    ("name", "values", "texts"),
    [
        ("drafters", ["none", "ngram"], ["none,ngram", "none ngram", '["none", "ngram"]']),
        ("cors_origins", ORIGINS, [",".join(ORIGINS)]),
        # Paths may have spaces.
        ("draft", DRAFTS, [", ".join(DRAFTS), json.dumps(DRAFTS)]),
    ],
)
def test_a_list_takes_commas_json_or_repetition_wherever_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, values: list[str], texts: list[str]
) -> None:
    flag, path = f"--{name.replace('_', '-')}", tmp_path / "slipstream.yaml"
    repeated = [part for value in values for part in (flag, value)]
    for arguments in (repeated, *([flag, text] for text in texts), [f"{flag}={texts[0]}"]):
        for settings in (load(*arguments, "m"), load("m", *arguments)):
            assert (getattr(settings, name), settings.model) == (values, "m")
    for given in (*texts, values):
        path.write_text(json.dumps({name: given}))
        assert getattr(load("--config", str(path)), name) == values
    for text in texts:
        monkeypatch.setenv(f"SLIPSTREAM_{name.upper()}", text)
        assert getattr(load(), name) == values


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"draft": ["Fast=/x"]}, "the name 'Fast' is not lower-case"),
        (
            {"tensor_parallel_size": 2, "engine_process": False},
            "^tensor_parallel_size: .* a process of its ",
        ),
        ({"restart_engine": True, "engine_process": False}, "^restart_engine: "),
        ({"request_log": "/no/such/log.jsonl"}, "^request_log: .*No such file"),
    ],
)
def test_what_cannot_be_is_refused_by_its_setting_before_anything_is_loaded(
    given: dict[str, Any], fault: str
) -> None:
    settings = Settings(port=0, **given)
    with pytest.raises(ValueError, match=fault):
        serve(settings, settings.engine_config())


@dataclass(frozen=True)
class PhraseSettings:
    phrases: str | None = field(default=None, metadata={"description": "File of phrases."})
    most: int = field(default=4, metadata={"description": "Most.", "bounds": {"ge": 1}})


def test_drafters_bring_settings_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("server.settings.drafter_settings", lambda: {"phrases": PhraseSettings})
    assert load().engine_config().drafter_settings == {}
    path = tmp_path / "slipstream.yaml"
    path.write_text("drafter: {phrases: {phrases: file.txt, most: 2}}\n")
    config = load("--config", str(path)).engine_config()
    assert config.drafter_settings == {"phrases": {"phrases": "file.txt", "most": 2}}
    monkeypatch.setenv("SLIPSTREAM_DRAFTER__PHRASES__MOST", "3")
    assert load("--config", str(path)).engine_config().drafter_settings["phrases"]["most"] == 3
    by_flag = load("--config", str(path), "--drafter.phrases.most", "5").engine_config()
    assert by_flag.drafter_settings == {"phrases": {"phrases": "file.txt", "most": 5}}
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        load("--drafter.phrases.most", "0")
    path.write_text("drafter: {phrases: {colour: red}}\n")
    with pytest.raises(ValueError, match=r"drafter\.phrases\.colour: no such setting"):
        load("--config", str(path))
    parser = ArgumentParser()
    add_flags(parser)
    assert "--drafter.phrases.phrases" in parser.format_help()
    assert "File of phrases." in parser.format_help()


def test_an_unknown_flag_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--no-such-flag", "1")
    assert "no-such-flag" in capsys.readouterr().err


# Costs much and serves the engine's own tests only.
ENGINE_ONLY = {"check_integrity", "promised_bytes"}
ALONE = {"tensor_parallel_size": 2}
KV_EVENTS = {
    "kv_events_endpoint": "tcp://*:5557",
    "kv_events_replay_endpoint": "tcp://*:5558",
    "kv_events_topic": "kv@pod@model",
    "kv_events_salted": True,
}
NO_ADDRESS = "kv_events_endpoint: .* is not tcp://HOST:PORT"


def test_every_engine_setting_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {each.name for each in fields(EngineConfig)} - ENGINE_ONLY - {"drafter_settings"}
    values: dict[str, Any] = {name: object() for name in names}
    values |= {"drafters": ["none", "ngram"], "drafter_plugins": ["phrase_book"]}
    values |= {"draft": ["a"], "lora": ["a=b"]}
    settings = with_drafters({"phrases": PhraseSettings})(drafter={"phrases": {"most": 5}})
    given = type(settings).model_construct(**{**dict(settings), **values})
    monkeypatch.setattr(EngineConfig, "__post_init__", lambda _: None)
    config = given.engine_config()
    values |= {name: tuple(each) for name, each in values.items() if isinstance(each, list)}
    assert {name: getattr(config, name) for name in names} == values
    assert config.drafter_settings == {"phrases": {"most": 5}}


def test_room_for_evicted_blocks_is_given_in_bytes_or_words_of_them() -> None:
    for text, num_bytes in {"4GiB": 4 << 30, "100MB": 100_000_000, "77": 77}.items():
        given: Any = {"kv_offload_bytes": text, "kv_offload_file": "kv"}
        assert Settings(**given).engine_config().kv_offload_bytes == num_bytes
    assert Settings().engine_config().kv_offload_bytes is None


OFFLOAD: Any = {"kv_offload_bytes": 1000, "kv_offload_file": "kv"}


@pytest.mark.parametrize(
    ("given", "changes", "fault"),
    [
        (OFFLOAD, {"kv_offload_bytes": None}, "kv_offload_file: say by kv_offload_bytes how large"),
        (OFFLOAD, {"enable_prefix_cache": False}, "kv_offload_bytes: there is no prefix cache"),
        (OFFLOAD, ALONE, "kv_offload_bytes is 1000, which tensor_parallel_size > 1 rules out"),
        *(
            (KV_EVENTS, {"kv_events_endpoint": x}, NO_ADDRESS)
            for x in ("*:5557", "inproc://x", "tcp://*:65536")
        ),
        (KV_EVENTS, {"kv_events_replay_endpoint": "tcp://*"}, "kv_events_replay_endpoint: .* is n"),
        (KV_EVENTS, {"kv_events_topic": None}, "kv_events_topic: kv_events_endpoint needs one"),
        (KV_EVENTS, {"kv_events_topic": "kv@pod"}, "kv_events_topic: kv_events_endpoint needs one"),
        (KV_EVENTS, {"enable_prefix_cache": False}, "kv_events_endpoint: there is no prefix cache"),
        (KV_EVENTS, {"kv_events_endpoint": None}, "kv_events_replay_endpoint is without effect"),
        (KV_EVENTS, dict.fromkeys([*KV_EVENTS][:2]), "kv_events_topic is without effect"),
        (KV_EVENTS, dict.fromkeys([*KV_EVENTS][:3]), "kv_events_salted is without"),
    ],
)
def test_what_would_have_no_effect_or_cannot_be_is_refused(
    given: dict[str, Any], changes: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ValueError, match=f"^{fault}"):
        Settings(**given | changes).engine_config()


@pytest.mark.parametrize(
    "setting",
    [
        {"device": "cuda:1"},
        {"quantization": "int8"},
        {"determinism": "exact"},
        {"quantized": "int8"},
        {"cuda_graph_rows": 8},
        {"prefix_layers": "3"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_needs_the_whole_model_is_refused_where_ranks_share_it(setting: Any) -> None:
    (name,) = setting
    told = f"^{name} is .*, which tensor_parallel_size > 1 rules out: "
    with pytest.raises(ValueError, match=told):
        Settings(**setting | ALONE).engine_config()
    Settings(**setting).engine_config()
    # A copy of the draft model needs no whole target.
    copied = {"quantized": "int8", "quantized_model": "draft"}
    assert Settings(**copied | ALONE).engine_config().quantized == "int8"


def test_plugins_can_be_turned_off_by_flag_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().engine_config().drafter_plugins is None
    assert load("--drafter-plugins", "[]").engine_config().drafter_plugins == ()
    monkeypatch.setenv("SLIPSTREAM_DRAFTER_PLUGINS", "[]")
    assert load().engine_config().drafter_plugins == ()


def test_defaults_are_the_engines_own_and_a_key_is_not_shown() -> None:
    assert Settings().engine_config() == EngineConfig()
    assert "s3cret" not in repr(Settings(api_key="s3cret"))


def test_models_of_a_file_have_settings_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n- org/one\n- model: two.gguf\n  max-model-len: 64\n  keep_alive: -1\n"
        "  speculative: {draft_strategy: none}\n"
    )
    shared: Any = {"max_model_len": 128, "speculative": {"return_drafted": True}}
    common = Settings(models=str(file), port=1, keep_alive="90s", **shared)
    one, two = settings_of_models(common, ())
    assert (one.model, one.max_model_len, one.keep_alive) == ("org/one", 128, 90)
    assert (two.model, two.max_model_len, two.keep_alive) == ("two.gguf", 64, math.inf)
    assert one.speculative.given() == {"return_drafted": True}
    assert two.speculative.given() == {"return_drafted": True, "draft_strategy": "none"}
    assert one.port == two.port == 1


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("models: []", "does not hold a list under models"),
        ("- a", "does not hold a list under models"),
        ("models: [a]\nport: 1", "does not hold a list under models"),
        ("models: [{draft: [b]}]", "models.0 is no model's name, nor a mapping with its model"),
        ("models: [a, {model: b, max_model_length: 3}]", "models.1: max_model_length: no such"),
        ("models: [{model: b, port: 3}]", "models.0: port is the server's, not a model's"),
        ("models: [{model: b, max_model_len: 0}]", "models.0.max_model_len: "),
        ("models: [{model: b, keep_alive: soon}]", "models.0.keep_alive: must be seconds"),
    ],
)
def test_what_is_wrong_with_a_file_of_models_is_said_with_its_place(
    tmp_path: Path, content: str, part: str
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(part)) as refused:
        settings_of_models(Settings(models=str(file)), ())
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("90", 90)]
    + [(0, 0), ("0", 0), (-1, math.inf), ("-1m", math.inf)],
)
def test_durations_are_gos_or_seconds(given: Any, seconds: float) -> None:
    assert Settings(keep_alive=given).keep_alive == seconds
