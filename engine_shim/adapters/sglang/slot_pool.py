"""One allocator's pages in its map: what is taken, given back, put into the tree, locked there and let go again.

A page is FREE in the allocator's free list, CACHED in the tree and locked by nobody (evictable), else USED: a request's
own, or locked in the tree (protected). Calls only note which slots they were about, since SGLang takes little time over
each operation; what follows for the pages is worked out in bulk, in order, once the slot numbers are on the host.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim.adapters.sglang.indices import Copier, Ready, as_one, copy_out
from engine_shim.adapters.sglang.state_map import StateMap
from engine_shim.layout import BlockState

MOST_NOTES = 4096  # a pool whose steps nobody tells is brought up to date all the same

_FREE, _CACHED, _USED = int(BlockState.FREE), int(BlockState.CACHED), int(BlockState.USED)


class Note(Enum):
    """What was done to some slots; the second part of its value, `state`, is what their pages are after it."""

    TAKE = "handed out", _USED
    GIVE_BACK = "given back", _FREE
    LET_GO = "in the tree, locked by nobody", _CACHED
    LOCK = "in the tree, locked", _USED
    CLEAR = "everything is given back", _FREE

    def __init__(self, _: str, state: int) -> None:
        self.state = state  # an attribute: `value` is a property, and costs more than all else that is done with it


_KEPT = frozenset({Note.LET_GO, Note.LOCK})


class SlotPool:
    """Pages 0 to `pages`, of which 0 is padding. `states` is what they are by the notes up to now, (pages + 1,)."""

    def __init__(self, page_tokens: int, pages: int, shown: StateMap, copier: Copier = copy_out) -> None:
        self.map = shown
        self.states: NDArray[np.uint8] = np.zeros(pages + 1, np.uint8)
        self.states[0] = int(BlockState.RESERVED)
        self._page_tokens = page_tokens
        self._copier = copier
        self._notes: deque[tuple[Note, Any, Ready]] = deque()

    def note(self, what: Note, slots: Any = None) -> None:
        """Something was done to these slots, a tensor of SGLang's."""
        if slots is None:
            self._notes.append((what, None, _always))
        else:
            # What is given back may be a view of a request's row, which changes; what is handed out is one of the free
            # list, all of which would stay in memory. Only the tree's own values are small and never change.
            self._notes.append((what, *self._copier(slots, what in _KEPT)))
        if len(self._notes) >= MOST_NOTES:
            self.settle()

    def settle(self) -> None:
        """Bring `states` up to all that has arrived on the host."""
        notes = self._notes
        while notes and notes[0][2]():
            what, host, _ = notes.popleft()
            if what is Note.CLEAR:
                self.states[1:] = _FREE
                continue
            state, parts = what.state, [host]
            while notes and notes[0][0].state == state and notes[0][0] is not Note.CLEAR and notes[0][2]():
                parts.append(notes.popleft()[1])
            slots = as_one(parts)
            # One pass over them: what is no slot, 0 or less, falls on the padding, which is put right again.
            self.states.put(slots if self._page_tokens == 1 else slots // self._page_tokens, state, mode="clip")
            self.states[0] = int(BlockState.RESERVED)

    def adopt(self, free: NDArray[np.int64], cached: NDArray[np.int64]) -> None:
        """Begin with a pool in use: pages that are not free, and those of the tree that nobody locks."""
        self.states[1:] = _USED
        self.states[free] = _FREE
        self.states[cached] = _CACHED

    def publish(self, running: int, waiting: int, steps: int) -> None:
        """Show everything up to now."""
        self.settle()
        self.map.publish(self.states, running, waiting, steps)

    def pages_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The pages that these slots are in, possibly repeated."""
        pages = slots if self._page_tokens == 1 else slots // self._page_tokens
        return pages[pages > 0]  # 0 stands for padding, and for no slot


def _always() -> bool:
    return True
