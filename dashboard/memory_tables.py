"""Memory as HTML text: devices and who holds them, host and control groups, torch's allocators. Pure.

What is not known is a word with its reason, never a zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agent.wire.devices import CgroupMemory, Device, DeviceList, EngineAllocator, MemoryRow
from dashboard.palette import Theme
from dashboard.widgets import heading_html, note_html
from dashboard.wording import count, counted, duration, escape, rate, share, size

A_RECORDING = "recording"  # DeviceList.nvml of a replay without devices
ROWS = {
    "kv_pool": ("KV pool", "the engine's map: blocks × bytes of a block"),
    "engine_other": ("engine, the rest", "weights, activations, graphs and contexts: NVML does not tell them apart"),
    "other_processes": ("other processes", "co-tenants of the device"),
    "reserved": ("reserved", "driver and firmware"),
    "unattributed": ("unattributed", "in use, and claimed by nobody who is visible"),
    "free": ("free", ""),
}


def devices_html(found: DeviceList, theme: Theme) -> str:
    """Every device with its rows and processes; without one, why there is none."""
    if found.nvml == A_RECORDING:
        return heading_html("Devices") + note_html(
            f"No device is shown: {found.nvml_reason}. The agent beside an engine tells its memory."
        )
    age = "not read yet" if found.age_seconds is None else f"read {duration(found.age_seconds)} ago"
    driver = f"driver {found.driver_version}" if found.driver_version else ""
    expected = found.expected_devices
    number = f"{len(found.devices)} of {counted(expected, 'device')}" if expected is not None else ""
    said = [f"NVML: {found.nvml}", found.nvml_reason if found.devices else "", driver, number, age]
    lines = heading_html("Devices", " · ".join(part for part in said if part))
    if not found.devices:
        why = found.nvml_reason or f"NVML is {found.nvml}"
        return lines + note_html(
            f"No device is shown: {why}. Engines without a GPU keep their pool in the host's memory."
        )
    return lines + "".join(_device(one, theme, 0) for one in found.devices)


def host_html(found: DeviceList) -> str:
    """The machine, the agent's control group, and the engines' processes."""
    host, rows = found.host, []
    if host is None:
        rows.append(("host", f"not known: {found.host_reason or 'not read yet'}", ""))
    else:
        used = f"{size(host.used_bytes)} used ({share(host.used_bytes, host.total_bytes)}) of {size(host.total_bytes)}"
        rest = f"{size(host.available_bytes)} available, {size(host.free_bytes)} free"
        swap = (
            f"swap {size(host.swap_used_bytes)} of {size(host.swap_total_bytes)}"
            if host.swap_total_bytes
            else "no swap"
        )
        rows.append(("host", used, f"{rest} · {swap}"))
    rows.append(("agent's control group", *_cgroup(found.cgroup, found.cgroup_reason)))
    body = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td><td>{escape(c)}</td></tr>" for a, b, c in rows)
    return (
        heading_html("Host")
        + f'<table class="kv-table kv-words">{_head("of", "memory", "more")}{body}</table>'
        + (heading_html("Engines' processes") + _engines(found))
    )


def allocators_html(allocators: Sequence[EngineAllocator], *, recorded: bool = False) -> str:
    """torch's allocator in each engine, or why it tells nothing."""
    head = heading_html("torch's allocator", "kvatlas allocator ENGINE asks a live engine for a snapshot of it")
    if not allocators and recorded:
        return head + note_html("A recording does not hold what it told.")
    if not allocators:
        return head + note_html("No engine tells of it: that takes an engine with a control socket.")
    rows = "".join(_allocator(one) for one in allocators)
    names = (
        "engine",
        "device",
        "reserved",
        "live",
        "pending",
        "free",
        "of it stuck",
        "stuck ÷ free",
        "retries",
        "OOMs",
    )
    return head + f'<table class="kv-table kv-left">{_head(*names)}{rows}</table>'


def rows_of(found: DeviceList) -> list[dict[str, Any]]:
    """Every figure as one flat row, for a file: what holds it, where, how many bytes."""
    rows: list[dict[str, Any]] = []
    for device in flat(found.devices):
        about: dict[str, Any] = {"gpu": device.gpu, "name": device.name, "state": device.state, "reason": device.reason}
        rows += [about | {"what": row.kind, "of": row.engine_id, "bytes": row.bytes} for row in device.rows or ()]
        rows += [
            about | {"what": "process", "of": one.engine_id or one.name, "pid": one.pid, "bytes": one.used_bytes}
            for one in device.processes or ()
        ]
        if not device.rows:
            rows.append(about | {"what": "device", "of": "", "bytes": None})
    if found.host is not None:
        rows += [{"what": name, "of": "host", "bytes": value} for name, value in found.host.model_dump().items()]
    for engine in found.engines:
        about = {"of": engine.engine_id, "rank": engine.rank, "pid": engine.pid, "reason": engine.reason}
        rows.append(about | {"what": "resident", "bytes": engine.resident_bytes})
    for allocator in found.allocators:
        for one in allocator.devices:
            about = {"of": allocator.engine_id, "rank": allocator.rank, "gpu": f"cuda:{one.device}"}
            figures = one.model_dump(exclude={"device", "fragmentation_rate"})
            rows += [about | {"what": f"torch {name}", "bytes": value} for name, value in figures.items()]
    return rows


def flat(devices: Iterable[Device]) -> Iterator[Device]:
    """Devices and their slices, one after the other."""
    for one in devices:
        yield one
        yield from flat(one.slices)


def _device(device: Device, theme: Theme, depth: int) -> str:
    about = [device.name or "", f"index {device.index}", device.bus_id or "", "MIG" if device.mig else ""]
    title = heading_html(device.uuid or device.gpu, " · ".join(part for part in about if part))
    state = note_html(f"{device.state}{': ' if device.reason else ''}{device.reason}")
    memory = device.memory
    if memory is None:
        body = note_html(f"Its memory is not known: {device.reason or device.state}.")
    elif device.rows is None:
        where = "in the rows of its slices" if device.slices else f"not told apart: {device.reason or device.state}"
        body = note_html(f"{size(memory.used_bytes)} of {size(memory.total_bytes)} in use; who holds it is {where}.")
    else:
        body = _bar(device.rows, memory.total_bytes, theme) + _rows(device.rows, memory.total_bytes, theme)
        body += note_html(f"Total {size(memory.total_bytes)}, by {memory.source}. " + " ".join(device.notes))
    processes = _processes(device) if depth == 0 or device.processes else ""
    slices = "".join(_device(one, theme, depth + 1) for one in device.slices)
    return f'<section class="kv-device">{title}{state}{body}{processes}{slices}</section>'


def _bar(rows: Sequence[MemoryRow], total: int, theme: Theme) -> str:
    parts = "".join(
        f'<i style="flex-grow:{row.bytes};background:{_colour(row.kind, theme)}" '
        f'title="{escape(_name(row))}: {size(row.bytes)}, {share(row.bytes, total)}"></i>'
        for row in rows
        if row.bytes
    )
    return f'<div class="kv-holds">{parts}</div>'


def _rows(rows: Sequence[MemoryRow], total: int, theme: Theme) -> str:
    body = "".join(
        f'<tr title="{escape(ROWS[row.kind][1])}"><td><i style="background:{_colour(row.kind, theme)}"></i>'
        f"{escape(_name(row))}<small>{escape(ROWS[row.kind][1])}</small></td><td>{size(row.bytes)}</td>"
        f"<td>{share(row.bytes, total)}</td></tr>"
        for row in rows
    )
    whole = f'<tr class="kv-total"><td>device</td><td>{size(total)}</td><td></td></tr>'
    return f'<table class="kv-table kv-states">{_head("what", "size", "share")}{body}{whole}</table>'


def _name(row: MemoryRow) -> str:
    owner = row.engine_id + (f" {row.rank}" if row.rank not in ("", "dp0.tp0.pp0") else "")
    return ROWS[row.kind][0] + (f" of {owner}" if owner else "")


def _colour(kind: str, theme: Theme) -> str:
    state = {"kv_pool": "used", "engine_other": "cached", "other_processes": "pinned", "free": "free"}.get(kind)
    return theme.states[state or ("reserved" if kind == "reserved" else "unknown")]


def _processes(device: Device) -> str:
    if device.processes is None:
        return note_html("Its processes are not known: NVML does not tell them here.")
    if not device.processes:
        return note_html("No process is on it.")
    body = "".join(
        f"<tr><td>{one.pid}</td><td>{escape(one.engine_id or 'another')}</td>"
        f"<td>{escape(one.name) or 'not visible to the agent'}</td>"
        f"<td>{size(one.used_bytes) if one.used_bytes is not None else 'not told by NVML'}</td></tr>"
        for one in device.processes
    )
    return f'<table class="kv-table kv-words">{_head("process", "engine", "name", "memory")}{body}</table>'


def _cgroup(group: CgroupMemory | None, reason: str) -> tuple[str, str]:
    if group is None:
        return f"not known: {reason or 'not read yet'}", ""
    limit = "no limit" if group.limit_bytes is None else f"limit {size(group.limit_bytes)}"
    of = "" if group.limit_bytes is None else f" ({share(group.usage_bytes, group.limit_bytes)})"
    more = [limit, f"working set {size(group.working_set_bytes)}" if group.working_set_bytes is not None else ""]
    more.append("OOM kills not told" if group.oom_kills is None else counted(group.oom_kills, "OOM kill"))
    more.append(f"v{group.version} {group.path}")
    return f"{size(group.usage_bytes)} used{of}", " · ".join(part for part in more if part)


def _engines(found: DeviceList) -> str:
    if not found.engines:
        return note_html("A recording has no process." if found.nvml == A_RECORDING else "No engine is known.")
    rows = []
    for one in found.engines:
        pid = "not known" if one.pid is None else str(one.pid)
        if one.resident_bytes is None:
            memory, more = f"not known: {one.reason or 'not read yet'}", ""
        else:
            memory = f"{size(one.resident_bytes)} resident"
            more = "control group: " + " · ".join(part for part in _cgroup(one.cgroup, one.reason) if part)
        name = one.engine_id + ("" if one.rank == "dp0.tp0.pp0" else f" {one.rank}")
        rows.append(f"<tr><td>{escape(name)}</td><td>{pid}</td><td>{escape(memory)}</td><td>{escape(more)}</td></tr>")
    return f'<table class="kv-table kv-words">{_head("engine", "process", "memory", "more")}{"".join(rows)}</table>'


def _allocator(one: EngineAllocator) -> str:
    name = escape(one.engine_id + ("" if one.rank == "dp0.tp0.pp0" else f" {one.rank}"))
    if not one.devices:
        return (
            f'<tr><td>{name}</td><td colspan="9" class="kv-reason">{escape(one.reason or "it tells nothing")}</td></tr>'
        )
    rows = []
    for device in one.devices:
        sizes = (device.reserved_bytes, device.live_bytes, device.pending_bytes, device.free_bytes, device.stuck_bytes)
        cells = [*map(size, sizes), rate(device.fragmentation_rate), count(device.retries), count(device.ooms)]
        rows.append(f"<tr><td>{name}</td><td>{escape(device.device)}</td>" + "".join(f"<td>{c}</td>" for c in cells))
    told = f'<tr><td></td><td colspan="9" class="kv-reason">{escape(one.reason)}</td></tr>' if one.reason else ""
    return "</tr>".join(rows) + "</tr>" + told


def _head(*names: str) -> str:
    return "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in names) + "</tr>"
