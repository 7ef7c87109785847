"""Whether an engine is well, as its map tells it: a pure decision with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from agent.model import NANOSECONDS
from agent.wire import EngineState
from engine_shim.snapshot import MapSnapshot


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each silence may last, in seconds."""

    stall_seconds: float = 3.0  # requests run and no step ends
    stale_seconds: float = 5.0  # no heartbeat
    # Requests run and steps end, yet nothing is published.
    publish_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """`reason` is "" for a live engine."""

    state: EngineState
    reason: str


def judge(
    snapshot: MapSnapshot, *, writer_alive: bool, now_unix: float, limits: Limits, torn_seconds: float = 0.0
) -> Judgement:
    """The state of an engine with a readable map.

    A hung engine keeps its heartbeat thread, so *stalled* is judged by steps while requests run; a stopped process
    loses the heartbeat too and is *stalled* by the same rule, or *stale* where it had nothing to do. A writer that
    holds no lock on its map any more is *gone*, however it ended.

    `torn_seconds` is how long no whole snapshot could be had, so that `snapshot` is an old one, of which only flags and
    heartbeat are of now. Whether steps end cannot be told meanwhile; a heartbeat speaks for them.
    """
    last_sign_ns = max(snapshot.last_step_unix_ns, snapshot.identity.created_unix_ns)
    if torn_seconds > 0:
        last_sign_ns = max(last_sign_ns, snapshot.heartbeat_unix_ns)
    step_age = _age(now_unix, last_sign_ns)
    heartbeat_age = _age(now_unix, snapshot.heartbeat_unix_ns)
    publish_age = _age(now_unix, snapshot.published_unix_ns)
    silent = heartbeat_age >= limits.stale_seconds
    if not writer_alive:
        how = "in good order" if snapshot.flags.closing else "without closing its map"
        return Judgement("gone", f"the engine ended {how}")
    if snapshot.flags.sleeping and not silent:
        return Judgement("sleeping", "the engine has given its KV memory back")
    if snapshot.running_requests > 0 and step_age >= limits.stall_seconds:
        also = f", nor a heartbeat for {heartbeat_age:.0f} s: the process is stopped" if silent else ""
        return Judgement(
            "stalled", f"{snapshot.running_requests} requests run and no step has ended for {step_age:.0f} s{also}"
        )
    if silent:
        return Judgement("stale", f"no heartbeat for {heartbeat_age:.0f} s")
    if torn_seconds >= limits.stale_seconds:
        return Judgement("stale", f"no whole snapshot could be had for {torn_seconds:.0f} s")
    if torn_seconds == 0 and snapshot.running_requests > 0 and publish_age >= limits.publish_seconds:
        return Judgement("stale", f"nothing published for {publish_age:.0f} s")
    return Judgement("live", "")


def _age(now_unix: float, then_unix_ns: int) -> float:
    return max(0.0, now_unix - then_unix_ns / NANOSECONDS)
