"""Asks engines over their control sockets what torch's allocator holds in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from agent.sampling.model import AgentView, PoolSample, rank_name
from engine_shim.control.messages import AllocatorReply
from engine_shim.errors import ControlMalformed, KvatlasError

TIMEOUT_SECONDS = 3.0
ASK_AGAIN_SECONDS = 60.0  # an engine that could not tell


@dataclass(frozen=True, slots=True)
class AllocatorSample:
    """What one process told. `devices` is by CUDA index there; names are those of the control socket, sizes bytes."""

    engine_id: str
    model: str
    rank: str
    reason: str  # why there is nothing, or what to beware of; "" where all is well
    backend: str = ""
    devices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class AllocatorControl(Protocol):
    """One engine's control socket; raises as EngineControl does."""

    def allocator(self, *, snapshot: bool = False, timeout_seconds: float | None = None) -> AllocatorReply: ...


class AllocatorPoll:
    """`read` asks every live engine once. For one thread."""

    def __init__(
        self,
        pools: Callable[[], AgentView],
        control_of: Callable[[Path], AllocatorControl],
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self._pools, self._control_of, self._monotonic = pools, control_of, monotonic
        self._silent: dict[tuple[str, int, int], tuple[str, float]] = {}  # pid and start: why, and when to ask again

    def read(self, say: Callable[[str], None]) -> tuple[AllocatorSample, ...]:
        """One sample a process. Does not raise."""
        processes: dict[tuple[str, int, int], PoolSample] = {}
        for sample in self._pools().samples.values():
            identity = sample.identity
            if sample.state in ("live", "stalled", "sleeping"):
                processes.setdefault((identity.engine_id, identity.pid, identity.pid_start_ticks), sample)
        for key in self._silent.keys() - processes.keys():
            del self._silent[key]
        return tuple(self._ask(key, sample, say) for key, sample in sorted(processes.items()))

    def _ask(self, key: tuple[str, int, int], sample: PoolSample, say: Callable[[str], None]) -> AllocatorSample:
        identity, now = sample.identity, self._monotonic()
        names = (identity.engine_id, identity.model, rank_name(identity))
        reason, again = self._silent.get(key, ("", now))
        if now < again:
            return AllocatorSample(*names, reason)
        say(f"the allocator of {sample.id}")
        try:
            reply = self._control_of(Path(sample.snapshot.path)).allocator(timeout_seconds=TIMEOUT_SECONDS)
        except ControlMalformed as error:
            reason = str(error)
        except KvatlasError as error:
            # An older shim calls the request malformed, in the same words as for any other.
            unknown = getattr(error, "error", "") == "bad_request"
            reason = "the engine's shim is too old to tell of its allocator" if unknown else str(error)
        else:
            if reply.available:
                self._silent.pop(key, None)
                return AllocatorSample(*names, reply.reason, reply.backend, _numbers(reply))
            reason = reply.reason
        self._silent[key] = (reason, now + ASK_AGAIN_SECONDS)
        return AllocatorSample(*names, reason)


def _numbers(reply: AllocatorReply) -> Mapping[str, Mapping[str, int]]:
    """The devices as the reply has them, without what is no number."""
    return MappingProxyType(
        {
            device: MappingProxyType(
                {name: one for name, one in told.items() if isinstance(one, int) and not isinstance(one, bool)}
            )
            for device, told in reply.devices.items()
            if isinstance(told, Mapping)
        }
    )
