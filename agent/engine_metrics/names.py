"""Every name under which an engine exports what the agent wants to know, over all generations: one table.

Where several rows give one quantity, the first that is exported counts, and they are never added: some generations
export the old name beside the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Literal

EngineKind = Literal["vllm", "sglang", "lmdeploy", "ollama"]


class Quantity(StrEnum):
    """What is asked for, by the name that the agent gives it. Ratios are 0 to 1; counters count from the start."""

    KV_USAGE = "kv_usage_ratio"
    RUNNING = "running_requests"
    WAITING = "waiting_requests"
    SWAPPED = "swapped_requests"
    PREEMPTIONS = "preemptions"
    PREFIX_QUERY_TOKENS = "prefix_query_tokens"
    PREFIX_HIT_TOKENS = "prefix_hit_tokens"
    PREFIX_HIT_RATIO = "prefix_hit_ratio"
    PROMPT_TOKENS = "prompt_tokens"
    GENERATION_TOKENS = "generation_tokens"
    CAPACITY_TOKENS = "capacity_tokens"
    CAPACITY_BLOCKS = "capacity_blocks"
    BLOCK_TOKENS = "block_tokens"
    USED_TOKENS = "used_tokens"
    FULL_USAGE = "full_attention_usage_ratio"
    SLIDING_USAGE = "sliding_window_usage_ratio"
    STATE_USAGE = "state_usage_ratio"
    MEMORY_BYTES = "memory_bytes"
    GPU_MEMORY_BYTES = "gpu_memory_bytes"
    CONTEXT_TOKENS = "context_tokens"


class Across(Enum):
    """How values of data-parallel ranks, which are engines of their own, become one."""

    SUM = "sum"
    MEAN = "mean"  # weighted by capacity where each rank tells its own
    SAME = "same"  # a property that they share; left out where they differ


@dataclass(frozen=True, slots=True)
class Meaning:
    """What kind of number a quantity is."""

    across: Across
    is_ratio: bool = False
    is_counter: bool = False


_SUM, _COUNTER = Meaning(Across.SUM), Meaning(Across.SUM, is_counter=True)
_RATIO, _SAME = Meaning(Across.MEAN, is_ratio=True), Meaning(Across.SAME)

MEANINGS: Mapping[Quantity, Meaning] = {
    Quantity.KV_USAGE: _RATIO,
    Quantity.RUNNING: _SUM,
    Quantity.WAITING: _SUM,
    Quantity.SWAPPED: _SUM,
    Quantity.PREEMPTIONS: _COUNTER,
    Quantity.PREFIX_QUERY_TOKENS: _COUNTER,
    Quantity.PREFIX_HIT_TOKENS: _COUNTER,
    Quantity.PREFIX_HIT_RATIO: _RATIO,
    Quantity.PROMPT_TOKENS: _COUNTER,
    Quantity.GENERATION_TOKENS: _COUNTER,
    Quantity.CAPACITY_TOKENS: _SUM,
    Quantity.CAPACITY_BLOCKS: _SUM,
    Quantity.BLOCK_TOKENS: _SAME,
    Quantity.USED_TOKENS: _SUM,
    Quantity.FULL_USAGE: _RATIO,
    Quantity.SLIDING_USAGE: _RATIO,
    Quantity.STATE_USAGE: _RATIO,
    Quantity.MEMORY_BYTES: _SUM,
    Quantity.GPU_MEMORY_BYTES: _SUM,
    Quantity.CONTEXT_TOKENS: _SAME,
}


@dataclass(frozen=True, slots=True)
class Name:
    """One name of a sample, as it stands in the text; its value is the quantity, or a label of it is. Of Ollama, whose
    list is JSON, the name of a field.

    Names that say "perc" mean shares of 0 to 1 all the same.
    """

    kind: EngineKind
    sample: str
    quantity: Quantity
    label: str = ""  # the number stands in this label
    since: str = ""  # the engine's versions that export it


NAMES: tuple[Name, ...] = (
    Name("vllm", "vllm:kv_cache_usage_perc", Quantity.KV_USAGE, since="0.9"),
    Name("vllm", "vllm:gpu_cache_usage_perc", Quantity.KV_USAGE, since="0.2 to 0.10"),
    Name("vllm", "vllm:num_requests_running", Quantity.RUNNING),
    Name("vllm", "vllm:num_requests_waiting", Quantity.WAITING),
    Name("vllm", "vllm:num_requests_swapped", Quantity.SWAPPED, since="0.2 to 0.8"),
    Name("vllm", "vllm:num_preemptions_total", Quantity.PREEMPTIONS),
    Name("vllm", "vllm:prefix_cache_queries_total", Quantity.PREFIX_QUERY_TOKENS, since="0.9"),
    Name("vllm", "vllm:gpu_prefix_cache_queries_total", Quantity.PREFIX_QUERY_TOKENS, since="0.8 to 0.10"),
    Name("vllm", "vllm:prefix_cache_hits_total", Quantity.PREFIX_HIT_TOKENS, since="0.9"),
    Name("vllm", "vllm:gpu_prefix_cache_hits_total", Quantity.PREFIX_HIT_TOKENS, since="0.8 to 0.10"),
    Name("vllm", "vllm:gpu_prefix_cache_hit_rate", Quantity.PREFIX_HIT_RATIO, since="0.6 to 0.8"),
    Name("vllm", "vllm:prompt_tokens_total", Quantity.PROMPT_TOKENS),
    Name("vllm", "vllm:generation_tokens_total", Quantity.GENERATION_TOKENS),
    Name("vllm", "vllm:cache_config_info", Quantity.CAPACITY_TOKENS, "kv_cache_size_tokens", since="0.28"),
    Name("vllm", "vllm:cache_config_info", Quantity.CAPACITY_BLOCKS, "num_gpu_blocks"),
    Name("vllm", "vllm:cache_config_info", Quantity.BLOCK_TOKENS, "block_size"),
    # The highest usage of its pools (KV, sliding window, state), so no number of tokens follows from it.
    Name("sglang", "sglang:token_usage", Quantity.KV_USAGE),
    Name("sglang", "sglang:full_token_usage", Quantity.FULL_USAGE),
    Name("sglang", "sglang:swa_token_usage", Quantity.SLIDING_USAGE),
    Name("sglang", "sglang:mamba_usage", Quantity.STATE_USAGE),
    Name("sglang", "sglang:num_used_tokens", Quantity.USED_TOKENS),
    Name("sglang", "sglang:kv_used_tokens", Quantity.USED_TOKENS),
    Name("sglang", "sglang:max_total_num_tokens", Quantity.CAPACITY_TOKENS),
    Name("sglang", "sglang:num_running_reqs", Quantity.RUNNING),
    Name("sglang", "sglang:num_queue_reqs", Quantity.WAITING),
    # Not num_retracted_reqs: that is a gauge, of the last batch alone.
    Name("sglang", "sglang:num_retracted_requests_total", Quantity.PREEMPTIONS),
    Name("sglang", "sglang:num_retracted_reqs_total", Quantity.PREEMPTIONS),
    Name("sglang", "sglang:cache_hit_rate", Quantity.PREFIX_HIT_RATIO),
    Name("sglang", "sglang:prompt_tokens_total", Quantity.PROMPT_TOKENS),
    Name("sglang", "sglang:generation_tokens_total", Quantity.GENERATION_TOKENS),
    Name("lmdeploy", "lmdeploy:gpu_cache_usage_perc", Quantity.KV_USAGE),
    Name("lmdeploy", "lmdeploy:num_requests_running", Quantity.RUNNING),
    Name("lmdeploy", "lmdeploy:num_requests_waiting", Quantity.WAITING),
    Name("lmdeploy", "lmdeploy:prompt_tokens_total", Quantity.PROMPT_TOKENS),
    Name("lmdeploy", "lmdeploy:generation_tokens_total", Quantity.GENERATION_TOKENS),
    # Nothing of its KV cache: what it tells is the memory of a loaded model, its cache included.
    Name("ollama", "size", Quantity.MEMORY_BYTES),
    Name("ollama", "size_vram", Quantity.GPU_MEMORY_BYTES),
    Name("ollama", "context_length", Quantity.CONTEXT_TOKENS),
)

MODEL_LABELS = ("model_name",)
# Each of these values is an engine with a pool of its own.
DATA_PARALLEL_LABELS = ("engine", "dp_rank")
# Whatever else tells series apart (tp_rank, pp_rank, moe_ep_rank, pid, ...) is processes of one engine, which say the
# same: the maximum counts.
WRITER_SAMPLE = "process_start_time_seconds"  # tells the process that answered from another one at the same address
