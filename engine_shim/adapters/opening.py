"""What every adapter does first: read its settings, and open a map, without a fault of ours stopping an engine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import replace

from engine_shim.allocation_map.folders import writer_folder
from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.writer import MapSpec, MapWriter
from engine_shim.errors import KvatlasError, MapBusy
from engine_shim.switches import switch

log = logging.getLogger("kvatlas.shim")

_MOST_NAMESAKES = 32


def open_map(spec: MapSpec) -> MapObserver:
    """The map of one pool. A second engine of the same name on this host gets a number. Never raises: where no map can
    be made, one log line says why and the observer that is returned does nothing."""
    writer, reason = open_writer(spec)
    return MapObserver(writer, reason=reason)


def open_writer(spec: MapSpec) -> tuple[MapWriter | None, str]:
    """As `open_map`, the writer itself; None, and why, where no map can be made."""
    try:
        folder = writer_folder()
        if folder.warning:
            log.warning("%s", folder.warning)
        name = spec.engine_id
        for number in range(2, _MOST_NAMESAKES):
            try:
                return MapWriter.create(spec, folder.path), ""
            except MapBusy:
                spec = replace(spec, engine_id=f"{name}-{number}")
        return MapWriter.create(spec, folder.path), ""
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine must start
        reason = str(error) if isinstance(error, KvatlasError) else repr(error)
        log.warning("not instrumented, the engine goes on: %s", reason)
        return None, reason


def name_the_speaker() -> None:
    """Let our log lines say whose they are, where the process has set up no logging that would. Never raises."""
    try:
        ours = logging.getLogger("kvatlas")
        if not ours.hasHandlers():
            handler = logging.StreamHandler()
            handler.setLevel(logging.WARNING)
            handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s kvatlas: %(message)s"))
            ours.addHandler(handler)
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine must start
        log.warning("kvatlas: its log lines stay without a name: %r", error)


def whole_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A setting that is a number; the default, with a log line, where it is none."""
    text = environment.get(name, "")
    if not text:
        return default
    try:
        return max(0, int(text))
    except ValueError:
        log.warning("%s=%r is not a number; %d is used", name, text, default)
        return default


def disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Did the operator say KVATLAS_DISABLE=1?"""
    return switch(environment, "KVATLAS_DISABLE")


def engine_id(model: str, environment: Mapping[str, str]) -> str:
    """KVATLAS_ENGINE_ID, else host and model, and the devices where this process was given some of the host's."""
    if given := environment.get("KVATLAS_ENGINE_ID"):
        return given
    devices = environment.get("CUDA_VISIBLE_DEVICES", "")
    name = os.path.basename(model.rstrip("/")) or "model"
    return "-".join(part for part in (socket.gethostname(), name, devices and f"gpu{devices}") if part)
