"""What an operator must know before believing a number: each condition says what it is and what to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from agent.client import AgentRefused
from agent.wire import AgentStatus, EngineSummary, ReplayStatus
from dashboard.wording import counted, duration, shortened

MEANINGFUL_STATES = ("live", "stale", "stalled")  # of pools whose states of blocks mean something
GOOD_ORDER = "in good order"  # how the agent's reason ends where an engine closed its map itself
HEARTBEAT_LOST_SECONDS = 3.0  # it beats twice a second

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One banner. Plain text: ids and reasons come from outside and are shown as they are."""

    severity: Severity
    what: str
    action: str


def unreachable(reason: str) -> Condition:
    return Condition(
        "error",
        f"Agent unreachable: {reason}. What follows would not be current, so nothing is shown.",
        "Start it with: kvatlas agent. If it listens elsewhere, start the dashboard with KVATLAS_AGENT_URL set to it.",
    )


def refused(error: AgentRefused) -> Condition:
    return Condition("error", f"The agent refused: {error.message}", error.action)


def no_engine(agent: AgentStatus) -> Condition:
    folders = ", ".join(agent.folders) or "no folder"
    return Condition(
        "info",
        f"No engine found. The agent is up and looks for allocation maps in {folders}.",
        "Start an engine with the shim installed, under the same user and with the same KVATLAS_DIR as the agent. "
        "kvatlas doctor checks both ends.",
    )


def not_listed(pool: str) -> Condition:
    return Condition(
        "warning",
        f"The agent no longer lists {pool}.",
        "Its engine ended or its map was removed. Pick another pool; this one comes back by itself if its engine does.",
    )


def no_such_agent(named: str, agents: int) -> Condition:
    there_are = "one agent" if agents == 1 else f"agents 1 to {agents}"
    return Condition(
        "error",
        f"No agent {shortened(named, 20)!r} is known: this dashboard has {there_are}. Nothing of another one is shown.",
        "Pick a pool above, or take agent= out of the page's address.",
    )


def unreadable_maps(unreadable: Sequence[str]) -> Condition:
    shown = "; ".join(unreadable[:3]) + (f"; and {len(unreadable) - 3} more" if len(unreadable) > 3 else "")
    return Condition(
        "warning",
        f"Seen and not readable: {shown}",
        "Run the agent as the engine's user or in its group, and with a version that knows the map.",
    )


def replayed(replay: ReplayStatus) -> Condition:
    """That nothing on the page is of now: said whatever else there is to say."""
    moment = datetime.fromtimestamp(replay.position_unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    goes_on = "at its end" if replay.at_end else "stopped" if replay.paused else f"at {replay.speed:g} times its speed"
    lost = counted(replay.lost_events, "event was", "events were")
    lost = f" {lost} lost when it was recorded." if replay.lost_events else ""
    fault = f" It stops here: {replay.fault}" if replay.fault else ""
    return Condition(
        "warning",
        f"A recording, not an engine: {replay.file} at {moment}, {goes_on}.{lost}{fault}",
        "POST /v1/replay goes to another place or speed; point the dashboard at an agent to see what runs now.",
    )


def conditions_of(engine: EngineSummary) -> list[Condition]:
    """All that stands between the operator and the numbers of this pool; empty for a live one."""
    found: list[Condition] = []
    because = f" ({engine.reason})" if engine.reason else ""
    if engine.state == "gone" and engine.reason.endswith(GOOD_ORDER):
        found.append(
            Condition(
                "info",
                f"The engine ended in good order. Its last map was read {duration(engine.snapshot_age_seconds)} ago.",
                "Its pool returns when it is started again.",
            )
        )
    elif engine.state == "gone":
        found.append(
            Condition(
                "error",
                f"Engine gone{because}. Its last map was read {duration(engine.snapshot_age_seconds)} ago.",
                "Look why it ended: its log, the kernel's out-of-memory messages. Its pool returns when it restarts.",
            )
        )
    elif engine.state == "stale":
        found.append(
            Condition(
                "error",
                f"Stale: nothing new for {duration(engine.snapshot_age_seconds)}{because}. The map below is old.",
                f"See whether process {engine.pid} still runs, or is stopped (kill -CONT {engine.pid} resumes it).",
            )
        )
    elif engine.state == "stalled":
        found.append(
            Condition(
                "error",
                f"Stalled: {engine.reason or 'no step has ended'}. The map below shows where it stopped.",
                _what_to_do_when_stalled(engine),
            )
        )
    elif engine.state == "sleeping":
        found.append(
            Condition(
                "info",
                f"Sleeping{because}: the engine has given its KV memory back. There is no map and no fragmentation.",
                "Wake the engine to see its pool again.",
            )
        )
    elif engine.state == "unreadable":
        found.append(
            Condition(
                "error",
                f"The map of this pool cannot be read{because}.",
                "Run kvatlas doctor beside the agent: it names the file, its owner and its version.",
            )
        )
    if engine.degraded:
        found.append(
            Condition(
                "warning",
                "Degraded: the shim in this engine has stopped recording after a fault of its own. "
                "The numbers no longer follow the pool.",
                "The engine itself is unharmed. Its log has one kvatlas line with the cause; a restart records again.",
            )
        )
    return found


def _what_to_do_when_stalled(engine: EngineSummary) -> str:
    """By cause: the heartbeat is a thread of its own, which a hung engine keeps and a stopped process loses."""
    pid = engine.pid
    if (engine.heartbeat_age_seconds or 0.0) < HEARTBEAT_LOST_SECONDS:
        return f"It hangs: take a stack of process {pid} (py-spy dump --pid {pid}) before restarting the engine."
    return f"Resume process {pid}: kill -CONT {pid}. (ps -o stat= -p {pid} says T while it is stopped.)"


def most_in_need(engines: Sequence[EngineSummary]) -> EngineSummary | None:
    """The pool to open the page on: one whose engine hangs, else whose sequences wait, else the most fragmented.

    Pools without a map to show come last, whatever is wrong with them.
    """
    return min(engines, key=_calmness, default=None)


def _calmness(engine: EngineSummary) -> tuple[bool, bool, bool, bool, float, str]:
    return (
        not map_is_meaningful(engine),
        engine.state == "live",
        not engine.forecast.admission_blocked,
        not engine.degraded,
        -(engine.fragmentation.rate or 0.0),
        engine.id,
    )


def map_is_meaningful(engine: EngineSummary) -> bool:
    """Whether there are blocks to draw at all: not for an engine that is gone, asleep or unreadable."""
    return engine.state in MEANINGFUL_STATES
