"""The faults of a soak. Each takes the world, breaks one thing, waits, mends it, and says in `world.faults` when."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks._soak_watch import Samples
from benchmarks._soak_world import PATIENCE_SECONDS, SoakBroken, World, counted_engine
from tests.alerts.slack_receiver import Answer, Receiver

GONE = ["engine-gone"]
SILENT = ["engine-stalled", "map-stale"]
CLOCK_STEP_SECONDS = 7200.0
SPARE_DESCRIPTORS = 2
FLOOD, DRIPPERS = 40, 8
DAMAGES = 256


@contextmanager
def fault(world: World, name: str, engine: str = "", rules: Sequence[str] = ()) -> Iterator[None]:
    """Write down when it was; `rules` are those one of which must tell of it."""
    entry = {"name": name, "engine": engine, "began": world.clock.now(), "ended": float("inf")}
    world.faults.append(entry)
    if rules:
        world.expected.append({"rules": list(rules), "engine": engine, "began": entry["began"]})
    try:
        yield
    finally:
        entry["ended"] = world.clock.now()


def kill_engine(world: World, name: str) -> None:
    """kill -9 of an engine, which an operator starts again."""
    with fault(world, "engine killed", name, GONE):
        world.end_engine(name, signal.SIGKILL)
        time.sleep(12)
        world.start_engine(name)


def restart_engine(world: World, name: str) -> None:
    """One that ends as it should and comes again, as in a rollout."""
    with fault(world, "engine restarted", name):
        world.end_engine(name, signal.SIGTERM)
        time.sleep(3)
        world.start_engine(name)


def stop_engine(world: World, name: str) -> None:
    """SIGSTOP, and SIGCONT after a while."""
    process = world.engines[name].process
    assert process is not None
    with fault(world, "engine stopped", name, SILENT):
        process.send_signal(signal.SIGSTOP)
        time.sleep(20)
        process.send_signal(signal.SIGCONT)


def fill_state(world: World) -> None:
    """The disk of the state folder is full."""
    with fault(world, "disk full"), _filled(world.state):
        time.sleep(15)


def fill_maps(world: World) -> None:
    """The tmpfs of the maps is full: an engine that starts meanwhile has no map and says so; the others go on."""
    with fault(world, "tmpfs full", "late"), _filled(world.maps):
        command = counted_engine(world.maps, 99, 20_000, 20)
        late = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        if late.returncode == 0 or "no map" not in late.stderr:
            world.surprises.append(f"an engine in a full tmpfs: exit {late.returncode}, {late.stderr[-200:]}")
        time.sleep(5)


def step_clock(world: World) -> None:
    """The host's clock is set two hours ahead, and back again."""
    with fault(world, "clock stepped"):
        world.clock.step(CLOCK_STEP_SECONDS)
        time.sleep(12)
        world.clock.step(0)
        time.sleep(2)


def corrupt_maps(world: World, name: str, alive: str) -> None:
    """The map of an engine that was killed is damaged, and so is a copy of one that runs."""
    dice = random.Random(7)
    copy = world.maps / "copy.dp0.tp0.pp0.kv.kvmap"
    with fault(world, "maps damaged", name):
        world.end_engine(name, signal.SIGKILL)
        _damage(world.maps / f"{world.engines[name].pool}.kvmap", dice)
        shutil.copyfile(world.maps / f"{world.engines[alive].pool}.kvmap", copy)
        for _ in range(6):
            _damage(copy, dice)
            time.sleep(2)
        copy.unlink()
        world.start_engine(name)


def slow_network(world: World, receivers: Sequence[Receiver], alarm: Callable[[], None]) -> None:
    """Receivers that answer late or never, while there is something to tell; and clients that read a byte at a time."""

    def late() -> Answer | None:
        if random.random() < 0.5:
            return Answer(hang=True)
        time.sleep(3)
        return None

    with fault(world, "network slow"):
        for receiver in receivers:
            receiver.choose = late
        readers = [threading.Thread(target=_drip, args=(world, 25.0), daemon=True) for _ in range(DRIPPERS)]
        for reader in readers:
            reader.start()
        alarm()
        for reader in readers:
            reader.join(60)
        for receiver in receivers:
            receiver.choose = lambda: None


def out_of_descriptors(world: World) -> None:
    """The agent may open hardly another file, while many connect."""
    assert world.agent is not None
    pid = world.agent.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with fault(world, "descriptors"), ExitStack() as flood:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (world.agent.num_fds() + SPARE_DESCRIPTORS, before[1]))
        for _ in range(FLOOD):
            flood.enter_context(socket.create_connection(("127.0.0.1", world.agent_port), 5))
        time.sleep(12)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def kill_agent(world: World, samples: Samples) -> None:
    """kill -9 of the agent, which is started again; how much of the past it has lost."""
    assert world.agent is not None
    samples.look()
    with fault(world, "agent killed"):
        world.agent.kill()
        world.agent.wait(PATIENCE_SECONDS)
        at = world.clock.now()
        world.start_agent()
    for engine in samples.times:
        kept = _kept_before(samples, engine, at)
        world.kills.append({"at": at, "kept": max(kept, default=0.0)})


def _kept_before(samples: Samples, engine: str, at: float) -> set[float]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := samples.between(engine, at - 60.0, at)) is None:
        if time.monotonic() > deadline:
            raise SoakBroken("the agent does not answer after its start")
        time.sleep(0.2)
    return {one for one in found if one <= at}


@contextmanager
def _filled(folder: Path) -> Iterator[None]:
    """Not a byte is left on that file system within."""
    path = folder / "full"
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for size in (1 << 20, 4096, 1):
            with _until_full():
                while True:
                    os.write(file, b"\0" * size)
        yield
    finally:
        os.close(file)
        path.unlink()


@contextmanager
def _until_full() -> Iterator[None]:
    """An error that there is no room is what one waits for."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _damage(path: Path, dice: random.Random) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for _ in range(DAMAGES):
            file.seek(dice.randrange(size))
            file.write(bytes([dice.randrange(256)]))


def _drip(world: World, seconds: float) -> None:
    """Ask for much, and read it a byte at a time."""
    until = time.monotonic() + seconds
    with suppress(OSError), socket.create_connection(("127.0.0.1", world.agent_port), 10) as connection:
        connection.settimeout(10)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while time.monotonic() < until and connection.recv(1):
            time.sleep(0.02)
