"""What engines export, over all generations, and what must be made of it: recorded lines, and the traps in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.engine_metrics.exposition import MAX_LINES, MAX_NOTES, NotMetrics, parse_exposition, parse_ollama
from agent.engine_metrics.model import EngineReading
from agent.engine_metrics.names import MEANINGS, NAMES, Quantity

TEXTS = Path(__file__).parent / "texts"
V0_INFO = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",calculate_kv_scales="False",cpu_offload_gb="0",'
    'enable_prefix_caching="False",gpu_memory_utilization="0.9",is_attention_free="False",num_cpu_blocks="9362",'
    'num_gpu_blocks="81767",num_gpu_blocks_override="None",sliding_window="None",swap_space_bytes="4294967296"} 1.0\n'
)


def one(text: str) -> EngineReading:
    (engine,) = parse_exposition(text).engines
    return engine


def usage(text: str) -> float | None:
    return one(text).total.get(Quantity.KV_USAGE)


def test_a_text_that_a_real_server_of_vllm_0_32_gave() -> None:
    answer = parse_exposition((TEXTS / "vllm_0.32.prom").read_text())
    (engine,) = answer.engines
    assert (engine.kind, engine.model, engine.notes) == ("vllm", "smollm2-135m", ())
    assert [rank.rank for rank in engine.ranks] == [0]
    assert dict(engine.total) == {
        Quantity.KV_USAGE: pytest.approx(58 / 599),
        Quantity.RUNNING: 6,
        Quantity.WAITING: 0,
        Quantity.PREEMPTIONS: 0,
        Quantity.PREFIX_QUERY_TOKENS: 32976,
        Quantity.PREFIX_HIT_TOKENS: 24064,
        Quantity.PROMPT_TOKENS: 32976,
        Quantity.GENERATION_TOKENS: 2899,
        Quantity.CAPACITY_TOKENS: 19200,
        Quantity.CAPACITY_BLOCKS: 600,
        Quantity.BLOCK_TOKENS: 32,
    }
    assert answer.writer == pytest.approx(1795994180, abs=100)


OLD, NEW = 'vllm:gpu_cache_usage_perc{model_name="m"} %s\n', 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} %s\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(OLD % 0.7, 0.7, id="0.6 has the old name"),
        pytest.param(OLD % 0.7 + NEW % 0.1, 0.1, id="0.10 has both: the new one, never the sum"),
        pytest.param(NEW % 0.1 + OLD % 0.7, 0.1, id="in any order"),
        pytest.param(NEW % 0.1, 0.1, id="0.11 has the new one"),
        pytest.param('vllm:num_requests_running{model_name="m"} 0\n', None, id="neither: not exported, not 0"),
        pytest.param(NEW % "NaN" + OLD % 0.7, 0.7, id="the new one is no number"),
    ],
)
def test_the_usage_gauge_was_renamed(text: str, expected: float | None) -> None:
    assert usage(text) == expected


def test_names_that_only_look_alike_are_not_taken() -> None:
    """A histogram whose name ends in _total, counters' creation times, and waiting requests by reason."""
    text = (
        'vllm:num_requests_waiting{engine="0",model_name="m"} 5\n'
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4\n'
        'vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 900\n'
        'vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e9\n'
    )
    assert dict(one(text).total) == {Quantity.WAITING: 5}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("42.0", "no share of 0 to 1, and may be meant as percent"),
        ("170", "no share of 0 to 1"),
        ("-0.5", "below 0"),
        ("NaN", "no number"),
        ("+Inf", "no number"),
    ],
)
def test_a_share_that_cannot_be_is_left_out_and_said(value: str, said: str) -> None:
    engine = one(NEW % value + 'vllm:num_requests_running{engine="0",model_name="m"} 2\n')
    assert dict(engine.total) == {Quantity.RUNNING: 2}
    assert said in engine.notes[0]


def test_a_share_a_rounding_above_1_is_1() -> None:
    assert usage(NEW % 1.0000001) == 1.0


def test_labels_without_a_number_are_unknown() -> None:
    info = 'vllm:cache_config_info{engine="0",num_gpu_blocks="None",num_gpu_blocks_override="None",block_size="16"} 1\n'
    engine = one(NEW % 0.5 + info)
    assert dict(engine.total) == {Quantity.KV_USAGE: 0.5, Quantity.BLOCK_TOKENS: 16}
    assert engine.notes == ()


def test_a_model_called_none_is_not_told() -> None:
    assert one('vllm:num_requests_running{model_name="None"} 1\n').model == ""


def test_the_first_generation_s_info_has_neither_model_nor_engine() -> None:
    engine = one(OLD % 0.25 + V0_INFO + 'vllm:num_requests_swapped{model_name="m"} 3\n')
    assert engine.ranks[0].rank is None
    assert engine.of_rank(0) is engine.ranks[0]
    assert engine.total[Quantity.CAPACITY_TOKENS] == 81767 * 16
    assert engine.total[Quantity.SWAPPED] == 3


def test_capacity_in_tokens_that_is_not_blocks_times_tokens_is_said_with_both() -> None:
    """Hybrid models: neither number is made of the other."""
    info = 'vllm:cache_config_info{engine="0",num_gpu_blocks="2000",block_size="16",kv_cache_size_tokens="290864"} 1\n'
    engine = one(NEW % 0.5 + info)
    assert engine.total[Quantity.CAPACITY_TOKENS] == 290_864
    assert "290,864" in engine.notes[0]
    assert "32,000" in engine.notes[0]


def test_tensor_parallel_ranks_say_the_same_and_data_parallel_ones_are_added() -> None:
    lines = [
        f'sglang:{name}{{dp_rank="{dp}",engine_type="unified",model_name="m",pp_rank="0",tp_rank="{tp}"}} {value}\n'
        for dp, running in ((0, 3), (1, 5))
        for tp in range(4)
        for name, value in (
            ("num_running_reqs", running if tp == 0 else 0),  # written by the first rank alone
            ("token_usage", 0.25 + dp / 2),
            ("max_total_num_tokens", 1000),
        )
    ]
    engine = one("".join(lines))
    assert [(rank.rank, rank.values[Quantity.RUNNING]) for rank in engine.ranks] == [(0, 3), (1, 5)]
    assert engine.total[Quantity.RUNNING] == 8
    assert engine.total[Quantity.CAPACITY_TOKENS] == 2000
    assert engine.total[Quantity.KV_USAGE] == 0.5  # a share is not a sum


def test_shares_of_ranks_are_weighted_by_capacity() -> None:
    lines = [
        f'sglang:token_usage{{dp_rank="{rank}"}} {used}\nsglang:max_total_num_tokens{{dp_rank="{rank}"}} {capacity}\n'
        for rank, used, capacity in ((0, 1.0, 100), (1, 0.0, 300))
    ]
    assert one("".join(lines)).total[Quantity.KV_USAGE] == 0.25


def test_a_quantity_that_one_rank_lacks_has_no_total() -> None:
    """Else a rank that says nothing would count as one at 0."""
    running = "".join(f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 2\n' for rank in (0, 1))
    engine = one(NEW % 0.5 + running)
    assert [rank.values.get(Quantity.KV_USAGE) for rank in engine.ranks] == [0.5, None]
    assert dict(engine.total) == {Quantity.RUNNING: 4}


def test_processes_that_each_export_a_gauge_are_one_engine() -> None:
    """A gauge without a mode for several processes comes out once for each, most of them never written to."""
    lines = [
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m",pid="{pid}"}} {v}\n' for pid, v in ((7, 0), (8, 0.4))
    ]
    assert usage("".join(lines)) == 0.4


def test_one_series_twice_is_the_maximum_and_is_said() -> None:
    text = 'vllm:num_requests_running{model_name="m"} 2\nvllm:num_requests_running{model_name="m"} 5\n'
    engine = one(text)
    assert engine.total[Quantity.RUNNING] == 5
    assert "twice with the same labels, as 2 and 5" in engine.notes[0]
    assert one(text.replace(" 5", " 2")).notes == ()


def test_usage_of_the_fullest_pool_beside_that_of_each() -> None:
    text = "sglang:token_usage 0.62\nsglang:full_token_usage 0.10\nsglang:mamba_usage 0.62\n"
    assert dict(one(text).total) == {
        Quantity.KV_USAGE: 0.62,
        Quantity.FULL_USAGE: 0.10,
        Quantity.STATE_USAGE: 0.62,
    }


def test_a_gauge_of_the_last_batch_is_no_counter() -> None:
    text = "sglang:num_retracted_reqs 1\nsglang:num_retracted_requests_total 48\n"
    assert one(text).total[Quantity.PREEMPTIONS] == 48


def test_lmdeploy() -> None:
    text = "".join(
        f'lmdeploy:{name}{{engine="0",model_name="internlm"}} {value}\n'
        for name, value in (("gpu_cache_usage_perc", 0.3), ("num_requests_running", 2), ("num_requests_waiting", 1))
    )
    engine = one(text)
    assert (engine.kind, engine.model) == ("lmdeploy", "internlm")
    assert dict(engine.total) == {Quantity.KV_USAGE: 0.3, Quantity.RUNNING: 2, Quantity.WAITING: 1}


def test_several_models_at_one_address_are_several_engines() -> None:
    text = "".join(f'vllm:num_requests_running{{engine="0",model_name="{name}"}} 1\n' for name in ("a", "b"))
    assert [engine.model for engine in parse_exposition(text).engines] == ["a", "b"]


def test_escapes_and_timestamps_are_the_parser_s_work() -> None:
    engine = one('vllm:num_requests_running{model_name="a\\"b\\\\c\\nd"} 3 1700000000000\n')
    assert engine.model == 'a"b\\c\nd'
    assert engine.total[Quantity.RUNNING] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(NEW % 0.5 + 'vllm:num_requests_running{engine="0",mod', "middle of a line", id="cut off"),
        pytest.param('vllm:num_requests_running{engine="0" 3\n', "not Prometheus text", id="a bracket is missing"),
        pytest.param("vllm:num_requests_running three\n", "not Prometheus text", id="a word for a number"),
    ],
)
def test_half_an_answer_is_none(text: str, said: str) -> None:
    with pytest.raises(NotMetrics, match=said):
        parse_exposition(text)


def test_a_text_of_somebody_else_has_no_engines() -> None:
    assert parse_exposition("# TYPE up gauge\nup 1\n").engines == ()
    assert parse_exposition("").engines == ()


def test_a_flood_of_doubtful_series_is_bounded() -> None:
    text = "".join(f'vllm:kv_cache_usage_perc{{model_name="m",pid="{i}"}} {i}\n' for i in range(2, 500))
    assert len(one(text).notes) <= MAX_NOTES
    many = "".join(f'vllm:num_requests_running{{model_name="{i}"}} 1\n' for i in range(1000))
    assert len(parse_exposition(many).engines) == 64
    assert len(one(f'vllm:num_requests_running{{model_name="{"m" * 10_000}"}} 1\n').model) == 256
    listed = {"models": [{"name": str(number), "size": 1} for number in range(1000)]}
    assert len(parse_ollama(json.dumps(listed)).engines) == 64


def test_more_series_than_any_engine_has_are_not_parsed() -> None:
    line = 'vllm:num_requests_running{model_name="m",pid="%d"} 1\n'
    assert one("".join(line % i for i in range(MAX_LINES))).total[Quantity.RUNNING] == 1
    with pytest.raises(NotMetrics, match="more than 20,000 series"):
        parse_exposition("".join(line % i for i in range(MAX_LINES + 1)))


def test_ollama_lists_models_and_nothing_of_their_cache() -> None:
    listed = {
        "models": [
            {"name": "qwen:7b", "model": "qwen:7b", "size": 6_000, "size_vram": 5_000, "context_length": 8192},
            {"name": "llama:1b", "size": 900, "size_vram": 0},
        ]
    }
    first, second = parse_ollama(json.dumps(listed)).engines
    assert (first.kind, first.model) == ("ollama", "qwen:7b")
    assert dict(first.total) == {
        Quantity.MEMORY_BYTES: 6000,
        Quantity.GPU_MEMORY_BYTES: 5000,
        Quantity.CONTEXT_TOKENS: 8192,
    }
    assert dict(second.total) == {Quantity.MEMORY_BYTES: 900, Quantity.GPU_MEMORY_BYTES: 0}
    assert parse_ollama('{"models": []}').engines == ()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"models": [3]}', '{"models": [{}]}', "[" * 100_000])
def test_what_is_not_ollama_s_list_is_refused(text: str) -> None:
    with pytest.raises(NotMetrics):
        parse_ollama(text)


def test_the_table_is_sound() -> None:
    """Each name once for a quantity, and every quantity with a meaning."""
    assert set(MEANINGS) == set(Quantity)
    rows = [(name.sample, name.label) for name in NAMES]
    assert len(rows) == len(set(rows))
    assert all(name.sample.startswith(f"{name.kind}:") for name in NAMES if name.kind != "ollama")
    for name in NAMES:
        # What counts from the start is exported with _total, and nothing else is.
        assert MEANINGS[name.quantity].is_counter == name.sample.endswith("_total"), name
