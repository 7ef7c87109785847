"""What a soak without a finding writes down."""

from __future__ import annotations

import math
from typing import Any

import pytest

SECONDS = 2400.0  # long enough for all that is judged
ROUTE = "POST /v1/engines/mover-a/compaction"
Record = dict[str, Any]


@pytest.fixture
def record() -> Record:
    """What a soak without a finding writes down: one engine killed, one agent killed."""
    alert = {"rule": "engine-gone", "engine": "engine-2", "fingerprint": "f", "starts": "s"}
    alert |= {"summary": "Pool kv of engine-2 is 96 % full"}
    usage = [[t, 90e6 + 1e5 * math.sin(t), 30 + t % 2, 20, 0.05 * t] for t in map(float, range(0, int(SECONDS), 2))]
    return {
        "seconds": SECONDS,
        "watched_from": 0.0,
        "faults": [
            {"name": "engine killed", "engine": "engine-2", "began": 20.0, "ended": 32.0},
            {"name": "agent killed", "engine": "", "began": 50.0, "ended": 54.0},
            {"name": "disk full", "engine": "", "began": 80.0, "ended": 95.0},
        ],
        "expected": [{"rules": ["engine-gone"], "engine": "engine-2", "began": 20.0}],
        "told": [
            {**alert, "at": 22.0, "firings": 1, "status": "firing"},
            {**alert, "at": 40.0, "firings": 0, "status": "resolved"},
        ],
        "slack": {"texts": ["WARNING: Pool kv of engine-2 is 97 % full", "RESOLVED"], "refused": 0},
        "samples": {
            "engine-1": [t for t in map(float, range(int(SECONDS))) if not 50 < t < 56],
            "engine-2": [t for t in map(float, range(int(SECONDS))) if not (20 < t < 34 or 50 < t < 56)],
        },
        "kills": [{"at": 50.0, "kept": 48.5}],
        "asked": [{"at": 10.0, "route": ROUTE}, {"at": 85.0, "route": ROUTE}, {"at": 100.0, "route": ROUTE}],
        "audit": [{"at": 10.2, "route": ROUTE}, {"at": 100.4, "route": ROUTE}],
        "usage": {"agent": usage, "dashboard": usage},
        "pages": {"pool": [], "time": [], "alerts": []},
        "watched": "engine-1",
        "unwatched": "engine-3",
        "engines": {
            name: {"steps": 6000, "waited_ms": 3.0, "longest_ms": 40.0, "died": ""} for name in ("engine-1", "engine-3")
        },
        "surprises": [],
        "scrapes": [[t, 0 if t == 52 else 200, 12.0] for t in map(float, range(2, int(SECONDS), 5))],
    }
