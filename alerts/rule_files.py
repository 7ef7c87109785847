"""Reads rules from YAML: all that is wrong at once, each with its line and what to write instead.

disable: [tail-waste]            # rules of the base that are not wanted
rules:
  - name: pool-nearly-full       # a rule of the base: what is not given stays as it is there
    above: 99%
  - name: many-wait              # a rule of one's own
    number: engine_waiting_requests
    above: 100
    exit: 20
    for: 2m
    severity: warning
    summary: "{value} requests wait at {engine_id}"
    meaning: ...
    action: ...
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import yaml

from alerts.model import Severity
from alerts.readings import Catalogue
from alerts.rules import REPEAT_SECONDS, Bound, Raise, Rule
from alerts.templates import Template, TemplateFault
from alerts.units import Unit, example, parse, tell
from alerts.yaml_nodes import Faults, compose, fields_of, items_of, shown, suggestion, text_of

TEXTS = ("summary", "meaning", "action")
KEYS = (
    "name", "number", "above", "below", "exit", "for", "keep_firing_for", "severity", "raise", "when", "labels",
    *TEXTS, "shows", "runbook", "repeat",
)  # fmt: skip
REQUIRED = ("number", "severity", *TEXTS)
LONGEST_TEXT = 400  # so that one alert fits a section of a Slack message
LEAST_REPEAT_SECONDS = 60.0
LONGEST_SECONDS = 30 * 86_400.0  # of any duration
MOST_RULES = 1000
MOST_ENTRIES = 20  # of one rule's lists and labels
_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")  # two underscores are Prometheus' own
_RUNBOOK = re.compile(r"https?://[^\s<>|]+|[a-z0-9-]+")
_TAKEN_LABELS = frozenset({"alertname", "rule", "severity"})


@dataclass(frozen=True, slots=True)
class RuleFile:
    """One file that was read: its rules by name as they stand there, and in its order."""

    file: str
    entries: Mapping[str, Mapping[str, yaml.Node]] = field(default_factory=dict)


NO_BASE = RuleFile("")


def read_rules(
    text: str, *, file: str, catalogue: Catalogue, base: RuleFile = NO_BASE
) -> tuple[RuleFile, tuple[Rule, ...]]:
    """The rules of `base` as `text` changes them, and its own. `file` names it in faults. Raises FileInvalid."""
    faults = Faults()
    root = compose(text, file)
    entries = {name: dict(fields) for name, fields in base.entries.items()}
    if root is not None:
        top = fields_of(root, ("disable", "rules"), "the file", faults)
        disabled = _disabled(top.get("disable"), entries, faults)
        lines: dict[str, int] = {}
        for node in items_of(top.get("rules"), "rules", faults, most=MOST_RULES):
            _take(node, entries, lines, faults)
        for name in disabled & lines.keys():
            faults.add(top["disable"], f"disable: {name} is changed in line {lines[name]}", "do one of the two")
        entries = {name: fields for name, fields in entries.items() if name not in disabled}
    builder = _Builder(catalogue, faults, file)
    rules = [builder.rule(name, fields) for name, fields in entries.items()]
    faults.raise_any()
    return RuleFile(file, entries), tuple(rule for rule in rules if rule is not None)


def _disabled(node: yaml.Node | None, base: Mapping[str, object], faults: Faults) -> set[str]:
    names = set()
    for item in items_of(node, "disable", faults, most=MOST_RULES):
        if isinstance(item, yaml.ScalarNode) and item.value in base:
            names.add(item.value)
        else:
            faults.add(item, f"there is no rule {shown(item)} to disable", suggestion(str(item.value), base))
    return names


def _take(node: yaml.Node, entries: dict[str, dict[str, yaml.Node]], lines: dict[str, int], faults: Faults) -> None:
    """One entry of the file, laid over the rule of the base that has its name."""
    fields = fields_of(node, KEYS, "a rule", faults)
    named = fields.get("name")
    if named is None:
        if isinstance(node, yaml.MappingNode):
            faults.add(node, "a rule has no name", "write name: with small letters, digits and dashes")
        return
    name = str(named.value)
    if not isinstance(named, yaml.ScalarNode) or not _NAME.fullmatch(name):
        faults.add(named, f"name: {shown(named)} is no name", "write small letters, digits and dashes")
        return
    if name in lines:
        faults.add(named, f"the rule {name} stands twice", f"keep one; the other is in line {lines[name]}")
        return
    lines[name] = named.start_mark.line + 1
    kept = dict(entries.get(name, {}))
    if "above" in fields or "below" in fields:
        turned = ("above" in kept) != ("above" in fields)
        for key in ("above", "below", *(["exit"] if turned else [])):
            kept.pop(key, None)
    if "number" in fields and kept:
        faults.add(fields["number"], f"{name} is a rule on another number", "give a rule of your own another name")
        fields.pop("number")
    entries[name] = {**kept, **fields}


class _Builder:
    """Rules from their entries."""

    def __init__(self, catalogue: Catalogue, faults: Faults, file: str) -> None:
        self._catalogue, self._faults, self._file = catalogue, faults, file

    def rule(self, name: str, fields: Mapping[str, yaml.Node]) -> Rule | None:
        """None where something is missing; the faults say what."""
        faults, before = self._faults, len(self._faults.found)
        for key in REQUIRED:
            if key not in fields:
                faults.add(fields["name"], f"the rule {name} has no {key}", f"write {key}:")
        number = self._number(fields["number"]) if "number" in fields else None
        unit = self._unit(number)
        enter = self._bound(fields, fields["name"], number, unit, f"the rule {name}")
        exit = self._threshold(fields["exit"], unit, "exit") if "exit" in fields else None
        if enter is not None and exit is not None and enter.crossed_by(exit):
            side, bad = ("at most", "above") if enter.above else ("at least", "below")
            faults.add(
                fields["exit"] if fields["exit"].start_mark.name == self._file else fields[bad],
                f"exit: {shown(fields['exit'])} is {'over' if enter.above else 'under'} {bad}: {shown(fields[bad])}",
                f"give an exit of {side} that, so that the alert can end",
            )
        severity = self._severity(fields.get("severity"), "severity")
        texts = {key: self._template(fields[key], key) for key in (*TEXTS, "shows") if key in fields}
        built = {
            "for_seconds": self._duration(fields.get("for"), "for", 0.0),
            "keep_firing_seconds": self._duration(fields.get("keep_firing_for"), "keep_firing_for", 0.0),
            "when": tuple(self._whens(fields.get("when"))),
            "raises": tuple(self._raises(fields, number, enter, severity)),
            "labels": MappingProxyType(self._labels(fields.get("labels"))),
            "runbook": self._runbook(fields.get("runbook")),
            "repeat_seconds": self._repeat(fields.get("repeat")),
        }
        if len(faults.found) > before or enter is None or severity is None:
            return None
        named = frozenset[str]().union(*(text.names for text in texts.values() if text is not None))
        return Rule(
            name=name,
            enter=enter,
            exit=enter.value if exit is None else exit,
            unit=unit or Unit.COUNT,
            severity=severity,
            units={key: one.unit for key, one in self._catalogue.numbers.items() if key in named},
            **texts,  # type: ignore[arg-type]
            **built,  # type: ignore[arg-type]
        )

    def _number(self, node: yaml.Node) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.value in self._catalogue.numbers:
            return str(node.value)
        self._faults.add(
            node, f"number: there is no {shown(node)}", suggestion(str(node.value), self._catalogue.numbers)
        )
        return None

    def _unit(self, number: str | None) -> Unit | None:
        return None if number is None else self._catalogue.numbers[number].unit

    def _bound(
        self, fields: Mapping[str, yaml.Node], at: yaml.Node, number: str | None, unit: Unit | None, what: str
    ) -> Bound | None:
        given = [key for key in ("above", "below") if key in fields]
        if len(given) != 1:
            which = "both above and below" if given else "neither above nor below"
            self._faults.add(fields[given[0]] if given else at, f"{what} has {which}", "write one of them")
            return None
        value = self._threshold(fields[given[0]], unit, given[0])
        if value is None or number is None:
            return None
        bound = Bound(number, given[0] == "above", value)
        highest = 1.0 if unit is Unit.FLAG else math.inf
        if not bound.crossed_by(highest if bound.above else 0.0):
            side = "over" if bound.above else "under"
            kind = "a flag is 0 or 1" if unit is Unit.FLAG else "no number is under 0"
            self._faults.add(
                fields[given[0]],
                f"{given[0]}: nothing is ever {side} {shown(fields[given[0]])}, since {kind}",
                f"write {example(unit or Unit.COUNT)}",
            )
            return None
        return bound

    def _threshold(self, node: yaml.Node, unit: Unit | None, what: str) -> float | None:
        """Refuses what is surely meant otherwise: 30 for 30 %, and values that no number has."""
        kind = unit or Unit.COUNT
        text = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
        value = parse(text, kind)
        if unit is None:
            return value
        if value is None:
            self._faults.add(node, f"{what}: {shown(node)} is no number in {unit}", f"write {example(kind)}")
        elif value < 0 or (unit is Unit.FLAG and value > 1):
            which = "a flag is 0 or 1" if unit is Unit.FLAG else "no number is under 0"
            self._faults.add(node, f"{what}: {shown(node)} is never reached, since {which}", f"write {example(kind)}")
        elif unit is Unit.RATIO and value > 1 and "%" not in text:
            self._faults.add(
                node,
                f"{what}: {shown(node)} is {tell(value, unit)}",
                f"write {value:g}% or {value / 100:g}; or {100 * value:g}%, if that is meant",
            )
        else:
            return value
        return None

    def _duration(self, node: yaml.Node | None, what: str, default: float) -> float:
        if node is None:
            return default
        value = parse(str(node.value), Unit.SECONDS) if isinstance(node, yaml.ScalarNode) else None
        if value is not None and 0 <= value <= LONGEST_SECONDS:
            return value
        what = f"{what}: {shown(node)} is {'too long' if value is not None and value > 0 else 'no duration'}"
        self._faults.add(node, what, f"write {example(Unit.SECONDS)}, {tell(LONGEST_SECONDS, Unit.SECONDS)} at most")
        return default

    def _repeat(self, node: yaml.Node | None) -> float | None:
        if node is None:
            return REPEAT_SECONDS
        if node.value == "never":
            return None
        value = self._duration(node, "repeat", REPEAT_SECONDS)
        if value < LEAST_REPEAT_SECONDS:
            self._faults.add(node, f"repeat: {shown(node)} is too often", "write 1m or more, or never")
        return value

    def _severity(self, node: yaml.Node | None, what: str) -> Severity | None:
        names = [one.value for one in Severity]
        if node is None:
            return None
        if isinstance(node, yaml.ScalarNode) and node.value in names:
            return Severity(node.value)
        self._faults.add(node, f"{what}: {shown(node)} is no severity", f"write one of {', '.join(names)}")
        return None

    def _whens(self, node: yaml.Node | None) -> Iterator[Bound]:
        for item in items_of(node, "when", self._faults, most=MOST_ENTRIES):
            fields = fields_of(item, ("number", "above", "below"), "an entry of when", self._faults)
            if "number" not in fields:
                self._faults.add(item, "an entry of when has no number", "write number:")
                continue
            number = self._number(fields["number"])
            bound = self._bound(fields, item, number, self._unit(number), "an entry of when")
            if bound is not None:
                yield bound

    def _raises(
        self, rule: Mapping[str, yaml.Node], number: str | None, enter: Bound | None, severity: Severity | None
    ) -> Iterator[Raise]:
        for item in items_of(rule.get("raise"), "raise", self._faults, most=MOST_ENTRIES):
            fields = fields_of(item, ("to", "number", "above", "below"), "an entry of raise", self._faults)
            if "to" not in fields:
                self._faults.add(item, "an entry of raise has no to", "write to: with the higher severity")
                continue
            to = self._severity(fields["to"], "to")
            if to is not None and severity is not None and to.rank <= severity.rank:
                self._faults.add(fields["to"], f"to: {to} is not over the rule's {severity}", "write a higher severity")
            one = self._number(fields["number"]) if "number" in fields else number
            bound = self._bound(fields, item, one, self._unit(one), "an entry of raise")
            if bound is None or to is None:
                continue
            if enter is not None and bound.number == enter.number:
                self._sense(bound, enter, fields, rule)
            yield Raise(to, bound)

    def _sense(
        self, bound: Bound, enter: Bound, fields: Mapping[str, yaml.Node], rule: Mapping[str, yaml.Node]
    ) -> None:
        """A bound on the rule's own number must be further out than the rule's, or it is always crossed, or never."""
        side, own = ("above" if one.above else "below" for one in (bound, enter))
        if bound.above is not enter.above:
            self._faults.add(fields[side], f"the rule is on {own}, and its raise on {side}", f"write {own}:")
        elif not enter.crossed_by(bound.value) and fields[side].start_mark.name == rule[own].start_mark.name:
            # Where the file moves a default threshold past a default raise, the alert is that bad from the start.
            self._faults.add(
                fields[side],
                f"{side}: {shown(fields[side])} is crossed whenever the rule's {shown(rule[own])} is",
                f"write something {'over' if enter.above else 'under'} that, or give the rule the higher severity",
            )

    def _labels(self, node: yaml.Node | None) -> dict[str, str]:
        labels: dict[str, str] = {}
        if node is None:
            return labels
        if not isinstance(node, yaml.MappingNode):
            self._faults.add(node, "labels is no mapping", "write names with values, as team: inference")
            return labels
        if len(node.value) > MOST_ENTRIES:
            self._faults.add(node, f"labels has {len(node.value):,} entries", f"write at most {MOST_ENTRIES}")
            return labels
        for key, value in node.value:
            name = str(key.value)
            if not isinstance(key, yaml.ScalarNode) or not _LABEL.fullmatch(name):
                self._faults.add(
                    key, f"{shown(key)} is no label name", "write letters, digits and underscores, not two at the front"
                )
            elif name in _TAKEN_LABELS | self._catalogue.labels or name in labels:
                self._faults.add(key, f"the label {name} is there already", "choose another name")
            elif (text := text_of(value, f"the label {name}", self._faults, longest=LONGEST_TEXT)) is not None:
                labels[name] = text
        return labels

    def _template(self, node: yaml.Node, what: str) -> Template | None:
        text = text_of(node, what, self._faults, longest=LONGEST_TEXT)
        if text is None:
            return None
        try:
            template = Template.parse(text)
        except TemplateFault as error:
            self._faults.add(node, f"{what}: {error}", "mend the text")
            return None
        for name in sorted(template.names - self._catalogue.names):
            self._faults.add(node, f"{what}: nothing is called {{{name}}}", suggestion(name, self._catalogue.names))
        return template

    def _runbook(self, node: yaml.Node | None) -> str | None:
        if node is None:
            return None
        if isinstance(node, yaml.ScalarNode) and _RUNBOOK.fullmatch(node.value):
            return str(node.value)
        self._faults.add(
            node, f"runbook: {shown(node)} is neither a URL nor a section", "write https://... or a section's name"
        )
        return None
