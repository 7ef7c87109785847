"""Opens black boxes again: what they say of themselves, and what is in them."""

from __future__ import annotations

import json
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.blackbox.contents import MAX_MAP_BYTES, read_facts
from agent.blackbox.keeper import SUFFIX
from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import KvatlasError, MapCorrupt, MapUnavailable
from engine_shim.snapshot import MapSnapshot

MAX_MEMBER_BYTES = 16 * 2**20  # of JSON: ten times what the largest can have
MAP, TOLD = "map.kvmap", ("events.json", "requests.json", "history.json", "marks.json")


class BoxDamaged(KvatlasError):
    """A file in the folder of black boxes that is none, or not whole."""


@dataclass(frozen=True, slots=True)
class FoundBox:
    """A box and its first member."""

    name: str
    size_bytes: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OpenBox:
    """A box with all that is in it. `snapshot` is None where it has no map; then `map_reason` says why."""

    found: FoundBox
    told: Mapping[str, Mapping[str, Any]]  # the members in JSON, by name; those that are not there are empty
    snapshot: MapSnapshot | None
    map_reason: str


class BoxReader:
    """Reads the folder that agent.blackbox.keeper writes. Any thread may ask; facts of a box are read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._facts: dict[tuple[str, int, int], FoundBox] = {}

    def boxes(self) -> tuple[tuple[FoundBox, ...], tuple[str, ...]]:
        """The one that ended last first; and what cannot be read, with its reason."""
        found: list[FoundBox] = []
        damaged: list[str] = []
        known, self._facts = self._facts, {}
        for path in sorted(self.folder.glob(f"*{SUFFIX}"), reverse=True):
            try:
                stands = path.stat()
                key = (path.name, stands.st_mtime_ns, stands.st_size)
                self._facts[key] = box = known.get(key) or FoundBox(path.name, stands.st_size, _facts_of(path))
                found.append(box)
            except FileNotFoundError:
                continue  # an older one that gave way
            except (OSError, BoxDamaged) as error:
                damaged.append(f"{path.name}: {error}")
        found.sort(key=lambda one: (float(one.facts["ended_unix"]), one.name), reverse=True)
        return tuple(found), tuple(damaged)

    def open(self, name: str) -> OpenBox:
        """The box of that name. Raises KeyError where there is none, BoxDamaged, OSError."""
        path = next((one for one in self.folder.glob(f"*{SUFFIX}") if one.name == name), None)
        if path is None:
            raise KeyError(name)
        found = FoundBox(name, path.stat().st_size, _facts_of(path))
        contents: dict[str, bytes] = {}
        try:
            with tarfile.open(path, "r:gz") as archive:
                for entry in archive:
                    most = MAX_MAP_BYTES if entry.name == MAP else MAX_MEMBER_BYTES
                    if entry.name not in (MAP, *TOLD):
                        continue
                    if entry.size > most:
                        raise BoxDamaged(f"{name}: {entry.name} claims {entry.size:,} bytes")
                    file = archive.extractfile(entry)
                    contents[entry.name] = file.read() if file is not None else b""
            told = {one: _object(contents.pop(one, b"{}")) for one in TOLD}
        except (tarfile.TarError, EOFError, zlib.error, ValueError) as error:
            raise BoxDamaged(f"{name} is damaged: {error}") from error
        snapshot, reason = self._snapshot(contents.get(MAP))
        return OpenBox(found, told, snapshot, reason)

    def _snapshot(self, content: bytes | None) -> tuple[MapSnapshot | None, str]:
        if content is None:
            return None, "the box has no map"
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".map-") as copy:
                copy.write(content)
                copy.flush()
                reader = MapReader(Path(copy.name))
                try:
                    return reader.read(0.0), ""
                finally:
                    reader.close()
        except MapUnavailable:
            return None, "the engine ended while it published: no whole instant is in its map"
        except MapCorrupt as error:
            return None, "the map in it cannot be read: " + str(error).partition(": ")[2]
        except OSError as error:
            return None, f"the map needs room beside the box to be read: {error.strerror}"


def _facts_of(path: Path) -> dict[str, Any]:
    try:
        facts = read_facts(path)
        float(facts["ended_unix"]), str(facts["id"]), str(facts["engine"]["engine_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise BoxDamaged(f"{error}" if isinstance(error, ValueError) else f"{error!r} in {path.name}") from error
    return facts


def _object(content: bytes) -> dict[str, Any]:
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError("a member is no JSON object")
    return value
