"""`kvatlas allocator SNAPSHOT`: a snapshot of torch's allocator, dumped or of a live engine, read safely and told."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.allocator.analysis import AllocatorReport, Holdings, analyze_snapshot
from agent.allocator.errors import SnapshotError
from agent.allocator.picture import require_plotting, write_picture
from agent.allocator.snapshot import Settings, read_snapshot
from agent.commands.compact import find_map
from agent.compaction.control_client import EngineControl
from engine_shim.layout import MAP_SUFFIX

_FILE_SUFFIXES = (".pickle", ".pkl", ".json")
SCHEMA = "kvatlas.allocator/v1"
MIB = 1 << 20
_COLUMNS = ("reserved", "live", "pending", "free")


def describe_allocator(what: str, *, html: Path | None = None) -> dict[str, Any]:
    """As `describe_snapshot`, of a file, or of a live engine: its id, its pool's id, or its map.

    Raises as that does, as `find_map` does, and as EngineControl.allocator does for an engine that cannot be asked.
    """
    path = Path(what)
    if not what.endswith(MAP_SUFFIX) and (path.exists() or "/" in what or path.suffix in _FILE_SUFFIXES):
        return describe_snapshot(path, html=html)
    if html is not None:
        require_plotting()
    found = find_map(what)
    reply = EngineControl(found.path).allocator(snapshot=True)
    if not reply.snapshot_file:
        raise SnapshotError(f"{found.id}: {reply.reason or 'the engine gave no snapshot'}")
    # By its name beside the map, since the engine may see that folder under another path.
    facts = describe_snapshot(found.path.with_name(Path(reply.snapshot_file).name), html=html)
    facts["engine"] = found.id
    if reply.reason:
        facts["warnings"].append(reply.reason)
    return facts


def describe_snapshot(path: Path, *, html: Path | None = None) -> dict[str, Any]:
    """What a snapshot says, as plain JSON values; with `html`, its picture is written there.

    Raises SnapshotError where the file is none, SettingsError where no picture can be made.
    """
    if html is not None:
        require_plotting()
    snapshot = read_snapshot(path)
    facts = report_json(analyze_snapshot(snapshot), snapshot.settings)
    facts["file"] = str(path)
    if html is not None:
        facts["html"] = str(html)
        facts["html_left_out"] = write_picture(snapshot, path.name, html)
    return facts


def report_json(report: AllocatorReport, settings: Settings) -> dict[str, Any]:
    """The report under the keys that scripts may rely on. Sizes are bytes; a rate is null where nothing is free."""
    return {
        "schema": SCHEMA,
        **_holdings(report.total),
        "pools": [
            {
                "name": pool.name,
                "device": pool.device,
                "id": list(pool.id),
                "private": pool.private,
                **_holdings(pool.holdings),
                "parts": [
                    {"kind": one.kind, "stream": one.stream, "expandable": one.expandable, **_holdings(one.holdings)}
                    for one in pool.parts
                ],
            }
            for pool in report.pools
        ],
        "advice": [asdict(one) for one in report.advice],
        "settings": asdict(settings),
        "warnings": list(report.warnings),
    }


def _holdings(holdings: Holdings) -> dict[str, Any]:
    return {**asdict(holdings), "fragmentation_rate": holdings.fragmentation_rate}


def render_allocator(facts: dict[str, Any]) -> str:
    """The same for people."""
    reserved = facts["reserved_bytes"]

    def share(size: int) -> str:
        return f"{size / reserved:6.1%}" if reserved else "     -"

    lines = [f"{facts['segments']:,} segments, {_size(reserved)} reserved"]
    for key, name in (("live", "live"), ("pending", "pending free"), ("free", "free")):
        lines.append(f"  {name:<14}{_size(facts[key + '_bytes']):>14}  {share(facts[key + '_bytes'])}")
    lines.append(f"  {'of live, waste':<14}{_size(facts['internal_waste_bytes']):>14}  by rounding")
    if facts["pools"]:
        lines += [
            "",
            f"{'pool':<28}" + "".join(f"{name:>13}" for name in _COLUMNS) + f"{'largest free':>14}{'fragmented':>12}",
        ]
    for pool in facts["pools"]:
        lines.append(_row(f"GPU {pool['device']} {pool['name']}", pool))
        if len(pool["parts"]) > 1:
            for part in pool["parts"]:
                stream = f" stream {part['stream']}" if part["stream"] else ""
                growing = " expandable" if part["expandable"] else ""
                lines.append(_row(f"  {part['kind'] or 'segments'}{growing}{stream}", part))
    if facts["advice"]:
        lines += ["", "what would give memory back:"]
    for one in facts["advice"]:
        lines.append(f"  {one['option']}: {_gain(one)}")
        lines += textwrap.wrap(one["reason"], 106, initial_indent="    ", subsequent_indent="    ")
        if one["helps"]:
            lines.append(f"    {one['setting']}")
    for one in facts["warnings"]:
        lines += textwrap.wrap(f"warning: {one}", 110, subsequent_indent="  ")
    if "html" in facts:
        left_out = f" ({facts['html_left_out']})" if facts["html_left_out"] else ""
        lines.append(f"picture in {facts['html']}{left_out}")
    return "\n".join(lines)


def _row(name: str, holdings: dict[str, Any]) -> str:
    sizes = "".join(f"{_size(holdings[key + '_bytes']):>13}" for key in _COLUMNS)
    rate = holdings["fragmentation_rate"]
    return (
        f"{name[:27]:<28}{sizes}{_size(holdings['largest_free_bytes']):>14}{'-' if rate is None else f'{rate:.1%}':>12}"
    )


def _gain(advice: dict[str, Any]) -> str:
    if not advice["helps"]:
        return "would not help"
    most = advice["at_most_bytes"]
    return _size(advice["bytes"]) if most is None else f"{_size(advice['bytes'])} to {_size(most)}"


def _size(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
