"""What of SGLang the hooks rely on, checked on the live objects before anything is touched."""

from __future__ import annotations

import inspect
from typing import Any

SUPPORTED = "0.5.23"  # the version these names and signatures were read in and tested with

TREE_METHODS = {
    "inc_lock_ref": ("node",),
    "dec_lock_ref": ("node",),
    "_insert_helper": ("node", "key", "value"),
}
POOL_METHODS = {"alloc": ("need_size",), "clear": ()}


def examine(tree: Any) -> list[str]:
    """What differs; empty where all is as expected."""
    problems = _look("RadixCache", tree, ("root_node", "page_size", "token_to_kv_pool_allocator"), TREE_METHODS)
    allocator = getattr(tree, "token_to_kv_pool_allocator", None)
    for one in pools_of(allocator):
        name = type(one).__name__
        problems += _look(name, one, ("size", "page_size", "free_pages", "free_group"), POOL_METHODS)
        if release_method(one) is None:
            problems.append(f"{name} has neither _release_page_ids nor free")
    return problems


def pools_of(allocator: Any) -> tuple[Any, ...]:
    """The allocators of one index space each: a hybrid one has two, of full and of sliding attention."""
    full, sliding = (getattr(allocator, name, None) for name in ("full_attn_allocator", "swa_attn_allocator"))
    return (allocator,) if full is None or sliding is None else (full, sliding)


def release_method(allocator: Any) -> str | None:
    """Where pages go back to the free list for good."""
    return next((name for name in ("_release_page_ids", "free") if callable(getattr(allocator, name, None))), None)


def _look(what: str, holder: Any, fields: tuple[str, ...], methods: dict[str, Any]) -> list[str]:
    problems = [f"{what}.{name} is missing" for name in fields if not hasattr(holder, name)]
    for name, parameters in methods.items():
        method = getattr(holder, name, None)
        given = tuple(inspect.signature(method).parameters)[: len(parameters)] if callable(method) else None
        if given != parameters:
            problems.append(f"{what}.{name} is missing, or does not take {', '.join(parameters) or 'nothing'}")
    return problems
