"""Where the memory of one GPU goes beside the KV pool: weights, activations and the rest, each with its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agent.capacity.deployment import DEFAULT_SEQUENCES, Deployment
from agent.capacity.families import SPARSE
from agent.capacity.formats import WeightFormat
from agent.capacity.geometry import ModelGeometry

GIB = 1 << 30
OTHER_BYTES = GIB
"""CUDA context, NCCL buffers and CUDA graphs of one GPU: an allowance, the 1 GB that is commonly quoted. Measured:
0.16 to 0.2 GiB outside torch (vllm-project/vllm#12126, #14447), and 0.1 to 2.4 GiB of CUDA graphs (#7553)."""
SAMPLER_BYTES = 40
"""Peak bytes a logit of vLLM's profiling run, fitted to one measurement: 1.26 GiB with 256 sequences, a vocabulary of
128,256, at TP 1 and 2 alike (vllm-project/vllm#10511)."""

UNKNOWN_BYTES = 1 << 50
"""Stands for weights without a bound."""
WeightSource = Literal["given", "counted", "guessed"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of all weights, least and most where they had to be guessed, and how they were found."""

    total: int
    least: int
    most: int
    source: WeightSource
    words: str


def weigh(geometry: ModelGeometry, deployment: Deployment, format: WeightFormat) -> Weights:
    """Bytes of the whole model's weights in `format`."""
    if deployment.model_weight_bytes is not None:
        given = deployment.model_weight_bytes
        return Weights(given, given, given, "given", f"weights: {_gib(given)} as given")
    if geometry.parameters is not None:
        count = geometry.parameters
        total = format.bytes_of(count, geometry.embedding_parameters, geometry.expert_parameters)
        if format.plain or format.keeps == "nothing":
            words = f"weights: {count:,} × {float(format.bits / 8):g} B = {total:,} B ({format.arithmetic})"
        else:
            quantized = geometry.expert_parameters if format.keeps == "all but experts" else (
                count - geometry.embedding_parameters
            )  # fmt: skip
            words = (
                f"weights: {quantized:,} × {float(format.bits):.4g}/8 B ({format.arithmetic}) + "
                f"{count - quantized:,} × 2 B kept in 16 bits = {total:,} B"
            )
        return Weights(total, total, total, "counted", words)
    return _guess(geometry, format)


def _guess(geometry: ModelGeometry, format: WeightFormat) -> Weights:
    """Feed-forward layers of plain decoders are 2 to 8 times the hidden size wide, most 2.7 to 4: a range."""
    hidden, layers = geometry.hidden_size, len(geometry.layers)
    embeddings = geometry.embedding_parameters or 2 * (geometry.vocab_size or 32000) * hidden
    low, middle, high = (
        format.bytes_of(embeddings + int(layers * hidden * hidden * width), embeddings, 0) for width in (8, 13, 28)
    )
    if geometry.model_type in SPARSE:
        words = f"weights: {geometry.parameters_note}, and those of experts are anybody's guess; give --weights-memory"
        return Weights(middle, low, UNKNOWN_BYTES, "guessed", words)
    words = (
        f"weights: {geometry.parameters_note}; guessed at {_gib(low)} to {_gib(high)}, {_gib(middle)} used; "
        "give --weights-memory"
    )
    return Weights(middle, low, high, "guessed", words)


def stage_shares(
    geometry: ModelGeometry, stages: tuple[range, ...], total: int, format: WeightFormat
) -> tuple[int, ...]:
    """Bytes of `total` weights on each pipeline stage: layers by their number, the table of embeddings on the first and
    the output head on the last.

    Where the head is the table, both ends keep the whole of it (vLLM 0.32, model_executor/models/qwen2.py: embed_tokens
    of the last rank), so that the stages have more than `total` together.
    """
    if len(stages) == 1:
        return (total,)
    tables = 1 if geometry.tied_embeddings else 2
    table = min(total // tables, format.kept_bytes((geometry.vocab_size or 0) * geometry.hidden_size))
    body = total - table * tables
    shares = [body * len(stage) // max(1, len(geometry.layers)) for stage in stages]
    shares[0] += table
    shares[-1] += table
    return tuple(shares)


def activations(geometry: ModelGeometry, deployment: Deployment) -> tuple[int, str]:
    """Peak activation bytes of one GPU in the engine's profiling run, and the sum in words: an estimate."""
    if deployment.activation_bytes is not None:
        return deployment.activation_bytes, f"activations: {_gib(deployment.activation_bytes)} as given"
    tokens, hidden, tp = deployment.max_batched_tokens, geometry.hidden_size, deployment.tp
    wide = geometry.intermediate_size or 4 * hidden
    width = 4 * hidden + (3 * wide + 3 * hidden) // tp
    forward = tokens * 2 * width
    sequences = min(deployment.max_num_seqs or DEFAULT_SEQUENCES, tokens)
    sampler = sequences * (geometry.vocab_size or 0) * SAMPLER_BYTES
    words = (
        f"activations, estimated: the larger of a step of {tokens:,} tokens × {width:,} × 2 B = {_gib(forward)} "
        f"and the sampler's {sequences} × {geometry.vocab_size or 0:,} logits × {SAMPLER_BYTES} B = {_gib(sampler)}"
    )
    return max(forward, sampler), words


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB"
