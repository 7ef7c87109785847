"""What a replay's API serves from: the parts of whichever session is the present one.

One application for all of them, since FastAPI keeps every function that it has ever served from, and with it all that
the function refers to: an application for each session would keep each one's samples for good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from agent.sampling.model import Clock
from agent.web.api import ApiContext


class _Part:
    """Attributes are those of what `present` gives at the time."""

    def __init__(self, present: Callable[[], Any]) -> None:
        self._present = present

    def __getattr__(self, name: str) -> Any:
        return getattr(self._present(), name)


def present_context(now: Callable[[], ApiContext]) -> ApiContext:
    """A context that is always what `now` gives. What is the same in every session is taken from the first."""

    def part(name: str) -> Any:
        return cast(Any, _Part(lambda: getattr(now(), name)))

    return replace(
        now(),
        view=lambda: now().view(),
        devices=lambda: now().devices(),
        clock=Clock(lambda: now().clock.wall(), lambda: now().clock.monotonic()),
        **{name: part(name) for name in ("exporter", "history", "compaction", "alerting", "past")},
    )
