"""The control socket as a file, who may use it, and what forks and deaths leave of it."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine_shim.control.mailbox import ControlMailbox, ControlTicket
from engine_shim.control.messages import (
    SCHEMA,
    CompactRequest,
    ErrorReply,
    MovingRequest,
    RunReply,
    StatusReply,
    StatusRequest,
    SwitchReply,
    encode_request,
    parse_reply,
)
from engine_shim.control.peer import MAX_ADDRESS_BYTES, Peer, refusal, socket_path
from engine_shim.control.server import ControlServer
from engine_shim.errors import ControlUnavailable, MapBusy

if TYPE_CHECKING:
    from tests.engine_shim.control.conftest import Call, Caller, Serve, StartEngine

PATIENCE_SECONDS = 120.0
SOMEBODY = 65534  # nobody's uid on most systems, and not ours
GROUP = 54321
STATUS = StatusReply(moving=True, relocation=None, running=False, policy="vllm", reason="")
STATUS_OF_ENGINE = StatusReply(moving=True, relocation=False, running=False, policy="vllm", reason="")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user: run the tests as root")


# The socket's file


def test_the_socket_stands_beside_the_map_for_user_and_group(serve: Serve, map_path: Path) -> None:
    before = os.umask(0o077)
    try:
        server, _ = serve()
    finally:
        os.umask(before)
    assert server.path == map_path.with_suffix(".sock")
    found = server.path.lstat()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert [path.name for path in map_path.parent.iterdir()] == [server.path.name]
    server.close()
    server.close()
    assert list(map_path.parent.iterdir()) == []


def test_closing_answers_what_is_open(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    runner = call(server).say(CompactRequest())
    run = mailbox.next()
    waiting = call(server).say(StatusRequest())
    assert mailbox.awake.acquire(timeout=PATIENCE_SECONDS)
    server.close()
    assert runner.error().error == "timeout"
    assert waiting.error().error == "unavailable"
    mailbox.answer(run, STATUS)
    assert mailbox.take() is None


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("length", [1, 150])
def test_long_paths_are_served_and_found(tmp_path: Path, serve: Serve, call: Call, depth: int, length: int) -> None:
    folder = tmp_path.joinpath(*["f" * 60] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    map_path = folder / ("e" * length + ".dp0.tp0.pp0.kv.kvmap")
    server, mailbox = serve(path=map_path)
    assert (len(os.fsencode(server.path)) > MAX_ADDRESS_BYTES) == (depth > 0 or len(os.fsencode(server.path)) > 107)
    caller = call(socket_path(map_path)).say(StatusRequest())
    mailbox.answer(mailbox.next(), STATUS)
    assert caller.reply() == STATUS
    with pytest.raises(MapBusy):
        ControlServer.start(map_path, ControlMailbox())
    server.close()
    assert list(folder.iterdir()) == []


def test_long_names_are_short_distinct_and_the_same_wherever_the_folder_is() -> None:
    names = [f"{'e' * 100}{i}.dp0.tp0.pp0.kv.kvmap" for i in range(50)] + ["é" * 50 + ".kvmap"]
    paths = [socket_path(Path("/run/kvatlas") / name) for name in names]
    assert len(set(paths)) == len(names)
    assert all(len(os.fsencode(path.name)) <= 83 and path.suffix == ".sock" for path in paths)
    assert [socket_path(Path("/host/var") / name).name for name in names] == [path.name for path in paths]
    assert socket_path(Path("/a/x.kv.kvmap")) == Path("/a/x.kv.sock")


def test_a_live_socket_is_not_taken_over(serve: Serve, map_path: Path, call: Call) -> None:
    server, mailbox = serve()
    with pytest.raises(MapBusy, match="live engine"):
        ControlServer.start(map_path, ControlMailbox())
    assert ControlServer.offer(map_path, ControlMailbox()) is None
    caller = call(server).say(StatusRequest())
    mailbox.answer(mailbox.next(), STATUS)
    assert caller.reply() == STATUS


def test_a_stale_socket_is_replaced(serve: Serve, map_path: Path, call: Call) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(map_path.with_suffix(".sock")))
        dead.listen()
    server, mailbox = serve()
    caller = call(server).say(StatusRequest())
    mailbox.answer(mailbox.next(), STATUS)
    assert caller.reply() == STATUS


def test_another_kind_of_file_is_left_alone(map_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = map_path.with_suffix(".sock")
    path.write_text("precious")
    with pytest.raises(ControlUnavailable, match="in the way"):
        ControlServer.start(map_path, ControlMailbox())
    assert ControlServer.offer(map_path, ControlMailbox()) is None
    assert "offers no control" in caplog.text
    assert path.read_text() == "precious"
    path.unlink()
    path.symlink_to("/dev/null")
    with pytest.raises(ControlUnavailable, match="in the way"):
        ControlServer.start(map_path, ControlMailbox())


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ControlUnavailable, match="No such file"):
        ControlServer.start(tmp_path / "nowhere" / "e.kvmap", ControlMailbox())


def test_closing_leaves_a_successor_alone(serve: Serve) -> None:
    server, _ = serve()
    server.path.unlink()
    server.path.write_text("another's")
    server.close()
    assert server.path.read_text() == "another's"


# Who may


@pytest.mark.parametrize(
    ("peer", "allowed"),
    [
        (Peer(1, 1000, 5), True),
        (Peer(1, 0, 5), True),
        (Peer(1, 2000, 100), True),
        (Peer(1, 2000, 5, (7, 100)), True),
        (Peer(1, 2000, 5, (7,)), False),
        (Peer(1, 2000, 1000), False),
        (Peer(1, 2000, 5, None), False),
    ],
)
def test_same_user_root_and_group_may(peer: Peer, allowed: bool) -> None:
    reason = refusal(peer, own_uid=1000, socket_gid=100)
    assert (reason == "") is allowed
    assert allowed or "uid 2000" in reason


@pytest.fixture
def open_map_path() -> Iterator[Path]:
    """A map path in a folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="kvatlas-test-"))
    folder.chmod(0o755)
    yield folder / "engine.kvmap"
    shutil.rmtree(folder)


# Becomes somebody else once Python has started, since that one may not be able to read where Python is; then asks.
STRANGER = f"""
import os, socket, sys
path, groups = sys.argv[1], [int(group) for group in sys.argv[2:]]
os.setgroups(groups); os.setgid({SOMEBODY}); os.setuid({SOMEBODY})
peer = socket.socket(socket.AF_UNIX)
try:
    peer.connect(path)
except PermissionError:
    print("not let in"); sys.exit()
try:
    peer.sendall(b'{{"schema":"{SCHEMA}","op":"status"}}\\n')
except OSError:
    pass
print(peer.makefile().readline())
"""


def ask_as_stranger(path: Path, *groups: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STRANGER, str(path), *map(str, groups)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@needs_root
@pytest.mark.parametrize("groups", [(), (GROUP + 1,)])
def test_another_user_is_refused(
    serve: Serve, open_map_path: Path, caplog: pytest.LogCaptureFixture, groups: tuple[int, ...]
) -> None:
    """By the file's mode, and where that was widened by the server itself."""
    server, mailbox = serve(path=open_map_path)
    os.chown(server.path, -1, GROUP)
    assert ask_as_stranger(server.path, *groups).communicate()[0].strip() == "not let in"
    server.path.chmod(0o666)
    for _ in range(2):
        reply = parse_reply(ask_as_stranger(server.path, *groups).communicate()[0].encode())
        assert isinstance(reply, ErrorReply)
        assert reply.error == "refused"
        assert f"uid {SOMEBODY}" in reply.message
        assert f"gid {GROUP}" in reply.message
    assert mailbox.take() is None
    server.close()
    assert caplog.text.count("control refused") == 1


@needs_root
def test_a_member_of_the_sockets_group_is_served(serve: Serve, open_map_path: Path) -> None:
    server, mailbox = serve(path=open_map_path)
    os.chown(server.path, -1, GROUP)
    stranger = ask_as_stranger(server.path, GROUP + 1, GROUP)
    ticket = mailbox.next()
    assert ticket.asker.uid == SOMEBODY
    assert ticket.asker.groups == (GROUP, GROUP + 1)
    mailbox.answer(ticket, STATUS)
    assert parse_reply(stranger.communicate()[0].encode()) == STATUS
    server.close()


@needs_root
def test_a_peer_in_more_groups_than_can_be_told_is_refused(serve: Serve, open_map_path: Path) -> None:
    server, _ = serve(path=open_map_path)
    os.chown(server.path, -1, GROUP)
    groups = range(GROUP - 150, GROUP + 150)
    reply = parse_reply(ask_as_stranger(server.path, *groups).communicate()[0].encode())
    assert isinstance(reply, ErrorReply)
    assert "as far as the kernel tells" in reply.message
    server.close()


# Forks and deaths


def test_a_forked_child_neither_serves_nor_removes(serve: Serve, call: Call) -> None:
    server, mailbox = serve()
    waiting = call(server).say(StatusRequest())
    assert mailbox.awake.acquire(timeout=PATIENCE_SECONDS)
    child = os.fork()
    if child == 0:
        fault = 0
        try:
            fault |= server.active << 0
            fault |= mailbox.pending() << 1
            fault |= (mailbox.take() is not None) << 2
            mailbox.answer(ControlTicket(StatusRequest(), Peer(1, 1, 1)), STATUS)
            server.close()
            fault |= (not server.path.exists()) << 3
        except BaseException:  # noqa: BLE001 - the child must not run on into pytest
            fault = 127
        os._exit(fault)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ticket = mailbox.take()
    assert ticket is not None
    mailbox.answer(ticket, STATUS)
    assert waiting.reply() == STATUS


def answered(call: Call, path: Path) -> bool:
    """Is there anybody at the socket?"""
    try:
        call(path)
    except ConnectionRefusedError:
        return False
    return True


def test_a_child_does_not_keep_a_dead_engines_socket_alive(
    start_engine: StartEngine, map_path: Path, call: Call
) -> None:
    engine, told = start_engine("--fork")
    assert call(Path(told["path"])).say(StatusRequest()).reply() == STATUS_OF_ENGINE
    engine.kill()
    engine.wait()
    os.kill(told["child"], 0)  # the child lives
    deadline = time.monotonic() + PATIENCE_SECONDS
    while answered(call, Path(told["path"])):  # the child lets go once it runs at all, which may be after its parent
        assert time.monotonic() < deadline
        time.sleep(0.02)
    _, again = start_engine()
    assert again["path"] == told["path"]
    assert call(Path(again["path"])).say(StatusRequest()).reply() == STATUS_OF_ENGINE


def status_of(caller: Caller) -> StatusReply:
    reply = caller.say(StatusRequest()).reply()
    assert isinstance(reply, StatusReply)
    return reply


def wait_for_run(caller: Caller, *, running: bool) -> StatusReply:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (status := status_of(caller)).running is not running:
        assert time.monotonic() < deadline, status
    return status


def test_an_engine_killed_in_mid_run_ends_the_connection_and_is_replaced(
    start_engine: StartEngine, map_path: Path, call: Call
) -> None:
    engine, told = start_engine()
    path = Path(told["path"])
    runner = call(path).say(CompactRequest(max_moves=10**9))
    watcher = call(path)
    wait_for_run(watcher, running=True)
    engine.kill()
    engine.wait()
    assert runner.is_closed()
    start_engine()
    assert not status_of(call(path)).running


def test_a_peer_killed_in_mid_run_leaves_the_engine_running(start_engine: StartEngine, call: Call) -> None:
    _, told = start_engine()
    path = Path(told["path"])
    line = encode_request(CompactRequest(max_moves=10**9)).decode()
    program = """
import socket, sys, time
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
peer.sendall(sys.argv[2].encode())
time.sleep(600)
"""
    peer = subprocess.Popen([sys.executable, "-c", program, path, line])
    watcher = call(path)
    wait_for_run(watcher, running=True)
    peer.kill()
    peer.wait()
    assert status_of(watcher).running
    assert watcher.say(MovingRequest(on=False)).reply() == SwitchReply(on=False)
    status = wait_for_run(watcher, running=False)
    assert status.last_report is not None
    assert status.last_report.decision == "aborted"
    assert status.last_report.moved_blocks > 0
    assert status.reason == "moving is switched off"


def test_an_idle_engine_is_woken(start_engine: StartEngine, call: Call) -> None:
    _, told = start_engine()
    reply = call(Path(told["path"])).say(CompactRequest(max_moves=5)).reply()
    assert isinstance(reply, RunReply)
    assert (reply.decision, reply.moved_blocks) == ("compacted", 5)
