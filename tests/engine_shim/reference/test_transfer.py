"""Transfers: the bytes that arrive are those of the blocks, which stay pinned until then and are given back after."""

from __future__ import annotations

import io
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_shim.layout import BlockState
from engine_shim.reference.engine import Engine, Pace
from engine_shim.reference.sequence import sequence_of
from engine_shim.reference.transfer import FolderTarget, receive
from engine_shim.workload import TraceRequest

EngineMaker = Callable[..., Engine]
Server = Callable[..., None]
Received = queue.SimpleQueue[bytes]


def until_finished(engine: Engine, *requests: TraceRequest) -> list[list[bytes]]:
    """Serve to the last token; returns each sequence's blocks as they lay in memory at that time."""
    sequences = [sequence_of(request, 16) for request in requests]
    contents: list[list[bytes]] = [[] for _ in sequences]
    for sequence in sequences:
        assert engine.submit(sequence)
    while engine.scheduler.has_work:
        engine.step()
        for sequence, blocks in zip(sequences, contents, strict=True):
            if sequence.table:
                blocks[:] = [bytes(engine.cache.read_blocks(b, 1)) for b in sequence.table]
    return contents


def drain(engine: Engine) -> None:
    """Step until every transfer has been collected. The sending thread is real, so this waits for it."""
    engine.serve(iter(()), Pace(), until_idle=True)


def test_a_file_holds_the_blocks(make_engine: EngineMaker, tmp_path: Path, device: str) -> None:
    engine = make_engine(policy="lowest-any", transfer_folder=tmp_path, device=device)
    (wanted,) = until_finished(engine, TraceRequest(7, 0.0, 100, 20))
    drain(engine)
    header, blocks = receive(io.BytesIO((tmp_path / "7.kv").read_bytes()))
    assert blocks == wanted
    assert header["request_id"] == "7"
    assert header["tokens"] == 119
    totals = engine.report().transfers
    assert (totals.sequences, totals.failed, totals.blocks) == (1, 0, 8)
    assert totals.descriptors == 1  # one run of blocks
    assert header["block_shape"] == [4, 2, 16, 2, 32]
    assert totals.sent_bytes == 8 * engine.cache.block_bytes


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[str, Received]]:
    """A peer on a unix socket that hands on what it gets, one connection a sequence."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = tmp_path / "peer.sock"
    listener.bind(str(path))
    listener.listen()
    received: Received = queue.SimpleQueue()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                received.put(stream.read())

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield f"unix:{path}", received
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def test_a_peer_gets_the_blocks(make_engine: EngineMaker, peer: tuple[str, Received]) -> None:
    address, received = peer
    engine = make_engine(transfer_peer=address, transfer_pinned_share=1.0)
    wanted = until_finished(engine, TraceRequest(0, 0.0, 100, 20), TraceRequest(1, 0.0, 33, 40))
    drain(engine)
    engine.close()
    # Sent is not yet read: the peer's thread may still be at the last connection.
    streams = [received.get(timeout=120) for _ in wanted]
    by_id = {str(header["request_id"]): blocks for header, blocks in map(receive, map(io.BytesIO, streams))}
    assert sorted(by_id) == ["0", "1"]
    assert by_id == {"0": wanted[0], "1": wanted[1]}


def test_blocks_are_pinned_until_they_are_sent(make_engine: EngineMaker, tmp_path: Path) -> None:
    """The reader of a fifo decides when the transfer goes on."""
    engine = make_engine(transfer_folder=tmp_path, blocks=40, transfer_pinned_share=1.0)
    os.mkfifo(tmp_path / "0.kv")
    until_finished(engine, TraceRequest(0, 0.0, 512, 2, (1,)))
    for _ in range(20):
        engine.step()
        assert engine.pool.num_pinned == 33
        assert engine.pool.num_used == 0
    # A later sequence shares the pinned prefix and is done with it first.
    until_finished(engine, TraceRequest(1, 0.0, 560, 2, (1, 2)))
    assert engine.report().prefix_hit_tokens == 512
    assert (engine.pool.states() == BlockState.PINNED).sum() > 33
    with (tmp_path / "0.kv").open("rb") as stream:
        _, blocks = receive(stream)
    assert len(blocks) == 33
    drain(engine)
    assert engine.pool.num_pinned == 0
    assert engine.pool.num_used == 0
    assert engine.pool.num_cached == 35
    assert engine.report().transfers.sequences == 2


def test_a_failed_transfer_gives_its_blocks_back(make_engine: EngineMaker, tmp_path: Path) -> None:
    engine = make_engine(transfer_peer=f"unix:{tmp_path / 'nobody'}")
    until_finished(engine, TraceRequest(0, 0.0, 100, 20))
    drain(engine)
    assert engine.report().transfers.failed == 1
    assert engine.pool.num_pinned == 0
    assert engine.pool.num_allocatable == 63


def test_closing_breaks_a_slow_transfer_off(make_engine: EngineMaker, tmp_path: Path) -> None:
    engine = make_engine(transfer_folder=tmp_path, transfer_bytes_per_second=1.0, transfer_pinned_share=1.0)
    until_finished(engine, TraceRequest(0, 0.0, 100, 20), TraceRequest(1, 0.0, 100, 20))
    assert engine.pool.num_pinned > 0
    engine.close()
    assert engine.report().transfers.failed == 2
    assert engine.pool.num_pinned == 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_no_file(make_engine: EngineMaker, tmp_path: Path) -> None:
    engine = make_engine(transfer_folder=tmp_path, transfer_pinned_share=1.0)
    for index in range(12):
        (tmp_path / f"{index}.kv").symlink_to("/dev/full")
        until_finished(engine, TraceRequest(index, 0.0, 30, 3))
    drain(engine)
    assert engine.report().transfers.failed == 12
    assert engine.pool.num_pinned == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reason", [OSError("the engine is shutting down"), KeyboardInterrupt()])
def test_a_file_that_is_broken_off_is_removed(tmp_path: Path, reason: BaseException) -> None:
    target = FolderTarget(tmp_path, keep=2)

    def break_off(request_id: str) -> None:
        with contextmanager(target.open)(request_id) as stream:
            stream.write(b"half")
            stream.flush()
            raise reason

    with contextmanager(target.open)("whole") as stream:
        stream.write(b"whole")
    for number in range(20):
        with pytest.raises(type(reason)):
            break_off(str(number))
    assert [path.name for path in tmp_path.iterdir()] == ["whole.kv"]


def test_a_request_that_comes_again_has_one_file_the_newest(tmp_path: Path) -> None:
    target = FolderTarget(tmp_path, keep=2)
    for request_id in ("0", "1", "0", "2"):
        with contextmanager(target.open)(request_id) as stream:
            stream.write(b"kv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.kv", "2.kv"]


def test_only_the_newest_files_are_kept(make_engine: EngineMaker, serve: Server, tmp_path: Path) -> None:
    engine = make_engine(transfer_folder=tmp_path, transfer_pinned_share=1.0)
    serve(engine, [TraceRequest(index, 0.1 * index, 30, 3) for index in range(12)])
    assert engine.report().transfers.sequences == 12
    assert sorted(int(path.stem) for path in tmp_path.iterdir()) == list(range(4, 12))


def test_a_link_slower_than_its_load_pins_a_bounded_share(make_engine: EngineMaker, tmp_path: Path) -> None:
    engine = make_engine(transfer_folder=tmp_path, transfer_bytes_per_second=1.0, transfer_pinned_share=0.4, blocks=101)
    for index in range(8):
        until_finished(engine, TraceRequest(index, 0.0, 160, 2, (index,)))  # 11 blocks each
        assert engine.pool.num_pinned <= 40
    assert engine.pool.num_pinned == 33
    assert engine.pool.num_used == 0  # those that were not sent were released all the same
    assert engine.report().transfers.skipped == 5
    engine.close()
    assert engine.report().transfers.failed == 3


def test_a_transfer_larger_than_the_bound_goes_alone(make_engine: EngineMaker, tmp_path: Path) -> None:
    engine = make_engine(transfer_folder=tmp_path, transfer_bytes_per_second=1.0, transfer_pinned_share=0.0)
    until_finished(engine, TraceRequest(0, 0.0, 160, 2, (0,)), TraceRequest(1, 0.0, 160, 2, (1,)))
    assert engine.pool.num_pinned == 11
    assert engine.report().transfers.skipped == 1
