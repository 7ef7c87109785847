"""`kvatlas replay FILE`: serves a recording to the dashboard and the API as the agent served the engine."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from engine_shim.errors import SettingsError

NANOSECONDS = 1_000_000_000


def replay(
    file: Annotated[Path, typer.Argument(help="A recording, as kvatlas record makes it.")],
    speed: Annotated[
        float, typer.Option(envvar="KVATLAS_REPLAY_SPEED", help="Seconds of the recording in a second.")
    ] = 1.0,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", envvar="KVATLAS_REPLAY_FROM", help="Where to begin: +SECONDS, Unix seconds or an ISO time."
        ),
    ] = None,
    paused: Annotated[bool, typer.Option("--paused", envvar="KVATLAS_REPLAY_PAUSED", help="Stay there.")] = False,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to serve on (KVATLAS_LISTEN).")] = None,
    config: Annotated[Path | None, typer.Option(envvar="KVATLAS_CONFIG", help="Settings file of the agent.")] = None,
) -> None:
    """Serve a recording to the dashboard and the API as if its engine ran; every answer says that it is a replay."""
    from agent.config import load_settings
    from agent.recording.chunks import RecordingError
    from agent.recording.player import MAX_SPEED, MIN_SPEED
    from agent.recording.reading import Recording
    from agent.recording.serving import run_replay

    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise SettingsError(f"speed={speed:g}: give {MIN_SPEED:g} to {MAX_SPEED:g}")
    settings = load_settings({} if listen is None else {"listen": listen}, file=config)
    if not file.exists():
        raise RecordingError(f"{file}: no such recording; kvatlas record ENGINE -o FILE makes one")
    recording = Recording(file)
    try:
        start_ns = None if start is None else place_of(start, recording.start_ns, recording.end_ns)
    except BaseException:  # raised again, with the file closed
        recording.close()
        raise
    run_replay(recording, settings, start_ns=start_ns, speed=speed, paused=paused)


def place_of(text: str, first_ns: int, last_ns: int) -> int:
    """A place on a recording's time line, as the command line names it. Raises SettingsError where there is none."""
    try:
        if text.startswith("+"):
            place = first_ns + _nanoseconds(text[1:])
        elif text.replace(".", "", 1).isdigit():
            place = _nanoseconds(text)
        else:
            moment = datetime.fromisoformat(text)
            place = _nanoseconds(str((moment if moment.tzinfo else moment.astimezone()).timestamp()))
    except (ValueError, OverflowError) as error:
        raise SettingsError(
            f"--from {text}: give +SECONDS, Unix seconds, or a time such as 2026-01-31T12:00"
        ) from error
    if not first_ns <= place <= last_ns:
        told = " to ".join(
            datetime.fromtimestamp(at / NANOSECONDS, UTC).isoformat(timespec="milliseconds")
            for at in (first_ns, last_ns)
        )
        seconds = (last_ns - first_ns) / NANOSECONDS
        raise SettingsError(f"--from {text} is outside of the recording, which goes from {told}: {seconds:.3f} s")
    return place


def _nanoseconds(text: str) -> int:
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError(text)
    return round(seconds * NANOSECONDS)
