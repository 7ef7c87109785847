"""What the agent says over HTTP of plans and of advice. Sizes are bytes; null: not known, or not asked for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from agent.wire import WireModel


class PlanAnswer(WireModel):
    """The plan, under the keys that scripts may rely on; more stand beside them, as in `kvatlas plan --json`."""

    model_config = ConfigDict(extra="allow")

    schema_: str = Field(alias="schema")
    model: str
    attention: str | None
    kv_bytes_per_token: int | None
    kv_bytes_per_token_ideal: int | None
    kv_bytes_per_block: int | None
    state_bytes_per_sequence: int | None
    memory: dict[str, Any] | None
    num_blocks: int | None
    pool_tokens: int | None
    max_concurrent_sequences: int | None
    fits: bool | None
    confidence: Literal["high", "medium", "low", "refused"]
    warnings: list[str]
    arithmetic: list[str]
    advice: list[dict[str, Any]] | None = None
    advice_together: dict[str, Any] | None = None


class LiveAdvice(WireModel):
    """What to change in an engine that runs, from its map."""

    schema_: str = Field(alias="schema")
    engine: str
    model: str
    memory_is_short: bool | None  # null where it is not known; the verdict says why
    verdict: str
    pool_bytes: int
    live_share: float | None
    options: list[dict[str, Any]]
    planned: dict[str, Any] | None
    planned_options: list[dict[str, Any]] | None


class PlanCard(WireModel):
    """A GPU that a plan can name."""

    name: str
    memory_bytes: int | None  # as CUDA offers it; null: it shares the host's
    estimated: bool
    source: str


class PlanChoices(WireModel):
    """What a plan can be asked for by name."""

    schema_: Literal["kvatlas.plan-choices/v1"] = Field(default="kvatlas.plan-choices/v1", alias="schema")
    presets: list[str]
    gpus: list[PlanCard]
    kv_dtypes: list[str]
    weight_dtypes: list[str]
