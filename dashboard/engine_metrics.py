"""What engines say of themselves in their own metrics: beside a map, and in place of one. Pure."""

from __future__ import annotations

from agent.wire import EngineMetrics, EngineSummary, UnmappedEngine
from dashboard.conditions import Condition
from dashboard.widgets import Tile, note_html
from dashboard.wording import count, counted, duration, escape, rate, size

_HELP = "As the engine reports it in its own metrics."
_OF_POOLS = {
    "full_attention_usage_ratio": "full attention",
    "sliding_window_usage_ratio": "sliding window",
    "state_usage_ratio": "state",
}


def disagreement(engine: EngineSummary) -> list[Condition]:
    """A banner where the map and the engine's own metrics lastingly differ."""
    made = engine.metrics_comparison
    if made is None or not made.disagrees or engine.metrics is None:
        return []
    return [
        Condition(
            "warning",
            f"The map and the engine's own metrics disagree: {made.reason}.",
            f"One of them is wrong. See that {engine.metrics.source} is this engine's and that its numbers change; "
            "a map at fault shows in the counter repairs, or as degraded.",
        )
    ]


def line_html(engine: EngineSummary) -> str:
    """One line on what the metrics say beside the map; "" where they are not read."""
    metrics, made = engine.metrics, engine.metrics_comparison
    if metrics is None or made is None:
        return ""
    verdict = (
        "disagree with the map"
        if made.disagrees
        else "agree with the map"
        if made.compared
        else f"not compared with the map: {made.why_not}"
    )
    parts = [f"Its own metrics, {duration(metrics.age_seconds)} ago: {verdict}"]
    if (usage := metrics.values.get("kv_usage_ratio")) is not None:
        parts.append(f"KV usage {rate(usage)}")
    if (running := _whole(metrics, "running_requests")) is not None:
        parts.append(f"{count(running)} running")
    if (waiting := _whole(metrics, "waiting_requests")) is not None:
        parts.append(f"{count(waiting)} waiting")
    return note_html(" · ".join([*parts, *metrics.notes]))


def unmapped_conditions(engine: UnmappedEngine) -> list[Condition]:
    """What must be known of an engine without a map, and what is wrong with it."""
    found = []
    if engine.state != "live":
        found.append(
            Condition(
                "error",
                f"{engine.state.capitalize()}: {engine.reason}. The numbers below are "
                f"{duration(engine.metrics.age_seconds)} old.",
                f"Look at {engine.metrics.source} and at the engine's log.",
            )
        )
    found.append(
        Condition(
            "info",
            "No block map: this is what the engine says of itself. Its blocks and their fragmentation are not known.",
            "Run the shim in the engine to see them.",
        )
    )
    return found


def unmapped_html(engine: UnmappedEngine) -> str:
    """One line that says which engine it is."""
    ranks = counted(len(engine.ranks), "data-parallel rank") if engine.ranks else ""
    parts = [engine.kind, engine.model, ranks, engine.metrics.source, *engine.metrics.notes]
    text = " · ".join(escape(part) for part in parts if part)
    return f'<div class="kv-identity"><b class="kv-state {escape(engine.state)}">no block map</b> {text}</div>'


def unmapped_tiles(engine: UnmappedEngine) -> list[Tile]:
    """The numbers that there are; what the engine does not export has no tile."""
    metrics, values = engine.metrics, engine.metrics.values
    tiles: list[Tile] = []
    if (usage := values.get("kv_usage_ratio")) is not None:
        used, capacity = _whole(metrics, "used_tokens"), _whole(metrics, "capacity_tokens")
        pools = [f"{name} {rate(values[key])}" for key, name in _OF_POOLS.items() if key in values]
        of = f"of {counted(capacity, 'token')}" if capacity is not None else "capacity not exported"
        held = f"{count(used)} " if used is not None else ""
        if used is None and capacity is not None and engine.kind == "vllm":  # whose usage is of just that capacity
            held = f"about {count(round(usage * capacity))} "
        tiles.append(Tile("KV usage", rate(usage), " · ".join([held + of, *pools]), _HELP))
    if (running := _whole(metrics, "running_requests")) is not None:
        waiting = _whole(metrics, "waiting_requests")
        detail = "" if waiting is None else f"{count(waiting)} waiting"
        tiles.append(Tile("Requests", f"{count(running)} running", detail, _HELP))
    if (preemptions := _whole(metrics, "preemptions")) is not None:
        tiles.append(Tile("Preemptions", count(preemptions), "since its start", _HELP))
    query, hits = _whole(metrics, "prefix_query_tokens"), _whole(metrics, "prefix_hit_tokens")
    if query and hits is not None:
        tiles.append(Tile("Prefix hits", rate(hits / query), f"{count(hits)} of {counted(query, 'token')}", _HELP))
    elif (hit_ratio := values.get("prefix_hit_ratio")) is not None:
        tiles.append(Tile("Prefix hits", rate(hit_ratio), "as the engine averages it", _HELP))
    if (generated := _whole(metrics, "generation_tokens")) is not None:
        prompt = _whole(metrics, "prompt_tokens")
        tiles.append(Tile("Tokens generated", count(generated), f"{count(prompt)} of prompts", _HELP))
    if (memory := _whole(metrics, "memory_bytes")) is not None:
        on_gpu = _whole(metrics, "gpu_memory_bytes")
        tiles.append(Tile("Memory", size(memory), f"{size(on_gpu)} on the GPU", _HELP))
    if (context := _whole(metrics, "context_tokens")) is not None:
        tiles.append(Tile("Context", counted(context, "token"), "of the loaded model", _HELP))
    age = duration(metrics.age_seconds)
    tiles.append(Tile("Read", f"{age} ago", "", "How old these numbers are.", "" if engine.state == "live" else "bad"))
    return tiles


def _whole(metrics: EngineMetrics, name: str) -> int | None:
    value = metrics.values.get(name)
    return None if value is None else round(value)
