"""Whether an engine is well, as its map tells it: a pure decision with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from agent.sampling.model import NANOSECONDS
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
class Ages:
    """Seconds since an engine last gave each sign."""

    step: float  # a step's end, or its start where none has ended
    heartbeat: float
    publish: float


@dataclass(slots=True)
class Silence:
    """How long a time that an engine writes has stayed as it is, by a clock that never goes back.

    The wall clocks of two processes are one clock, yet that may be set: an hour back, and a difference to it would
    call a stopped engine lively for an hour. They are compared only for how long before a look a change came, and
    believed only as far as the last look.
    """

    _value_ns: int | None = None
    _since: float = 0.0
    _looked: float = 0.0

    def seconds(self, value_ns: int, now_unix: float, now: float) -> float:
        """`value_ns` is what the engine has written, in Unix time; `now` is monotonic, both in seconds."""
        if value_ns != self._value_ns:
            age = max(0.0, now_unix - value_ns / NANOSECONDS)
            if self._value_ns is not None:
                age = min(age, now - self._looked)
            self._value_ns, self._since = value_ns, now - age
        self._looked = now
        return now - self._since


@dataclass(frozen=True, slots=True)
class Judgement:
    """`reason` is "" for a live engine."""

    state: EngineState
    reason: str


def judge(
    snapshot: MapSnapshot, ages: Ages, *, writer_alive: bool, limits: Limits, torn_seconds: float = 0.0
) -> Judgement:
    """The state of an engine with a readable map.

    A hung engine keeps its heartbeat thread, so *stalled* is judged by steps while requests run; a stopped process
    loses the heartbeat too and is *stalled* by the same rule, or *stale* where it had nothing to do. A writer that
    holds no lock on its map any more is *gone*, however it ended.

    `torn_seconds` is how long no whole snapshot could be had, so that `snapshot` is an old one, of which only flags and
    heartbeat are of now. Whether steps end cannot be told meanwhile; a heartbeat speaks for them.
    """
    step_age = min(ages.step, ages.heartbeat) if torn_seconds > 0 else ages.step
    silent = ages.heartbeat >= limits.stale_seconds
    if not writer_alive:
        how = "in good order" if snapshot.flags.closing else "without closing its map"
        return Judgement("gone", f"the engine ended {how}")
    if snapshot.flags.sleeping and not silent:
        return Judgement("sleeping", "the engine has given its KV memory back")
    if snapshot.running_requests > 0 and step_age >= limits.stall_seconds:
        also = f", nor a heartbeat for {ages.heartbeat:.0f} s: the process is stopped" if silent else ""
        return Judgement(
            "stalled", f"{snapshot.running_requests} requests run and no step has ended for {step_age:.0f} s{also}"
        )
    if silent:
        return Judgement("stale", f"no heartbeat for {ages.heartbeat:.0f} s")
    if torn_seconds >= limits.stale_seconds:
        return Judgement("stale", f"no whole snapshot could be had for {torn_seconds:.0f} s")
    if torn_seconds == 0 and snapshot.running_requests > 0 and ages.publish >= limits.publish_seconds:
        return Judgement("stale", f"nothing published for {ages.publish:.0f} s")
    return Judgement("live", "")
