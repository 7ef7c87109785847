"""A small engine with the names and signatures of vLLM 0.32 that its adapter uses; real vLLM is in tests/engines."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

BLOCK = 16


class Block:
    """As vLLM's KVCacheBlock."""

    def __init__(self, number: int, pool: BlockPool | None) -> None:
        self.block_id, self.pool = number, pool
        self.ref_cnt = 0
        self.is_null = False
        self._block_hash: str | None = None
        self._block_hash_num_tokens: int | None = None
        self.prev_free_block: Block | None = None
        self.next_free_block: Block | None = None

    @property
    def block_hash(self) -> str | None:
        return self._block_hash


class FreeQueue:
    """As vLLM's: a list of blocks that are linked to each other, between two heads."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.num_free_blocks = 0
        self.fake_free_list_head, self.fake_free_list_tail = Block(-1, None), Block(-1, None)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        for block in blocks:
            self.insert(block, self.fake_free_list_tail)

    def iter_blocks_after(self, block: Block | None) -> Iterator[Block]:
        following = (block or self.fake_free_list_head).next_free_block
        while following is not None and following is not self.fake_free_list_tail:
            yield following
            following = following.next_free_block

    def popleft(self) -> Block:
        block = self.fake_free_list_head.next_free_block
        assert block is not None
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        before, after = block.prev_free_block, block.next_free_block
        assert before is not None
        assert after is not None
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def insert(self, block: Block, following: Block) -> None:
        before = following.prev_free_block
        assert before is not None
        before.next_free_block = following.prev_free_block = block
        block.prev_free_block, block.next_free_block = before, following
        self.num_free_blocks += 1


class HashTable:
    """As vLLM's BlockHashToBlockMap."""

    def __init__(self) -> None:
        self._cache: dict[str, Block] = {}

    def insert(self, key: str, block: Block) -> None:
        self._cache[key] = block

    def pop(self, key: str, block_id: int) -> Block | None:
        return self._cache.pop(key, None)


class BlockPool:
    """As vLLM's BlockPool."""

    def __init__(self, blocks: int = 64) -> None:
        self.num_gpu_blocks = blocks
        self.enable_caching = True
        self.blocks = [Block(number, self) for number in range(blocks)]
        self.free_block_queue = FreeQueue(self.blocks)
        self.cached_block_hash_to_block = HashTable()
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.cached_block_hashes_by_block: dict[int, set[str]] = {}
        self.metrics_collector = None
        self._reuse_watchers: dict[int, Callable[[Block], None]] = {}

    def cache(self, block: Block, name: str) -> None:
        """The block is full, and may be found by this hash from now on."""
        block._block_hash = name
        self.cached_block_hash_to_block.insert(name, block)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        blocks = [self.free_block_queue.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._maybe_evict_cached_block(block)
            block.ref_cnt = 1
        return blocks

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:  # one without a hash is of no use but to be handed out
                last = self.free_block_queue.fake_free_list_tail
                first = self.free_block_queue.fake_free_list_head.next_free_block
                assert first is not None
                self.free_block_queue.insert(block, first if block.block_hash is None else last)

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def evict_blocks(self, block_ids: set[int]) -> None:
        for number in block_ids:
            self._maybe_evict_cached_block(self.blocks[number])

    def unpin_blocks(self, blocks: Iterable[Block], on_reuse: Callable[[Block], None]) -> None:
        self.free_blocks(blocks)

    def reset_prefix_cache(self) -> bool:
        self.cached_block_hash_to_block = HashTable()
        for block in self.blocks:
            block._block_hash = None
        return True

    def _emit_block_removed_events(self, block_hashes: list[str]) -> None:
        return

    def _maybe_evict_cached_block(self, block: Block) -> None:
        if block._block_hash is not None:
            self.cached_block_hash_to_block.pop(block._block_hash, block.block_id)
            block._block_hash = None


class FullAttentionManager:
    """As vLLM's."""

    def __init__(self, pool: BlockPool) -> None:
        self.block_pool = pool
        self.block_size = BLOCK
        self.kv_cache_group_id = 0
        self.kv_cache_spec = SimpleNamespace(kind="full_attention", page_size_bytes=1)
        self.req_to_blocks: dict[str, list[Block]] = {}

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Block]:
        table = self.req_to_blocks.setdefault(request_id, [])
        fresh = self.block_pool.get_new_blocks(max(0, -(-num_tokens // BLOCK) - len(table)))
        table += fresh
        return fresh

    def add_local_computed_blocks(self, request_id: str, new_computed_blocks: Sequence[Block], *rest: int) -> None:
        self.block_pool.touch(new_computed_blocks)
        self.req_to_blocks[request_id] = list(new_computed_blocks)

    def allocate_external_computed_blocks(self, request_id: str, *rest: int) -> None:
        return

    def remove_skipped_blocks(self, request_id: str, *rest: int) -> None:
        return

    def pop_blocks_for_free(self, request_id: str) -> list[Block]:
        return self.req_to_blocks.pop(request_id, [])

    def free(self, request_id: str) -> None:
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))


class KVCacheCoordinator:
    """As vLLM's, with one group."""

    def __init__(self, pool: BlockPool) -> None:
        self.single_type_managers = (FullAttentionManager(pool),)

    def allocate_new_computed_blocks(self, request_id: str, new_computed_blocks: Sequence[Any], *rest: int) -> None:
        self.single_type_managers[0].add_local_computed_blocks(request_id, new_computed_blocks[0])


class KVCacheManager:
    """As vLLM's."""

    def __init__(self, pool: BlockPool) -> None:
        self.block_pool = pool
        self.coordinator = KVCacheCoordinator(pool)

    def new_step_starts(self) -> None:
        return

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Block]]:
        return [], []

    def allocate_slots(self, request: Any, num_new_tokens: int) -> list[Block] | None:
        tokens = request.num_computed_tokens + num_new_tokens
        return self.coordinator.single_type_managers[0].allocate_new_blocks(request.request_id, tokens, tokens)

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        return


class Scheduler:
    """As vLLM's; `defer` as where a KV consumer runs with two batches in flight."""

    __module__ = "vllm.v1.core.sched.scheduler"

    def __init__(self, *, blocks: int = 64, defer: bool = False) -> None:
        pool = BlockPool(blocks)
        self.kv_cache_manager = KVCacheManager(pool)
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.connector = None
        self.defer_block_free = defer
        self.deferred_frees: deque[tuple[int, list[Block]]] = deque()
        self.sched_step_seq = self.processed_step_seq = 0
        self.block_size = BLOCK
        parallel = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="stand-in", dtype="torch.float32"),
            parallel_config=SimpleNamespace(**parallel),
            device_config=SimpleNamespace(device_type="cpu"),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            attention_config=SimpleNamespace(),
        )
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        self.kv_cache_config = SimpleNamespace(
            kv_cache_tensors=[SimpleNamespace(size=blocks)],
            num_blocks=blocks,
            needs_kv_cache_zeroing=False,
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=manager.kv_cache_spec, layer_names=["the only one"])],
        )

    def add(self, name: str) -> None:
        """A request that runs from the next step on."""
        request = SimpleNamespace(
            request_id=name, num_computed_tokens=0, num_tokens=BLOCK, lora_request=None, cache_salt=None, last_step=0
        )
        self.requests[name] = request
        self.running.append(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.kv_cache_manager.new_step_starts()
        counts = {request.request_id: BLOCK if not request.num_computed_tokens else 1 for request in self.running}
        self.sched_step_seq += bool(counts)
        for name, count in counts.items():
            self.kv_cache_manager.allocate_slots(self.requests[name], count)
            self.requests[name].num_computed_tokens += count
            self.requests[name].last_step = self.sched_step_seq
        self.kv_cache_manager.take_kv_cache_block_copies()
        return SimpleNamespace(num_scheduled_tokens=counts)

    def get_grammar_bitmask(self, scheduler_output: Any) -> None:
        return

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """`model_runner_output`: the requests that have ended with it."""
        self.processed_step_seq += bool(scheduler_output.num_scheduled_tokens)
        while self.deferred_frees and self.deferred_frees[0][0] <= self.processed_step_seq:
            self.kv_cache_manager.block_pool.free_blocks(self.deferred_frees.popleft()[1])
        for name in model_runner_output:
            self._end(name)

    def finish_requests(self, request_ids: Iterable[str], finished_status: str) -> None:
        for name in request_ids:
            self._end(name)

    def _end(self, name: str) -> None:
        request = self.requests[name]
        self.running = [one for one in self.running if one is not request]
        self._free_request(request)

    def _free_request(self, request: Any) -> None:
        self._free_blocks(request)

    def _free_blocks(self, request: Any) -> None:
        manager = self.kv_cache_manager.coordinator.single_type_managers[0]
        if self.defer_block_free and request.last_step > self.processed_step_seq:
            self.deferred_frees.append((self.sched_step_seq, manager.pop_blocks_for_free(request.request_id)))
        else:
            manager.free(request.request_id)
        del self.requests[request.request_id]

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        self.kv_cache_manager.coordinator.single_type_managers[0].free(request.request_id)
        request.num_computed_tokens = 0

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self.kv_cache_manager.block_pool.reset_prefix_cache()

    def shutdown(self) -> None:
        return


class Core:
    """As vLLM's EngineCoreProc: waits at a queue while it has no requests, and calls what waits for that first."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.input_queue: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._idle_state_callbacks: list[Callable[[Any], None]] = []

    def idle(self) -> None:
        """What vLLM's loop does before it waits."""
        while self._idle_state_callbacks:
            self._idle_state_callbacks.pop()(self)

    def loop_until(self, over: Callable[[], bool]) -> None:
        """vLLM's loop, without requests."""
        while not over():
            self.idle()
            if over():
                return
            self.input_queue.get(timeout=30)
