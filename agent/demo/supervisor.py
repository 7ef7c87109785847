"""Child processes that never outlive this one: each is tied to it by the kernel, and a guardian cleans up behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.demo.guardian import IF_EMPTY, KILL_SECONDS, TERM_SECONDS, end_groups, start_ticks
from engine_shim.allocation_map.folders import writer_folder
from engine_shim.errors import KvatlasError, SettingsError

DEMO_PREFIX = "demo-"  # of the folder for maps
PORTS_TRIED = 50
TAIL_LINES = 5


class ChildFailed(KvatlasError):
    """A process that should run ended by itself; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process, with what it writes to standard output and to its log."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    log: Path


class Supervisor:
    """A context: its children, its private folder in memory and its scratch folder are gone after it.

    Also where this process is killed: the kernel then signals each child, and the guardian, a small process of its
    own, waits for them and removes the folders.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = dict(environment)
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        parent = writer_folder(self._environment).path
        self._made_parent = not parent.exists()
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.maps = Path(tempfile.mkdtemp(prefix=DEMO_PREFIX, dir=parent))
            self.scratch = Path(tempfile.mkdtemp(prefix="kvatlas-demo-"))
        except OSError as error:
            raise SettingsError(
                f"no folder can be made in {parent}: {error.strerror}; set KVATLAS_DIR to one that can be written"
            ) from error
        made_parent = [IF_EMPTY, str(parent)] if self._made_parent else []
        self._guardian = subprocess.Popen(
            [sys.executable, "-P", "-m", "agent.demo.guardian", str(self.maps), str(self.scratch), *made_parent],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def start(
        self,
        name: str,
        module: Sequence[str],
        *,
        python: Path | None = None,
        folder: Path | None = None,
        **environment: str,
    ) -> Child:
        """Run `python -P -m module...`; its maps go to, and are looked for in, this supervisor's folder, and what it
        writes to the folder for temporary files goes to the scratch one. `python` and `folder` are another
        interpreter and another current folder."""
        output, log = self.scratch / f"{name}.out", self.scratch / f"{name}.log"
        tie = [sys.executable, "-P", "-m", "engine_shim.tether", str(os.getpid())]
        with output.open("wb") as out, log.open("wb") as err:
            process = subprocess.Popen(
                [*tie, str(python or sys.executable), "-P", "-m", *module],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment | {"KVATLAS_DIR": str(self.maps), "TMPDIR": str(self.scratch)} | environment,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others in order
            )
        child = Child(name, process, output, log)
        self.children.append(child)
        stdin, ticks = self._guardian.stdin, start_ticks(process.pid)
        if stdin is not None and ticks is not None:
            stdin.write(f"{process.pid} {ticks}\n".encode())
            stdin.flush()
        return child

    def check(self) -> None:
        """Raise ChildFailed for the first child that ended by itself."""
        for child in self.children:
            if child.process.poll() is not None:
                tail = child.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
                ended = f"{child.name} ended with status {child.process.returncode}"
                raise ChildFailed(": ".join([ended, " | ".join(tail)]) if tail else ended)

    def stop(self, children: Sequence[Child]) -> None:
        """End children in good order, kill what does not end in time."""
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        for child in children:
            try:
                child.process.wait(TERM_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        end_groups([child.process.pid for child in children])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(self.children)
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()
        try:
            self._guardian.wait(TERM_SECONDS + KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        for folder in (self.maps, self.scratch):  # where somebody ended the guardian
            shutil.rmtree(folder, ignore_errors=True)
        if self._made_parent:
            try:
                self.maps.parent.rmdir()
            except OSError:
                return  # somebody else has a map in it by now


def free_address(listen: str) -> tuple[str, int]:
    """HOST:PORT as given, or with the next port that is free; SettingsError where none of the next fifty is."""
    host, _, port_text = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port_text.isdecimal() or not 0 < int(port_text) < 65536:
        raise SettingsError(f"{listen!r} is not an address; give HOST:PORT, as in 127.0.0.1:9477")
    first = int(port_text)
    for port in range(first, min(first + PORTS_TRIED, 65536)):
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a part of a name is too long, or empty
            reason = error.strerror if isinstance(error, OSError) else "not a host name"
            raise SettingsError(f"{listen}: no such host ({reason}); give an address of this machine") from error
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise SettingsError(f"{listen}: {error.strerror}; give an address of this machine") from error
        return host, port
    raise SettingsError(f"{listen}: this port and the next {PORTS_TRIED - 1} are in use; give another")


def url(address: tuple[str, int]) -> str:
    """Where to point a client: an address that listens everywhere is reached over loopback."""
    host, port = address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not listened on
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def joined(address: tuple[str, int]) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
