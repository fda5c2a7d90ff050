"""All settings of the server in one class: flags, then ``SLIPSTREAM_*`` variables, then a file,
then defaults.
"""

from __future__ import annotations

import tomllib
from argparse import ArgumentParser, Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.config import EngineConfig
from server.request.speculative import SpeculativeCaps, SpeculativeField

_ENGINE = EngineConfig()


class SpeculativeDefaults(SpeculativeField):
    """Speculation of requests that do not say otherwise: the fields of a request's ``speculative``
    object.
    """

    # Flags and variables are text, so types are not strict here.
    model_config = ConfigDict(strict=False)

    adaptive_depth: bool | Literal["fixed", "target_rate", "goodput"] | None = Field(
        default=None, description="true, false, fixed, target_rate or goodput."
    )
    verification: Literal["match", "rejection", "block"] | None = Field(
        default=None, description="match, or for drafters that draw, rejection or block."
    )
    options: dict[str, bool | int | float | str] | None = Field(
        default=None, description="The drafter's own options, as GET /v1/drafters lists them."
    )


class ConfigFileSource(PydanticBaseSettingsSource):
    """Reads the YAML or TOML file that a source of higher rank has named in ``config``."""

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
        path = Path(name)
        try:
            text = path.read_text(encoding="utf-8")
            content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"cannot read the settings file: {error}") from error
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise ValueError(f"the settings file {path.name} does not hold a mapping")
        # Files may spell names as flags do.
        return {str(key).replace("-", "_"): value for key, value in content.items()}


class Settings(BaseSettings):
    """Serve a model over OpenAI's API; every request drafts, and no output changes for it.

    MODEL is a local folder or a hub id; without it, the small code model that comes with
    Slipstream is served. Each flag can also be given as an environment variable (--max-num-seqs:
    SLIPSTREAM_MAX_NUM_SEQS) or in a YAML or TOML file (--config). Flags win over variables,
    variables over the file.
    """

    model_config = SettingsConfigDict(
        env_prefix="SLIPSTREAM_",
        env_nested_delimiter="__",
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=True,
        nested_model_default_partial_update=True,
        protected_namespaces=(),
        validate_default=True,
    )

    model: CliPositionalArg[str | None] = Field(
        default=None, description="Folder or hub id of the model; default: the bundled one."
    )
    config: str | None = Field(
        default=None, description="YAML or TOML file with any of these settings."
    )

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0: any free one."
    )
    served_model_name: str | None = Field(
        default=None, description="Name in the API; default: the folder's name or the hub id."
    )
    api_key: SecretStr | None = Field(
        default=None,
        description="Clients must send it as a bearer token to /v1. Prefer the variable.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="info writes a line per request."
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, description="On shutdown: how long running requests may take to finish."
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1024, description="Larger requests get a 413.")
    max_choices: int = Field(
        default=128, ge=1, description="Most choices a request may ask for, over all its prompts."
    )

    drafters: list[str] | None = Field(default=None, description="Drafters to load; default: all.")
    drafter_plugins: list[str] | None = Field(
        default=None,
        description="Drafters that other installed packages may bring; default: all, []: none.",
    )
    stand_template: str | None = Field(
        default=_ENGINE.stand_template,
        description="File with the stand drafter's static tree, as slipstream stand-template "
        "writes it; default: the one shipped.",
    )
    speculative: SpeculativeDefaults = SpeculativeDefaults()
    speculative_caps: SpeculativeCaps = SpeculativeCaps()

    device: str = Field(default=_ENGINE.device, description="cpu, cuda or cuda:N.")
    dtype: str = Field(default=_ENGINE.dtype, description="auto, float32, bfloat16 or float16.")
    determinism: Literal["exact", "fast"] | None = Field(
        default=_ENGINE.determinism,
        description="exact: tokens never depend on what else is in the batch. "
        "Default: exact on a CPU, fast elsewhere.",
    )
    max_model_len: int | None = Field(
        default=_ENGINE.max_model_len, ge=1, description="Prompt plus output; default: the model's."
    )
    max_num_seqs: int = Field(
        default=_ENGINE.max_num_seqs, ge=1, description="Most requests in a batch."
    )
    max_num_batched_tokens: int = Field(
        default=_ENGINE.max_num_batched_tokens,
        ge=1,
        description="Most tokens in a step: prompt, decode and drafts.",
    )
    max_num_nodes: int = Field(
        default=_ENGINE.max_num_nodes, ge=0, description="Most draft tokens per request and step."
    )
    max_num_waiting: int = Field(
        default=_ENGINE.max_num_waiting, ge=1, description="Longest queue; more requests get a 429."
    )
    prefill_chunk: int = Field(
        default=_ENGINE.prefill_chunk,
        ge=1,
        description="Most prompt tokens of a request in a step.",
    )
    block_size: int = Field(default=_ENGINE.block_size, ge=1, description="Tokens in a KV block.")
    num_blocks: int | None = Field(
        default=_ENGINE.num_blocks, ge=1, description="KV blocks; default: what memory allows."
    )
    kv_memory_fraction: float = Field(
        default=_ENGINE.kv_memory_fraction,
        gt=0,
        le=1,
        description="Share of free memory for KV blocks.",
    )
    enable_prefix_cache: bool = Field(
        default=_ENGINE.enable_prefix_cache, description="Reuse the KV of prompts that begin alike."
    )
    draft_model: str | None = Field(
        default=_ENGINE.draft_model,
        description="Folder or hub id of a small model with the same tokenizer, for the small_model "
        "drafter; default: the bundled model's.",
    )
    draft_kv_dtype: Literal["auto", "fp8"] = Field(
        default=_ENGINE.draft_kv_dtype,
        description="Type of the draft model's KV; fp8 halves it and may cost acceptance.",
    )
    quantized: Literal["int8", "int4", "fp8"] | None = Field(
        default=_ENGINE.quantized,
        description="Make a copy with such weights for the quantized drafter (needs torchao).",
    )
    quantized_model: Literal["target", "draft"] = Field(
        default=_ENGINE.quantized_model, description="Which model the quantized drafter copies."
    )
    prefix_layers: str | None = Field(
        default=_ENGINE.prefix_layers,
        description="Layers of the target for the prefix_layers drafter: how many of the first "
        "(3), or which (0,1,4,5).",
    )
    medusa_heads: str | None = Field(
        default=_ENGINE.medusa_heads,
        description="Folder of heads for the medusa drafter; default: the bundled model's.",
    )
    eagle_head: str | None = Field(
        default=_ENGINE.eagle_head,
        description="Folder of the head for the eagle drafter; default: the bundled model's.",
    )
    num_threads: int | None = Field(
        default=_ENGINE.num_threads,
        ge=1,
        description="CPU threads of the model; default: torch's choice.",
    )
    trust_remote_code: bool = Field(
        default=_ENGINE.trust_remote_code,
        description="Run Python code that comes with a hub model.",
    )
    revision: str | None = Field(
        default=_ENGINE.revision, description="Branch, tag or commit on the hub."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Highest rank first; a source of flags, where there is one, comes before all."""
        return init_settings, env_settings, ConfigFileSource(settings_cls)

    def engine_config(self) -> EngineConfig:
        """Raises ValueError where the engine's settings contradict each other."""
        values = {
            field.name: getattr(self, field.name)
            for field in fields(EngineConfig)
            if field.name in type(self).model_fields
        }
        for name in ("drafters", "drafter_plugins"):
            values[name] = None if values[name] is None else tuple(values[name])
        return EngineConfig(**values)


Flags = CliSettingsSource[Any]


def add_flags(parser: ArgumentParser) -> Flags:
    """Gives ``parser`` a flag for each setting; the result turns its findings into settings."""
    flags: Flags = CliSettingsSource(Settings, root_parser=parser)
    return flags


def load_settings(flags: Flags, parsed: Namespace) -> Settings:
    """Settings from parsed flags and the sources below them.

    Raises pydantic's ValidationError, SettingsError or ValueError.
    """
    names = {action.dest for action in flags.root_parser._actions}
    given = Namespace(**{name: value for name, value in vars(parsed).items() if name in names})
    # mypy knows the fields only, not the arguments that BaseSettings adds to them.
    return Settings(_cli_settings_source=flags(parsed_args=given))  # type: ignore[call-arg]
