"""Rules from YAML: what is right is read, and all that is wrong is named at once, with its line and what to write."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alerts.model import Severity
from alerts.readings import Catalogue, NamedNumber
from alerts.rule_files import NO_BASE, RuleFile, read_rules
from alerts.rules import REPEAT_SECONDS, Bound, Raise, Rule
from alerts.units import Unit
from alerts.yaml_nodes import MAX_BYTES, Fault, FileInvalid

CATALOGUE = Catalogue(
    {
        "used_ratio": NamedNumber(Unit.RATIO, "share in use"),
        "left_seconds": NamedNumber(Unit.SECONDS, "until it is full"),
        "waste_bytes": NamedNumber(Unit.BYTES, "for nothing"),
        "waiting": NamedNumber(Unit.COUNT, "that wait"),
        "gone": NamedNumber(Unit.FLAG, "whether it is gone"),
    },
    frozenset({"engine_id", "pool"}),
    frozenset({"reason"}),
)
FULL = """\
rules:
  - name: full
    number: used_ratio
    above: 95%
    exit: 0.9
    for: 30s
    keep_firing_for: 1m
    severity: warning
    raise:
      - to: critical
        number: waiting
        above: 10
    when:
      - number: left_seconds
        below: 5m
    labels:
      team: inference
    summary: "{engine_id} is {value} full"
    meaning: "{waiting} wait, {waste_bytes} are wasted"
    action: "{{look}} at {pool}"
    shows: "{value}, {reason}"
    runbook: full
    repeat: 2h
"""


def read(text: str, base: RuleFile = NO_BASE) -> tuple[Rule, ...]:
    return read_rules(text, file="rules.yml", catalogue=CATALOGUE, base=base)[1]


def faults(text: str, base: RuleFile = NO_BASE) -> list[str]:
    with pytest.raises(FileInvalid) as caught:
        read(text, base)
    return str(caught.value).splitlines()


def test_a_rule_is_read_with_everything_in_it() -> None:
    (rule,) = read(FULL)
    assert (rule.name, rule.enter, rule.exit) == ("full", Bound("used_ratio", True, 0.95), 0.9)
    assert (rule.for_seconds, rule.keep_firing_seconds, rule.repeat_seconds) == (30.0, 60.0, 7200.0)
    assert rule.raises == (Raise(Severity.CRITICAL, Bound("waiting", True, 10.0)),)
    assert rule.when == (Bound("left_seconds", False, 300.0),)
    assert dict(rule.labels) == {"team": "inference"}
    assert rule.units == {"waiting": Unit.COUNT, "waste_bytes": Unit.BYTES}
    assert rule.action.render({"pool": "kv"}) == "{look} at kv"


def test_what_is_not_given_has_a_default() -> None:
    (rule,) = read("rules: [{name: gone, number: gone, above: 0.5, severity: info, summary: s, meaning: m, action: a}]")
    assert (rule.exit, rule.for_seconds, rule.keep_firing_seconds) == (0.5, 0.0, 0.0)
    assert rule.repeat_seconds == REPEAT_SECONDS
    assert (rule.when, rule.raises, dict(rule.labels), rule.runbook) == ((), (), {}, None)


@pytest.mark.parametrize("text", ["", "# nothing\n", "rules: []", "{}"])
def test_a_file_without_rules_is_none_of_its_own(text: str) -> None:
    assert read(text) == ()


def test_a_file_changes_single_fields_of_a_rule_it_is_laid_over() -> None:
    base, (before,) = read_rules(FULL, file="base.yml", catalogue=CATALOGUE)
    (after,) = read("rules:\n  - name: full\n    above: 99%\n    severity: info\n", base)
    assert (after.enter.value, after.severity) == (0.99, Severity.INFO)
    assert (after.exit, after.for_seconds, after.summary) == (before.exit, before.for_seconds, before.summary)
    (turned,) = read("rules:\n  - name: full\n    below: 10%\n", base)
    assert (turned.enter.above, turned.exit) == (False, 0.1)  # an exit of the other side means nothing
    assert read("disable: [full]", base) == ()


def test_rules_of_ones_own_stand_beside_those_of_the_base() -> None:
    base, _ = read_rules(FULL, file="base.yml", catalogue=CATALOGUE)
    own = FULL.replace("name: full", "name: own")
    assert [rule.name for rule in read(own, base)] == ["full", "own"]


CASES = [
    # a line of FULL, what stands there instead, the line of the fault, what it says and what to write instead
    (r"number: used_ratio$", "number: used_rato", 3, "there is no 'used_rato'", "did you mean used_ratio?"),
    (r"above: 95%$", "above: ninety", 4, "'ninety' is no number in ratio", "write 0.3 or 30%"),
    (r"above: 95%$", "above: 95GiB", 4, "'95GiB' is no number in ratio", "write 0.3 or 30%"),
    (r"above: 95%$", "above: .nan", 4, "'.nan' is no number in ratio", "write 0.3 or 30%"),
    (r"above: 95%$", "above:", 4, "'' is no number", "write 0.3"),
    (r"above: 95%$", "above: [1]", 4, "a list is no number", "write 0.3"),
    (r"above: 95%$", "above: 95%\n    below: 10%", 4, "both above and below", "write one of them"),
    (r"    above: 95%\n", "", 2, "neither above nor below", "write one of them"),
    (r"exit: 0.9$", "exit: 96%", 5, "exit: '96%' is over above: '95%'", "an exit of at most that"),
    (r"for: 30s$", "for: soon", 6, "'soon' is no duration", "write 90s, 5m or 2h"),
    (r"for: 30s$", "for: -1s", 6, "'-1s' is no duration", "write 90s"),
    (r"for: 30s$", "for: 1:30", 6, "'1:30' is no duration", "write 90s"),
    (r"for: 30s$", "fore: 30s", 6, "a rule has no 'fore'", "did you mean for?"),
    (r"for: 30s$", "for: 30s\n    for: 40s", 7, "for stands twice", "the other is in line 6"),
    (r"severity: warning$", "severity: bad", 8, "'bad' is no severity", "write one of info, warning, critical"),
    (r"    severity: warning\n", "", 2, "has no severity", "write severity:"),
    (r"to: critical$", "to: warning", 10, "warning is not over the rule's warning", "a higher severity"),
    (r"number: waiting$", "number: wating", 11, "there is no 'wating'", "did you mean waiting?"),
    (r"below: 5m$", "below: 5 parsecs", 15, "'5 parsecs' is no number in seconds", "write 90s, 5m or 2h"),
    (r"      team: inference$", "      9team: x", 17, "'9team' is no label name", "letters, digits and underscores"),
    (r"      team: inference$", "      pool: x", 17, "the label pool is there already", "choose another name"),
    (r"is \{value\} full", "is {valu} full", 18, "nothing is called {valu}", "did you mean value?"),
    (r"is \{value\} full", "is {value full", 18, "a brace stands alone", "write {{ or }}"),
    (r"is \{value\} full", "is {value.real} full", 18, "is not a plain name", "write {name}"),
    (r"is \{value\} full", "is {value!r} full", 18, "is not a plain name", "write {name}"),
    (r'"\{engine_id\} is \{value\} full"', '""', 18, "summary is empty", "write a text"),
    (r'"\{engine_id\} is \{value\} full"', '"' + "x" * 401 + '"', 18, "summary has 401 characters", "at most 400"),
    (r"runbook: full$", "runbook: javascript:alert(1)", 22, "neither a URL nor a section", "write https://"),
    (r"repeat: 2h$", "repeat: 1s", 23, "'1s' is too often", "1m or more, or never"),
    (r"name: full$", "name: Full Pool", 2, "'Full Pool' is no name", "small letters, digits and dashes"),
    (r"- name: full\n    number", "- number", 2, "a rule has no name", "write name:"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "instead", "line", "what", "hint"), CASES)
def test_a_fault_names_its_line_and_what_to_write_instead(
    pattern: str, instead: str, line: int, what: str, hint: str
) -> None:
    text, count = re.subn(pattern, lambda _: instead, FULL, count=1, flags=re.MULTILINE)
    assert count == 1
    found = faults(text)
    assert len(found) == 1, found
    assert found[0].startswith(f"rules.yml:{line}: ")
    assert what in found[0]
    assert hint in found[0]


def test_every_fault_is_named_at_once_in_the_order_of_the_lines() -> None:
    text = FULL
    for pattern, instead in (("95%", "ninety"), ("30s", "soon"), ("severity: warning", "severity: bad"), ("2h", "1s")):
        text = text.replace(pattern, instead)
    found = faults(text)
    assert [line.split(":")[1] for line in found] == ["4", "6", "8", "23"]


def test_a_name_that_stands_twice_is_named_with_the_line_of_the_first() -> None:
    (found,) = faults(FULL + FULL.removeprefix("rules:\n"))
    assert found == "rules.yml:24: the rule full stands twice; keep one; the other is in line 2"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("rules:\n  - name: [", 2, "not YAML"),
        ("rules: 'x", 1, "not YAML"),
        ("a: *b", 1, "not YAML"),
        ("rules: []\n---\nrules: []", 2, "not YAML"),
        ("- name: full", 1, "the file is a list"),
        ("rules: {name: full}", 1, "rules is a mapping"),
        ("rules: [full]", 1, "a rule is a single value"),
        ("rule: []", 1, "the file has no 'rule'"),
        ("? [1]\n: 2", 1, "the file has no a list"),
        ("disable: [full]", 1, "there is no rule 'full' to disable"),
        ("rules: []\n\x07", 2, "the character U+0007"),
        ("[" * 5000, 1, "nested too deep"),
        ("#" * (MAX_BYTES + 1), 1, "262,145 characters"),
        ("&a [*a]", 1, "the file is a list"),
    ],
)
def test_what_is_no_file_of_rules_is_told_with_its_line(text: str, line: int, what: str) -> None:
    found = faults(text)
    assert found[0].startswith(f"rules.yml:{line}: {what}"), found


def test_a_contradiction_with_the_base_is_named_where_the_file_makes_it() -> None:
    base, _ = read_rules(FULL, file="base.yml", catalogue=CATALOGUE)
    (found,) = faults("rules:\n  - name: full\n    above: 50%\n", base)
    assert found.startswith("rules.yml:3: exit: '0.9' is over above: '50%'")
    (found,) = faults("rules:\n  - name: full\n    exit: 99%\n", base)
    assert found.startswith("rules.yml:3: ")
    (found,) = faults("rules:\n  - name: full\n    number: waiting\n", base)
    assert "another number" in found


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(FULL)), st.characters()), min_size=1, max_size=6))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(damage: Sequence[tuple[int, str]]) -> None:
    text = FULL
    for place, character in damage:
        text = text[:place] + character + text[place + 1 :]
    found: tuple[Fault, ...] = ()
    try:
        read(text)
    except FileInvalid as error:
        found = error.faults
    assert all(fault.line >= 1 and fault.instead for fault in found)
