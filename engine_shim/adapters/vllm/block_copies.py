"""The block copies of one scheduler step, which its worker makes as one gather and then one scatter.

Nothing has been copied when blocks change their contents again within the step, so each destination is traced back to
where its contents lie before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Copy = tuple[int, int]  # source, destination


class StepCopies:
    """What is to be copied with the step that is being scheduled.

    A change is worked out first (`composed`) and then taken over in one dictionary operation (`apply`), so that there
    is no state between.
    """

    def __init__(self) -> None:
        self._origins: dict[int, int] = {}  # block to where its contents are; to itself where nothing is to be copied

    def __len__(self) -> int:
        return sum(block != origin for block, origin in self._origins.items())

    def sources(self) -> set[int]:
        """What is still to be read."""
        return {origin for block, origin in self._origins.items() if block != origin}

    def composed(self, copies: Sequence[Copy]) -> dict[int, int]:
        """The change that these copies make. All of them are of one moment: a source may be another's destination."""
        origins = self._origins
        change = {source: source for source, _ in copies}
        change |= {destination: origins.get(source, source) for source, destination in copies}
        return change

    def apply(self, change: Mapping[int, int]) -> None:
        """Take over what `composed` has worked out."""
        self._origins.update(change)

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody wants the contents of these any more: they were handed out."""
        for block in blocks:
            self._origins.pop(block, None)

    def drain(self, others: Iterable[Copy]) -> list[Copy]:
        """All copies of the step, each destination once; `others` are vLLM's own, made after ours in its mind. Empty
        afterwards."""
        origins = self._origins
        copies = [(origins.get(source, source), destination) for source, destination in others]
        copies += [(origin, block) for block, origin in origins.items() if block != origin]
        origins.clear()
        return copies
