"""A device's memory by who holds it: rows that sum to the total, and never more certain than what is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.devices.accounting import EngineClaim, OtherClaim, attribute, find_uuid
from agent.devices.model import DeviceMemory, EngineHere, RowKind

GIB = 2**30


def engine(pool_bytes: int, name: str = "engine") -> EngineHere:
    return EngineHere(name, "dp0.tp0.pp0", 100, 1, ("GPU-1234",), "cuda", pool_bytes)


def memory(total: int, free: int, reserved: int | None = 0) -> DeviceMemory:
    return DeviceMemory(total, total - free - (reserved or 0), free, reserved, "nvml v2")


NOBODY = OtherClaim(0, 0, 0)
sizes = st.integers(0, 2**40)


@given(
    total=sizes,
    free=sizes,
    reserved=st.none() | sizes,
    claims=st.lists(st.tuples(sizes, st.none() | sizes), max_size=3),
    others=st.builds(OtherClaim, sizes, sizes, st.integers(0, 5)),
)
def test_rows_always_sum_to_the_total(
    total: int, free: int, reserved: int | None, claims: list[tuple[int, int | None]], others: OtherClaim
) -> None:
    """Also where the parts contradict the whole, as they do while they change between two questions."""
    claimed = [EngineClaim(engine(pool), held) for pool, held in claims]
    found = attribute(DeviceMemory(total, 0, free, reserved, "nvml v2"), claimed, others)
    assert sum(row.bytes for row in found.rows) == total
    assert all(row.bytes >= 0 for row in found.rows)


def test_co_tenants_and_what_nobody_claims() -> None:
    found = attribute(memory(80 * GIB, 40 * GIB), [EngineClaim(engine(10 * GIB), 18 * GIB)], OtherClaim(12 * GIB, 0, 0))
    assert {row.kind: row.bytes for row in found.rows} == {
        RowKind.KV_POOL: 10 * GIB,
        RowKind.ENGINE_OTHER: 8 * GIB,
        RowKind.OTHER_PROCESSES: 12 * GIB,
        RowKind.RESERVED: 0,
        RowKind.UNATTRIBUTED: 10 * GIB,
        RowKind.FREE: 40 * GIB,
    }
    assert found.notes == ()


def test_an_engine_that_is_not_visible_has_its_pool_alone() -> None:
    found = attribute(memory(80 * GIB, 50 * GIB), [EngineClaim(engine(10 * GIB), None)], NOBODY)
    assert found.bytes_of(RowKind.KV_POOL) == 10 * GIB
    assert found.bytes_of(RowKind.ENGINE_OTHER) is None  # not known, so no row: not nothing
    assert found.bytes_of(RowKind.UNATTRIBUTED) == 20 * GIB
    assert "not visible" in found.notes[0]


@pytest.mark.parametrize(("held", "expected"), [(None, RowKind.UNATTRIBUTED), (12 * GIB, RowKind.OTHER_PROCESSES)])
def test_processes_that_cannot_be_told_are_others_only_where_every_engine_was_found(
    held: int | None, expected: RowKind
) -> None:
    found = attribute(memory(80 * GIB, 50 * GIB), [EngineClaim(engine(10 * GIB), held)], OtherClaim(0, 5 * GIB, 1))
    assert (found.bytes_of(RowKind.OTHER_PROCESSES) == 5 * GIB) is (expected is RowKind.OTHER_PROCESSES)
    assert (found.bytes_of(RowKind.UNATTRIBUTED) or 0) >= (
        13 * GIB if expected is RowKind.OTHER_PROCESSES else 20 * GIB
    )


def test_claims_beyond_what_is_used_are_cut_and_said_so() -> None:
    found = attribute(memory(80 * GIB, 60 * GIB), [EngineClaim(engine(10 * GIB), 18 * GIB)], OtherClaim(12 * GIB, 0, 0))
    assert found.bytes_of(RowKind.OTHER_PROCESSES) == 2 * GIB
    assert "cut to fit" in found.notes[0]


def test_without_a_reserved_part_there_is_no_such_row() -> None:
    found = attribute(memory(80 * GIB, 60 * GIB, None), [], NOBODY)
    assert found.bytes_of(RowKind.RESERVED) is None


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("GPU-af7b61d8-1111-2222-3333-444444444444", "GPU-af7b61d8-1111-2222-3333-444444444444"),
        ("gpu-AF7B61D8-1111-2222-3333-444444444444", "GPU-af7b61d8-1111-2222-3333-444444444444"),
        ("af7b61d8-1111-2222-3333-444444444444", "GPU-af7b61d8-1111-2222-3333-444444444444"),
        ("GPU-af7b", "GPU-af7b61d8-1111-2222-3333-444444444444"),
        ("GPU-a", None),  # too short to be meant
        ("GPU-bb", None),  # two begin so
        ("MIG-5b6c", "MIG-5b6c0000-1111"),
        ("0", None),  # an index names nothing
        ("", None),
    ],
)
def test_devices_are_found_by_uuid_or_by_a_short_one_that_is_unique(wanted: str, found: str | None) -> None:
    known = ["GPU-af7b61d8-1111-2222-3333-444444444444", "GPU-bbbb0000", "GPU-bbbb1111", "MIG-5b6c0000-1111"]
    assert find_uuid(wanted, known) == found
