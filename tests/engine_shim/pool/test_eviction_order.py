"""The order of eviction, against a list that does the same slowly."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.pool.eviction_order import EvictionOrder

BLOCKS = 8
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "pop", "replace"]), st.integers(0, BLOCKS - 1), st.integers(0, 7)),
    max_size=60,
)


@settings(max_examples=400)
@given(STEPS)
def test_equals_a_plain_list(steps: list[tuple[str, int, int]]) -> None:
    order, plain = EvictionOrder(), list[int]()
    for what, block, other in steps:
        if what == "add" and block not in plain:
            order.add([block])
            plain.append(block)
        elif what == "remove" and block in plain:
            order.remove([block])
            plain.remove(block)
        elif what == "pop":
            count = min(len(plain), other % 3)
            assert order.pop_oldest(count) == plain[:count]
            del plain[:count]
        elif what == "replace" and block in plain and other not in plain:
            order.replace(block, other)
            plain[plain.index(block)] = other
        assert list(order) == plain
        assert len(order) == len(plain)
        assert [block in order for block in range(BLOCKS)] == [block in plain for block in range(BLOCKS)]


def test_names_do_not_pile_up() -> None:
    order = EvictionOrder(range(4))
    for _ in range(1000):
        order.replace(0, 9)
        order.add([0])
        order.remove([9])
        order.replace(0, 9)
        order.replace(9, 0)
    assert len(order._name_of) <= 4
    assert len(order._block_of) <= 4
    order.clear()
    assert list(order) == []
    assert 0 not in order
