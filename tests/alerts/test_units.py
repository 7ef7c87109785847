"""Numbers as people read and write them."""

from __future__ import annotations

import math

import pytest

from alerts.units import Unit, parse, tell


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.412, Unit.RATIO, "41 %"),
        (0.004, Unit.RATIO, "0.4 %"),
        (1.0, Unit.RATIO, "100 %"),
        (0.0, Unit.SECONDS, "0 s"),
        (1.5, Unit.SECONDS, "1.5 s"),
        (45.0, Unit.SECONDS, "45 s"),
        (119.6, Unit.SECONDS, "2 min"),
        (3599.0, Unit.SECONDS, "1 h"),
        (4800.0, Unit.SECONDS, "1 h 20 min"),
        (86_400.0, Unit.SECONDS, "1 d"),
        (187_200.0, Unit.SECONDS, "2 d 4 h"),
        (-90.0, Unit.SECONDS, "-90 s"),
        (1.0, Unit.BLOCKS, "1 block"),
        (1234.0, Unit.BLOCKS, "1,234 blocks"),
        (512.0, Unit.BYTES, "512 B"),
        (1.5 * 2**30, Unit.BYTES, "1.5 GiB"),
        (12.0, Unit.PER_MINUTE, "12 a minute"),
        (0.25, Unit.PER_MINUTE, "0.25 a minute"),
        (3.0, Unit.COUNT, "3"),
        (1.0, Unit.FLAG, "yes"),
        (0.0, Unit.FLAG, "no"),
        (None, Unit.RATIO, "unknown"),
        (math.nan, Unit.SECONDS, "unknown"),
    ],
)
def test_a_number_is_told(value: float | None, unit: Unit, text: str) -> None:
    assert tell(value, unit) == text


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("95%", Unit.RATIO, 0.95),
        ("95 %", Unit.RATIO, 0.95),
        (".5", Unit.RATIO, 0.5),
        ("1e-3", Unit.RATIO, 0.001),
        ("5m", Unit.SECONDS, 300.0),
        ("1.5h", Unit.SECONDS, 5400.0),
        ("2d", Unit.SECONDS, 172_800.0),
        ("90", Unit.SECONDS, 90.0),
        ("-1", Unit.COUNT, -1.0),
        ("1MiB", Unit.BYTES, 1_048_576.0),
        ("95%", Unit.COUNT, None),
        ("5m", Unit.RATIO, None),
        ("1MB", Unit.BYTES, None),
        ("nan", Unit.RATIO, None),
        ("inf", Unit.SECONDS, None),
        ("1e999", Unit.COUNT, None),
        ("", Unit.COUNT, None),
        ("5m 3s", Unit.SECONDS, None),
        ("0x10", Unit.COUNT, None),
    ],
)
def test_a_number_is_read(text: str, unit: Unit, value: float | None) -> None:
    assert parse(text, unit) == value
