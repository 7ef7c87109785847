"""Answers of an agent made by hand, for what is laid out without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent import wire
from agent.terminal.reading import Look, worst_first
from agent.wire import alerts as wire_alerts

NOW = 1_700_000_000.0


def make_engine(id: str = "engine", **changes: Any) -> wire.EngineSummary:
    fields: dict[str, Any] = {
        "id": f"{id}.dp0.tp0.pp0.kv",
        "engine_id": id,
        "incarnation": "7",
        "kind": "vllm",
        "version": "0.32",
        "model": "org/model",
        "pool": "kv",
        "policy": "vllm",
        "medium": "gpu",
        "gpu_uuids": [],
        "rank": "dp0.tp0.pp0",
        "pid": 1,
        "state": "live",
        "reason": "",
        "degraded": False,
        "snapshot_age_seconds": 0.5,
        "heartbeat_age_seconds": 0.5,
        "last_step_age_seconds": 0.5,
        "running_requests": 3,
        "waiting_requests": 1,
        "total_blocks": 16,
        "usable_blocks": 15,
        "headroom_blocks": 1,
        "block_tokens": 16,
        "block_bytes": 4096,
        "blocks": wire.BlockCounts(free=4, cached=5, used=5, pinned=1, reserved=1),
        "fragmentation": wire.Fragmentation(
            rate=0.5,
            strict_rate=0.75,
            largest_allocatable_run=4,
            largest_free_run=1,
            allocatable_runs=3,
            run_length_histogram=[1, 1, 1],
        ),
        "tail_waste_tokens": 3,
        "tail_waste_bytes": 768,
        "oldest_pinned_seconds": None,
        "forecast": wire.Forecast(exhaustion_seconds=None, reason="it does not fall"),
        "counters": {},
    }
    return wire.EngineSummary(**{**fields, **changes})


def make_alert(engine: str = "engine", **changes: Any) -> wire_alerts.AlertRecord:
    fields: dict[str, Any] = {
        "fingerprint": "1" * 16,
        "rule": "pool-nearly-full",
        "severity": "warning",
        "state": "firing",
        "held": "",
        "labels": {"engine_id": engine, "pool": "kv", "rank": "dp0.tp0.pp0", "model": "org/model"},
        "value": 0.99,
        "value_text": "99 %",
        "threshold_text": "97 %",
        "summary": f"{engine} runs full",
        "meaning": "New requests wait.",
        "action": "Send it fewer requests.",
        "started_unix": NOW - 180,
        "ended_unix": None,
        "reason": "",
        "link": None,
        "runbook_url": None,
    }
    return wire_alerts.AlertRecord(**{**fields, **changes})


def make_look(
    engines: list[wire.EngineSummary], firing: list[wire_alerts.AlertRecord] | None = None, **changes: Any
) -> Look:
    status = wire.AgentStatus(
        version="1",
        started_unix=NOW - 1000,
        interval_seconds=1,
        threshold=0.3,
        folders=["/run/kvatlas"],
        unreadable=[],
        writes_enabled=True,
    )
    listed = wire_alerts.AlertList(
        now_unix=NOW, open=firing or [], recent=[], mutes=[], sinks=[], kept=True, rules=["pool-nearly-full"]
    )
    ordered = tuple(worst_first(engines, listed))
    given: dict[str, Any] = {
        "listing": wire.EngineList(now_unix=NOW, agent=status, engines=engines),
        "engines": ordered,
        "chosen": ordered[0].id if ordered else None,
        "alerts": listed,
    }
    return Look(**{**given, **changes})


@pytest.fixture
def engine() -> Callable[..., wire.EngineSummary]:
    return make_engine


@pytest.fixture
def alert() -> Callable[..., wire_alerts.AlertRecord]:
    return make_alert


@pytest.fixture
def look() -> Callable[..., Look]:
    return make_look
