"""Serves a recording over HTTP until a signal, as the agent serves the maps of its host."""

from __future__ import annotations

import logging
import signal
from types import FrameType

import uvicorn

from agent.app import SHUTDOWN_SECONDS, bind
from agent.config import AgentSettings
from agent.descriptors import raise_limit, share_out
from agent.log import EventLog, configure_logging
from agent.recording.player import Player
from agent.recording.reading import Recording
from agent.sampling.model import NANOSECONDS
from agent.web.connections import ACCEPTED_AT_ONCE, BoundedServer, bounded_protocol
from agent.web.security import WriteGuard, is_loopback


def run_replay(
    recording: Recording, settings: AgentSettings, *, start_ns: int | None, speed: float, paused: bool
) -> None:
    """Serve until SIGTERM or SIGINT. Raises SettingsError or AgentStartError before anything has begun, RecordingError
    where what leads to the start is damaged."""
    configure_logging(settings.log_level)
    log = EventLog(logging.getLogger("kvatlas.replay"))
    token = settings.read_token()
    listener = bind(settings)
    try:
        guard = WriteGuard(token=token, listens_on_loopback=is_loopback(settings.address[0]))
        player = Player(recording, settings, guard, start_ns=start_ns, speed=speed, paused=paused)
        server = BoundedServer(
            uvicorn.Config(
                player,
                loop="asyncio",
                http=bounded_protocol(share_out(raise_limit()).connections),
                backlog=ACCEPTED_AT_ONCE,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )

        def leave(number: int, frame: FrameType | None) -> None:
            server.should_exit = True

        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)
        host, port = listener.getsockname()[:2]
        status = player.status()
        log.event(
            "replaying",
            address=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
            file=str(recording.path),
            engine=recording.header.id,
            seconds=round((recording.end_ns - recording.start_ns) / NANOSECONDS, 3),
            gaps=len(recording.gaps) + recording.more_gaps,
            ended=status.recording_ended,
            dropped=recording.torn,
        )
        player.start()
        try:
            server.run(sockets=[listener])
        finally:
            player.stop()
            log.event("stopped")
    finally:
        listener.close()
        recording.close()
