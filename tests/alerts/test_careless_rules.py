"""Rules that are well-formed and surely not what was meant, and files that are made to cost much."""

from __future__ import annotations

import pytest

from alerts.rule_files import MOST_ENTRIES, read_rules
from alerts.rules import Rule
from alerts.yaml_nodes import MAX_BYTES, MOST_FAULTS, FileInvalid
from tests.alerts.test_rule_files import CATALOGUE

RULE = """\
rules:
  - name: mine
    number: used_ratio
    above: 90%
    severity: warning
    summary: s
    meaning: m
    action: a
"""


def rules_of(text: str) -> tuple[Rule, ...]:
    return read_rules(text, file="rules.yml", catalogue=CATALOGUE)[1]


def faults(text: str) -> list[str]:
    with pytest.raises(FileInvalid) as caught:
        rules_of(text)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("replaced", "by", "line", "what", "instead"),
    [
        ("above: 90%", "above: 90", 4, "above: '90' is 9000 %", "write 90% or 0.9"),
        ("above: 90%", "above: -0.1", 4, "above: '-0.1' is never reached", "write 0.3 or 30%"),
        ("above: 90%", "below: 0", 4, "below: nothing is ever under '0'", "write 0.3 or 30%"),
        ("above: 90%", "above: 90%\n    exit: -1%", 5, "exit: '-1%' is never reached", "write 0.3 or 30%"),
        ("above: 90%", "above: 90%\n    exit: 80", 5, "exit: '80' is 8000 %", "write 80% or 0.8"),
        ("above: 90%", "above: 90%\n    for: 31d", 5, "for: '31d' is too long", "30 d at most"),
        (
            "action: a",
            "action: a\n    raise: [{to: critical, above: 50%}]",
            9,
            "above: '50%' is crossed whenever the rule's '90%' is",
            "write something over that",
        ),
        (
            "action: a",
            "action: a\n    raise: [{to: critical, below: 50%}]",
            9,
            "the rule is on above, and its raise on below",
            "write above:",
        ),
        ("summary: s", 'summary: "\\x1b[2J"', 6, "summary holds the character U+001B", "remove it"),
        ("summary: s", 'summary: "\\ud800"', 6, "summary holds the character U+D800", "remove it"),
        ("summary: s", 'summary: "{value:>9}"', 6, "summary: {value:>9} is not a plain name", "write {name}"),
        ("action: a", "action: a\n    labels: {__name__: x}", 9, "'__name__' is no label name", "not two at the front"),
    ],
)
def test_what_was_surely_meant_otherwise_is_a_fault(replaced: str, by: str, line: int, what: str, instead: str) -> None:
    [found] = faults(RULE.replace(replaced, by))
    assert found.startswith(f"rules.yml:{line}: {what}")
    assert instead in found
    assert len(rules_of(RULE)) == 1  # the negative control


@pytest.mark.parametrize("above", ["1", "1.5"])
def test_a_flag_is_never_over_one(above: str) -> None:
    flag = RULE.replace("number: used_ratio", "number: gone")
    [found] = faults(flag.replace("90%", above))
    assert "a flag is 0 or 1; write 0.5" in found
    assert rules_of(flag.replace("90%", "0.5"))


def test_a_ratio_over_one_may_be_meant() -> None:
    assert rules_of(RULE.replace("90%", "300%"))[0].enter.value == 3.0
    assert rules_of(RULE.replace("90%", "1"))[0].enter.value == 1.0


def test_a_default_raise_that_the_file_s_threshold_has_passed_is_no_fault() -> None:
    base, _ = read_rules(RULE + "    raise: [{to: critical, above: 95%}]", file="base.yml", catalogue=CATALOGUE)
    text = "rules:\n  - name: mine\n    above: 97%"
    [rule] = read_rules(text, file="rules.yml", catalogue=CATALOGUE, base=base)[1]
    assert rule.enter.value == 0.97


def test_what_is_disabled_and_changed_contradicts_itself() -> None:
    base, _ = read_rules(RULE, file="base.yml", catalogue=CATALOGUE)
    text = "disable: [mine]\nrules:\n  - name: mine\n    above: 95%"
    with pytest.raises(FileInvalid, match=r"rules.yml:1: disable: mine is changed in line 3; do one of the two"):
        read_rules(text, file="rules.yml", catalogue=CATALOGUE, base=base)


def test_aliases_make_no_long_list_of_a_short_file() -> None:
    """Each of a thousand rules names the same list: read entry by entry that would be millions of them."""
    entries = "- {number: used_ratio, above: 1%}\n    " * 5000
    text = f"rules:\n  - name: first\n    when: &all\n    {entries}\n"
    text += "".join(f"  - {{name: r{number}, when: *all}}\n" for number in range(900))
    assert len(text) < MAX_BYTES
    found = faults(text)
    assert f"when has 5,000 entries; write at most {MOST_ENTRIES}" in "".join(found[:10])
    assert len(found) <= MOST_FAULTS + 1


def test_of_very_many_faults_the_first_are_named() -> None:
    found = faults("rules:\n" + "  - {a: b}\n" * 900)
    assert len(found) == MOST_FAULTS + 1
    assert sum(line.endswith("and more; mend these") for line in found) == 1
