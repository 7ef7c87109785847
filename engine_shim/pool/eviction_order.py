"""Cached blocks in the order of their eviction, where contents may move to another block and keep their turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

_NAMELESS = -1  # for a block that is no member, while another one's contents go by its number


class EvictionOrder(Collection[int]):
    """A queue of distinct blocks. Members go by names, which are their own numbers until contents move: so that
    adding and evicting stay single operations on an ordered dict, and moving costs no walk through it."""

    __slots__ = ("_block_of", "_last_name", "_name_of", "_names")

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self._names: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)
        self._block_of: dict[int, int] = {}  # for names that are not their block's number
        self._name_of: dict[int, int] = {}  # for blocks whose number is not their name
        self._last_name = _NAMELESS

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, block: object) -> bool:
        return self._name_of.get(block, block) in self._names if isinstance(block, int) else False

    def __iter__(self) -> Iterator[int]:
        if not self._block_of:
            return iter(self._names)
        block_of = self._block_of
        return (block_of.get(name, name) for name in self._names)

    def add(self, blocks: Sequence[int]) -> None:
        """Put blocks that are not members at the end."""
        if not self._name_of.keys().isdisjoint(blocks):
            blocks = [self._new_name(block) for block in blocks]
        self._names.update(dict.fromkeys(blocks))

    def remove(self, blocks: Iterable[int]) -> None:
        """Take members out, wherever they stand."""
        names = self._names
        for block in blocks:
            name = self._name_of.get(block, block)
            del names[name]
            if name in self._block_of:
                self._forget(name, block)

    def pop_oldest(self, count: int) -> list[int]:
        """Take the first `count` members out; there must be as many."""
        pop = self._names.popitem
        names = [pop(last=False)[0] for _ in range(count)]
        if self._block_of.keys().isdisjoint(names):  # the usual case, whatever else has moved
            return names
        blocks = [self._block_of.get(name, name) for name in names]
        for name, block in zip(names, blocks, strict=True):
            if name in self._block_of:
                self._forget(name, block)
        return blocks

    def replace(self, block: int, other: int) -> None:
        """Let `other`, no member, stand where the member `block` stood."""
        name = self._name_of.get(block, block)
        self._lose_name(block)
        if name == other:
            del self._block_of[name]
            self._name_of.pop(other, None)
        else:
            self._block_of[name] = other
            self._name_of[other] = name

    def clear(self) -> None:
        self._names.clear()
        self._block_of.clear()
        self._name_of.clear()

    def _new_name(self, block: int) -> int:
        if block not in self._name_of:
            return block
        self._last_name -= 1
        self._name_of[block] = self._last_name
        self._block_of[self._last_name] = block
        return self._last_name

    def _forget(self, name: int, block: int) -> None:
        """Drop what is known of a name that is gone and of its block."""
        self._block_of.pop(name, None)
        self._lose_name(block)
        if self._name_of.get(name) == _NAMELESS:
            del self._name_of[name]

    def _lose_name(self, block: int) -> None:
        if block in self._names:  # as the name of other contents
            self._name_of[block] = _NAMELESS
        else:
            self._name_of.pop(block, None)
