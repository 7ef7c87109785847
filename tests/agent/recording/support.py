"""Engines that run when they are told, and everything that an agent answers about one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.history import METRICS
from agent.recording.chunks import ChunkFile, ChunkKind, ChunkWriter
from agent.recording.contents import decode_events, encode_events

ROOT = Path(__file__).resolve().parents[3]
STEPPING_ENGINE = Path(__file__).with_name("stepping_engine.py")
# Whether something is as it was says nothing of these: when it was looked at, and when the engine last gave a sign.
CLOCKS = {"now_unix", "started_unix", "heartbeat_age_seconds", "snapshot_age_seconds"}
# An agent's own, or what says that this is a replay.
OWN = {"replay", "folders", "unreadable", "writes_enabled", "version"}


class SteppingEngine:
    """A process with a pool, which stands still until it is told to step."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, STEPPING_ENGINE, json.dumps({"folder": str(folder), **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.path = Path(self._answer()["path"])
        self.id = self.path.name.removesuffix(".kvmap")

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def _tell(self, **command: Any) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return int(self._answer()["steps"])

    def step(self, count: int, now_ns: int | None = None) -> int:
        """Run so many steps, from a time on or now; returns how many it has run in all, once they are published."""
        return self._tell(steps=count, now_ns=now_ns)

    def switch(self, policy: str) -> None:
        """Go on under another allocation policy."""
        self._tell(steps=0, policy=policy)

    def close(self) -> None:
        """End in good order."""
        self._tell(close=True)
        self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


Ask = Callable[[str], tuple[int, Any]]
"""GET a path: the status and the JSON."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What an agent answered about one pool at one instant, by path."""

    now_unix: float
    by_path: Mapping[str, Any]


def questions(id: str, blocks: int, now_unix: float) -> list[str]:
    """Every path of /v1 that is about pools, with parameters that between them tell all of it."""
    of = f"/v1/engines/{id}"
    end = f"from={now_unix - 300:.6f}&to={now_unix:.6f}"
    return [
        "/v1/engines",
        of,
        f"{of}/map?cells=4096",
        f"{of}/map?cells=37",
        *(f"{of}/blocks?start={start}&count=4096" for start in range(0, blocks, 4096)),
        f"{of}/requests",
        f"{of}/advice",
        *(f"{of}/history?metric={metric}&{end}&step=5" for metric in METRICS),
        f"{of}/compaction?plan=true",
        f"{of}/frames?at={now_unix:.6f}",
        f"{of}/frames?at={now_unix - 7:.6f}&cells=50",
        f"{of}/frames/times?{end}",
        f"{of}/marks?{end}",
        f"{of}/marks?{end}&limit=2&holds=false",
    ]


# A live agent has no such path.
OF_A_REPLAY = {"/v1/replay"}


def further_questions(ask: Ask, id: str) -> list[str]:
    """Every path of /v1 that is not among the questions, to be asked without parameters."""
    known = {path.partition("?")[0] for path in questions(id, 1, 0.0)}
    paths = ask("/openapi.json")[1]["paths"]
    every = [path for path, methods in paths.items() if "get" in methods and path.startswith("/v1/")]
    every = [path.replace("{id}", id) for path in every if path not in OF_A_REPLAY]
    return [path for path in every if path not in known]


def ask_all(ask: Ask, paths: Iterable[str], now_unix: float) -> Answers:
    return Answers(now_unix, {path: ask(path) for path in paths})


def without(value: Any, names: set[str], endings: tuple[str, ...] = ()) -> Any:
    """A JSON value without these keys, and those with these endings, wherever they stand."""
    if isinstance(value, dict):
        left = {key for key in value if key not in names and not key.endswith(endings)}
        return {key: without(value[key], names, endings) for key in left}
    if isinstance(value, list | tuple):
        return [without(one, names, endings) for one in value]
    return value


def rewrite(source: Path, target: Path, change: Callable[[int, np.ndarray], np.ndarray]) -> None:
    """Copy a recording with its events changed: `change` gets the number of the chunk of events and its rows."""

    def changed(number: int, payload: bytes) -> bytes:
        first, rows = decode_events(payload)
        return encode_events(first, change(number, rows))

    rewrite_chunks(source, target, {ChunkKind.EVENTS: changed})


def rewrite_chunks(source: Path, target: Path, changes: Mapping[int, Callable[[int, bytes], bytes | None]]) -> None:
    """Copy a recording with chunks of some kinds changed: the function of a kind gets the number of the chunk among
    those of its kind, and its payload, and returns another one, or None for none."""
    chunks, writer = ChunkFile(source), ChunkWriter(target)
    numbers: Counter[int] = Counter()
    for place in chunks.places():
        payload: bytes | None = chunks.read(place)
        if place.kind in changes and payload is not None:
            payload = changes[place.kind](numbers[place.kind], payload)
            numbers[place.kind] += 1
        if payload is not None:
            writer.append(ChunkKind(place.kind), place.time_ns, payload)
    writer.finish()
    chunks.close()


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two JSON values are not equal; fractions to one part in a million, times to two milliseconds."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        return [line for key in keys for line in differences(one.get(key), other.get(key), f"{where}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{where}[{i}]")
        ]
    if isinstance(one, float) and isinstance(other, float):
        rel, least = (0.0, 2e-3) if "_unix" in where.rpartition(".")[2] else (1e-6, 1e-5)
        return [] if one == pytest.approx(other, rel=rel, abs=least) else [f"{where}: {one} is not {other}"]
    return [] if one == other else [f"{where}: {one!r} is not {other!r}"]
