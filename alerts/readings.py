"""Named numbers of one source at one time: all that rules are judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from alerts.units import Unit


def no_labels() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is known of one source now.

    A number that is not known now is None or left out: that neither fires nor resolves anything. Where it will not be
    known any more, since what it told of has ended in good order, `void` says so, and open alerts on it are over.
    """

    source: str  # an id that lasts; the alerts of a source that is not read any more are over after a time
    labels: Mapping[str, str]  # name the source to people, and an alert together with its rule
    numbers: Mapping[str, float | None]
    texts: Mapping[str, str] = field(default_factory=no_labels)  # more for the texts of rules
    incarnation: str = ""  # another one means that the source started anew
    unknown: str = ""  # why numbers are missing: "no heartbeat for 12 s"
    void: str = ""  # "the engine ended in good order"
    link: str | None = None

    def number(self, name: str) -> float | None:
        """None where it is missing or no finite number."""
        value = self.numbers.get(name)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class NamedNumber:
    """What there is to make rules of. `text` says what it is, for who writes them."""

    unit: Unit
    text: str


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Every number, label and text that readings may hold; what rules are checked against."""

    numbers: Mapping[str, NamedNumber]
    labels: frozenset[str] = field(default_factory=frozenset)
    texts: frozenset[str] = field(default_factory=frozenset)

    @property
    def names(self) -> frozenset[str]:
        """What a template may hold."""
        return self.labels | self.texts | {*self.numbers, "value", "threshold"}
