"""Who holds a device's memory: rows that sum to its total, whatever the parts claim. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.devices.model import Attribution, DeviceMemory, EngineHere, MemoryRow, RowKind

MIN_UUID_PREFIX = 4  # hexadecimal digits after "GPU-" or "MIG-"


@dataclass(frozen=True, slots=True)
class EngineClaim:
    """An engine on one device. `process_bytes` is what NVML gives to its processes; None: they are not visible."""

    engine: EngineHere
    process_bytes: int | None


@dataclass(frozen=True, slots=True)
class OtherClaim:
    """Processes that belong to no engine, and those of which that cannot be told from here."""

    known_bytes: int
    unseen_bytes: int
    unseen: int  # how many processes


def attribute(memory: DeviceMemory, claims: Sequence[EngineClaim], others: OtherClaim) -> Attribution:
    """Rows over the device's memory; they sum exactly to `memory.total_bytes`.

    Used memory is `total - free - reserved`. Engines have the first claim on it, then other processes; what nobody
    claims is unattributed. Where claims exceed what is used they are cut, and a note says so. Memory of processes that
    cannot be told from here counts as other processes only where every engine on the device was found: else the engine
    may be one of them.
    """
    notes: list[str] = []
    free = min(memory.free_bytes, memory.total_bytes)
    reserved = min(memory.reserved_bytes or 0, memory.total_bytes - free)
    left = memory.total_bytes - free - reserved
    rows: list[MemoryRow] = []
    for claim in claims:
        pool, other, note = _engine_parts(claim)
        notes += note
        for kind, size in ((RowKind.KV_POOL, pool), (RowKind.ENGINE_OTHER, other)):
            if size is not None:
                granted = min(size, left)
                left -= granted
                rows.append(MemoryRow(kind, granted, claim.engine.engine_id, claim.engine.rank))
    claimed = sum(sum(size or 0 for size in _engine_parts(claim)[:2]) for claim in claims)
    known = others.known_bytes
    all_found = all(claim.process_bytes is not None for claim in claims)
    if others.unseen and all_found:
        known += others.unseen_bytes
    elif others.unseen:
        notes.append(
            f"{others.unseen} processes on this device are not visible from here, of which an engine may be one: "
            "their memory is unattributed. Share the host's process namespace with the agent to tell them apart"
        )
    if claimed + known > memory.total_bytes - free - reserved:
        notes.append("the processes' figures add up to more than the device says is used; they were cut to fit")
    granted = min(known, left)
    left -= granted
    rows.append(MemoryRow(RowKind.OTHER_PROCESSES, granted))
    if memory.reserved_bytes is not None:
        rows.append(MemoryRow(RowKind.RESERVED, reserved))
    rows += [MemoryRow(RowKind.UNATTRIBUTED, left), MemoryRow(RowKind.FREE, free)]
    return Attribution(tuple(rows), tuple(notes))


def _engine_parts(claim: EngineClaim) -> tuple[int, int | None, list[str]]:
    """The engine's pool, the rest of its memory (None where its process is not visible), and notes."""
    engine, held = claim.engine, claim.process_bytes
    if held is None:
        note = f"the process of engine {engine.engine_id} is not visible here: what it holds beside its pool is in "
        return engine.pool_bytes, None, [note + "unattributed"]
    if engine.pool_bytes > held:
        note = f"engine {engine.engine_id} has a pool of {engine.pool_bytes} bytes, and its process holds {held}"
        return held, 0, [note]
    return engine.pool_bytes, held - engine.pool_bytes, []


def find_uuid(wanted: str, known: Iterable[str]) -> str | None:
    """The device that a map names: the whole UUID, or a short prefix where only one begins so.

    Indices name nothing here: CUDA and NVML count in different orders.
    """
    wanted = wanted.strip()
    lower = wanted.lower()
    if not lower.startswith(("gpu-", "mig-")):
        lower = f"gpu-{lower}"  # torch and some tools write it bare
    digits = lower[4:].replace("-", "")
    matches = [one for one in known if one.lower().startswith(lower)]
    exact = [one for one in matches if one.lower() == lower]
    if exact:
        return exact[0]
    return matches[0] if len(matches) == 1 and len(digits) >= MIN_UUID_PREFIX else None
