"""Another version of Transformers, whose methods take more: none of its calls may fail for our hooks.

Stand-ins have the names and signatures of Transformers 5.19; the real one is in tests/engines.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.adapters.hooks import Hook, Hooks
from engine_shim.adapters.transformers.attachment import Attachment
from engine_shim.adapters.transformers.shape import examine
from tests.engine_shim.adapters.later_versions import MORE, takes_more


class Ledger:
    def __init__(self) -> None:
        self.shared_ref_counts: dict[int, int] = {}
        self.cached_blocks: dict[int, None] = {}
        self.block_to_hash: dict[int, int] = {}

    def evict_cached_blocks(self) -> list[int]:
        return []

    def reset(self) -> None:
        return


class Allocator:
    index, layer_type, pages_per_block, tokens_per_page, bytes_per_block, blocks_per_sector = 0, "full", 1, 16, 8, 1

    def __init__(self, pool: Any) -> None:
        self.pool, self.ledger = pool, Ledger()
        self.block_table: dict[str, list[int]] = {}

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        return

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        return

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        return [], []

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        return

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        return


class Pool:
    num_sectors, num_reserved_sectors, free_sectors = 4, 0, ()

    def count_free_blocks(self, index: int) -> int:
        return 0


class Cache:
    num_sectors, bytes_per_sector, use_prefix_sharing = 4, 8, True
    cache_tensor = SimpleNamespace(nbytes=32)

    def __init__(self) -> None:
        self.pool = Pool()
        self.cache_allocators = {"full": Allocator(self.pool)}

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        return False

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        return

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        return 0


class Scheduler:
    active_requests, waiting_requests, safety_margin = (), (), 0

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[Any, ...]:
        return None, False, 0, 0


class Processor:
    config = model_runner = distributed_helper = None

    def __init__(self) -> None:
        self.cache, self.scheduler = Cache(), Scheduler()

    def prepare_next_batch(self) -> bool:
        return False

    def update_batch(self) -> None:
        return

    def fail_all_requests(self, error: Exception) -> None:
        return


HOOKED = [
    *[(Allocator, name) for name in ("allocate_cache_to_request", "acquire_prefix_blocks", "fork_blocks")],
    *[(Allocator, name) for name in ("free_blocks", "mark_complete_blocks")],
    *[(Ledger, name) for name in ("evict_cached_blocks", "reset")],
    *[(Cache, name) for name in ("can_store_request_tokens", "free_blocks", "search_prefix_match")],
    (Scheduler, "schedule_batch"),
    *[(Processor, name) for name in ("prepare_next_batch", "update_batch", "fail_all_requests")],
]


def hooked(processor: Processor, counted: list[str], faults: list[BaseException]) -> Hooks:
    """The hooks on a processor, with an observer that only says what was counted."""
    attachment: Any = object.__new__(Attachment)
    attachment.hooks, attachment.reason = Hooks(), ""
    attachment._processor, attachment._scheduler = processor, processor.scheduler
    attachment.observer = SimpleNamespace(counted=lambda name, *_: counted.append(name))
    attachment.observers = ()
    attachment._audit = SimpleNamespace(adopt=lambda: None)
    attachment._show = lambda **_: None
    attachment.fault = faults.append
    book: Any = SimpleNamespace(let_go=lambda name: None, known_owner=lambda name: 0, owner_of=lambda name: 0)
    book.spaces = (SimpleNamespace(allocator=processor.cache.cache_allocators["full"]),)
    attachment.book = book
    attachment.attach()
    hooks: Hooks = attachment.hooks
    return hooks


def test_a_stand_in_has_all_that_is_looked_for() -> None:
    """The control: what is refused below is refused for what was changed."""
    assert examine(Processor()) == []
    found: list[Hook] = hooked(Processor(), [], [])._hooks
    assert {(type(hook.owner), hook.name) for hook in found} == set(HOOKED)


@pytest.mark.parametrize(("owner", "name"), HOOKED)
def test_what_takes_more_is_left_alone_or_handed_all_of_it(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    monkeypatch.setattr(owner, name, takes_more(getattr(owner, name)))
    processor = Processor()
    if problems := examine(processor):
        assert f"{owner.__name__.replace('Ledger', 'BlockLedger')}.{name} takes " in problems[0]
        assert MORE in problems[0]
        return
    (hook,) = [one for one in hooked(processor, [], [])._hooks if (type(one.owner), one.name) == (owner, name)]
    kinds = {parameter.kind for parameter in inspect.signature(getattr(hook.owner, name)).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds
    assert inspect.Parameter.VAR_POSITIONAL in kinds


@pytest.mark.parametrize("name", ["acquire_prefix_blocks", "fork_blocks"])
def test_an_allocator_whose_methods_take_more_is_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Allocator, name, takes_more(getattr(Allocator, name)))
    assert len(examine(Processor())) == 1


def test_what_comes_besides_is_handed_on_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("can_store_request_tokens", "free_blocks", "search_prefix_match"):
        monkeypatch.setattr(Cache, name, takes_more(getattr(Cache, name)))
    monkeypatch.setattr(Cache, "search_prefix_match", takes_more(lambda self, request_id, prompt_ids: 2))
    monkeypatch.setattr(Allocator, "free_blocks", takes_more(Allocator.free_blocks))
    processor, counted, faults = Processor(), list[str](), list[BaseException]()
    hooked(processor, counted, faults)
    cache: Any = processor.cache
    more = {MORE: True}
    assert not cache.can_store_request_tokens("state", 3, **more)
    assert not cache.can_store_request_tokens("state", 3, True, **more)
    assert not cache.can_store_request_tokens(state="state", request_len=3, dry_run=True, **more)
    cache.free_blocks("r", no_cache=True, **more)
    cache.search_prefix_match("r", [1, 2, 3], **more)
    cache.cache_allocators["full"].free_blocks("r", **more)
    assert faults == []
    assert counted == ["allocation_failures", "preemptions", "prefix_query_tokens", "prefix_hit_tokens"]
