"""Lets two unreferenced blocks of a vLLM pool change places in everything vLLM knows of their contents.

Afterwards each has the other's hashes and the other's place in the order of eviction; what lies in memory is for the
caller to copy. Hashes are given a new block inside of their entry, at the same place: of blocks with equal contents
vLLM takes the first, and popping and inserting would change which one that is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def unreferenced(block: Any) -> bool:
    """May the block's contents change? It is in the free queue, and nobody holds it. Count 0 alone does not say so."""
    return block.ref_cnt == 0 and block.next_free_block is not None and not block.is_null


def exchange(pool: Any, one: Any, other: Any) -> None:
    """Exchange hashes, places in the free queue, and vLLM's residency samples of two unreferenced blocks."""
    _exchange_hashes(pool, one, other)
    _exchange_places(one, other)
    collector = pool.metrics_collector
    if collector is not None:
        _exchange_items(collector.block_metrics, one.block_id, other.block_id)


def _exchange_hashes(pool: Any, one: Any, other: Any) -> None:
    more = pool.cached_block_hashes_by_block
    first, second = one.block_id, other.block_id
    names = dict.fromkeys(hash_ for hash_ in (one._block_hash, other._block_hash) if hash_ is not None)
    for block in (first, second) if more else ():
        names.update(dict.fromkeys(more.get(block, ())))
    entries: dict[Any, Any] = pool.cached_block_hash_to_block._cache
    replacement: dict[int, Any] = {first: other, second: one}
    for name in names:
        entry: Any = entries.get(name)
        if isinstance(entry, dict):
            known: list[Any] = [replacement.get(key, block) for key, block in entry.items()]
            entries[name] = {block.block_id: block for block in known}
        elif entry is not None and entry.block_id in replacement:
            entries[name] = replacement[entry.block_id]
    one._block_hash, other._block_hash = other._block_hash, one._block_hash
    one._block_hash_num_tokens, other._block_hash_num_tokens = other._block_hash_num_tokens, one._block_hash_num_tokens
    if more:
        _exchange_items(more, first, second)


def _exchange_items(items: dict[int, Any], one: int, other: int) -> None:
    first, second = items.pop(one, None), items.pop(other, None)
    if first is not None:
        items[other] = first
    if second is not None:
        items[one] = second


def _exchange_places(one: Any, other: Any) -> None:
    if other.next_free_block is one:
        one, other = other, one
    before, after = one.prev_free_block, other.next_free_block
    if one.next_free_block is other:
        other.prev_free_block, other.next_free_block = before, one
        one.prev_free_block, one.next_free_block = other, after
    else:
        one_after, other_before = one.next_free_block, other.prev_free_block
        other.prev_free_block, other.next_free_block = before, one_after
        one.prev_free_block, one.next_free_block = other_before, after
        one_after.prev_free_block = other
        other_before.next_free_block = one
    before.next_free_block = other
    after.prev_free_block = one


def forget(pool: Any, blocks: Collection[Any]) -> None:
    """After a change that broke off: no prefix is known by any of these blocks, whatever was half done, and the free
    queue is whole again, with those of them that nobody references at its front. O(blocks of the pool)."""
    gone = {block.block_id for block in blocks}
    entries = pool.cached_block_hash_to_block._cache
    removed = []
    for name, entry in list(entries.items()):
        known = entry if isinstance(entry, dict) else {entry.block_id: entry}
        kept = {block.block_id: block for block in known.values() if block.block_id not in gone}
        if len(kept) < len(known):
            removed += [name] * (len(known) - len(kept))
            del entries[name]
            if kept:
                entries[name] = kept
    for block in blocks:
        block.reset_hash()
        pool.cached_block_hashes_by_block.pop(block.block_id, None)
        if pool.metrics_collector is not None:
            pool.metrics_collector.block_metrics.pop(block.block_id, None)
    _relink(pool, list(blocks))
    pool._emit_block_removed_events(removed)


def _relink(pool: Any, first: list[Any]) -> None:
    queue = pool.free_block_queue
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    forwards = _walk(head, tail, "next_free_block")
    backwards = _walk(tail, head, "prev_free_block")[::-1]
    linked = [
        block
        for block in pool.blocks
        if block.ref_cnt == 0 and not block.is_null and (block.next_free_block or block.prev_free_block) is not None
    ]
    unheld = (block for block in (*first, *forwards, *backwards, *linked) if block.ref_cnt == 0)
    order = {block.block_id: block for block in unheld}
    before = head
    for block in order.values():
        before.next_free_block, block.prev_free_block = block, before
        before = block
    before.next_free_block, tail.prev_free_block = tail, before
    queue.num_free_blocks = len(order)


def _walk(start: Any, end: Any, step: str) -> list[Any]:
    """The blocks on the way, as far as it is whole."""
    found: dict[int, Any] = {}
    block = getattr(start, step)
    while block is not None and block is not end and block.block_id not in found:
        found[block.block_id] = block
        block = getattr(block, step)
    return list(found.values())


def trade(pool: Any, used: Any, spare: Any) -> None:
    """A block in use and an unreferenced one change places: references and hashes, and the one that was in use gets the
    other's place in the order of eviction. Tables are for the caller."""
    _exchange_hashes(pool, used, spare)
    before, after = spare.prev_free_block, spare.next_free_block
    used.prev_free_block, used.next_free_block = before, after
    before.next_free_block = after.prev_free_block = used
    spare.prev_free_block = spare.next_free_block = None
    used.ref_cnt, spare.ref_cnt = spare.ref_cnt, used.ref_cnt
    collector = pool.metrics_collector
    if collector is not None:
        _exchange_items(collector.block_metrics, used.block_id, spare.block_id)
