"""Chained hashes that name the full blocks of a token sequence, so that equal prefixes can share blocks."""

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
