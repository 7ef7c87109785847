"""How many files this process may have open, and who gets them: maps, connections, and a reserve for the rest."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from agent.sampling.discovery import MAX_MAPS

MAX_CONNECTIONS = 256
# Listening and polling, standard streams, the audit log, scans, control sockets, what libraries open for a moment, and
# connections that are accepted and not yet closed again: up to four rounds of connections.ACCEPTED_AT_ONCE.
RESERVE = 48


@dataclass(frozen=True, slots=True)
class Shares:
    """Open files that maps and connections may take."""

    maps: int
    connections: int


def share_out(limit: int) -> Shares:
    """Divide what is left of `limit` beside the reserve: a quarter for connections, the rest for maps; of each, one at
    least and no more than there is a use for."""
    left = max(0, limit - RESERVE)
    connections = min(MAX_CONNECTIONS, max(1, left // 4))
    return Shares(maps=min(MAX_MAPS, max(1, left - connections)), connections=connections)


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, which needs no privilege; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_MAPS + MAX_CONNECTIONS + RESERVE if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # a sandbox may forbid it; then it stays as it is
            return soft
        return wanted
    return soft
