"""Tells what torch's allocator holds in this process, on request and off the engine's thread; imports no torch itself.

Statistics are counters that the allocator keeps anyway. A snapshot walks its blocks under its lock and makes a Python
object of each, so that it is made only where somebody asks for one, without traces and stacks, and written to a file
beside the map. Either may have to wait for the allocator's lock, which the engine holds while it asks the driver for
memory: hence a thread of its own, one at a time, and the control socket goes on meanwhile.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine_shim.control.mailbox import ControlTicket
from engine_shim.control.messages import AllocatorReply, AllocatorRequest, ControlReply, Detail, ErrorReply

MAX_DEVICES = 16
MAX_BLOCKS = 200_000  # of a snapshot: some 20 MB of JSON
SUFFIX = ".allocator.json"
# Ours from torch's, over all of its pools, private ones included.
STATISTICS = {
    "reserved_bytes": "reserved_bytes.all.current",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
    "live_bytes": "allocated_bytes.all.current",
    "live_peak_bytes": "allocated_bytes.all.peak",
    "active_bytes": "active_bytes.all.current",  # live, and freed but held for another stream
    "requested_bytes": "requested_bytes.all.current",
    "stuck_bytes": "inactive_split_bytes.all.current",  # free, beside live blocks in the same segment
    "segments": "segment.all.current",
    "retries": "num_alloc_retries",  # times that the driver refused and the cache was emptied
    "ooms": "num_ooms",
}
_SEGMENT = ("device", "address", "total_size", "stream", "segment_type", "segment_pool_id", "is_expandable")
_BLOCK = ("size", "requested_size", "state")

_log = logging.getLogger("kvatlas.control")


class AllocatorDesk:
    """One engine's. `take` starts to answer; the answer comes through `answer`, from another thread."""

    def __init__(self, map_path: Path, answer: Callable[[ControlTicket, ControlReply], None]) -> None:
        self._file = map_path.with_name(map_path.name.removesuffix(".kvmap") + SUFFIX)
        self._answer = answer
        self._at_work = threading.Lock()

    def take(self, ticket: ControlTicket) -> bool:
        """False where one is at work already."""
        if not self._at_work.acquire(blocking=False):
            return False
        try:
            threading.Thread(target=self._serve, args=(ticket,), name="kvatlas-allocator", daemon=True).start()
        except RuntimeError:  # no thread is to be had: the process is at its limit, or ends
            self._at_work.release()
            return False
        return True

    def close(self) -> None:
        """Remove the snapshot, which is this engine's."""
        with suppress(OSError):
            self._file.unlink()

    def _serve(self, ticket: ControlTicket) -> None:
        try:
            request = ticket.request
            wants_snapshot = isinstance(request, AllocatorRequest) and request.snapshot
            reply: ControlReply = read_allocator(sys.modules, self._file if wants_snapshot else None)
        except Exception as error:  # noqa: BLE001 - torch's own, of whatever version: it must not reach the engine
            _log.warning("torch's allocator could not be read: %r", error)
            message = f"torch's allocator could not be read: {type(error).__name__}: {str(error)[:500]}"
            reply = ErrorReply(error="failed", message=message, action="see the engine's log")
        finally:
            self._at_work.release()
        self._answer(ticket, reply)


def read_allocator(modules: Mapping[str, Any], snapshot_file: Path | None = None) -> AllocatorReply:
    """What the torch that is loaded among `modules` tells; the reason where it tells nothing.

    With a file, also a light snapshot, written there. Raises whatever torch raises, and OSError where the file cannot
    be written.
    """
    cuda, reason = _cuda(modules)
    if cuda is None:
        return AllocatorReply(available=False, reason=reason)
    backend = _backend(cuda)
    devices: dict[str, Detail] = {}
    for index in range(min(int(cuda.device_count()), MAX_DEVICES)):
        told = cuda.memory_stats(index)
        statistics = {name: int(told[key]) for name, key in STATISTICS.items() if key in told}
        if statistics.get("reserved_peak_bytes"):  # this process has used it
            devices[str(index)] = statistics
    if backend not in ("native", ""):
        reason = f"the allocator is {backend}, of which torch keeps only a part of the statistics"
    if snapshot_file is None:
        return AllocatorReply(available=True, reason=reason, backend=backend, devices=devices)
    why_not, size = _write_snapshot(cuda, backend, snapshot_file)
    return AllocatorReply(
        available=True,
        reason=why_not or reason,
        backend=backend,
        devices=devices,
        snapshot_file="" if why_not else str(snapshot_file),
        snapshot_bytes=size,
    )


def _cuda(modules: Mapping[str, Any]) -> tuple[Any, str]:
    """torch.cuda where its allocator is at work, else None and why."""
    torch = modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if torch is None or cuda is None:
        return None, "no CUDA allocator here: torch is not loaded in this process"
    if getattr(getattr(torch, "version", None), "cuda", None) is None and not _is_hip(torch):
        return None, "no CUDA allocator here: this torch is built for the CPU"
    if not cuda.is_initialized():
        return None, (
            f"no CUDA allocator here: process {os.getpid()} has not initialised CUDA. Where an engine has workers, its "
            "memory is theirs"
        )
    return cuda, ""


def _is_hip(torch: Any) -> bool:
    return getattr(getattr(torch, "version", None), "hip", None) is not None


def _backend(cuda: Any) -> str:
    tell = getattr(getattr(cuda, "memory", None), "get_allocator_backend", None)
    return str(tell()) if callable(tell) else ""


def _write_snapshot(cuda: Any, backend: str, path: Path) -> tuple[str, int]:
    """Why there is none, or "" and its size."""
    take = cuda.memory_snapshot
    if "include_traces" not in inspect.signature(take).parameters:
        return "no snapshot: this torch cannot leave traces out of one, which may take a second to make", 0
    segments = take(include_traces=False)
    blocks = sum(len(one["blocks"]) for one in segments)
    if blocks > MAX_BLOCKS:
        return f"no snapshot: {blocks:,} blocks are more than {MAX_BLOCKS:,}; dump one in the process itself", 0
    light = [
        {
            **{name: one[name] for name in _SEGMENT if name in one},
            "blocks": [{name: block[name] for name in _BLOCK if name in block} for block in one["blocks"]],
        }
        for one in segments
    ]
    text = json.dumps({"segments": light, "allocator_backend": backend}, separators=(",", ":")).encode()
    fresh = path.with_name(path.name + ".new")
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    try:
        with open(file, "wb") as writer:
            writer.write(text)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)  # a file system that is full must not stay so for our sake
        raise
    return "", len(text)
