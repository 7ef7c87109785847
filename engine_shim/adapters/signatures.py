"""Does an engine's method take what our wrapper around it hands on?

A wrapper that names its parameters fails in the engine's hands when another version of the engine passes one more, so
what it names is all that the method may take. One that hands on whatever else comes says so with `...` at the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

Parameters = tuple[str | EllipsisType, ...]

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def differences(what: str, holder: Any, methods: Mapping[str, Parameters]) -> list[str]:
    """What is missing of these methods of `holder`, or takes something else; empty where all are as expected."""
    found = []
    for name, wanted in methods.items():
        method = getattr(holder, name, None)
        if not callable(method):
            found.append(f"{what}.{name} is missing")
        elif difference := _difference(method, wanted):
            found.append(f"{what}.{name} {difference}")
    return found


def _difference(method: Any, wanted: Parameters) -> str:
    given = _parameters(method)
    if wanted and wanted[-1] is ...:
        given, wanted = given[: len(wanted) - 1], wanted[:-1]
    if given == wanted:
        return ""
    return f"takes {', '.join(given) or 'nothing'}, not {', '.join(map(str, wanted)) or 'nothing'}"


def _parameters(method: Any) -> tuple[str, ...]:
    """Names, and the kind of those that cannot be handed on by their place."""
    try:
        found = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # built in, or wrapped beyond recognition
        return ()
    return tuple(one.name if one.kind in _BY_PLACE else f"{one.kind.description} {one.name}" for one in found)
