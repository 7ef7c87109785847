"""`kvatlas compact ENGINE`: asks an engine over its control socket, with no agent in between."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agent.compaction.audit import Asker, AuditEntry, AuditLog
from agent.compaction.control_client import EngineControl
from agent.compaction.requests import USELESS, Reply, figures_of
from agent.compaction.tally import outcome_of
from agent.log import EventLog
from agent.sampling.discovery import FoundMap, scan
from engine_shim.allocation_map.folders import map_folders
from engine_shim.allocation_map.reader import MapReader
from engine_shim.control.messages import (
    CompactRequest,
    ControlRequest,
    MovingRequest,
    PlanRequest,
    RelocationRequest,
    RunReply,
    StatusReply,
    StatusRequest,
    TurnOffRequest,
)
from engine_shim.errors import KvatlasError, MapUnavailable, SettingsError
from engine_shim.layout import MAP_SUFFIX

SCHEMA = "kvatlas.compact/v1"


Wish = Literal["run", "plan", "off", "on", "relocation_off", "relocation_on", "unplug"]
_SWITCHES: dict[Wish, tuple[str, str, bool]] = {  # the audit log's word, the decision's, and whether it is to be on
    "off": ("moving", "moving", False),
    "on": ("moving", "moving", True),
    "relocation_off": ("relocation", "relocation", False),
    "relocation_on": ("relocation", "relocation", True),
    "unplug": ("unplug", "instrumentation", False),
}
_STILL_RELOCATING = "relocating allocation stays on; --no-relocation switches it off"


@dataclass(frozen=True, slots=True)
class Order:
    """What to ask for."""

    what: Wish
    target: float = 0.10
    max_moves: int | None = None

    def request(self) -> ControlRequest:
        if self.what == "run":
            return CompactRequest(target=self.target, max_moves=self.max_moves)
        if self.what == "plan":
            return PlanRequest(target=self.target, max_moves=self.max_moves)
        if self.what == "unplug":
            return TurnOffRequest(reason="kvatlas compact --unplug")
        action, _, on = _SWITCHES[self.what]
        return MovingRequest(on=on) if action == "moving" else RelocationRequest(on=on)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it, as plain JSON values; `fine` where the engine did as asked."""

    facts: dict[str, Any]
    fine: bool
    warning: str = ""  # it was done, and is not in the audit log that was named


def carry_out(engine: str, order: Order, audit_log: Path | None) -> Result:
    """Find the engine, ask it, and note that in the audit log where there is one.

    Where that file cannot be written, the warning says so: the engine was asked already. Raises SettingsError for an
    engine or an order that is none, and what EngineControl.request raises.
    """
    if not 0 <= order.target <= 1:
        raise SettingsError(f"target={order.target:g}: give a fragmentation rate from 0 to 1")
    if order.max_moves is not None and order.max_moves < 0:
        raise SettingsError(f"max_moves={order.max_moves}: give 0 or more")
    found = find_map(engine)
    began = time.monotonic()
    outcome, reason, warning = "failed", "", ""
    figures: dict[str, Any] = {}
    control = EngineControl(found.path)
    try:
        reply = control.request(order.request())
        outcome, reason, figures = _take(reply)
    except KvatlasError as error:
        outcome, reason = outcome_of(error), str(error)
        raise
    finally:
        if audit_log is not None and order.what != "plan":
            warning = _note(audit_log, found.id, order, outcome, reason, time.monotonic() - began, figures)
    switch = _SWITCHES.get(order.what)
    fine = outcome not in USELESS if switch is None else outcome == ("on" if switch[2] else "off")
    if order.what == "off" and _relocates(control):
        reason = f"{reason}; {_STILL_RELOCATING}" if reason else _STILL_RELOCATING
    facts = {
        "schema": SCHEMA,
        "engine": found.id,
        "file": str(found.path),
        "decision": outcome if switch is None else f"{switch[1]}_{outcome}",
        "reason": reason,
        **(figures or dict.fromkeys(_FIGURES)),
    }
    if audit_log is not None and order.what != "plan":
        facts["audit_log_fault"] = warning
    return Result(facts, fine, warning)


def find_map(engine: str, folders: Sequence[Path] | None = None) -> FoundMap:
    """The map of an engine: a file, an id as in /v1/engines, or an engine's own id where it has one pool alone.

    Raises SettingsError that names what there is; MapUnavailable for a file that is not there.
    """
    path = Path(engine)
    if engine.endswith(MAP_SUFFIX):
        if not path.is_file():
            raise MapUnavailable(f"{path}: no such map; GET /v1/engines, or kvatlas doctor, lists those of this host")
        status = path.stat()
        return FoundMap(path.name.removesuffix(MAP_SUFFIX), path, (status.st_dev, status.st_ino))
    looked = tuple(map_folders() if folders is None else folders)
    maps = scan(looked).maps
    chosen = [found for found in maps if found.id == engine] or [found for found in maps if _engine_id(found) == engine]
    # What a dead engine left behind does not stand in the way of the one that took its place.
    chosen = [found for found in chosen if _alive(found)] or chosen
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        names = ", ".join(str(found.path) for found in chosen)
        raise SettingsError(f"{engine!r} is the name of {len(chosen)} pools; give one of the files {names}")
    there = f"there are {', '.join(found.id for found in maps)}" if maps else "there are none"
    raise SettingsError(
        f"no engine {engine!r} in {', '.join(map(str, looked))}: {there}; "
        "give the map's file, or set KVATLAS_DIR as the engine has it; kvatlas doctor says what is found where"
    )


def render_result(result: Result) -> str:
    """The same for people."""
    facts = result.facts
    lines = [f"{facts['engine']}: {facts['decision']}" + (f", {facts['reason']}" if facts["reason"] else "")]
    if facts["planned_moves"] is None or facts["decision"] == "refused":
        return lines[0]

    def rate(value: float | None) -> str:
        return "undefined" if value is None else f"{value:.1%}"

    def runs(value: int | None) -> str:
        return "undefined" if value is None else f"{value:,}"

    moved = f"moved {facts['moved_blocks']:,} blocks ({facts['moved_bytes']:,} bytes)"
    lines.append(f"planned {facts['planned_moves']:,} moves, {moved}")
    before, after = facts["largest_allocatable_run_before"], facts["largest_allocatable_run_after"]
    word = "would be" if facts["decision"] == "planned" else "is"
    lines.append(
        f"fragmentation was {rate(facts['fragmentation_rate_before'])} and {word}"
        f" {rate(facts['fragmentation_rate_after'])}; the longest run was {runs(before)} and {word} {runs(after)}"
        " blocks"
    )
    details = facts["details"]
    if isinstance(seconds := details.get("seconds"), int | float):
        stall = details.get("longest_stall_seconds")
        held = f", the longest step was held up {stall * 1000:.2f} ms" if isinstance(stall, int | float) else ""
        lines.append(f"took {seconds:.3f} s{held}")
    return "\n".join(lines)


_FIGURES = (
    "planned_moves",
    "moved_blocks",
    "moved_bytes",
    "fragmentation_rate_before",
    "fragmentation_rate_after",
    "largest_allocatable_run_before",
    "largest_allocatable_run_after",
    "details",
)


def _take(reply: Reply) -> tuple[str, str, dict[str, Any]]:
    if isinstance(reply, RunReply):
        return reply.decision, reply.reason, figures_of(reply)
    return ("on" if getattr(reply, "on", False) else "off"), reply.reason, {}


def _relocates(control: EngineControl) -> bool:
    """Does the engine relocate, now that its moves are off? False where it does not say: what was asked for is done."""
    try:
        status = control.request(StatusRequest())
    except KvatlasError:
        return False
    return isinstance(status, StatusReply) and bool(status.relocation)


def _engine_id(found: FoundMap) -> str | None:
    """As the map's header has it; None where it cannot be read."""
    try:
        reader = MapReader(found.path)
    except (KvatlasError, OSError):
        return None
    try:
        return reader.identity.engine_id
    finally:
        reader.close()


def _alive(found: FoundMap) -> bool:
    try:
        reader = MapReader(found.path)
    except (KvatlasError, OSError):
        return False
    try:
        return reader.writer_alive()
    finally:
        reader.close()


def _note(
    path: Path, engine: str, order: Order, outcome: str, reason: str, seconds: float, figures: dict[str, Any]
) -> str:
    """An entry in the audit log; why it is not there, or ""."""
    run = order.what == "run"
    log = AuditLog(path, EventLog(_unheard()), ring_entries=1)
    log.record(
        AuditEntry(
            time_unix=time.time(),
            asker=Asker(route="cli", access="local", uid=os.getuid(), pid=os.getpid()),
            action="compact" if run else _SWITCHES[order.what][0],
            engine=engine,
            parameters={"target": order.target, "max_moves": order.max_moves}
            if run
            else {"on": _SWITCHES[order.what][2]},
            outcome=outcome,
            reason=reason,
            seconds=seconds,
            result=figures,
        )
    )
    log.close()
    if not log.fault:
        return ""
    return f"this is not in the audit log: {path}: {log.fault}; mend it, or name another file with --audit-log"


def _unheard() -> logging.Logger:
    """The warning says in whole sentences what the log would, in a word."""
    logger = logging.getLogger("kvatlas.compact")
    logger.disabled = True
    return logger
