"""Which blocks of a vLLM pool to hand out, so that what is in use lies together at low addresses.

Nothing here knows vLLM: it is given what each block holds, and answers with block numbers. The rules are those of
`engine_shim`'s own policy `relocating`: what is in use stays below a ceiling, of which a share of the allocatable
blocks (`slack`) is left below, where a block that holds nothing is taken without a copy; several blocks at once come
from runs; and only so many prefixes are displaced as the budget of copies allows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

TAKEN, EMPTY, PREFIX = 0, 1, 2  # in use, or nobody's; allocatable and holds nothing; allocatable and holds a prefix
RUN_BLOCKS = 5
SEARCHED_BLOCKS = 1 << 17  # by one search for runs: a pass over so many takes at most some 0.2 ms
SLACK = 0.0
STRETCH = 0.1
_ALLOCATABLE = bytes((0, 1, 1)) + bytes(253)


class Placement:
    """One byte a block, searched with memchr. Marks may be stale, for vLLM has ways around its own methods: whoever
    takes a block looks at the block itself, and tells `mark` where the two differ."""

    def __init__(self, blocks: int, *, slack: float = SLACK) -> None:
        self._marks = bytearray(blocks)
        self._allocatable = bytearray(blocks)  # 1 where the mark is not TAKEN
        self._floor = [0, 0, 0]  # by mark: no block below has it
        self._clear_share = 1.0 - slack

    def mark(self, block: int, mark: int) -> None:
        """What this block is from now on. May be told again."""
        self._marks[block] = mark
        self._allocatable[block] = mark != TAKEN
        if block < self._floor[mark]:
            self._floor[mark] = block

    def mark_all(self, marks: bytes) -> None:
        """What all blocks are."""
        self._marks[:] = marks
        self._allocatable[:] = marks.translate(_ALLOCATABLE)
        self._floor = [0, 0, 0]

    def taken(self, blocks: Iterable[int]) -> None:
        """These are allocatable no more."""
        marks, allocatable = self._marks, self._allocatable
        for block in blocks:
            marks[block] = allocatable[block] = TAKEN

    def ceiling(self, allocatable: int, count: int) -> int:
        """What is in use lies below it once `count` more of the `allocatable` blocks are."""
        return len(self._marks) - int(self._clear_share * max(0, allocatable - count))

    def choose(self, victims: Sequence[int], allocatable: int, copies: int) -> list[int]:
        """As many blocks as there are `victims`, ascending, to be handed out in their place: what the victims hold is
        given up, and of the blocks that are chosen at most `copies` hold a prefix that has to be copied away first.

        What is returned is marked as taken, and victims that are not among it as empty.
        """
        count = len(victims)
        ceiling = self.ceiling(allocatable, count)
        for victim in victims:
            self.mark(victim, EMPTY)
        if count == 1:
            chosen = self._lowest(EMPTY, 1, ceiling) or self._lowest(PREFIX, min(1, copies), ceiling)
        else:
            chosen, displaced = self._runs(count, ceiling, allocatable, copies)
            chosen += self._lowest(EMPTY, count - len(chosen), ceiling)
            chosen += self._lowest(PREFIX, min(count - len(chosen), copies - displaced), ceiling)
        marks = self._marks
        rest = [victim for victim in sorted(victims) if marks[victim] == EMPTY][: count - len(chosen)]
        self.taken(rest)
        return sorted(chosen + rest)

    def choose_lower(
        self, hits: Sequence[int], allocatable: int, copies: int, keep: Collection[int]
    ) -> list[tuple[int, int]]:
        """(hit, place) for those unreferenced `hits` that lie too high: one copy each where the place holds nothing,
        two where hit and place change contents. Places in `keep`, which are hits themselves, are passed over.

        Marks stay as they are; places are good for this call alone.
        """
        ceiling = self.ceiling(allocatable, len(hits))
        high = [hit for hit in hits if hit >= ceiling]
        places = self._lowest_beside(EMPTY, min(len(high), copies), ceiling, keep)
        empty = len(places)
        places += self._lowest_beside(PREFIX, min(len(high) - empty, (copies - empty) // 2), ceiling, keep)
        return list(zip(high, places, strict=False))

    def _lowest_beside(self, mark: int, count: int, end: int, keep: Collection[int]) -> list[int]:
        """The `count` lowest blocks so marked below `end` and not in `keep`, or as many as there are; none is taken."""
        found: list[int] = []
        passed: list[int] = []
        while len(found) < count and (more := self._lowest(mark, count - len(found), end)):
            found += [block for block in more if block not in keep]
            passed += more
        for block in passed:
            self.mark(block, mark)
        return found

    def _runs(self, count: int, ceiling: int, allocatable: int, copies: int) -> tuple[list[int], int]:
        """Up to `count` blocks in runs, and how many of them hold a prefix. Below the ceiling where there are such;
        else the bottom of the large run above is taken before a prompt is made of single holes."""
        chosen: list[int] = []
        displaced = 0
        for end in (ceiling, ceiling + int(STRETCH * max(0, allocatable - count))):
            found = self._take_runs(count - len(chosen), end, copies - displaced)
            displaced += sum(self._marks[block] == PREFIX for block in found)
            self.taken(found)
            chosen += found
            if len(chosen) == count:
                break
        return chosen, displaced

    def _lowest(self, mark: int, count: int, end: int) -> list[int]:
        """Take the `count` lowest blocks so marked below `end`, or as many as there are."""
        marks, floor = self._marks, self._floor[mark]
        found: list[int] = []
        while len(found) < count:
            block = marks.find(mark, floor, end)
            if block < 0:
                floor = max(floor, end)
                break
            marks[block] = self._allocatable[block] = TAKEN
            found.append(block)
            floor = block + 1
        self._floor[mark] = floor
        return found

    def _take_runs(self, count: int, end: int, copies: int) -> list[int]:
        """Up to `count` allocatable blocks that lie in runs of RUN_BLOCKS or of as many as are still wanted, lowest
        first; the search ends where one more would displace more than `copies` prefixes. Marks stay."""
        marks, allocatable = self._marks, self._allocatable
        position = max(min(self._floor[EMPTY], self._floor[PREFIX]), min(end, len(marks)) - SEARCHED_BLOCKS)
        found: list[int] = []
        while (missing := count - len(found)) > 0:
            start = allocatable.find(1, position, end)  # passes over what is taken ten times as fast
            if start >= 0:
                start = allocatable.find(b"\x01" * min(RUN_BLOCKS, missing), start, end)
            if start < 0:
                break
            stop = min(start + missing, end)
            gap = allocatable.find(0, start, stop)
            position = stop if gap < 0 else gap
            for block in range(start, position):
                copies -= marks[block] == PREFIX
                if copies < 0:
                    return found
                found.append(block)
        return found
