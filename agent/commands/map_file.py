"""`kvatlas map FILE` or `ENGINE`: one allocation map, read once and told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from agent.commands.compact import find_map
from agent.fragmentation import FragmentationReport, analyze
from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import MapUnavailable
from engine_shim.layout import MAP_SUFFIX
from engine_shim.snapshot import MapSnapshot

SCHEMA = "kvatlas.map/v1"


def map_named(name: str) -> Path:
    """The file itself; where none is of that name, the map of the engine with that id. Raises as `find_map` does."""
    path = Path(name)
    if path.exists() or path.name != name or name.endswith(MAP_SUFFIX):
        return path
    return find_map(name).path


def describe_map(path: Path, *, now_unix: float | None = None) -> dict[str, Any]:
    """What a map says, as plain JSON values. Raises MapUnavailable, MapCorrupt or MapVersionError.

    A map whose writer died in the middle of a publish has no whole snapshot; that is said, not guessed around.
    """
    reader = MapReader(path)
    try:
        alive = reader.writer_alive()
        try:
            snapshot = reader.read(1.0)
        except MapUnavailable as error:
            if not alive:
                raise MapUnavailable(
                    f"{path}: its writer died while it published; no whole snapshot is left"
                ) from error
            raise
    finally:
        reader.close()
    now = time.time() if now_unix is None else now_unix
    return _as_json(path, snapshot, analyze(snapshot.states), alive, now)


def _as_json(path: Path, snapshot: MapSnapshot, report: FragmentationReport, alive: bool, now: float) -> dict[str, Any]:
    identity, flags = snapshot.identity, snapshot.flags
    known = not flags.sleeping
    return {
        "schema": SCHEMA,
        "file": str(path),
        "engine": identity.engine_id,
        "incarnation": f"{identity.incarnation:016x}",
        "kind": identity.kind,
        "version": identity.version,
        "model": identity.model,
        "pool": identity.pool,
        "policy": identity.policy,
        "medium": identity.medium,
        "dtype": identity.dtype,
        "pid": identity.pid,
        "writer_alive": alive,
        "sleeping": flags.sleeping,
        "degraded": flags.degraded,
        "closing": flags.closing,
        "total_blocks": report.total_blocks,
        "usable_blocks": report.usable_blocks,
        "blocks": {
            "free": report.free_blocks,
            "cached": report.cached_blocks,
            "used": report.used_blocks,
            "pinned": report.pinned_blocks,
            "reserved": report.reserved_blocks,
            "unknown": report.unknown_blocks,
        },
        "headroom_blocks": identity.headroom_blocks,
        "block_tokens": identity.block_tokens,
        "block_bytes": identity.block_bytes,
        "fragmentation_rate": report.fragmentation_rate if known else None,
        "strict_fragmentation_rate": report.strict_fragmentation_rate if known else None,
        "largest_allocatable_run": report.largest_allocatable_run if known else None,
        "allocatable_runs": report.allocatable_runs if known else None,
        "running_requests": snapshot.running_requests,
        "waiting_requests": snapshot.waiting_requests,
        "heartbeat_age_seconds": round(max(0.0, now - snapshot.heartbeat_unix_ns / 1e9), 3),
        "snapshot_age_seconds": round(max(0.0, now - snapshot.published_unix_ns / 1e9), 3),
        "counters": dict(snapshot.counters),
    }


def render_map(facts: dict[str, Any]) -> str:
    """The same for people."""
    blocks = facts["blocks"]
    usable = facts["usable_blocks"]

    def share(count: int) -> str:
        return f"{count / usable:6.1%}" if usable else "     -"

    def rate(value: float | None) -> str:
        return "undefined" if value is None else f"{value:.1%}"

    writer = "alive" if facts["writer_alive"] else "gone"
    flags = [name for name in ("sleeping", "degraded", "closing") if facts[name]]
    policy = facts["policy"] or "unknown"
    fragmentation = (
        f"fragmentation {rate(facts['fragmentation_rate'])} over free and cached blocks, "
        f"{rate(facts['strict_fragmentation_rate'])} over free ones"
    )
    lines = [
        f"{facts['engine']}  {facts['model']}  pool {facts['pool']}  ({facts['kind']}, policy {policy})",
        f"writer {writer}, pid {facts['pid']}, heartbeat {facts['heartbeat_age_seconds']:.1f} s ago"
        + (f", {', '.join(flags)}" if flags else ""),
        f"{facts['total_blocks']:,} blocks of {facts['block_tokens']} tokens, {facts['block_bytes']:,} bytes each",
        *(f"  {name:<9}{count:>12,}  {share(count)}" for name, count in blocks.items() if count or name != "unknown"),
        fragmentation,
    ]
    if facts["largest_allocatable_run"] is not None:
        lines.append(
            f"largest run {facts['largest_allocatable_run']:,} of {blocks['free'] + blocks['cached']:,} allocatable"
            f" blocks, {facts['allocatable_runs']:,} runs"
        )
    return "\n".join(lines)
