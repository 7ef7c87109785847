"""Who holds which blocks of a vLLM pool: request ids to owners, their tokens, and the tokens of each block.

Per step this costs a few C-level passes over the scheduled requests and some NumPy calls; Python code runs only for a
request whose last block changed since the step before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_shim.allocation_map.map_observer import MapObserver

_computed = attrgetter("num_computed_tokens")

_NO_TAIL = -2  # no block is being filled; -1 is where the last token of a request without computed tokens would be


class Holding(NamedTuple):
    """One block in one request's table."""

    block: int
    owner: int
    position: int
    group: int


class RequestBook:
    """The live requests of one scheduler, as owners in one map."""

    def __init__(
        self, scheduler: Any, managers: list[Any], observer: MapObserver, *, null: int, hash_ids: bool
    ) -> None:
        self._requests: Mapping[str, Any] = scheduler.requests
        self._scheduler = scheduler
        self._managers = managers
        # A state group's block holds a state, not a number of tokens.
        self._groups = [manager for manager in managers if not hasattr(manager.kv_cache_spec, "mamba_type")]
        self._observer = observer
        self._null = null
        self._hash_ids = hash_ids
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []
        self._owner: NDArray[np.int64] = np.zeros(64, np.int64)
        self._tail_index: NDArray[np.int64] = np.full((64, len(self._groups)), _NO_TAIL, np.int64)
        self._tail_block: NDArray[np.int64] = np.zeros((64, len(self._groups)), np.int64)
        self._ending: dict[str, int] = {}  # and the last step that was scheduled when vLLM forgot it

    def owner_of(self, request_id: str) -> int:
        """The owner value of a request, which is announced when it is new; 0 where the owner table is full."""
        row = self._rows.get(request_id)
        if row is None:
            row = self._open(request_id)  # which may make the arrays anew
        return int(self._owner[row])

    def known_owner(self, request_id: str) -> int:
        """As `owner_of`, 0 for a request that never held a block."""
        row = self._rows.get(request_id)
        return 0 if row is None else int(self._owner[row])

    def emptied(self, request_id: str) -> None:
        """The request's tables are gone: it was preempted, or has ended."""
        if (row := self._rows.get(request_id)) is not None:
            self._tail_index[row] = _NO_TAIL

    def ended(self, request_id: str) -> None:
        """vLLM has forgotten the request. While its blocks wait for a step in flight it is still named."""
        if request_id in self._rows:
            self._ending[request_id] = int(getattr(self._scheduler, "sched_step_seq", 0))

    def close_ended(self) -> None:
        """Close those that ended and whose blocks have all gone back."""
        if not self._ending:
            return
        for request_id in self._settled():
            del self._ending[request_id]
            if request_id not in self._requests:  # the id may have come back
                self._close(request_id)

    def _settled(self) -> list[str]:
        """Those that ended and whose blocks wait for no step. With two batches in flight some request's blocks always
        wait, so each goes by its own step; and by the one after, since vLLM gives blocks back in the order in which
        they began to wait, and a copy on write among them may wait for one step more than what comes behind it."""
        scheduler = self._scheduler
        if not getattr(scheduler, "deferred_frees", None):
            return list(self._ending)
        processed = getattr(scheduler, "processed_step_seq", None)
        if processed is None or not hasattr(scheduler, "sched_step_seq"):
            return []
        return [request_id for request_id, step in self._ending.items() if step < processed]

    def renamed(self, moves: Mapping[int, int]) -> None:
        """Blocks whose contents are in others now, tables and all."""
        sources = np.fromiter(moves, np.int64, len(moves))
        order = np.argsort(sources)
        destinations = np.fromiter(moves.values(), np.int64, len(moves))[order]
        place = np.searchsorted(sources[order], self._tail_block).clip(max=len(moves) - 1)
        moved = sources[order][place] == self._tail_block
        self._tail_block[moved] = destinations[place[moved]]

    def sweep(self) -> int:
        """Close owners that vLLM no longer knows and that were not seen to end; how many those were."""
        lost = [name for name in self._rows if name not in self._requests and name not in self._ending]
        for request_id in lost:
            self._close(request_id)
        return len(lost)

    def holders(self, blocks: Mapping[int, int], group_of: Mapping[int, int], budget: int) -> list[Holding]:
        """Who holds these blocks, which stand at `blocks[block]` in every table that has them; each is found once, and
        after `budget` looks no more. A shared prefix is at the same place in all tables, since its hash is of all that
        comes before."""
        missing = dict(blocks)
        found: list[Holding] = []
        for name in self._rows:
            for manager in self._managers:
                table = manager.req_to_blocks.get(name) or ()
                group = manager.kv_cache_group_id
                budget -= len(missing)
                for block, place in list(missing.items()):
                    if place < len(table) and table[place].block_id == block and group_of[block] == group:
                        found.append(Holding(block, self.known_owner(name), place, group))
                        del missing[block]
            if not missing or budget < 0:
                break
        return found

    def scheduled(self, counts: Mapping[str, int]) -> None:
        """A step was scheduled: `counts` new tokens by request id, already part of each request's computed tokens."""
        if not counts:
            return
        self._observer.counted("tokens_written", sum(counts.values()))
        # A step may be shown after the output of the one before it, with which requests end, or after an abort.
        names = list(filter(self._requests.__contains__, counts))
        total = len(names)
        if not total:
            return
        rows = np.fromiter(
            (self._rows[name] if name in self._rows else self._open(name) for name in names), np.int64, total
        )
        computed = np.fromiter(map(_computed, map(self._requests.__getitem__, names)), np.int64, total)
        blocks: list[int] = []
        tokens: list[int] = []
        for group, manager in enumerate(self._groups):
            size = manager.block_size
            index = (computed - 1) // size
            same = index == self._tail_index[rows, group]
            known = rows[same]
            blocks += self._tail_block[known, group].tolist()
            tokens += (computed[same] - index[same] * size).tolist()
            for place in np.flatnonzero(~same).tolist():
                self._advance(
                    group, names[place], int(rows[place]), int(index[place]), int(computed[place]), blocks, tokens
                )
        self._observer.progressed(self._owner[rows].tolist(), computed.tolist())
        self._observer.wrote(blocks, tokens, 0)

    def _advance(
        self, group: int, name: str, row: int, index: int, computed: int, blocks: list[int], tokens: list[int]
    ) -> None:
        """Note the tokens of every block from the last one that was being filled to the one that is being filled."""
        manager = self._groups[group]
        size = manager.block_size
        table = manager.req_to_blocks.get(name) or ()
        before = int(self._tail_index[row, group])
        first, last = min(before, index), max(before, index)
        for place in range(max(0, first), min(last + 1, len(table))):
            block = table[place].block_id
            if block != self._null:
                blocks.append(block)
                tokens.append(min(size, max(0, computed - place * size)))
        if 0 <= index < len(table) and table[index].block_id != self._null:
            self._tail_index[row, group] = index
            self._tail_block[row, group] = table[index].block_id
        else:
            self._tail_index[row, group] = _NO_TAIL

    def _open(self, request_id: str) -> int:
        request = self._requests.get(request_id)
        lora = getattr(request, "lora_request", None)
        shown = hashlib.sha256(request_id.encode()).hexdigest() if self._hash_ids else request_id
        owner = self._observer.open_owner(
            shown, str(getattr(lora, "lora_name", "") or ""), str(getattr(request, "cache_salt", None) or "")
        )
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = len(self._rows)
            if row == len(self._owner):
                self._owner = np.concatenate((self._owner, np.zeros_like(self._owner)))
                self._tail_index = np.concatenate((self._tail_index, np.full_like(self._tail_index, _NO_TAIL)))
                self._tail_block = np.concatenate((self._tail_block, np.zeros_like(self._tail_block)))
        self._rows[request_id] = row
        self._owner[row] = owner
        self._tail_index[row] = _NO_TAIL
        return row

    def _close(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._observer.close_owner(int(self._owner[row]))
            self._free_rows.append(row)
