"""A question to the planner as it comes from outside: one model of it for the command and for the HTTP API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.capacity.advisor import Option, advise
from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import MAX_BYTES, Deployment
from agent.capacity.fields import printable, show
from agent.capacity.gpus import find_gpu
from agent.capacity.planner import Plan, plan
from agent.capacity.presets import PRESETS, Preset
from agent.capacity.together import Together, together
from agent.capacity.words import to_json
from agent.config import variable
from engine_shim.errors import SettingsError

GIB = 1 << 30
MAX_CONFIG_BYTES = 16 << 20
CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan, and where advice was wanted the options, and those that make it fit together where one is not enough."""

    plan: Plan
    options: tuple[Option, ...] | None
    together: Together | None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; `advice` is None where none was wanted."""
        facts = to_json(self.plan)
        facts["advice"] = None if self.options is None else [one.to_json() for one in self.options]
        facts["advice_together"] = None if self.together is None else self.together.to_json()
        return facts


class PlanSettings(BaseModel):
    """Every setting of a plan; what is None keeps the preset's or the planner's default. Sizes are GiB of one GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    gpu: str | None = Field(default=None, description="a card of the table, such as A100-80GB", max_length=128)
    gpu_memory_gib: float | None = Field(default=None, description="memory of one GPU as CUDA offers it")
    tp: int | None = Field(default=None, description="tensor-parallel ranks")
    pp: int | None = Field(default=None, description="pipeline stages")
    dp: int | None = Field(default=None, description="data-parallel replicas")
    weight_dtype: str | None = Field(
        default=None, description="auto, fp16, fp8, int8, awq, gptq, q4_k_m, ...", max_length=32
    )
    kv_dtype: str | None = Field(default=None, description="auto, fp16, fp8, int8, int4, ...", max_length=32)
    block_size: int | None = Field(default=None, description="tokens in a block")
    max_model_len: int | None = Field(default=None, description="longest sequence; the model's")
    max_num_seqs: int | None = Field(default=None, description="sequences of that length that must fit at once; 1")
    gpu_memory_utilization: float | None = Field(
        default=None, description="share of the GPU that the engine may take; 0.9"
    )
    headroom: float | None = Field(default=None, description="share of blocks that new sequences leave; 0")
    max_num_batched_tokens: int | None = Field(default=None, description="tokens of one step; 8192")
    weights_gib: float | None = Field(default=None, description="all weights of the model; counted from the config")
    activation_gib: float | None = Field(default=None, description="peak activations of one GPU; estimated")
    other_gib: float | None = Field(default=None, description="context, graphs and the rest of one GPU; 1 GiB")
    co_tenant_gib: float | None = Field(default=None, description="memory that other processes hold on each GPU")
    kv_cache_gib: float | None = Field(default=None, description="the pool itself, in place of what is left over")
    hybrid_manager: bool | None = Field(
        default=None, description="windowed layers give back what they left behind; true"
    )
    prefix_cache: bool | None = Field(default=None, description="whether prefixes are cached; true")

    def deployment(self, base: Deployment) -> Deployment:
        """`base` with what is set here. SettingsError for a value that is out of range."""
        named = {
            "tp": self.tp,
            "pp": self.pp,
            "dp": self.dp,
            "weight_dtype": self.weight_dtype,
            "kv_dtype": self.kv_dtype,
            "block_tokens": self.block_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "utilization": self.gpu_memory_utilization,
            "headroom": self.headroom,
            "max_batched_tokens": self.max_num_batched_tokens,
            "memory_bytes": _bytes("gpu-memory", self.gpu_memory_gib),
            "model_weight_bytes": _bytes("weights-memory", self.weights_gib),
            "activation_bytes": _bytes("activation-memory", self.activation_gib),
            "other_bytes": _bytes("other-memory", self.other_gib),
            "co_tenant_bytes": _bytes("co-tenant-memory", self.co_tenant_gib),
            "kv_cache_bytes": _bytes("kv-cache-memory", self.kv_cache_gib),
            "hybrid_manager": self.hybrid_manager,
            "prefix_cache": self.prefix_cache,
        }
        changes: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        if self.gpu is not None:
            changes["gpu"] = find_gpu(self.gpu)
            changes.setdefault("memory_bytes", None)
        return replace(base, **changes)


def plan_settings(**given: Any) -> PlanSettings:
    """The settings of a command. SettingsError names each that is none, and what to give in its place."""
    try:
        return PlanSettings(**given)
    except ValidationError as error:
        raise SettingsError("; ".join(_refused(dict(one)) for one in error.errors(include_url=False))) from error


def _refused(problem: Mapping[str, Any]) -> str:
    field, given = str(problem["loc"][0]), problem["input"]
    name = field.removesuffix("_gib").removesuffix("_memory") + "_memory" if field.endswith("_gib") else field
    flag = name.replace("_", "-")
    said = f"{flag}={show(given)} (--{flag} or {variable(f'plan_{name}')})"
    wanted = PlanSettings.model_fields[field].description
    if problem["type"] == "string_too_long":
        return f"{said} has {len(given):,} characters of {problem['ctx']['max_length']} at most; give {wanted}"
    return f"{said}: {problem['msg']}; give {wanted}"


class PlanRequest(PlanSettings):
    """POST /v1/plan: a model's parsed config.json or the name of a preset, and the settings."""

    config: dict[str, Any] | None = Field(default=None, description="the parsed config.json of a model")
    preset: str | None = Field(default=None, description="a preset's name, in place of config", max_length=128)
    model: str | None = Field(default=None, description="what to call the model in the answer", max_length=256)
    advise: bool = Field(default=False, description="also say what to change, best first")

    def ask(self) -> Answer:
        """The plan, and the advice where it was asked for.

        Raises SettingsError for settings that are none, LayoutUnknown for a model whose layout is not known.
        """
        if (self.config is None) == (self.preset is None):
            raise SettingsError("give either config, the parsed config.json of a model, or preset, the name of one")
        if self.preset is not None:
            found = find_preset(self.preset)
            if found is None:
                raise SettingsError(f"no preset {self.preset!r}; there are {', '.join(PRESETS)}")
            config, base, name = found.config, found.deployment, self.model or self.preset
            return answer(config, name, self.deployment(base), advice=self.advise)
        return answer(self.config or {}, self.model, self.deployment(Deployment()), advice=self.advise)


def answer(config: Mapping[str, Any], name: str | None, deployment: Deployment, *, advice: bool) -> Answer:
    """The plan of a config, and the advice where it is wanted."""
    geometry = read_geometry(config, name)
    found = plan(geometry, deployment)
    if not advice:
        return Answer(found, None, None)
    return Answer(found, advise(geometry, deployment), together(geometry, deployment))


def find_preset(name: str) -> Preset | None:
    """A preset by name, whatever the case."""
    return PRESETS.get(name.lower())


def load_model(source: str) -> tuple[Mapping[str, Any], str, Deployment]:
    """What `kvatlas plan` was given: a preset's name, a config.json, or a folder with one.

    A folder's safetensors index, where there is one, gives the exact bytes of the weights. SettingsError says what is
    wrong with the file.
    """
    path = Path(source)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name too long, or a folder that may not be searched
        raise SettingsError(f"{printable(source)} cannot be read: {error.strerror or error}") from error
    if is_folder:
        config = _load_object(path / CONFIG_NAME)
        index = path / INDEX_NAME
        total = _total_size(index) if index.exists() else None
        return config, printable(path.resolve().name), Deployment(model_weight_bytes=total)
    if path.is_file():
        called = path.stem if path.name != CONFIG_NAME else path.resolve().parent.name
        return _load_object(path), printable(called), Deployment()
    preset = find_preset(source)
    if preset is None:
        raise SettingsError(
            f"there is no file {printable(source)}, and no preset of that name; give a model's config.json or its "
            f"folder, or one of {', '.join(PRESETS)}"
        )
    return preset.config, source.lower(), preset.deployment


def _total_size(index: Path) -> int | None:
    metadata = _load_object(index).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if total is None:
        return None
    if isinstance(total, bool) or not isinstance(total, int) or not 0 < total <= MAX_BYTES:
        raise SettingsError(
            f"{index}: its total_size is {str(total)[:40]}, no number of bytes; mend or remove the file"
        )
    return total


def _load_object(path: Path) -> Mapping[str, Any]:
    try:
        if not path.is_file() and path.exists():
            raise SettingsError(f"{path} is no regular file: give a model's config.json")
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise SettingsError(f"{path} is larger than {MAX_CONFIG_BYTES >> 20} MiB: it is no config.json")
        value = json.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{path} holds no JSON object: give a model's config.json")
    return value


def _bytes(name: str, gib: float | None) -> int | None:
    if gib is None:
        return None
    if not 0 <= gib <= 1 << 20:
        raise SettingsError(f"{name}={gib:g}: give GiB, from 0 to {1 << 20}")
    return int(gib * GIB)
