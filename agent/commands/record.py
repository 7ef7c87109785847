"""`kvatlas record ENGINE -o FILE`: writes down what one engine's pool does, until it ends or somebody stops it."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from agent.commands.compact import find_map
from agent.config import AgentSettings, load_settings
from agent.recording.chunks import ChunkWriter
from agent.recording.device_source import DeviceSource
from agent.recording.recorder import Recorder, record
from agent.sampling.model import Clock
from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import SettingsError

SCHEMA = "kvatlas.record/v1"
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.05, 60.0


def record_command(
    engine: Annotated[str, typer.Argument(help="An engine id, an id as in /v1/engines, or a map file.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", envvar="KVATLAS_RECORD_OUTPUT", help="File to write; must not be there.")
    ],
    seconds: Annotated[
        float | None, typer.Option(envvar="KVATLAS_RECORD_SECONDS", help="Stop after so long; until Ctrl-C by default.")
    ] = None,
    interval_seconds: Annotated[
        float, typer.Option(envvar="KVATLAS_RECORD_INTERVAL_SECONDS", help="Time between samples.")
    ] = 1.0,
    devices: Annotated[
        bool | None,
        typer.Option("--devices/--no-devices", help="Read GPUs through NVML (KVATLAS_DEVICES), as the agent does."),
    ] = None,
    config: Annotated[Path | None, typer.Option(envvar="KVATLAS_CONFIG", help="Settings file of the agent.")] = None,
    as_json: Annotated[bool, typer.Option("--json", envvar="KVATLAS_JSON", help="Print one JSON object.")] = False,
) -> None:
    """Record every event and state of one pool, and its host's devices, into a file, to be replayed later."""
    import json

    settings = load_settings({} if devices is None else {"devices": devices}, file=config)
    facts = record_engine(engine, output, seconds, interval_seconds, settings)
    print(json.dumps(facts, allow_nan=False) if as_json else render(facts))


def record_engine(
    engine: str, output: Path, seconds: float | None, interval_seconds: float, settings: AgentSettings
) -> dict[str, Any]:
    """Record, and say what came of it, as plain JSON values. `settings` say how devices are read.

    Raises SettingsError, MapUnavailable or MapCorrupt for an engine that cannot be read, RecordingError for a file that
    is there already, RecordingFull where it cannot be written any more; what was written is then readable all the same.
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise SettingsError(f"seconds={seconds:g}: give more than 0")
    if not MIN_INTERVAL_SECONDS <= interval_seconds <= MAX_INTERVAL_SECONDS:
        raise SettingsError(
            f"interval_seconds={interval_seconds:g}: give {MIN_INTERVAL_SECONDS:g} to {MAX_INTERVAL_SECONDS:g}"
        )
    found = find_map(engine, settings.map_folders())
    reader = MapReader(found.path)
    stop = threading.Event()

    def leave(number: int, frame: FrameType | None) -> None:
        stop.set()

    def told(path: Path) -> None:
        print(f"recording {found.id} into {path}; Ctrl-C ends it", file=sys.stderr, flush=True)

    clock = Clock()
    devices = DeviceSource(settings, (found.path.parent,), clock)
    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        devices.start()
        recorder = Recorder(reader, ChunkWriter(output), found.id, interval_seconds, clock, devices=devices.view)
        reason = record(recorder, stopping=stop.wait, seconds=seconds, told=told)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        devices.stop()
        reader.close()
    tally = recorder.tally
    return {
        "schema": SCHEMA,
        "engine": found.id,
        "file": str(output),
        "bytes": recorder.writer.written_bytes,
        "ended": reason,
        "events": tally.events,
        "gaps": tally.gaps,
        "lost_events": tally.lost_events,
        "samples": tally.samples,
        "unavailable_samples": tally.unavailable_samples,
        "mixed_samples": tally.mixed_samples,
        "device_readings": tally.device_readings,
        "publishes_events": not tally.silent_map,
    }


def render(facts: dict[str, Any]) -> str:
    """The same for people."""
    lost = f"{facts['lost_events']:,} events were lost in {facts['gaps']:,} gaps" if facts["gaps"] else "no event lost"
    if not facts["publishes_events"]:
        lost = "states as of each sample alone, since this map publishes no events"
    return (
        f"{facts['file']}: {facts['events']:,} events and {facts['samples']:,} samples of {facts['engine']} in"
        f" {facts['bytes']:,} bytes, {lost}; {facts['ended']}"
    )
