"""`kvatlas bundle`: packs what a bug report needs, without request ids and secrets."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from agent.blackbox.contents import Ended, Members, box_members, read_facts, write_archive
from agent.blackbox.keeper import FOLDER, SUFFIX
from agent.blackbox.privacy import hash_id, hide, known_secrets, tell_audit, tell_settings
from agent.client import agent_address
from agent.compaction.audit import read_entries
from agent.config import AgentSettings, load_settings
from agent.doctor import examine, to_json
from agent.history import History, MemoryHistory
from agent.history.entries import Mark
from agent.history.lasting import LastingHistory
from agent.history.reading import HistoryReader
from agent.history.writer import FILE, HistoryWriter
from agent.sampling.discovery import FoundMap, printable, scan
from alerts.database import DatabaseUnusable
from engine_shim import __version__
from engine_shim.allocation_map.reader import MapReader
from engine_shim.errors import KvatlasError, MapUnavailable, SettingsError
from engine_shim.layout import MAJOR, MINOR
from engine_shim.text import safe_name

SCHEMA = "kvatlas.bundle/v1"
MAX_BOX_BYTES = 64 * 2**20  # of all black boxes in one bundle; the newest first
MAX_LINES = 2_000  # of the log, and of the audit log
MARK_SECONDS = 86_400.0
ASK_SECONDS = 3.0
ROUTES = {
    "agent/engines.json": "/v1/engines",
    "agent/devices.json": "/v1/devices",
    "agent/alerts.json": "/v1/alerts",
    "agent/compactions.json": "/v1/compactions",
    "agent/metrics.txt": "/metrics",
}


@dataclass(slots=True)
class _Bundle:
    """What is packed so far, and what is not, with the reason."""

    members: Members = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add_json(self, name: str, value: Any) -> None:
        self.members[name] = json.dumps(value, default=str).encode() + b"\n"

    def add_lines(self, name: str, lines: Iterable[str]) -> None:
        self.members[name] = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def bundle(
    engine: Annotated[
        str | None, typer.Argument(help="An engine id, or an id as in /v1/engines; without it, all of them.")
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", envvar="KVATLAS_BUNDLE_OUTPUT", help="The archive to write.")
    ] = Path("kvatlas-bundle.tar.gz"),
    config: Annotated[Path | None, typer.Option(envvar="KVATLAS_CONFIG", help="Settings file of the agent.")] = None,
    state_dir: Annotated[
        Path | None, typer.Option(envvar="KVATLAS_STATE_DIR", help="Folder where the agent keeps its past.")
    ] = None,
    agent: Annotated[
        str, typer.Option(envvar="KVATLAS_AGENT_URL", help="Address of the agent.")
    ] = "http://127.0.0.1:9477",
    as_json: Annotated[bool, typer.Option("--json", envvar="KVATLAS_JSON", help="Print one JSON object.")] = False,
) -> None:
    """Pack black boxes, maps and the agent's state for a bug report, without request ids and secrets."""
    settings = load_settings({"state_dir": state_dir} if state_dir is not None else {}, file=config)
    facts = make_bundle(engine, output, settings, agent)
    if as_json:
        print(json.dumps(facts, allow_nan=False))
        return
    boxes = "1 black box" if facts["black_boxes"] == 1 else f"{facts['black_boxes']} black boxes"
    maps = "1 map" if facts["maps"] == 1 else f"{facts['maps']} maps"
    print(f"{facts['file']}: {facts['bytes']:,} bytes, {boxes}, {maps}")
    for line in facts["left_out"]:
        print(f"left out: {line}")
    print("read it before you publish it: it names models, engines, folders and packages of this host")


def make_bundle(engine: str | None, output: Path, settings: AgentSettings, agent_url: str) -> dict[str, Any]:
    """Write the archive; returns what is in it, as plain JSON values.

    Raises SettingsError where nothing is known of that engine or the address is none, KvatlasError where the file
    cannot be written.
    """
    agent_address(agent_url)
    if output.is_symlink() or (output.exists() and not output.is_file()):
        raise SettingsError(f"{output} is there, and is no regular file; give another with -o")
    packed, now = _Bundle(), time.time()
    folders = settings.map_folders()
    boxes = [] if settings.state_dir is None else _boxes(settings.state_dir, engine)
    every_map = scan(folders).maps
    maps = [one for one in every_map if engine is None or engine in (one.id, _engine_id(one))]
    if engine is not None and not boxes and not maps:
        known = ", ".join(sorted({one.id for one in every_map})) or "none"
        where = ", ".join(map(str, folders))
        raise SettingsError(
            f"nothing is known of an engine {engine!r}: no black box, and in {where} the maps of {known};"
            " leave the engine out, or set KVATLAS_STATE_DIR and KVATLAS_DIR as for the agent"
        )
    _add_boxes(packed, boxes)
    _add_maps(packed, maps, settings)
    _add_agent(packed, settings, folders)
    _ask_agent(packed, agent_url)
    secrets = known_secrets(settings)
    for name, content in packed.members.items():
        if not name.endswith((SUFFIX, ".kvmap")):
            packed.members[name] = hide(content.decode("utf-8", "replace"), secrets).encode()
    manifest = {
        "schema": SCHEMA,
        "version": __version__,
        "map_version": f"{MAJOR}.{MINOR}",
        "created_unix": now,
        "engine": engine,
        "members": {name: len(content) for name, content in packed.members.items()},
        "left_out": [hide(line, secrets) for line in packed.left_out],
    }
    try:
        size = write_archive(output, {"bundle.json": json.dumps(manifest).encode() + b"\n", **packed.members}, now)
    except OSError as error:  # its own text names the file under its temporary name
        raise KvatlasError(f"{output} cannot be written ({error.strerror}); give another with -o") from error
    return {
        "schema": SCHEMA,
        "file": str(output),
        "bytes": size,
        "black_boxes": sum(name.endswith(SUFFIX) for name in packed.members),
        "maps": len(maps),
        "members": ["bundle.json", *packed.members],
        "left_out": manifest["left_out"],
    }


def _boxes(state_folder: Path, engine: str | None) -> list[Path]:
    """Of an engine, or of all; the newest first."""
    found = sorted((state_folder / FOLDER).glob(f"*{SUFFIX}"), reverse=True)
    return found if engine is None else [path for path in found if engine in _names_in(path)]


def _names_in(path: Path) -> tuple[str, ...]:
    """Ids of the pool and of the engine that a box is of."""
    try:
        facts = read_facts(path)
        return str(facts["id"]), str(facts["engine"]["engine_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _add_boxes(packed: _Bundle, boxes: Iterable[Path]) -> None:
    total = 0
    for path in boxes:
        try:
            total += path.stat().st_size
            if total > MAX_BOX_BYTES:
                packed.left_out.append(f"{path.name}: a bundle holds {MAX_BOX_BYTES:,} bytes of black boxes")
                continue
            packed.members[f"{FOLDER}/{path.name}"] = path.read_bytes()
        except OSError as error:
            packed.left_out.append(f"{path.name}: {error.strerror}")


def _add_maps(packed: _Bundle, maps: Iterable[FoundMap], settings: AgentSettings) -> None:
    """The maps that are there now, told as black boxes are."""
    history, reader = _history(settings)
    told = tell_settings(settings)
    for found in maps:
        try:
            opened = MapReader(found.path)
        except (KvatlasError, OSError) as error:
            packed.left_out.append(f"map {found.id}: {printable(error)}")
            continue
        try:
            identity, alive, snapshot = opened.identity, opened.writer_alive(), None
            with suppress(MapUnavailable):
                snapshot = opened.read()
            with open(found.path, "rb") as file, tempfile.TemporaryDirectory() as folder:
                state, reason = ("live", "") if alive else ("gone", "its writer is gone")
                marks = () if reader is None else _marks(reader, found.id)
                file_number = file.fileno()
                ended = Ended(found.id, identity, state, reason, file_number, snapshot, settings=told, marks=marks)
                members = box_members(ended, history, Path(folder))
        except (KvatlasError, OSError) as error:
            packed.left_out.append(f"map {found.id}: {printable(error)}")
            continue
        finally:
            opened.close()
        for name, content in members.items():
            packed.members[f"maps/{safe_name(found.id)}/{name}"] = content


def _marks(reader: HistoryReader, id: str) -> tuple[Mark, ...]:
    now = time.time()
    with suppress(DatabaseUnusable):
        return reader.marks(id, now - MARK_SECONDS, now + 1)
    return ()


def _add_agent(packed: _Bundle, settings: AgentSettings, folders: tuple[Path, ...]) -> None:
    """What can be told of the agent without asking it."""
    packed.add_json("settings.json", tell_settings(settings))
    packed.add_json("doctor.json", to_json(examine(folders, settings)))
    if settings.audit_log is not None:
        try:
            entries = list(read_entries(settings.audit_log))[-MAX_LINES:]
            packed.add_lines("audit.jsonl", (json.dumps(tell_audit(entry.to_json())) for entry in entries))
        except OSError as error:
            packed.left_out.append(f"audit log: {error.strerror}")
    if settings.state_dir is None:
        packed.left_out.append("log, history and black boxes: KVATLAS_STATE_DIR is not set")
        return
    try:
        packed.add_lines("log.jsonl", HistoryReader(settings.state_dir / FILE).lines(MAX_LINES))
    except DatabaseUnusable as error:
        packed.left_out.append(f"log: {error}")


def _ask_agent(packed: _Bundle, url: str) -> None:
    with httpx.Client(base_url=url, timeout=ASK_SECONDS, trust_env=False) as http:
        for name, route in ROUTES.items():
            try:
                answer = http.get(route)
                answer.raise_for_status()
                if name.endswith(".json"):
                    packed.add_json(name, _without_addresses(answer.json()))
                else:
                    packed.members[name] = answer.content
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                packed.left_out.append(f"what the agent says: {type(error).__name__} at {route} of KVATLAS_AGENT_URL")
                return


def _without_addresses(value: Any) -> Any:
    """With each peer's address hashed."""
    if isinstance(value, dict):
        return {
            key: hash_id(one) if key == "address" and isinstance(one, str) else _without_addresses(one)
            for key, one in value.items()
        }
    return [_without_addresses(one) for one in value] if isinstance(value, list) else value


def _history(settings: AgentSettings) -> tuple[History, HistoryReader | None]:
    """The past as it lies on the disk; nothing is written to it."""
    memory = MemoryHistory()
    if settings.state_dir is None or not os.path.exists(settings.state_dir / FILE):
        return memory, None
    reader = HistoryReader(settings.state_dir / FILE)
    return LastingHistory(memory, HistoryWriter(settings.state_dir, 0), reader), reader


def _engine_id(found: FoundMap) -> str | None:
    try:
        reader = MapReader(found.path)
    except (KvatlasError, OSError):
        return None
    try:
        return reader.identity.engine_id
    finally:
        reader.close()
