"""A fleet as Prometheus knows it: the agents' metrics, asked for over its HTTP API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx

from dashboard.fleet import LINE_POINTS, LINE_SECONDS, PoolCard

THRESHOLD = 0.30  # the agents' default; no metric tells it
TIMEOUT_SECONDS = 3.0
_FAMILIES = (
    "engine_up",
    "engine_stalled",
    "engine_sleeping",
    "engine_degraded",
    "engine_info",
    "engine_running_requests",
    "engine_waiting_requests",
    "snapshot_age_seconds",
    "pool_blocks",
    "pool_fragmentation_ratio",
    "pool_admission_blocked",
    "pool_exhaustion_seconds",
)
_NOW = f'{{__name__=~"kvatlas_({"|".join(_FAMILIES)})"}}'
_READ_AT = "timestamp(kvatlas_snapshot_age_seconds)"
_OVER_TIME = 'kvatlas_pool_fragmentation_ratio{set="allocatable"}'
Key = tuple[str, str]  # id of the pool, and where it was scraped
Labels = Mapping[str, str]


class PrometheusUnavailable(Exception):
    """No usable answer; the text says why, without the address."""


class Prometheus:
    """Asks one server. For one thread at a time."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT_SECONDS, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def cards(self) -> list[PoolCard]:
        """Every pool that the server scraped within its lookback; PrometheusUnavailable where it does not answer."""
        now = time.time()
        step = LINE_SECONDS / (LINE_POINTS - 1)
        over_time = {
            "query": _OVER_TIME,
            "start": f"{now - LINE_SECONDS:.3f}",
            "end": f"{now:.3f}",
            "step": f"{step:.3f}",
        }
        return cards_of(
            self._ask("/api/v1/query", {"query": _NOW, "time": f"{now:.3f}"}),
            self._ask("/api/v1/query", {"query": _READ_AT, "time": f"{now:.3f}"}),
            self._ask("/api/v1/query_range", over_time),
            now,
        )

    def _ask(self, path: str, query: dict[str, str]) -> list[dict[str, Any]]:
        try:
            response = self._http.get(path, params=query)
            answer = response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise PrometheusUnavailable(str(error) or type(error).__name__) from error
        if not isinstance(answer, dict) or answer.get("status") != "success":
            said = answer.get("error") if isinstance(answer, dict) else None
            raise PrometheusUnavailable(f"HTTP {response.status_code}: {said or 'not an answer of its API'}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


def cards_of(
    now_series: list[dict[str, Any]], read_at: list[dict[str, Any]], over_time: list[dict[str, Any]], now: float
) -> list[PoolCard]:
    """Pools from the `result` of an instant query for what is, one for when that was, and one over time."""
    found: dict[Key, dict[str, float]] = {}
    facts: dict[Key, Labels] = {}
    for series in now_series:
        labels = series["metric"]
        if (key := _key(labels)) is None:
            continue
        name = labels["__name__"].removeprefix("kvatlas_")
        if name == "engine_info":
            facts[key] = labels
        part = labels.get("state") or labels.get("set") or ""
        found.setdefault(key, {})[f"{name} {part}".rstrip()] = float(series["value"][1])
        facts.setdefault(key, labels)
    ages = {_key(series["metric"]): now - float(series["value"][1]) for series in read_at}
    lines = {_key(series["metric"]): _line(series["values"], now) for series in over_time}
    return [
        _card(key, facts[key], values, ages.get(key, 0.0), lines.get(key, ()))
        for key, values in found.items()
        if "engine_up" in values
    ]


def _key(labels: Labels) -> Key | None:
    try:
        return f"{labels['engine_id']}.{labels['rank']}.{labels['pool']}", labels.get("instance", "")
    except KeyError:
        return None  # somebody else's metric of that name


def _card(
    key: Key, labels: Labels, values: Mapping[str, float], scraped_seconds: float, line: tuple[float | None, ...]
) -> PoolCard:
    state, reason = _state(values)
    age = values.get("snapshot_age_seconds")
    blocks = {
        name.removeprefix("pool_blocks "): int(n) for name, n in values.items() if name.startswith("pool_blocks ")
    }
    return PoolCard(
        id=key[0],
        agent=None,
        where=key[1],
        kind=labels.get("kind", ""),
        model=labels.get("model", ""),
        state=state,
        reason=reason,
        blocks=blocks,
        rate=values.get("pool_fragmentation_ratio allocatable"),
        threshold=THRESHOLD,
        running=int(values.get("engine_running_requests", 0)),
        waiting=int(values.get("engine_waiting_requests", 0)),
        blocked=values.get("pool_admission_blocked") == 1,
        degraded=values.get("engine_degraded") == 1,
        exhaustion_seconds=values.get("pool_exhaustion_seconds"),
        age_seconds=None if age is None else age + max(0.0, scraped_seconds),
        line=line,
    )


def _state(values: Mapping[str, float]) -> tuple[str, str]:
    if values.get("engine_stalled") == 1:
        return "stalled", "requests run and no step ends"
    if values["engine_up"] != 1:
        return "stale", "no heartbeat, or its map cannot be read"
    return ("sleeping", "it has given its KV memory back") if values.get("engine_sleeping") == 1 else ("live", "")


def _line(values: list[list[Any]], now: float) -> tuple[float | None, ...]:
    """Values by time into LINE_POINTS equal steps; what was not scraped is None."""
    line: list[float | None] = [None] * LINE_POINTS
    for at, value in values:
        index = round((float(at) - (now - LINE_SECONDS)) / LINE_SECONDS * (LINE_POINTS - 1))
        if 0 <= index < LINE_POINTS:
            line[index] = float(value)
    return tuple(line)
