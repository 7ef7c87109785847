"""Asks an engine over its control socket: one connection and one deadline for each request."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from engine_shim.control.messages import (
    MAX_LINE_BYTES,
    AllocatorReply,
    AllocatorRequest,
    ControlRequest,
    ErrorReply,
    RunReply,
    StatusReply,
    SwitchReply,
    encode_request,
    parse_reply,
)
from engine_shim.control.peer import socket_address, socket_path
from engine_shim.control.server import ControlLimits
from engine_shim.errors import ControlMalformed, ControlRefused, ControlTimeout, ControlUnavailable, KvatlasError

# Beyond the engine's own deadlines, so that its reply, which says more than silence does, comes first.
GRACE_SECONDS = 2.0
CONNECT_SECONDS = 5.0


class EngineControl:
    """The engine that writes one map. Holds nothing open between requests; may be used from several threads."""

    def __init__(self, map_path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = socket_path(map_path)
        self._clock = clock

    def request(
        self, request: ControlRequest, *, timeout_seconds: float | None = None
    ) -> RunReply | SwitchReply | StatusReply:
        """Send a request and wait for what came of it; without a timeout, for as long as the engine may take.

        Raises:
            ControlUnavailable: no socket, its engine has ended, or the engine does not come to take the request.
            ControlTimeout: no reply in time; whether the request was carried out is not known.
            ControlRefused: the engine says no: to this user, to what is asked for, or because a run is in progress.
            ControlMalformed: the request cannot be sent as it is, or the reply is none of this version's.
        """
        reply = self._ask(request, timeout_seconds)
        if isinstance(reply, AllocatorReply):
            raise ControlMalformed(f"{self.path}: the engine answered about its allocator, which it was not asked for")
        return reply

    def allocator(self, *, snapshot: bool = False, timeout_seconds: float | None = None) -> AllocatorReply:
        """What torch's allocator holds there; with `snapshot` also in a file beside the map. Raises as `request`."""
        reply = self._ask(AllocatorRequest(snapshot=snapshot), timeout_seconds)
        if not isinstance(reply, AllocatorReply):
            raise ControlMalformed(f"{self.path}: the engine answered {reply.kind} when asked for its allocator")
        return reply

    def _ask(
        self, request: ControlRequest, timeout_seconds: float | None
    ) -> RunReply | SwitchReply | StatusReply | AllocatorReply:
        line = encode_request(request)
        if timeout_seconds is None:
            timeout_seconds = ControlLimits().wait_seconds(request) + GRACE_SECONDS
        deadline = self._clock() + timeout_seconds
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            self._connect(connection, deadline)
            reply = parse_reply(self._exchange(connection, line, deadline))
        if isinstance(reply, ErrorReply):
            raise self._error(reply)
        return reply

    def _connect(self, connection: socket.socket, deadline: float) -> None:
        # With a timeout of Python's, connecting would fail at once where the backlog is full for a moment.
        seconds = max(0.001, min(CONNECT_SECONDS, deadline - self._clock()))
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        )
        try:
            with socket_address(self.path) as address:
                connection.connect(address)
        except FileNotFoundError as error:
            raise ControlUnavailable(
                f"{self.path} is not there: this engine offers no control. It has ended, had KVAtlas taken out of it, "
                "was started with --no-control, is of a kind that is watched alone (Transformers), or could not make "
                "the socket, which its log says"
            ) from error
        except ConnectionRefusedError as error:
            raise ControlUnavailable(f"{self.path}: the engine that made it has ended; start it again") from error
        except PermissionError as error:
            raise ControlRefused(
                f"{self.path} may not be used by this user; run as the engine's user, as root, or in the group of "
                "that file"
            ) from error
        except BlockingIOError as error:
            raise ControlUnavailable(
                f"{self.path}: the engine does not accept connections, it may be stopped; see whether its process runs"
            ) from error
        except OSError as error:
            raise ControlUnavailable(f"{self.path} cannot be connected to: {error.strerror}") from error

    def _exchange(self, connection: socket.socket, line: bytes, deadline: float) -> bytes:
        received = bytearray()
        try:
            connection.settimeout(max(0.001, deadline - self._clock()))
            try:
                connection.sendall(line)
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                    raise
                # The engine turned us away before it read anything; what it said is still to be fetched.
            while b"\n" not in received:
                connection.settimeout(max(0.001, deadline - self._clock()))
                data = connection.recv(MAX_LINE_BYTES)
                if not data:
                    break
                received += data
                if len(received) > MAX_LINE_BYTES:
                    raise ControlMalformed(f"{self.path}: the reply is longer than {MAX_LINE_BYTES} bytes")
        except TimeoutError as error:
            raise ControlTimeout(
                f"{self.path}: no reply in time; whether the request was carried out is not known. Ask for the status"
            ) from error
        except OSError as error:
            raise self._broken(error.strerror) from error
        reply, newline, _ = received.partition(b"\n")
        if not newline:
            raise self._broken("it closed the connection")
        return bytes(reply)

    def _broken(self, how: str | None) -> ControlTimeout:
        return ControlTimeout(
            f"{self.path}: the engine did not reply ({how}); whether the request was carried out is not known. "
            "See whether the engine still runs, then ask for the status"
        )

    def _error(self, reply: ErrorReply) -> KvatlasError:
        text = f"{reply.message} ({reply.action})"
        if reply.error == "unavailable":
            return ControlUnavailable(f"{self.path}: {text}")
        if reply.error == "timeout":
            return ControlTimeout(f"{self.path}: {text}")
        return ControlRefused(text, error=reply.error, field=reply.field)
