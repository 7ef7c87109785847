"""The agent's settings that are about engines' own metrics."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

from agent.engine_metrics.sources import MetricsSource, parse_sources


class EngineMetricsSettings(BaseSettings):
    """Where engines' own metrics are read, and how often."""

    engine_metrics: tuple[str, ...] = Field(
        default=(), description="address of an engine's own metrics, as URL or ENGINE_ID=URL; repeatable"
    )
    engine_metrics_seconds: float = Field(
        default=5.0, ge=0.5, le=300, description="time between two readings of an engine's own metrics"
    )

    @field_validator("engine_metrics", mode="before")
    @classmethod
    def _addresses_from_text(cls, value: Any) -> Any:
        """The environment has them in one text, with commas or blanks between."""
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @field_validator("engine_metrics")
    @classmethod
    def _addresses_are_such(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_sources(value)
        return value

    def metrics_sources(self) -> tuple[MetricsSource, ...]:
        """The addresses."""
        return parse_sources(self.engine_metrics)
