"""Rules: when a named number is worth a message, how bad that is, and what the message says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from alerts.model import Severity
from alerts.readings import Reading, no_labels
from alerts.templates import Template
from alerts.units import Unit, tell

REPEAT_SECONDS: Final = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Bound:
    """A number on the wrong side of a value: `above` it, or below. At the value itself it is not crossed."""

    number: str
    above: bool
    value: float

    def crossed_by(self, value: float) -> bool:
        return value > self.value if self.above else value < self.value

    def text(self, unit: Unit) -> str:
        """ "over 30 %"; nothing for a flag, which says it all."""
        return "" if unit is Unit.FLAG else f"{'over' if self.above else 'under'} {tell(self.value, unit)}"


@dataclass(frozen=True, slots=True)
class Raise:
    """A firing alert is as bad as `to` once this is crossed; it does not get better before it is over."""

    to: Severity
    bound: Bound


class Verdict(Enum):
    """What one reading says of one rule."""

    CROSSED = "beyond the threshold"
    BETWEEN = "between the thresholds"  # neither begins an episode nor ends one
    CLEAR = "beyond the exit"
    UNMET = "beyond the threshold, and something else that must be so is not"  # begins no episode, ends no firing one
    UNKNOWN = "the number is not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. An episode begins when `enter` is crossed and every bound in `when` is too, fires after `for_seconds`,
    and is over once the number has been at `exit`, or beyond on the good side, for `keep_firing_seconds`."""

    name: str
    enter: Bound
    exit: float
    unit: Unit
    severity: Severity
    summary: Template
    meaning: Template
    action: Template
    for_seconds: float = 0.0
    keep_firing_seconds: float = 0.0
    when: tuple[Bound, ...] = ()
    raises: tuple[Raise, ...] = ()
    labels: Mapping[str, str] = field(default_factory=no_labels)
    units: Mapping[str, Unit] = field(default_factory=dict)  # of the numbers that its texts name
    shows: Template | None = None  # the value for people; else the number in its unit
    runbook: str | None = None  # a URL, or the name of a section of the runbook
    repeat_seconds: float | None = REPEAT_SECONDS  # None: it is told once

    @property
    def number(self) -> str:
        return self.enter.number

    @property
    def says_it_all(self) -> bool:
        """Whether its value is no number: it is so, or it is not."""
        return self.unit is Unit.FLAG or self.shows is not None

    @property
    def over_text(self) -> str:
        """Where the number has to be for it to be over: "at most 20 %"."""
        if self.says_it_all:
            return ""
        return f"{'at most' if self.enter.above else 'at least'} {tell(self.exit, self.unit)}"

    @property
    def condition(self) -> str:
        """A digest of what decides when it fires and which alert that is; its texts and its severity are not in it."""
        bounds = [(bound.number, bound.above, bound.value) for bound in (self.enter, *self.when)]
        labels = sorted(self.labels.items())
        text = json.dumps([bounds, self.exit, self.for_seconds, self.keep_firing_seconds, labels])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def judge(self, reading: Reading) -> Verdict:
        """A missing or invalid number is UNKNOWN, and so is a crossed one as long as `when` cannot be told."""
        value = reading.number(self.number)
        if value is None:
            return Verdict.UNKNOWN
        if self.enter.crossed_by(value):
            return self._conditions(reading)
        over = value <= self.exit if self.enter.above else value >= self.exit
        return Verdict.CLEAR if over else Verdict.BETWEEN

    def _conditions(self, reading: Reading) -> Verdict:
        verdict = Verdict.CROSSED
        for bound in self.when:
            value = reading.number(bound.number)
            if value is None:
                verdict = Verdict.UNKNOWN
            elif not bound.crossed_by(value):
                return Verdict.UNMET
        return verdict

    def severity_of(self, reading: Reading) -> Severity:
        """How bad it is by this reading."""
        worst = self.severity
        for one in self.raises:
            value = reading.number(one.bound.number)
            if value is not None and one.bound.crossed_by(value) and one.to.rank > worst.rank:
                worst = one.to
        return worst


def fingerprint(rule: str, labels: Mapping[str, str]) -> str:
    """Names one alert over all its episodes."""
    text = json.dumps([rule, sorted(labels.items())], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
