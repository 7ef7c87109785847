"""Every sum that a plan shows comes out at the number that it shows, over all models and ways to spread them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import Deployment
from agent.capacity.formats import weight_format
from agent.capacity.geometry import ModelGeometry
from agent.capacity.memory import stage_shares, weigh
from agent.capacity.planner import Plan, plan
from agent.capacity.presets import PRESETS
from agent.capacity.words import arithmetic
from engine_shim.errors import SettingsError

GIB = 1 << 30
WHISPER = {
    "model_type": "whisper",
    "decoder_layers": 32,
    "num_hidden_layers": 32,
    "decoder_attention_heads": 20,
    "d_model": 1280,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "torch_dtype": "float16",
}
PLACES = [
    Deployment(memory_bytes=5000 * GIB, tp=tp, pp=pp, kv_dtype=kv, max_model_len=2048)
    for tp, pp, kv in product((1, 4), (1, 3), ("fp16", "int8", "int4"))
]


def value_of(text: str) -> int | None:
    """The product or sum of a line, from its words; None where it shows none."""
    found = re.match(r"(?:[\w -]+: )(.*?) = ([\d,]+) B", text)
    if found is None or "layers ×" not in text:
        return None
    words = found[1]
    if ";" in words:
        words = words.partition("holds ")[2]
    words = words.replace(",", "")
    # "… × 128 × 1 B (+ 4 B a vector)": so much more for each vector, which is every factor but the size of one.
    words = re.sub(r"(\d+) × ([\d.]+) B \(\+ (\d+) B a vector\)", r"(\1 × \2 + \3)", words)
    words = re.sub(r"\(K V\)|KV heads|latent vector|encoder tokens|layers|conv|ssm|delta|kv(?= )| B\b", "", words)
    assert re.fullmatch(r"[\d.() ×+]+", words), words
    return int(_evaluate(ast.parse(words.replace("×", "*").strip(), mode="eval").body))


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    assert isinstance(node, ast.Constant)
    return Fraction(str(node.value))


def shown(text: str) -> int:
    found = re.search(r" = ([\d,]+) B", text)
    assert found is not None
    return int(found[1].replace(",", ""))


def plans(geometry: ModelGeometry) -> list[Plan]:
    found = []
    for one in PLACES:
        try:
            found.append(plan(geometry, one))
        except SettingsError:
            continue  # heads that four ranks cannot divide
    return found


def test_products_and_sums_of_every_model(cases: dict[str, Any], geometry_of: Callable[..., ModelGeometry]) -> None:
    geometries = [geometry_of(name) for name in cases] + [read_geometry(WHISPER)]
    kinds: set[str] = set()
    for geometry in geometries:
        for found in plans(geometry):
            lines = arithmetic(found)
            tokens = 0
            for line in lines:
                value = value_of(line)
                if value is not None:
                    kinds.add(line.partition(":")[0])
                    assert value == shown(line), line
                if "B a token" in line and "layers" in line:
                    tokens += shown(line)
            assert tokens == found.kv_bytes_per_token
    assert {"full", "mla", "sliding", "state a sequence", "cross-attention a sequence", "a block"} <= kinds


def test_a_wrong_product_is_noticed() -> None:
    line = "full: 2 layers × 2 (K, V) × 8 KV heads × 64 × 2 B = 8,192 B a token"
    assert value_of(line) != shown(line)
    assert value_of(line.replace("8,192", "4,096")) == 4096
    line = "mla: 61 layers × 1 latent vector × 576 × 1 B (+ 4 B a vector) = 35,380 B a token"
    assert value_of(line) == shown(line)


def test_blocks_are_those_of_the_stage_that_has_least_room() -> None:
    # 32 layers on 5 stages: the first and last have a layer less, and embeddings that weigh more than a layer.
    geometry = read_geometry(PRESETS["llama-3.1-8b"].config)
    uneven = 0
    for gib in range(6, 30):
        found = plan(geometry, Deployment(memory_bytes=gib * GIB, pp=5, max_model_len=2048))
        line = next(one for one in arithmetic(found) if one.startswith("blocks: "))
        size, block, blocks = (int(one.replace(",", "")) for one in re.findall(r"[\d,]*\d", line)[:3])
        assert found.pool is not None
        assert size // block == blocks == found.pool.num_blocks
        uneven += block != found.kv_bytes_per_block
    assert uneven


LAYER_OF_LLAMA_3_8B = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
TABLE_OF_LLAMA_3_8B = 128256 * 4096


@pytest.mark.parametrize(("name", "bits"), [("bfloat16", 16), ("awq", 4.15625), ("fp8", 8 + 32 / 128**2)])
def test_each_pipeline_end_holds_a_table_in_16_bits_whatever_the_layers_are_in(name: str, bits: float) -> None:
    geometry = read_geometry(PRESETS["llama-3.1-8b"].config)
    format = weight_format(name)
    total = weigh(geometry, Deployment(), format).total
    first, second, third, last = stage_shares(geometry, tuple(range(8 * one, 8 * one + 8) for one in range(4)), total,
                                              format)  # fmt: skip
    layers = 8 * (LAYER_OF_LLAMA_3_8B * bits / 8 + 2 * 4096 * 2)
    assert second == third == pytest.approx(layers, rel=1e-5)
    assert first == last == pytest.approx(layers + 2 * TABLE_OF_LLAMA_3_8B, rel=1e-5)
    assert first + second + third + last == pytest.approx(total, abs=4)


def test_a_table_that_is_the_head_as_well_is_whole_on_both_ends() -> None:
    tied = read_geometry(dict(PRESETS["llama-3.1-8b"].config) | {"tie_word_embeddings": True})
    format = weight_format("awq")
    total = weigh(tied, Deployment(), format).total
    shares = stage_shares(tied, (range(16), range(16, 32)), total, format)
    assert sum(shares) == pytest.approx(total + 2 * TABLE_OF_LLAMA_3_8B, abs=2)
    assert stage_shares(tied, (range(32),), total, format) == (total,)
    assert stage_shares(tied, (range(16), range(16, 32)), 1000, format) == (1000, 1000)  # less than a table


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"co_tenant_bytes": 20 * GIB}, "use --gpu-memory-utilization 0.75 or less"),
        ({"co_tenant_bytes": 80 * GIB}, "0.00 GiB are free beside other processes; stop one of those"),
        ({"co_tenant_bytes": 100 * GIB}, "0.00 GiB are free beside other processes; stop one of those"),
        ({"kv_cache_bytes": 79 * GIB}, "more than the GPU has free"),
        ({"max_num_seqs": 4000}, "too little on each GPU"),
        ({"other_bytes": 90 * GIB}, "over the budget"),
    ],
)
def test_what_does_not_fit_says_by_how_much(place: dict[str, Any], words: str) -> None:
    geometry = read_geometry(PRESETS["llama-3.1-8b"].config)
    found = plan(geometry, Deployment(memory_bytes=80 * GIB, max_model_len=4096, **place))
    assert found.fits is False
    assert words in found.verdict
    assert found.pool is not None
    assert found.pool.shortfall_bytes > 0


def test_memory_of_others_stands_in_the_sum_of_the_pool() -> None:
    geometry = read_geometry(PRESETS["llama-3.1-8b"].config)
    found = plan(geometry, Deployment(memory_bytes=80 * GIB, co_tenant_bytes=20 * GIB))
    line = next(one for one in arithmetic(found) if one.startswith("pool: "))
    figures = map(float, re.findall(r"-?\d+\.\d\d(?= GiB)", line))
    _, _, total, others, free, weights, activations, rest, left = figures
    assert total - others == pytest.approx(free, abs=0.02)
    assert free - weights - activations - rest == pytest.approx(left, abs=0.03)


def test_weights_without_a_bound_give_no_number_of_blocks(geometry_of: Callable[..., ModelGeometry]) -> None:
    found = plan(geometry_of("Llama-4-Scout"), Deployment(memory_bytes=80 * GIB, max_num_seqs=64))
    assert (found.fits, found.pool) == (False, None)
    assert "of weights, the least that they may be: does not fit" in found.verdict


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "DeepSeek-V3", "Qwen3-30B-A3B", "Gemma-2-9B"])
def test_the_longest_sequence_does_not_hang_on_the_length_asked_for(
    geometry_of: Callable[..., ModelGeometry], name: str
) -> None:
    geometry = geometry_of(name)

    def longest(length: int) -> int:
        found = plan(geometry, Deployment(kv_cache_bytes=8 * GIB, max_model_len=length))
        assert found.pool is not None
        return found.pool.longest_sequence_tokens

    assert len({longest(length) for length in (1, 2, 15, 17, 4096, 1 << 30)}) == 1
    fits, too_long = (
        plan(geometry, Deployment(kv_cache_bytes=8 * GIB, max_model_len=longest(1) + more)) for more in (0, 1)
    )
    assert (fits.fits, too_long.fits) == (True, False)


def test_bytes_of_a_sequence_are_those_of_its_blocks(
    cases: dict[str, Any], geometry_of: Callable[..., ModelGeometry]
) -> None:
    for name in cases:
        for found in plans(geometry_of(name)):
            blocks = found.reserve_blocks_per_sequence
            assert found.reserve_bytes_per_sequence == blocks * found.kv_bytes_per_block
    # The published figure: 32 sequences of 8,192 tokens.
    mixed = plan(geometry_of("gpt-oss-20b"), Deployment(max_model_len=8192))
    assert 32 * mixed.reserve_bytes_per_sequence == 12 * GIB
    assert 32 * mixed.ideal_bytes_per_sequence == 6.09375 * GIB
