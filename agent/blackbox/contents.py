"""What a black box holds: a map's last state, told as members of an archive."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agent.blackbox.privacy import hash_id, scrub_map
from agent.history.entries import Mark
from agent.history.model import METRICS, History
from agent.sampling.discovery import printable
from engine_shim import __version__
from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import MapCorrupt, MapUnavailable
from engine_shim.layout import EVENT, EventKind
from engine_shim.snapshot import EngineIdentity, MapSnapshot, OwnerEntry

SCHEMA = "kvatlas.black-box/v1"
FACTS = "box.json"  # the first member, so that it is read without the others
MAX_MAP_BYTES = 64 * 2**20
MAX_EVENTS = 10_000
HISTORY_SECONDS, HISTORY_STEP_SECONDS = 3600.0, 10.0
MARK_SECONDS = 86_400.0
NANOSECONDS = 1_000_000_000

Members = dict[str, bytes]
"""Contents by the name that they have in the archive."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An engine whose box is to be made. `snapshot` is the last whole one, `file` the map, open; None: not there."""

    id: str
    identity: EngineIdentity
    state: str  # "gone", "unreadable", or "replaced" by a new start
    reason: str
    file: int | None = None
    snapshot: MapSnapshot | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # the agent's, without secrets
    marks: Sequence[Mark] = ()


def read_whole(file: int) -> bytearray:
    """An open map as it lies there. Raises MapCorrupt where it is larger than what is kept, OSError."""
    size = os.fstat(file).st_size
    if size > MAX_MAP_BYTES:
        raise MapCorrupt(f"the map has {size:,} bytes, and up to {MAX_MAP_BYTES:,} are kept")
    content = bytearray(size)
    view, at = memoryview(content), 0
    while at < size and (got := os.preadv(file, [view[at:]], at)):
        at += got
    view.release()
    if at < size:
        raise MapCorrupt(f"cut short: {at} of {size} bytes are there")
    return content


def box_members(ended: Ended, history: History, folder: Path) -> Members:
    """Everything that can be had of it; what cannot is named under "left_out". `folder` is for a file of the moment.

    No member holds a request id or a cache salt, but for their hashes.
    """
    left_out: list[str] = []
    members: Members = {}
    snapshot = ended.snapshot
    told = tuple(_hashed(one) for one in snapshot.owners) if snapshot is not None else ()
    events: list[dict[str, Any]] = []
    missed = 0
    if ended.file is None:
        left_out.append("map.kvmap: the file was gone before it could be opened")
    else:
        try:
            content = read_whole(ended.file)
            scrub_map(content)
            members["map.kvmap"] = bytes(content)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".map-") as copy:
                copy.write(content)
                copy.flush()
                reader = MapReader(Path(copy.name))
                try:
                    events, missed = _events(reader)
                    snapshot = reader.read(0.0)
                    told = snapshot.owners
                except MapUnavailable as error:
                    left_out.append(
                        f"its last publish never ended ({error}): counts and requests are of the one before"
                    )
                finally:
                    reader.close()
        except (MapCorrupt, MapUnavailable, OSError) as error:
            left_out.append(f"map.kvmap: {printable(error)}")
    ended_unix = last_sign_unix(ended.identity, snapshot)
    facts = _json(_facts(ended, snapshot, ended_unix, left_out))
    members["events.json"] = _json({"schema": f"{SCHEMA}/events", "not_kept_by_the_ring": missed, "events": events})
    members["requests.json"] = _json({"schema": f"{SCHEMA}/requests", "requests": [asdict(one) for one in told]})
    members["history.json"] = _json(_history(ended.id, history, ended_unix))
    members["marks.json"] = _json({"schema": f"{SCHEMA}/marks", "marks": [asdict(one) for one in ended.marks]})
    return {FACTS: facts, **members}


def read_facts(path: Path) -> dict[str, Any]:
    """What an archive says of itself. Raises OSError, or ValueError where it is no black box."""
    try:
        with tarfile.open(path, "r:gz") as archive:
            first = archive.next()
            file = archive.extractfile(first) if first is not None and first.name == FACTS else None
            facts = json.load(file) if file is not None else None
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} is no black box")
    return facts


def last_sign_unix(identity: EngineIdentity, snapshot: MapSnapshot | None) -> float:
    """When the engine was alive for sure the last time, by its own clock."""
    signs = [identity.created_unix_ns]
    if snapshot is not None:
        signs += [snapshot.heartbeat_unix_ns, snapshot.published_unix_ns, snapshot.last_step_unix_ns]
    return max(signs) / NANOSECONDS


def write_archive(path: Path, members: Mapping[str, bytes], mtime: float) -> int:
    """A gzipped tar for its owner alone, under a temporary name until it is whole; returns its size in bytes.

    Raises OSError.
    """
    part = path.with_name(f".{path.name}.part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(file, "wb") as raw:
            with tarfile.open(fileobj=raw, mode="w:gz", compresslevel=6) as archive:
                for name, content in members.items():
                    entry = tarfile.TarInfo(name)
                    entry.size, entry.mtime, entry.mode = len(content), int(max(0.0, mtime)), 0o600
                    archive.addfile(entry, io.BytesIO(content))
            raw.flush()
            os.fsync(raw.fileno())
            size = os.fstat(raw.fileno()).st_size
        os.replace(part, path)
    except BaseException:  # raised again: half an archive stays behind for nothing, not even a Ctrl-C
        part.unlink(missing_ok=True)
        raise
    return size


def _facts(ended: Ended, snapshot: MapSnapshot | None, ended_unix: float, left_out: list[str]) -> dict[str, Any]:
    identity = asdict(ended.identity) | {"incarnation": f"{ended.identity.incarnation:016x}"}
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "id": ended.id,
        "ended_unix": ended_unix,
        "state": ended.state,
        "reason": ended.reason,
        "engine": identity,
        "agent": {"version": __version__, "settings": dict(ended.settings)},
        "left_out": left_out,
    }
    if snapshot is not None:
        facts |= {
            "in_good_order": snapshot.flags.closing,
            "flags": asdict(snapshot.flags),
            "sequence": snapshot.sequence,
            "published_unix": snapshot.published_unix_ns / NANOSECONDS,
            "last_step_unix": snapshot.last_step_unix_ns / NANOSECONDS or None,
            "running_requests": snapshot.running_requests,
            "waiting_requests": snapshot.waiting_requests,
            "blocks_by_state": list(snapshot.state_counts),
            "counters": dict(snapshot.counters),
            "groups": [asdict(one) for one in snapshot.groups],
            "histograms": {name: asdict(one) for name, one in snapshot.histograms.items()},
        }
    return facts


def _events(reader: MapReader) -> tuple[list[dict[str, Any]], int]:
    batch = reader.events(0)
    names = {int(kind): kind.name.lower() for kind in EventKind}
    fields = [name for name in EVENT.names or () if name not in ("pad", "kind")]
    rows = batch.events[-MAX_EVENTS:]
    told = []
    for row in rows:
        event: dict[str, Any] = {"kind": names.get(int(row["kind"]), f"kind {int(row['kind'])}")}
        event.update({name: int(row[name]) for name in fields})
        told.append(event)
    return told, batch.missed + len(batch.events) - len(rows)


def _history(id: str, history: History, ended_unix: float) -> dict[str, Any]:
    """Every metric over the last hour of the engine's life, from the first bucket on that has anything."""
    columns: dict[str, list[list[float | None]]] = {}
    starts: list[float] = []
    for metric in METRICS:
        try:
            end = ended_unix + HISTORY_STEP_SECONDS
            buckets = history.query(id, metric, end - HISTORY_SECONDS, end, HISTORY_STEP_SECONDS)
        except (KeyError, ValueError):
            continue  # this agent has seen nothing of it, or its clock tells of no time that can be
        starts = [one.start_unix for one in buckets]
        columns[metric] = [[one.minimum, one.mean, one.maximum] for one in buckets]
    return {
        "schema": f"{SCHEMA}/history",
        "step_seconds": HISTORY_STEP_SECONDS,
        "start_unix": starts,
        "minimum_mean_maximum": columns,
    }


def _hashed(owner: OwnerEntry) -> OwnerEntry:
    return OwnerEntry(
        owner=owner.owner,
        request_id=hash_id(owner.request_id),
        lora=owner.lora,
        cache_salt=hash_id(owner.cache_salt),
        tokens=owner.tokens,
        blocks=owner.blocks,
        first_seen_unix_ns=owner.first_seen_unix_ns,
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, default=_plain, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    return str(value)
