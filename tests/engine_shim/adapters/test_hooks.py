"""Hooks on an engine's objects: put on, taken off, and dropped where the engine has replaced its object."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from engine_shim.adapters.hooks import Hook, Hooks, Method, is_hooked


class Table:
    """An engine's object."""

    def get(self) -> int:
        return 1


def plus_one(hook: Hook) -> Method:
    return lambda: hook.inner() + 1


@pytest.fixture
def no_collector() -> Iterator[None]:
    """As for what vLLM's start has made, which it freezes: only references count."""
    gc.disable()
    yield
    gc.enable()


def test_a_dropped_hook_is_off_and_its_object_is_held_no_longer(no_collector: None) -> None:
    hooks, table, other = Hooks(), Table(), Table()
    hook = hooks.wrap(table, "get", plus_one)
    hooks.wrap(other, "get", plus_one)
    assert (table.get(), other.get()) == (2, 2)
    hooks.drop(hook)
    assert (table.get(), other.get(), len(hooks)) == (1, 2, 1)
    assert not is_hooked(table, "get")
    gone = weakref.ref(table)
    del table, hook
    assert gone() is None
    hooks.remove_all()
    assert (other.get(), len(hooks)) == (1, 0)


def test_of_two_hooks_on_one_method_the_inner_one_can_be_dropped() -> None:
    """It stays inside of the other, as where somebody else has wrapped the method again."""
    hooks, table = Hooks(), Table()
    inner = hooks.wrap(table, "get", plus_one)
    hooks.wrap(table, "get", plus_one)
    hooks.drop(inner)
    hooks.drop(inner)
    assert (table.get(), len(hooks)) == (3, 1)
