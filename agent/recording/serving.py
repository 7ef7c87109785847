"""Serves a recording over HTTP until a signal, as the agent serves the maps of its host."""

from __future__ import annotations

import logging

from agent.config import AgentSettings
from agent.descriptors import raise_limit, share_out
from agent.log import EventLog, configure_logging
from agent.recording.player import Player
from agent.recording.reading import Recording
from agent.sampling.model import NANOSECONDS
from agent.web.listening import address_of, bind, end_on_signal, make_server
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
        server = make_server(player, most=share_out(raise_limit()).connections)
        end_on_signal(server)
        status = player.status()
        log.event(
            "replaying",
            address=address_of(listener),
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
