"""Joins devices, maps and processes: which engine is on which device, and whose its memory is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent.devices.accounting import EngineClaim, OtherClaim, attribute, find_uuid
from agent.devices.model import DeviceProcess, DeviceSample, DeviceView, EngineHere, NamedProcess
from agent.devices.processes import LocalProcess, ProcessTable
from agent.sampling.model import AgentView, rank_name

TIER_SUFFIX = "-sectors"  # of a pool that shows the memory of another one again, in larger pieces


def engines_of(view: AgentView) -> tuple[EngineHere, ...]:
    """The processes that hold pools now; pools of one process are one. Those that ended hold nothing any more."""
    found: dict[tuple[str, str, int, int], EngineHere] = {}
    for sample in view.samples.values():
        if sample.state == "gone":
            continue
        identity = sample.identity
        key = (identity.engine_id, rank_name(identity), identity.pid, identity.pid_start_ticks)
        counts = not (sample.snapshot.flags.sleeping or identity.pool.endswith(TIER_SUFFIX))
        size = identity.total_blocks * identity.block_bytes if counts else 0
        engine = found.get(key) or EngineHere(*key, identity.gpu_uuids, identity.medium, 0)
        found[key] = replace(
            engine,
            pool_bytes=engine.pool_bytes + size,
            gpu_uuids=tuple(dict.fromkeys((*engine.gpu_uuids, *identity.gpu_uuids))),
        )
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Join:
    """One round's: all devices, all engines, and those of them whose process is visible here."""

    devices: Sequence[DeviceSample]
    engines: Sequence[EngineHere]
    here: Sequence[tuple[EngineHere, LocalProcess]]
    table: ProcessTable

    def views(self) -> tuple[DeviceView, ...]:
        """Every device with its memory attributed."""
        return tuple(self._view(device) for device in self.devices)

    def _view(self, device: DeviceSample, mates: Sequence[DeviceSample] = ()) -> DeviceView:
        """`mates` are slices whose memory is this one's: what is on them is in these rows."""
        slices = []
        shown: set[int] = set()  # GPU instances whose memory stands in rows already
        for one in device.slices:
            if one.gpu_instance is not None and one.gpu_instance in shown:
                slices.append(DeviceView(one, None, ()))
                continue
            if one.gpu_instance is not None and one.memory is not None:
                shown.add(one.gpu_instance)
            same = one.gpu_instance is not None
            slices.append(
                self._view(one, [other for other in device.slices if same and other.gpu_instance == one.gpu_instance])
            )
        named = list(dict.fromkeys(engine for one in (device, *mates) for engine in self._named(one)))
        owners = self._owners(device, *mates)
        processes = None if device.processes is None else tuple(self._name(*one) for one in owners)
        if device.memory is None or any(one.attribution for one in slices):
            ids = {one.engine_id for one in (*named, *(owner for _, owner in owners if owner))}
            return DeviceView(device, None, tuple(sorted(ids)), processes, tuple(slices))
        claims, others = self._claims(named, owners)
        ids = {claim.engine.engine_id for claim in claims}
        attribution = attribute(device.memory, claims, others)
        return DeviceView(device, attribution, tuple(sorted(ids)), processes, tuple(slices))

    def _owners(self, *devices: DeviceSample) -> list[tuple[DeviceProcess, EngineHere | None]]:
        """Each process once, with the engine whose it is, by pid and start time."""
        listed = {process.pid: process for device in reversed(devices) for process in device.processes or ()}
        return [(listed[pid], self.table.owner(pid, self.here)) for pid in sorted(listed)]

    def _name(self, process: DeviceProcess, owner: EngineHere | None) -> NamedProcess:
        # Outside of the machine's first namespace that pid may be of another process here, so that no name is given.
        local = self.table.look(process.pid) if owner is not None or self.table.sees_all else None
        return NamedProcess(
            process.pid, process.used_bytes, owner.engine_id if owner else "", local.name if local else ""
        )

    def _named(self, device: DeviceSample) -> list[EngineHere]:
        """Engines whose map names this device."""
        known = [one.uuid for parent in self.devices for one in (parent, *parent.slices) if one.uuid]
        return [
            engine
            for engine in self.engines
            if engine.medium != "cpu"
            and device.uuid is not None
            and any(find_uuid(uuid, known) == device.uuid for uuid in engine.gpu_uuids)
        ]

    def _claims(
        self, named: Sequence[EngineHere], owners: Sequence[tuple[DeviceProcess, EngineHere | None]]
    ) -> tuple[list[EngineClaim], OtherClaim]:
        """What engines hold by their processes; the rest is of others, seen or unseen."""
        held: dict[EngineHere, int | None] = {}
        known = unseen_bytes = unseen = 0
        pids_are_ours = self.table.sees_all
        for process, owner in owners:
            size = process.used_bytes
            if owner is not None and owner.medium != "cpu":
                held[owner] = held.get(owner) if size is None else (held.get(owner) or 0) + size
            elif owner is not None or pids_are_ours:
                known += size or 0
            else:
                unseen, unseen_bytes = unseen + 1, unseen_bytes + (size or 0)
        # An engine whose map names no device is on those where its process is.
        engines = [*named, *(engine for engine in held if engine not in named)]
        return [EngineClaim(engine, held.get(engine)) for engine in engines], OtherClaim(known, unseen_bytes, unseen)
