"""Who holds blocks: the requests of one batch processor, as owners in its map."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from engine_shim.adapters.transformers.blocks import BlockSpace
from engine_shim.allocation_map.map_observer import MapObserver


class RequestBook:
    """Requests that have a block table, from the first block to the last. Ids only, never tokens of a prompt."""

    def __init__(self, observer: MapObserver, *, hash_ids: bool) -> None:
        self.spaces: tuple[BlockSpace, ...] = ()
        self._observer = observer
        self._hash_ids = hash_ids
        self._owner: dict[str, int] = {}
        self._tokens: dict[str, int] = {}  # as shown

    def __len__(self) -> int:
        return len(self._owner)

    def owner_of(self, request_id: str) -> int:
        """The request's owner value, announced when it is new; 0 where the owner table is full."""
        owner = self._owner.get(request_id)
        if owner is None:
            shown = hashlib.sha256(request_id.encode()).hexdigest() if self._hash_ids else request_id
            owner = self._owner[request_id] = self._observer.open_owner(shown)
        return owner

    def known_owner(self, request_id: str) -> int:
        """As `owner_of`, 0 for a request that holds nothing."""
        return self._owner.get(request_id, 0)

    def has_tokens(self, request_id: str, tokens: int) -> None:
        """The request was given this many tokens without computing them: of a prefix, or of the request it forks."""
        self._tokens[request_id] = tokens
        self._observer.progressed([self.owner_of(request_id)], [tokens])

    def let_go(self, request_id: str) -> None:
        """One allocator has taken the request's table away; when all have, the request is over for the map."""
        if request_id in self._owner and not any(request_id in space.allocator.block_table for space in self.spaces):
            self._observer.close_owner(self._owner.pop(request_id))
            self._tokens.pop(request_id, None)

    def scheduled(self, batch: Sequence[Any]) -> None:
        """A batch was prepared: its requests' positions tell the tokens computed with it."""
        units: list[int] = []
        tokens: list[int] = []
        owners: list[int] = []
        lengths: list[int] = []
        written = 0
        for future in batch:
            state = future.state
            name, length = state.request_id, int(state.position_offset)
            if name not in self._owner:
                continue
            before = self._tokens.get(name, 0)
            self._tokens[name] = length
            owners.append(self._owner[name])
            lengths.append(length)
            written += int(future.query_length)
            for space in self.spaces:
                space.filled(space.allocator.block_table.get(name, ()), before, length, units, tokens)
        if owners:
            self._observer.progressed(owners, lengths)
            self._observer.wrote(units, tokens, written)

    def forget(self) -> None:
        """Everybody leaves the map, to come back under new owner values: what it says they hold may be wrong."""
        for owner in self._owner.values():
            self._observer.close_owner(owner)
        self._owner.clear()

    def tell_again(self) -> None:
        """Blocks were told anew, so their tokens must be."""
        units: list[int] = []
        tokens: list[int] = []
        for name, length in self._tokens.items():
            self.has_tokens(name, length)
            for space in self.spaces:
                space.filled(space.allocator.block_table.get(name, ()), 0, length, units, tokens)
        if units:
            self._observer.wrote(units, tokens, 0)
