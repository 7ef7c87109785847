"""What the blocks hold. Pattern mode: keys and values are a function of a token's content and position.

No model runs, and yet each layer is really written, and any block can be compared with what it must hold at any
time. The row of a token in one tensor is picked from a base of random rows by a hash of (content id, position,
tensor): ten tensors pick independently, so two different tokens hardly ever agree everywhere, while sequences with
a common prefix write the same bytes, as a model would.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_shim.reference.kv_cache import KVCache
from engine_shim.reference.sequence import Sequence

BASE_ROWS_LOG2 = 12
MAX_CONTENT = (1 << 63) - 1
VERIFY_SLICE = 1 << 16  # tokens
# Odd 64-bit constants of the splitmix64 generator (Steele, Lea, Flood, OOPSLA 2014).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens start..stop-1 of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        """Does this compute the last known token, so that the next one can be chosen?"""
        return self.stop == self.sequence.length


class Runner(Protocol):
    """Computes one step: writes keys and values through the block tables and chooses next tokens."""

    def run(self, batch: Items[Work]) -> list[list[int]]:
        """For each piece of work the next token; where a prompt ends, one for each sample, the best first; none
        where known tokens are still to be computed."""
        ...

    def registered(self, sequence: Sequence, first: int, last: int) -> None:
        """Blocks first..last-1 of the sequence's table are full and went to the prefix cache."""
        ...

    def copied(self, copies: Items[tuple[int, int]]) -> None:
        """Block contents were copied (source, destination), all read before any was written."""
        ...


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Tokens of a block that do not hold what they must."""

    block: int
    request_id: str  # "" for a cached block
    first_position: int
    tokens: int

    def __str__(self) -> str:
        holder = self.request_id or "the prefix cache"
        return f"block {self.block} of {holder}: {self.tokens} tokens differ, first position {self.first_position}"


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every bit of the input moves every bit of the output."""
    mixed = (values ^ (values >> np.uint64(30))) * MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * MIX_2
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def token_keys(content_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 64-bit key for each (content id, position)."""
    with np.errstate(over="ignore"):
        return mix(content_ids.astype(np.uint64) + mix(positions.astype(np.uint64) * GOLDEN))


class PatternContent:
    """The runner of pattern mode, and the check of what lies in the blocks."""

    def __init__(self, cache: KVCache, seed: int = 1) -> None:
        self.cache = cache
        generator = torch.Generator().manual_seed(seed)
        heads, head_dim = cache.geometry.kv_heads, cache.geometry.head_dim
        base = torch.randn((1 << BASE_ROWS_LOG2, heads, head_dim), generator=generator)
        # As the cache stores them: of a quantised format, the codes and scales of these very numbers.
        stored = cache.format.encode(base).flatten(1)
        # Bits are moved and compared, not numbers: eight bytes at a time where a row has them, which is faster.
        self._word = torch.int64 if stored[0].nbytes % 8 == 0 else torch.uint8
        self._base: Tensor = stored.view(self._word).to(cache.device)
        self._tensors = len(cache.tensors)
        # One odd multiplier a tensor: the top bits of key * multiplier pick the row.
        with np.errstate(over="ignore"):
            self._multipliers = mix(np.arange(1, self._tensors + 1, dtype=np.uint64) * GOLDEN) | np.uint64(1)
        # What each block must hold once it is in the prefix cache. Follows what copies were meant to do, so that a
        # copy that was not done, or done wrong, shows.
        self._cached_keys = np.zeros((cache.num_blocks, cache.block_tokens), dtype=np.uint64)

    def run(self, batch: Items[Work]) -> list[list[int]]:
        """Write every tensor of every token in the batch; the next token is a function of sequence and position."""
        if batch:
            contents = np.concatenate([work.sequence.tokens[work.start : work.stop] for work in batch])
            slots, positions = self.cache.batch_slots([(work.sequence.table, work.start, work.stop) for work in batch])
            self.write(slots, token_keys(contents, positions))
        return [_next_tokens(work.sequence) if work.completes else [] for work in batch]

    def registered(self, sequence: Sequence, first: int, last: int) -> None:
        """Note what blocks first..last-1 must hold from now on."""
        size = self.cache.block_tokens
        keys = self.keys(sequence, first * size, last * size)
        self._cached_keys[sequence.table[first:last]] = keys.reshape(-1, size)

    def copied(self, copies: Items[tuple[int, int]]) -> None:
        """Contents are expected where they were copied to."""
        sources, destinations = zip(*copies, strict=True)
        self._cached_keys[list(destinations)] = self._cached_keys[list(sources)]

    def keys(self, sequence: Sequence, start: int, stop: int) -> NDArray[np.uint64]:
        """What identifies tokens start..stop-1 of a sequence."""
        return token_keys(sequence.tokens[start:stop], np.arange(start, stop, dtype=np.int64))

    def write(self, slots: NDArray[np.int64], keys: NDArray[np.uint64]) -> None:
        """Write the rows of `keys` to `slots`, in each tensor of the cache."""
        where = torch.from_numpy(slots).to(self.cache.device)
        for index in range(self._tensors):
            self._rows(index).index_copy_(0, where, self._expected(keys, index))

    def differing(self, slots: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of `slots` do not hold the rows of `keys`, bit for bit, in some tensor."""
        if len(slots) > VERIFY_SLICE:  # temporaries of a whole pool would double its memory
            parts = range(0, len(slots), VERIFY_SLICE)
            return np.concatenate(
                [self.differing(slots[i : i + VERIFY_SLICE], keys[i : i + VERIFY_SLICE]) for i in parts]
            )
        where = torch.from_numpy(slots).to(self.cache.device)
        wrong = torch.zeros(len(slots), dtype=torch.bool, device=self.cache.device)
        for index in range(self._tensors):
            held = self._rows(index).index_select(0, where)
            wrong |= (held != self._expected(keys, index)).any(dim=1)
        return np.asarray(wrong.cpu().numpy())

    def verify_sequence(self, sequence: Sequence) -> list[Mismatch]:
        """Compare all computed tokens of a sequence, through its block table."""
        slots = self.cache.slots(sequence.table, 0, sequence.computed)
        wrong = np.flatnonzero(self.differing(slots, self.keys(sequence, 0, sequence.computed)))
        return _by_block(wrong, sequence.table, self.cache.block_tokens, sequence.request_id)

    def verify_block(self, block: int) -> list[Mismatch]:
        """Compare a block of the prefix cache with what it held when it went there."""
        return self.verify_cached([block])

    def verify_cached(self, blocks: Items[int]) -> list[Mismatch]:
        """Compare blocks of the prefix cache with what they held when they went there."""
        if not blocks:
            return []
        slots = self.cache.block_slots(np.asarray(blocks, dtype=np.int64)).reshape(-1)
        wrong = np.flatnonzero(self.differing(slots, self._cached_keys[list(blocks)].reshape(-1)))
        return _by_block(wrong, blocks, self.cache.block_tokens, "")

    def verify_all(self, sequences: Items[Sequence], cached_blocks: Items[int]) -> list[Mismatch]:
        """Every computed token of the given sequences and every given cached block; returns what differs."""
        found = [mismatch for sequence in sequences for mismatch in self.verify_sequence(sequence)]
        return found + self.verify_cached(cached_blocks)

    def _rows(self, tensor: int) -> Tensor:
        return self.cache.rows(tensor).view(self._word)

    def _expected(self, keys: NDArray[np.uint64], index: int) -> Tensor:
        with np.errstate(over="ignore"):
            picked = (keys * self._multipliers[index]) >> np.uint64(64 - BASE_ROWS_LOG2)
        return self._base.index_select(0, torch.from_numpy(picked.astype(np.int64)).to(self.cache.device))


def _by_block(wrong: NDArray[np.int64], table: Items[int], block_tokens: int, request_id: str) -> list[Mismatch]:
    indices, first, counts = np.unique(wrong // block_tokens, return_index=True, return_counts=True)
    return [
        Mismatch(table[int(index)], request_id, int(wrong[where]), int(count))
        for index, where, count in zip(indices, first, counts, strict=True)
    ]


def _next_tokens(sequence: Sequence) -> list[int]:
    """Output tokens of pattern mode: contents of each sample's own, the same again after a preemption."""
    branching = sequence.length == sequence.prompt_tokens
    samples = range(sequence.samples) if branching else (sequence.sample,)
    return [(sequence.seed(sample) + sequence.length * int(GOLDEN)) & MAX_CONTENT for sample in samples]
