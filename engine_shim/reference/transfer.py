"""Finished sequences sent to a file or a peer by a thread of its own; their blocks stay pinned meanwhile.

Stream: one line of JSON (`request_id`, `blocks`, `runs`, `block_shape`, `block_bytes`, `dtype`, `head_dim`, `tokens`),
then the blocks in the order of the sequence, each in the order of `block_shape`: layers, keys and values, tokens,
heads, elements, which are bytes of codes and scales where `dtype` is a quantised format. A run of neighbouring blocks
is one piece of memory.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from engine_shim.errors import SettingsError
from engine_shim.pool.block_pool import BlockPool
from engine_shim.reference.kv_cache import KVCache, coalesce
from engine_shim.reference.pacer import Pacer
from engine_shim.reference.sequence import Sequence

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
PIECE_BYTES = 1 << 20  # between two looks at the pace and at whether to stop
PINNED_SHARE = 0.1  # of the usable blocks: a link slower than its load must not take the pool away from the sequences


class Target(Protocol):
    """Where the bytes of a sequence go."""

    def open(self, request_id: str) -> Iterator[BinaryIO]:
        """One stream for one sequence, closed at the end."""
        ...


class FolderTarget:
    """One file a sequence; only the newest `keep` stay, so that a long run does not fill the disk, and none that is
    half written."""

    def __init__(self, folder: Path, keep: int = 8) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"transfer folder {folder} cannot be made: {error.strerror or error}") from error
        self._folder = folder
        self._kept: dict[Path, None] = {}  # the oldest first
        self._keep = keep

    def open(self, request_id: str) -> Iterator[BinaryIO]:
        path = self._folder / f"{request_id.replace('/', '_')}.kv"
        stream = path.open("wb")
        try:
            with stream:  # whose end writes what is left, and may find the disk full
                yield stream
        except BaseException:
            self._kept.pop(path, None)
            path.unlink(missing_ok=True)
            raise
        self._kept.pop(path, None)  # a request that comes again has the newest file
        self._kept[path] = None
        while len(self._kept) > self._keep:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            oldest.unlink(missing_ok=True)


class PeerTarget:
    """One connection a sequence to `host:port` or `unix:/path`."""

    def __init__(self, address: str) -> None:
        self._address = address
        host, _, port = address.rpartition(":")
        if not address.startswith("unix:") and not (host and port.isdigit()):
            raise SettingsError(f"transfer peer {address!r} is neither host:port nor unix:/path")

    def open(self, request_id: str) -> Iterator[BinaryIO]:
        if self._address.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(self._address.removeprefix("unix:"))
        else:
            host, _, port = self._address.rpartition(":")
            connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
        with connection, connection.makefile("wb") as stream:
            yield stream


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """What was sent. A descriptor is one contiguous piece of memory: a run of blocks."""

    sequences: int = 0
    failed: int = 0
    skipped: int = 0  # not sent, since too many blocks were pinned
    blocks: int = 0
    descriptors: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    sequence: Sequence
    table: tuple[int, ...]
    pinned: tuple[int, ...]


class Transfers:
    """Hands finished sequences to the sending thread and gives their blocks back once they are sent.

    All methods are for the engine's thread; the sending thread only reads pinned blocks and calls `wake`.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: KVCache,
        target: Target,
        *,
        bytes_per_second: float | None = None,
        pinned_share: float = PINNED_SHARE,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """`pinned_share`: of the usable blocks, that all transfers together may pin; one alone may always go.
        `clock` and `wait` are what the rate is held by; by default real seconds, and a wait that `close` ends."""
        if bytes_per_second is not None and not bytes_per_second > 0:  # so that NaN is refused too
            raise SettingsError(f"transfer rate {bytes_per_second} bytes/s must be above 0")
        if not 0 <= pinned_share <= 1:
            raise SettingsError(f"transfers may pin a share of 0 to 1 of the pool, not {pinned_share}")
        self._pool, self._cache, self._target = pool, cache, target
        self._most_pinned = int(pinned_share * pool.usable_blocks)
        self._wake = wake
        self._pins: Counter[int] = Counter()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[tuple[_Job, TransferTotals]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._pacer = None
        if bytes_per_second is not None:
            self._pacer = Pacer(bytes_per_second, clock=clock, wait=wait or self._stopping.wait)
        self.in_flight = 0
        self.totals = TransferTotals()
        self._thread = threading.Thread(target=self._send_all, name="kv-transfer", daemon=True)
        self._thread.start()

    def start(self, sequence: Sequence) -> bool:
        """Pin the sequence's blocks and queue it. A block in two transfers at once is pinned once.

        False, and counted, where others are in flight and too many blocks would be pinned: it is not sent then, and
        its blocks are the caller's to release.
        """
        table = tuple(sequence.table)
        fresh = [block for block in table if block not in self._pins]
        if self.in_flight and len(self._pins) + len(fresh) > self._most_pinned:
            self.totals = replace(self.totals, skipped=self.totals.skipped + 1)
            return False
        self._pool.pin(fresh)
        self._pins.update(table)
        self.in_flight += 1
        self._jobs.put(_Job(sequence, table, table))
        return True

    def collect(self) -> list[Sequence]:
        """Unpin what has been sent since the last call; returns the sequences, whose blocks can be released."""
        done: list[Sequence] = []
        while True:
            try:
                job, totals = self._sent.get_nowait()
            except queue.Empty:
                return done
            self._pins.subtract(job.pinned)
            free = [block for block in job.pinned if not self._pins[block]]
            for block in free:
                del self._pins[block]
            self._pool.unpin(free)
            self.in_flight -= 1
            self.totals = _sum(self.totals, totals)
            done.append(job.sequence)

    def close(self) -> None:
        """Break off what is under way and end the thread."""
        self._stopping.set()
        self._jobs.put(None)
        self._thread.join()

    def _send_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            totals = TransferTotals(failed=1)
            try:
                if not self._stopping.is_set():
                    totals = self._send(job)
            except OSError as error:
                # A full disk or a peer that left must not keep the blocks: the sequence is given up, the pool is not.
                if not self._stopping.is_set():
                    log.warning("transfer of %s failed: %s", job.sequence.request_id, error)
            self._sent.put((job, totals))
            self._wake()

    def _send(self, job: _Job) -> TransferTotals:
        runs = [(first, count) for first, _, count in coalesce((block, i) for i, block in enumerate(job.table))]
        cache = self._cache
        sent = 0
        header = {
            "request_id": job.sequence.request_id,
            "blocks": list(job.table),
            "runs": runs,
            "block_shape": list(cache.blocks.shape[1:]),
            "block_bytes": cache.block_bytes,
            "dtype": cache.format.name,
            "head_dim": cache.geometry.head_dim,
            "tokens": job.sequence.computed,
        }
        pacer = self._pacer
        if pacer is not None:
            pacer.begin()
        with contextmanager(self._target.open)(job.sequence.request_id) as stream:
            stream.write(json.dumps(header).encode() + b"\n")
            for first, count in runs:
                at_once = max(1, PIECE_BYTES // cache.block_bytes)
                for start in range(first, first + count, at_once):
                    self._require_going()
                    piece = cache.read_blocks(start, min(at_once, first + count - start))
                    stream.write(piece)
                    sent += piece.nbytes
                    if pacer is not None:
                        pacer.sent(piece.nbytes)
        if pacer is not None:
            pacer.end()
            self._require_going()  # what a slower link would still have to send has not arrived
        return TransferTotals(1, 0, 0, len(job.table), len(runs), sent)

    def _require_going(self) -> None:
        if self._stopping.is_set():
            raise OSError("the engine is shutting down")


def receive(stream: BinaryIO) -> tuple[dict[str, object], list[bytes]]:
    """Read one sequence as a peer does: its header, and each block's bytes in table order."""
    header = json.loads(stream.readline())
    return header, [stream.read(header["block_bytes"]) for _ in header["blocks"]]


def _sum(left: TransferTotals, right: TransferTotals) -> TransferTotals:
    return TransferTotals(
        left.sequences + right.sequences,
        left.failed + right.failed,
        left.skipped + right.skipped,
        left.blocks + right.blocks,
        left.descriptors + right.descriptors,
        left.sent_bytes + right.sent_bytes,
    )
