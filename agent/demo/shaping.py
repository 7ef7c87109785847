"""Requests of a recorded trace, made so small that a model of 135 million parameters on few cores can serve them. Pure.

Lengths are divided, and arrivals slowed down by whoever sends them; which prompts share which prefixes is as recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine_shim.workload import TraceRequest, Workload, prompt_content_ids

PROMPT_SCALE = 16  # 512 recorded tokens, the unit in which the trace tells shared prefixes, are 32: one block
ANSWER_SCALE = 4
MOST_PROMPT_TOKENS = 1536
MOST_ANSWER_TOKENS = 256
FIRST_TOKEN, TOKENS = 1_000, 40_000  # ordinary ones of the vocabulary of 49,152
_MIX = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio: neighbouring numbers become unlike ones


@dataclass(frozen=True, slots=True)
class ShapedRequest:
    """What to send, and when, in seconds of the trace since its first request."""

    arrival_s: float
    prompt: tuple[int, ...]
    answer_tokens: int


def shape(request: TraceRequest, first_arrival_s: float = 0.0) -> ShapedRequest:
    """One request. Prompts that share a recorded prefix begin with the same tokens, others differ from the first on."""
    tokens = min(MOST_PROMPT_TOKENS, -(-request.prompt_tokens // PROMPT_SCALE))
    recorded = min(tokens * PROMPT_SCALE, request.prompt_tokens)
    contents = prompt_content_ids(request, 0, recorded)[::PROMPT_SCALE]
    prompt = tuple(FIRST_TOKEN + ((content * _MIX & (1 << 64) - 1) >> 24) % TOKENS for content in contents)
    answer = min(MOST_ANSWER_TOKENS, -(-request.output_tokens // ANSWER_SCALE))
    return ShapedRequest(request.arrival_s - first_arrival_s, prompt, answer)


def shaped(workload: Workload) -> Iterator[ShapedRequest]:
    """Every request in order of arrival, and again from the first when there are no more: without an end."""
    first = workload.requests[0].arrival_s
    span = workload.requests[-1].arrival_s - first + 1.0
    turn = 0
    while True:
        for request in workload.requests:
            yield shape(request, first - turn * span)
        turn += 1
