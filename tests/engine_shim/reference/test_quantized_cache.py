"""A quantised KV cache: its bytes are the formula's and the planner's, and whatever moves a block keeps its bits."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import Deployment
from agent.capacity.formats import kv_format
from agent.capacity.planner import plan
from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.reader import MapReader
from engine_shim.compaction.report import CompactionReport, Outcome
from engine_shim.compaction.run import RunSettings
from engine_shim.errors import SettingsError
from engine_shim.reference.build import EngineSettings, build_engine
from engine_shim.reference.clock import VirtualClock
from engine_shim.reference.content import BASE_ROWS_LOG2, PatternContent
from engine_shim.reference.decoder import Decoder, generate_contiguous
from engine_shim.reference.engine import Engine, Pace
from engine_shim.reference.geometry import GEOMETRIES, TEST_GEOMETRY, Geometry, smallest_filling
from engine_shim.reference.kv_cache import KVCache
from engine_shim.reference.quantization import STORED_FORMATS
from engine_shim.reference.scheduler import Limits
from engine_shim.reference.sequence import Sequence, sequence_of
from engine_shim.reference.transfer import receive
from engine_shim.workload import TraceRequest

EngineMaker = Callable[..., Engine]
Server = Callable[..., None]
QUANTISED = [name for name in STORED_FORMATS if STORED_FORMATS[name].element is torch.uint8]


def config_of(geometry: Geometry) -> dict[str, Any]:
    """As the model's file would say it."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16",
        "num_hidden_layers": geometry.layers, "num_attention_heads": geometry.query_heads,
        "num_key_value_heads": geometry.kv_heads, "head_dim": geometry.head_dim, "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate, "vocab_size": geometry.vocabulary,
        "max_position_embeddings": 2048,
    }  # fmt: skip


def planned_block_bytes(geometry: Geometry, block_tokens: int, name: str) -> int:
    deployment = Deployment(kv_cache_bytes=1 << 30, block_tokens=block_tokens, kv_dtype=name)
    return plan(read_geometry(config_of(geometry)), deployment).kv_bytes_per_block


@pytest.mark.parametrize("name", STORED_FORMATS)
@pytest.mark.parametrize("model", GEOMETRIES)
def test_bytes_are_those_of_the_formula_and_of_the_planner(model: str, name: str) -> None:
    geometry, stored = GEOMETRIES[model], STORED_FORMATS[name]
    if stored.refusal(geometry.head_dim):
        with pytest.raises(SettingsError, match="heads of a multiple of 32"):
            KVCache(geometry, 2, dtype=name)
        return
    cache = KVCache(geometry, 3, block_tokens=8, dtype=name)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in cache.tensors}
    token_bytes = sum(storages.values()) // (3 * 8)
    vectors = 2 * geometry.layers * geometry.kv_heads
    planned = kv_format(name)
    assert token_bytes == vectors * (geometry.head_dim * planned.bits / 8 + planned.vector_bytes)
    assert cache.block_bytes == 8 * token_bytes == 8 * stored.token_bytes(geometry)
    assert cache.block_bytes == planned_block_bytes(geometry, 8, name)


def test_eight_bits_are_half_and_scales() -> None:
    """Not 37.5 %, and four bits are not 18.75 %."""
    geometry = GEOMETRIES["Llama-3.1-8B"]
    plain = KVCache(geometry, 2).nbytes
    shares = {name: KVCache(geometry, 2, dtype=name).nbytes / plain for name in QUANTISED}
    assert shares == {
        "fp8": 0.5, "fp8_per_token_head": 132 / 256, "int8": 132 / 256, "int4": 68 / 256, "int4_group32": 72 / 256,
    }  # fmt: skip


@pytest.mark.parametrize("name", STORED_FORMATS)
def test_a_token_is_appended_to_a_partly_filled_block(name: str, device: str) -> None:
    """Nothing but its own bytes changes, and what is read through the table is what was written, to the format."""
    cache = KVCache(TEST_GEOMETRY, 9, block_tokens=4, dtype=name, device=torch.device(device))
    table = array("q", [7, 2, 5])
    vectors = torch.randn(11, 2, 32, generator=torch.Generator().manual_seed(1)).to(device)
    for position in range(11):
        before = cache.blocks.view(torch.uint8).clone()
        where = torch.from_numpy(cache.slots(table, position, position + 1)).to(device)
        cache.write(3, where, vectors[position : position + 1] * 2.0**position)
        changed = (cache.blocks.view(torch.uint8) != before).nonzero().cpu()
        assert {tuple(place) for place in changed[:, :4].tolist()} == {(table[position // 4], 1, 1, position % 4)}
    scaled = vectors * 2.0 ** torch.arange(11, device=device)[:, None, None]
    stored = STORED_FORMATS[name]
    read = cache.read(3, torch.from_numpy(cache.slots(table, 0, 11)).to(device))
    assert torch.equal(read, stored.decode(stored.encode(scaled), 32))
    assert read.shape == (11, 2, 32)
    assert not torch.equal(read, cache.read(3, torch.from_numpy(cache.slots(array("q", [2, 7, 5]), 0, 11)).to(device)))


# Pattern mode


@pytest.mark.parametrize("name", QUANTISED)
def test_contents_hold_over_preemption_hits_forks_and_moves(
    make_engine: EngineMaker, serve: Server, crowd: list[TraceRequest], name: str, device: str
) -> None:
    engine = make_engine(dtype=name, policy="relocating", verify_every=1, samples=2, device=device)
    serve(engine, crowd, samples=2)
    report = engine.report()
    assert engine.verify_all() == []
    assert report.mismatched_blocks == 0
    assert report.served_requests == len(crowd)
    assert min(report.preemptions, report.prefix_hit_tokens, report.relocation_copies) > 0


def started(engine: Engine, count: int = 24) -> list[Sequence]:
    """Every other sequence ends soon, so that gaps are left between the others' blocks."""
    sequences = [
        sequence_of(TraceRequest(i, 0.0, 60 + 16 * (i % 3), 120 if i % 2 else 6, (5000 + i,)), 16) for i in range(count)
    ]
    for sequence in sequences:
        assert engine.submit(sequence)
    for _ in range(8):
        engine.step()
    return [sequence for sequence in sequences if sequence.table]


def test_verification_knows_what_a_quantised_pattern_reads_as(make_engine: EngineMaker) -> None:
    """The tokens' rows are the seed's own random numbers, half a step off at most."""
    engine = make_engine(dtype="int8", seed=5)
    sequence = started(engine)[0]
    content, cache = engine.runner, engine.cache
    assert isinstance(content, PatternContent)
    base = torch.randn((1 << BASE_ROWS_LOG2, 2, 32), generator=torch.Generator().manual_seed(5))
    keys = content.keys(sequence, 0, sequence.computed)
    for tensor in range(len(cache.tensors)):
        with np.errstate(over="ignore"):
            rows = (keys * content._multipliers[tensor]) >> np.uint64(64 - BASE_ROWS_LOG2)
        wanted = base[torch.from_numpy(rows.astype(np.int64))]
        read = cache.read(tensor, torch.from_numpy(cache.slots(sequence.table, 0, sequence.computed)))
        steps = wanted.abs().amax(-1, keepdim=True) / 127
        assert bool(((read - wanted).abs() <= 0.5001 * steps).all())
        assert bool(((read - wanted).abs() > 0.4 * steps).any())


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("byte", [0, -1])
def test_one_wrong_bit_of_a_code_or_a_scale_is_seen(make_engine: EngineMaker, name: str, byte: int) -> None:
    engine = make_engine(dtype=name)
    sequence = started(engine)[0]
    assert engine.verify_all() == []
    block = sequence.table[2]
    engine.cache.tensors[3][block, 5, 1, byte] ^= 1
    content = engine.runner
    assert isinstance(content, PatternContent)
    (mismatch,) = content.verify_sequence(sequence)
    assert (mismatch.block, mismatch.first_position, mismatch.tokens) == (block, 2 * 16 + 5, 1)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_run_moves_blocks_bit_for_bit_and_gives_pages_back(make_engine: EngineMaker, name: str) -> None:
    engine = make_engine(blocks=512, dtype=name, policy="fifo", elastic=True, prefix_cache=False)
    live = started(engine)
    before = {s.request_id: b"".join(bytes(engine.cache.read_blocks(b, 1)) for b in s.table) for s in live}
    tables = {sequence.request_id: list(sequence.table) for sequence in live}
    reports: list[CompactionReport] = []
    engine.compaction.start(RunSettings(target=0.0, max_step_seconds=1.0, verify=True), done=reports.append)
    while engine.compaction.active:
        engine.compaction.step()
    assert reports[0].outcome is Outcome.REACHED
    assert reports[0].moved_blocks > 0
    assert engine.elastic is not None
    assert engine.elastic.given_back_bytes > 0
    assert {sequence.request_id: list(sequence.table) for sequence in live} != tables
    for sequence in live:
        held = b"".join(bytes(engine.cache.read_blocks(block, 1)) for block in sequence.table)
        assert held == before[sequence.request_id]
    assert engine.verify_all() == []
    engine.serve(iter(()), Pace(), until_idle=True)  # pages are taken again
    assert engine.report().mismatched_blocks == 0


def test_a_copy_without_its_scales_is_seen(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a mover that knows codes alone."""
    engine = make_engine(blocks=512, dtype="int8", policy="fifo", prefix_cache=False)
    started(engine)
    blocks = engine.cache.blocks

    def codes_only(sources: Any, destinations: Any) -> None:
        blocks[destinations, ..., :32] = blocks[sources, ..., :32]

    monkeypatch.setattr(engine.cache.copier, "copy", codes_only)
    engine.compaction.start(RunSettings(target=0.0, max_step_seconds=1.0))
    while engine.compaction.active:
        engine.compaction.step()
    assert engine.verify_all() != []


@pytest.mark.parametrize("name", QUANTISED)
def test_what_a_peer_receives_reads_as_the_cache_did(make_engine: EngineMaker, tmp_path: Path, name: str) -> None:
    engine = make_engine(dtype=name, transfer_folder=tmp_path)
    sequence = sequence_of(TraceRequest(7, 0.0, 100, 3), 16)
    assert engine.submit(sequence)
    engine.step()
    engine.step()
    cache = engine.cache
    wanted = cache.read(5, torch.from_numpy(cache.slots(sequence.table, 0, 100)))
    engine.serve(iter(()), Pace(), until_idle=True)
    header, blocks = receive(io.BytesIO((tmp_path / "7.kv").read_bytes()))
    assert header["dtype"] == name
    received = torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8).view(-1, *header["block_shape"])  # type: ignore[misc]
    tokens = received[:, 2, 1].flatten(0, 1)[:100]
    assert torch.equal(STORED_FORMATS[name].decode(tokens, 32), wanted)


# Model mode


@pytest.mark.parametrize("name", QUANTISED)
def test_paging_changes_no_token(make_engine: EngineMaker, name: str, device: str) -> None:
    settings: dict[str, Any] = {"content": "model", "blocks": 44, "headroom": 0.0, "limits": Limits(8, 96)}
    engine = make_engine(**settings, dtype=name, policy="relocating", device=device)
    requests = [TraceRequest(i, 0.0, 90 + 37 * i, 24, (90 + i,)) for i in range(6)]
    queued = [sequence_of(request, 16, vocabulary=TEST_GEOMETRY.vocabulary) for request in requests]
    for sequence in queued:
        assert engine.submit(sequence)
    while engine.scheduler.has_work:
        engine.step()
    assert engine.report().preemptions > 0
    runner = engine.runner
    assert isinstance(runner, Decoder)

    def alone(sequence: Sequence, stored: str) -> list[int]:
        prompt = sequence.tokens[: sequence.prompt_tokens].tolist()
        return generate_contiguous(runner.weights, TEST_GEOMETRY, prompt, 24, STORED_FORMATS[stored])

    outputs = [sequence.tokens[sequence.prompt_tokens :].tolist() for sequence in queued]
    assert outputs == [alone(sequence, name) for sequence in queued]
    if name.startswith("int4"):  # negative control: what is read is really what the format makes of it
        assert outputs != [alone(sequence, "float32") for sequence in queued]


# Settings and map


def test_the_map_names_the_format_and_its_bytes(tmp_path: Path) -> None:
    settings = EngineSettings(
        engine_id="one", blocks=32, model_geometry="test-tiny", dtype="int4_group32", device="cpu"
    )
    engine, observer = build_engine(settings, VirtualClock(), map_folder=tmp_path)
    assert isinstance(observer, MapObserver)
    try:
        engine.step()
        assert observer.path is not None
        identity = MapReader(observer.path).read(2.0).identity
        assert (identity.dtype, identity.block_bytes) == ("int4_group32", 16 * 2 * 4 * 2 * 18)
        assert identity.block_bytes == planned_block_bytes(TEST_GEOMETRY, 16, identity.dtype)
    finally:
        engine.close()
        observer.close()


def test_the_smallest_geometry_is_chosen_by_what_the_format_takes() -> None:
    def chosen(name: str) -> str:
        stored = STORED_FORMATS[name]
        fitting = [one for one in GEOMETRIES.values() if not stored.refusal(one.head_dim)]
        return smallest_filling(
            4096, block_tokens=16, token_bytes=stored.token_bytes, least_bytes=512 << 20, among=fitting
        ).name

    assert chosen("float16") == "Qwen2.5-0.5B"
    assert chosen("int8") == "SmolLM2-135M"  # 12,240 B a token are enough where 6,528 are not
    assert chosen("int4_group32") == "Llama-3.2-1B"
