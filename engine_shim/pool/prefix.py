"""Names the full blocks of a token sequence by chained hashes, and finds the blocks that hold a prefix."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine_shim.errors import PoolError

HASH_BYTES = 16  # a collision would silently serve another sequence's contents: 64 bits are too few for that


def chain_hash(parent: int, content: bytes, salt: str = "") -> int:
    """Hash one link: the same value only for the same parent, contents and salt. 128 bits, stable over processes."""
    digest = blake2b(content, digest_size=HASH_BYTES, key=salt.encode()[:64])
    digest.update(parent.to_bytes(HASH_BYTES, "little"))
    return int.from_bytes(digest.digest(), "little")


def hash_prefix_blocks(token_ids: Sequence[int], block_tokens: int, *, parent: int = 0, salt: str = "") -> list[int]:
    """Hash each full block of `token_ids`; a trailing partial block gets none.

    Hash `i` stands for all tokens up to the end of block `i`, not for the block alone. `parent` continues a chain
    (the hash of the block before), `salt` (at most 64 bytes of it) keeps tenants apart.
    """
    if block_tokens < 1:
        raise PoolError(f"block_tokens={block_tokens}: a block holds at least one token")
    words = array("q", token_ids).tobytes()
    block_bytes = block_tokens * 8
    hashes = []
    for start in range(0, len(words) - block_bytes + 1, block_bytes):
        parent = chain_hash(parent, words[start : start + block_bytes], salt)
        hashes.append(parent)
    return hashes


class PrefixIndex:
    """Which blocks hold which prefixes. A block has one hash; of several blocks with one hash, all stay known, and
    the first that was added is found."""

    def __init__(self) -> None:
        self.hash_of: dict[int, int] = {}  # by block; for others to read
        # The block of each hash; duplicates, which are rare, in a dict that keeps their order.
        self._holders: dict[int, int | dict[int, None]] = {}

    def find(self, hashes: Sequence[int]) -> list[int]:
        """The blocks that hold the longest run of `hashes` from its start."""
        found: list[int] = []
        for block_hash in hashes:
            holder = self._holders.get(block_hash)
            if holder is None:
                break
            found.append(holder if isinstance(holder, int) else next(iter(holder)))
        return found

    def add(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Name blocks; those that have this very hash already stay as they are, another one they must not have."""
        holders = self._holders
        self.hash_of.update(zip(blocks, hashes, strict=True))
        for block, block_hash in zip(blocks, hashes, strict=True):
            holder = holders.setdefault(block_hash, block)
            if holder != block:
                if isinstance(holder, int):
                    holder = holders[block_hash] = {holder: None}
                holder[block] = None

    def forget(self, blocks: Sequence[int]) -> None:
        """Take the names of named blocks away."""
        hash_of, holders = self.hash_of, self._holders
        for block in blocks:
            block_hash = hash_of.pop(block)
            holder = holders[block_hash]
            if not isinstance(holder, int):
                del holder[block]
                if holder:
                    continue
            del holders[block_hash]

    def relocate(self, copies: Sequence[tuple[int, int]]) -> None:
        """Let prefixes follow (source, destination) copies of their contents, all at once, so that two may change
        places. Among duplicates each keeps its place: later hits land on the same copy as before."""
        hash_of, holders = self.hash_of, self._holders
        hashes = [hash_of.pop(source) for source, _ in copies]
        shared: set[int] = set()
        for (_, destination), block_hash in zip(copies, hashes, strict=True):
            hash_of[destination] = block_hash
            if isinstance(holders[block_hash], int):
                holders[block_hash] = destination
            else:
                shared.add(block_hash)
        if shared:
            renamed = dict(copies)
            for block_hash in shared:
                holder = holders[block_hash]
                if not isinstance(holder, int):
                    holders[block_hash] = {renamed.get(block, block): None for block in holder}

    def clear(self) -> None:
        """Forget every prefix."""
        self.hash_of.clear()
        self._holders.clear()
