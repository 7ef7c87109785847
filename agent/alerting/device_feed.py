"""Readings of devices and host memory. What the device monitor does not know has no number here either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from agent.devices.model import NOTHING_READ, DevicesView
from agent.devices.signals import signals
from alerts.readings import Reading


@dataclass(slots=True)
class DeviceFeed:
    """Puts what the device monitor's signals say beside the agent's own reading."""

    devices: Callable[[], DevicesView] = lambda: NOTHING_READ

    def readings(self, own: Reading) -> Iterator[Reading]:
        """The agent's reading with the numbers of its host, since no two readings may have the same labels; then one of
        each device and of each engine's process."""
        view = self.devices()
        if view.taken_monotonic is None:
            yield own  # nothing was read yet, so nothing is absent either
            return
        subjects: dict[tuple[tuple[str, str], ...], Reading] = {(): own}
        for one in signals(view):
            subject = tuple(sorted(one.labels.items()))
            name = "/".join(value for _, value in subject)
            reading = subjects.get(subject) or Reading(
                source=f"device:{name}", labels={**own.labels, **dict(subject)}, numbers={}, link=own.link
            )
            told = {"reason": one.reason} if one.reason and one.value else {}
            subjects[subject] = replace(
                reading,
                numbers={**reading.numbers, one.name: one.value},
                texts={"reason": "none", **reading.texts, **told},
            )
        yield from subjects.values()
