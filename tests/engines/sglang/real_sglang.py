"""SGLang's own allocators and radix cache on the CPU, driven by the requests of a recorded trace.

What SGLang's scheduler does with them for one request (match, lock, evict, allocate, insert, free what was there twice,
unlock) is done here in its order; the scheduler itself needs a GPU.
"""

from __future__ import annotations

import random
import re
import sys
from array import array
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def declare_vision_operators() -> None:
    """SGLang imports torchvision, whose compiled part is of PyTorch's CUDA build and does not load beside the CPU's.
    The names that its Python part asks for are declared, so that it imports; none of them is ever called here."""
    spec = find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "_meta_registrations.py").read_text(encoding="utf-8")
    names = set(re.findall(r"torchvision::(\w+)", text)) | set(re.findall(r'@register_meta\("(\w+)"', text))
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in names:
        library.define(f"{name}(Tensor a) -> Tensor")
    sys.modules["__declared_vision_operators__"] = library  # it lives as long as the process


declare_vision_operators()

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402

import engine_shim  # noqa: E402
from engine_shim.workload import load_workload, prompt_content_ids  # noqa: E402

TRACE = Path(engine_shim.__file__).parent / "traces" / "mooncake_conversation_0-3999.jsonl.gz"


def make(kind: str, size: int) -> RadixCache:
    """A tree over a `token`, `paged` (16 tokens a page) or `sliding` allocator of `size` slots."""
    page = 16 if kind == "paged" else 1
    common: tuple[Any, ...] = (torch.float16, "cpu")
    allocator: Any
    if kind == "token":
        allocator = TokenToKVPoolAllocator(size, *common, None, False)
    elif kind == "paged":
        allocator = PagedTokenToKVPoolAllocator(size, page, *common, None, True)
    else:
        pool = SWAKVPool(
            size=size,
            size_swa=size,
            page_size=page,
            dtype=torch.float16,
            head_num=1,
            head_dim=2,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1],
            device="cpu",
        )
        allocator = SWATokenToKVPoolAllocator(size, size, page, *common, pool, False)
    return RadixCache(CacheInitParams(False, None, allocator, page))


class Driver:
    """Serves the trace's requests over one tree; `prompt_share` of each prompt is used, so that they fit."""

    def __init__(self, tree: RadixCache, *, prompt_share: float, concurrent: int) -> None:
        self.tree = tree
        self.allocator: Any = tree.token_to_kv_pool_allocator
        self.page = int(tree.page_size)
        self.evicted = self.hits = self.served = 0
        self._concurrent = concurrent
        self._share = prompt_share
        self._requests = iter(load_workload(TRACE).requests)
        self._dice = random.Random(4)
        self.running: list[dict[str, Any]] = []

    def step(self) -> None:
        """Admit up to two requests, decode a token for each that runs, finish what is done."""
        for _ in range(2):
            if len(self.running) < self._concurrent:
                self._admit()
        self._decode()
        for one in [one for one in self.running if one["left"] <= 0]:
            self.running.remove(one)
            self._finish(one)

    def drain(self) -> None:
        while self.running:
            one = self.running.pop()
            self._finish(one)

    def _admit(self) -> None:
        request = next(self._requests, None)
        if request is None:
            return
        length = max(self.page, int(request.prompt_tokens * self._share))
        tokens = array("q", prompt_content_ids(request, 0, length))
        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:-1], None)))
        node, prefix = found.last_device_node, int(found.device_prefix_len)
        self.tree.inc_lock_ref(node)
        slots = self.tree.path_device_indices(node)
        fresh = self._take(prefix, length, slots)
        if fresh is None:
            self.tree.dec_lock_ref(node)
            return
        self.hits += prefix
        self.running.append(
            {
                "tokens": tokens,
                "slots": torch.cat((slots, fresh)),
                "node": node,
                "prefix": prefix,
                "left": self._dice.randrange(2, 20),
            }
        )

    def _decode(self) -> None:
        """One more slot for every request, in one allocation, as for a batch of the scheduler's."""
        for one in self.running:
            one["left"] -= 1
        if not self.running or not self._make_room(len(self.running) * self.page):
            return
        lengths = torch.tensor([len(one["slots"]) + 1 for one in self.running])
        if self.page == 1:
            fresh = self.allocator.alloc(len(self.running))
        else:
            last = torch.stack([one["slots"][-1] for one in self.running])
            fresh = self.allocator.alloc_decode(lengths, lengths, last)
        for place, one in enumerate(self.running):
            one["tokens"].append(self._dice.randrange(1 << 40))
            one["slots"] = torch.cat((one["slots"], fresh[place : place + 1]))

    def _make_room(self, tokens: int) -> bool:
        if self.allocator.available_size() < tokens:
            self.evicted += int(self.tree.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)
        return bool(self.allocator.available_size() >= tokens)

    def _take(self, before: int, length: int, slots: Any) -> Any:
        """Slots for tokens `before` to `length`, after evicting what is needed; None where there is no room."""
        need = length - before
        if not self._make_room(need + self.page):
            return None
        if self.page == 1:
            return self.allocator.alloc(need)
        last = slots[-1:] if len(slots) else torch.tensor([-1])
        lengths = torch.tensor([before]), torch.tensor([length])
        return self.allocator.alloc_extend(lengths[0], lengths[0], lengths[1], lengths[1], last, need)

    def _finish(self, one: dict[str, Any]) -> None:
        slots, key = one["slots"], RadixKey(one["tokens"][: len(one["slots"])], None).page_aligned(self.page)
        kept = len(key)
        result = self.tree.insert(InsertParams(key=key, value=slots[:kept].clone()))
        self.allocator.free_segment(slots[one["prefix"] : result.prefix_len], start_pos=one["prefix"])
        if kept < len(slots):
            self.allocator.free_segment(slots[kept:], start_pos=kept)
        self.tree.dec_lock_ref(one["node"])
        self.served += 1
