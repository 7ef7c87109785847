"""One sequence in the engine: its tokens, how far they are computed, and the blocks that hold them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from itertools import count

import numpy as np
from numpy.typing import NDArray

from engine_shim.pool.prefix import chain_hash
from engine_shim.workload import TraceRequest, prompt_content_ids, request_block_hashes


class Status(Enum):
    """Where a sequence stands; a preempted one waits again and has lost its blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens[:length]` are known; the first `computed` of them have keys and values in the blocks of `table`.

    `hashes[i]` names full block i, prompt and answer, for the prefix cache. `table` is an array of 64-bit integers, so
    that whoever moves blocks reads and rewrites all tables without a Python step for each of their blocks.
    """

    request_id: str
    tokens: NDArray[np.int64]  # room for the prompt and all of the output
    prompt_tokens: int
    length: int
    hashes: list[int]
    samples: int = 1  # continuations that share the prompt
    sample: int = 0  # which of them this is
    owner: int = 0
    computed: int = 0
    registered: int = 0  # full blocks handed to the prefix cache
    preemptions: int = 0
    status: Status = Status.WAITING
    table: array[int] = field(default_factory=lambda: array("q"))
    number: int = field(default_factory=count(1).__next__, init=False)  # of this sequence alone, in this process

    @property
    def max_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Known tokens whose keys and values are still to be computed."""
        return self.length - self.computed

    @property
    def complete(self) -> bool:
        """Is the last output token chosen? Its own keys and values are never needed."""
        return self.length >= self.max_tokens

    def seed(self, sample: int) -> int:
        """A number of one sample's own, the same in every process; 64 bits."""
        digest = blake2b(f"{self.request_id}#{sample}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def append(self, token: int) -> None:
        """Take the next output token."""
        self.tokens[self.length] = token
        self.length += 1

    def forget_blocks(self) -> array[int]:
        """Give up all blocks, to be computed anew later; returns them as they were."""
        table, self.table = self.table, array("q")
        self.computed = self.registered = 0
        return table

    def branch(self, sample: int, block_tokens: int) -> Sequence:
        """Another continuation of what is computed so far: the same blocks, its own tokens and names from here on."""
        shared = self.computed // block_tokens
        hashes = self.hashes[:shared]
        hashes += [chain_hash(own, b"sample", str(sample)) for own in self.hashes[shared:]]
        return replace(
            self,
            tokens=self.tokens.copy(),
            hashes=hashes,
            sample=sample,
            owner=0,
            table=self.table[:],
        )


def sequence_of(
    request: TraceRequest, block_tokens: int, *, vocabulary: int | None = None, samples: int = 1, round_: int = 0
) -> Sequence:
    """Turn a request of a trace into a sequence whose prompt is the trace's contents.

    Tokens are content numbers, or token ids below `vocabulary` where a model is to read them. Later rounds of the
    same trace share no prefix with earlier ones.
    """
    prompt = np.array(prompt_content_ids(request, 0, request.prompt_tokens), dtype=np.int64)
    if vocabulary is not None:
        prompt = _scatter(prompt) % vocabulary
    tokens = np.zeros(request.prompt_tokens + request.output_tokens, dtype=np.int64)
    tokens[: request.prompt_tokens] = prompt
    salt = f"round {round_}" if round_ else ""
    return Sequence(
        request_id=f"{request.index}" if not round_ else f"{request.index}.{round_}",
        tokens=tokens,
        prompt_tokens=request.prompt_tokens,
        length=request.prompt_tokens,
        hashes=request_block_hashes(request, block_tokens, salt=salt),
        samples=samples,
    )


def _scatter(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Spread consecutive content numbers over the vocabulary (Knuth's multiplicative hash, TAOCP 6.4)."""
    with np.errstate(over="ignore"):
        return np.asarray((numbers * np.int64(2654435761)) >> np.int64(7) & np.int64(0x7FFFFFFF))
