"""`kvatlas doctor`: what this host offers and what keeps the agent from seeing an engine, with the fix beside it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from agent.alerting.rule_files import load_rules
from agent.alerting.sinks import LOG, make_sinks
from agent.config import AgentSettings
from agent.demo.supervisor import DEMO_PREFIX
from agent.devices.model import DeviceState, LibraryState
from agent.devices.nvml import NvmlReader, meminfo
from agent.devices.watcher import Timing, Watcher
from agent.doctor_places import examine_folder, examine_maps, examine_shared_memory, examine_writer
from agent.findings import Finding, Level
from agent.sampling.discovery import scan
from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import KvatlasError, SettingsError
from engine_shim.launcher import installed

PACKAGES = (
    "numpy",
    "fastapi",
    "uvicorn",
    "pydantic",
    "pydantic-settings",
    "prometheus-client",
    "psutil",
    "nvidia-ml-py",
    "httpx",
    "slack-sdk",
    "PyYAML",
    "typer",
    "streamlit",
    "plotly",
    "torch",
)
__all__ = ["Finding", "examine", "examine_devices", "to_json"]

SCHEMA = "kvatlas.doctor/v1"
BOXES_MIB = 256  # that black boxes take at most


def examine(folders: Sequence[Path], settings: AgentSettings) -> list[Finding]:
    """Every check, in the order in which a person would go about it. Changes nothing."""
    return [
        *_python(),
        *_distributions(installed()),
        *(examine_folder(folder) for folder in folders),
        examine_writer(),
        examine_shared_memory(),
        *_demos(folders),
        *examine_maps(folders),
        _port(settings),
        _alerts(settings),
        _state(settings),
        *examine_devices(),
    ]


def to_json(findings: Iterable[Finding]) -> dict[str, Any]:
    listed = [
        {"check": one.check, "level": one.level, "message": one.message, "action": one.action} for one in findings
    ]
    return {"schema": SCHEMA, "ok": all(one["level"] != "failed" for one in listed), "findings": listed}


def _alerts(settings: AgentSettings) -> Finding:
    """Whether the agent would take these rules and receivers; nobody is sent anything."""
    try:
        rules, names = load_rules(settings.alert_rules), [sink.name for sink in make_sinks(settings)]
    except SettingsError as error:
        return Finding("alerts", "failed", str(error), "mend the setting; kvatlas alerts check FILE reads rules alone")
    message = f"{len(rules)} rules, told to {', '.join(names) or 'nobody'}"
    if settings.alert_store is None and set(names) - {LOG}:
        action = "set KVATLAS_STATE_DIR to a folder that lasts, so that a restart repeats and loses nothing"
        return Finding("alerts", "warning", f"{message}, kept in memory alone", action)
    return Finding("alerts", "ok", message)


def _state(settings: AgentSettings) -> Finding:
    """Whether what the agent sees would outlive it."""
    folder = settings.state_dir
    if folder is None:
        action = (
            "set KVATLAS_STATE_DIR to a folder that outlives the container, to look back after a restart or a crash"
        )
        return Finding("state folder", "note", "not set: the past is in memory alone", action)
    name = f"state folder {folder}"
    there = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, "failed", "cannot be written by this user", "mend its permissions, or name another folder")
    free, wanted = shutil.disk_usage(there).free // 2**20, settings.state_max_mib + BOXES_MIB
    if free < settings.state_max_mib and not (folder / "history.sqlite").exists():
        action = "lower KVATLAS_STATE_MAX_MIB, or name a folder on a larger disk"
        return Finding(name, "warning", f"{free:,} MiB free, and up to {wanted:,} MiB are kept", action)
    return Finding(name, "ok", f"{free:,} MiB free, up to {wanted:,} MiB are kept")


def _python() -> list[Finding]:
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} absent")
    host = f"Python {platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}"
    findings = [Finding("python", "ok", host), Finding("packages", "ok", ", ".join(versions))]
    if platform.machine() not in ("x86_64", "AMD64"):
        message = f"the map's ordering of stores is proven on x86-64; on {platform.machine()} it is not"
        findings.append(Finding("architecture", "warning", message, "treat the numbers with care"))
    return findings


def _distributions(found: dict[str, str]) -> list[Finding]:
    if len(found) > 1:
        message = "kvatlas and kvatlas-shim are both in this environment and overwrite each other's files"
        return [Finding("distributions", "failed", message, "pip uninstall kvatlas-shim, or give each its own venv")]
    if not found:
        return [Finding("distributions", "note", "run from a checkout: neither distribution is installed")]
    return [Finding("distributions", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))]


def _demos(folders: Sequence[Path]) -> list[Finding]:
    """A demo's maps lie in a folder of its own, where no agent but its own looks."""
    findings = []
    for folder in folders:
        for private in sorted(folder.glob(f"{DEMO_PREFIX}*")):
            ids = [one.id for one in scan((private,)).maps if _is_written(one.path)]
            if ids:
                action = f"its own agent watches it; KVATLAS_DIR={private} shows it to other commands"
                findings.append(Finding(f"demo {private}", "ok", f"runs with {', '.join(ids)}", action))
            elif private.is_dir():
                action = "it starts or ends; if no demo runs, it was killed, and the folder can be removed"
                findings.append(Finding(f"demo {private}", "note", "no engine writes here", action))
    return findings


def _is_written(path: Path) -> bool:
    try:
        reader = MapReader(path)
        try:
            return reader.writer_alive()
        finally:
            reader.close()
    except (KvatlasError, OSError):
        return False


def _port(settings: AgentSettings) -> Finding:
    host, port = settings.address
    name = f"port {host}:{port}"
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of a name is too long, or empty
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        return Finding(name, "note", f"cannot be had: {reason}", "fine if the agent runs; else use --listen")
    return Finding(name, "ok", "free")


def examine_devices(timeout_seconds: float = 10.0) -> list[Finding]:
    """How NVML and each device stand. The agent needs no GPU; without one it says less about devices."""
    reader = NvmlReader(monotonic=time.monotonic, system=meminfo)
    watcher = Watcher("nvml", reader.read, Timing(3600.0, timeout_seconds))
    watcher.start()  # on a thread, since a driver that hangs must not take the examination with it
    answered = watcher.wait(1, timeout_seconds)
    reading = watcher.latest().value if answered else None
    watcher.stop()
    if reading is None:
        message = f"NVML has not answered in {timeout_seconds:g} s"
        return [Finding("gpu", "warning", message, "look at the kernel's log for the driver")]
    if reading.state is LibraryState.NO_BINDINGS:
        return [Finding("gpu", "note", reading.reason, "pip install nvidia-ml-py to see device memory")]
    if reading.state is not LibraryState.OK:
        level: Level = "note" if reading.state is LibraryState.NO_LIBRARY else "warning"
        return [Finding("gpu", level, f"NVML does not answer: {reading.reason}")]
    names = ", ".join(device.key for device in reading.devices)
    whole = Finding("gpu", "ok", f"NVML sees {len(reading.devices)} devices" + (f": {names}" if names else ""))
    troubled = [device for device in reading.devices if device.state is not DeviceState.OK]
    return [whole, *(Finding(f"gpu {one.key}", "warning", f"{one.state.value}: {one.reason}") for one in troubled)]
