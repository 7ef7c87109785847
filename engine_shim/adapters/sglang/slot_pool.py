"""One allocator's pages in its map: what is taken, given back, put into the tree, locked there and let go again.

A page is FREE in the allocator's free list, CACHED in the tree and locked by nobody (evictable), else USED: a request's
own, or locked in the tree (protected). SGLang takes little time over each operation, so that a call only writes down
the state of the pages that it was about: at once where their numbers are on the host, else in order as they arrive.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim.adapters.sglang.indices import Copier, Ready, copy_out
from engine_shim.adapters.sglang.state_map import StateMap
from engine_shim.layout import BlockState

MOST_NOTES = 4096  # a pool whose steps nobody tells is brought up to date all the same
MOST_WAITING = 16 * MOST_NOTES

_FREE, _CACHED, _USED = int(BlockState.FREE), int(BlockState.CACHED), int(BlockState.USED)
_RESERVED = int(BlockState.RESERVED)


class Note(Enum):
    """What was done to some slots; the second part of its value, `state`, is what their pages are after it."""

    TAKE = "handed out", _USED
    GIVE_BACK = "given back", _FREE
    LET_GO = "in the tree, locked by nobody", _CACHED
    LOCK = "in the tree, locked", _USED
    CLEAR = "everything is given back", _FREE

    def __init__(self, _: str, state: int) -> None:
        self.state = state  # an attribute: `value` is a property, and costs more than all else that is done with it


class Told(Enum):
    """How a note tells of its pages."""

    NEW = "slot numbers, the first of a page among those of every page that was free"
    WHOLE = "slot numbers, all of a page and then all of the next"
    SLOTS = "slot numbers, of any part of a page"
    PAGES = "page numbers"


class SlotPool:
    """Pages 0 to `pages`, of which 0 is padding. `states` is what they are by the notes up to the last `settle`."""

    def __init__(self, page_tokens: int, shown: StateMap, copier: Copier | None = None) -> None:
        """`copier` is for numbers of a device; one that is given is asked for all numbers."""
        self.map = shown
        self.states: NDArray[np.uint8] = shown.states
        self._page_tokens = page_tokens
        # A byte for each slot, that of a page's first one being the page's: dividing slot numbers would cost as much as
        # all else. Behind them lie a page that there is not, and one for -1, which SGLang's tables have for no slot.
        self._slots = shown.padded if page_tokens == 1 else np.zeros((len(self.states) + 2) * page_tokens, np.uint8)
        self._firsts = self._slots[::page_tokens]
        self._beyond = self._firsts[len(self.states) : -1]
        self._firsts[0] = _RESERVED
        self._copier = copier
        self._notes: deque[tuple[Note, Told, Any, Ready]] = deque()

    def note(self, what: Note, numbers: Any = None, told: Told = Told.SLOTS) -> None:
        """Something was done to what these numbers, a tensor of SGLang's, tell of; None for every page."""
        if not self._notes and (numbers is None or (self._copier is None and numbers.is_cpu)):
            self._apply(what, numbers, told)
            return
        self._notes.append((what, told, *self._under_way(numbers)))
        if len(self._notes) >= MOST_NOTES:
            self.settle()
            if len(self._notes) >= MOST_WAITING:
                raise RuntimeError(f"{MOST_WAITING:,} tensors of slot numbers have not arrived on the host")

    def _under_way(self, numbers: Any) -> tuple[Any, Ready]:
        if numbers is None:
            return None, _now
        if self._copier is not None:
            return self._copier(numbers)
        # What has to wait for others is copied: SGLang may write to it meanwhile.
        return (numbers.clone(), _now) if numbers.is_cpu else copy_out(numbers)

    @property
    def arrived(self) -> bool:
        """Has something arrived on the host that `states` does not show?"""
        return bool(self._notes) and self._notes[0][3]()

    def settle(self) -> None:
        """Bring `states` up to all that has arrived on the host, in order. IndexError for a page that there is not."""
        notes = self._notes
        while notes and notes[0][3]():
            what, told, host, _ = notes.popleft()
            self._apply(what, host, told)
        if self._beyond.any():
            raise IndexError(f"slot numbers beyond the {len(self.states) - 1:,} pages that the allocator began with")
        self._firsts[0] = _RESERVED  # on which fell what SGLang calls slot 0: padding, or no slot
        if self._page_tokens > 1:
            self.states[:] = self._firsts[: len(self.states)]

    def _apply(self, what: Note, host: Any, told: Told) -> None:
        if host is None:
            self._firsts[: len(self.states)] = what.state
            return
        numbers = host.numpy()
        if self._page_tokens > 1:
            if told is Told.PAGES or told is Told.SLOTS:
                self._firsts[numbers if told is Told.PAGES else numbers // self._page_tokens] = what.state
                return
            if told is Told.WHOLE:
                numbers = numbers[:: self._page_tokens]
        self._slots[numbers] = what.state

    def adopt(self, free: NDArray[np.int64], cached: NDArray[np.int64]) -> None:
        """Begin with a pool in use: pages that are not free, and those of the tree that nobody locks."""
        self._firsts[: len(self.states)] = _USED
        self._firsts[free] = _FREE
        self._firsts[cached] = _CACHED

    def publish(self, running: int, waiting: int, steps: int) -> None:
        """Show everything up to now."""
        self.settle()
        self.map.publish(running, waiting, steps)

    def pages_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The pages that these slots are in, possibly repeated."""
        pages = slots if self._page_tokens == 1 else slots // self._page_tokens
        return pages[pages > 0]  # 0 stands for padding, and for no slot


def _now() -> bool:
    return True
