"""What a method may take for a wrapper to stand around it."""

from __future__ import annotations

from typing import Any

import pytest

from engine_shim.adapters.signatures import Parameters, differences


class Methods:
    """What an engine may have."""

    def none(self) -> None: ...

    def two(self, first: int, second: int) -> None: ...

    def optional(self, first: int, second: int, third: int = 3) -> None: ...

    def by_name(self, first: int, *, second: int) -> None: ...

    def anything(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "wanted", "difference"),
    [
        ("none", (), ""),
        ("none", (...,), ""),
        ("none", ("first",), "takes nothing, not first"),
        ("two", ("first", "second"), ""),
        ("two", ("first", ...), ""),
        ("two", (...,), ""),
        ("two", (), "takes first, second, not nothing"),
        ("two", ("second", "first"), "takes first, second, not second, first"),
        ("optional", ("first", "second"), "takes first, second, third, not first, second"),
        ("optional", ("first", "second", ...), ""),
        ("by_name", ("first", "second"), "takes first, keyword-only second, not first, second"),
        ("by_name", ("first", ...), ""),
        ("anything", ("first",), "takes variadic positional args, variadic keyword kwargs, not first"),
        ("anything", (...,), ""),
    ],
)
def test_what_a_wrapper_names_is_all_that_may_be_taken(name: str, wanted: Parameters, difference: str) -> None:
    expected = [f"Engine.{name} {difference}"] if difference else []
    assert differences("Engine", Methods(), {name: wanted}) == expected


def test_what_is_missing_is_named() -> None:
    assert differences("Engine", Methods(), {"gone": ()}) == ["Engine.gone is missing"]
    assert differences("Engine", None, {"none": ()}) == ["Engine.none is missing"]
