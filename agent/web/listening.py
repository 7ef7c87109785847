"""The listening socket and the HTTP server on it: the same for a live agent and for a recording that is played back."""

from __future__ import annotations

import errno
import signal
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from agent.config import AgentSettings
from agent.web.connections import ACCEPTED_AT_ONCE, BACKLOG, BoundedServer, bounded_protocol
from engine_shim.errors import KvatlasError, SettingsError

SHUTDOWN_SECONDS = 3


class AgentStartError(KvatlasError):
    """The agent cannot serve; the text says why and what to do."""


def bind(settings: AgentSettings) -> socket.socket:
    """The listening socket. Raises SettingsError where there is no such address, AgentStartError where it is not to
    be had."""
    host, port = settings.address
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a part of a name is too long, or empty
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise SettingsError(
            f"listen={settings.listen}: no such host ({reason}); give an address of this machine"
        ) from error
    # The protocol is named because asyncio sets TCP_NODELAY only where it is: without that, each answer on a connection
    # that is kept alive waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            what = (
                f"port {port} of {host} is in use; stop what listens there, or choose another with --listen HOST:PORT"
            )
            raise AgentStartError(what) from error
        raise AgentStartError(
            f"listen={settings.listen}: {error.strerror}; choose another with --listen HOST:PORT"
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL under which the socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: ASGIApp, *, most: int) -> BoundedServer:
    """A server that holds at most `most` connections and ends SHUTDOWN_SECONDS after it is asked to."""
    return BoundedServer(
        uvicorn.Config(
            app,
            loop="asyncio",
            http=bounded_protocol(most),
            backlog=ACCEPTED_AT_ONCE,
            ws="none",
            proxy_headers=False,  # who asks is who is connected: whoever is may write any address into a header
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
    )


def end_on_signal(server: BoundedServer) -> None:
    """Let SIGTERM and SIGINT end the server. It raises the signal that ended it once more after its shutdown; with this
    the process ends with 0."""

    def leave(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
