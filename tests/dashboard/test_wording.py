"""Numbers in words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dashboard
from dashboard import wording


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (15 * 2**20 + 2**19, "15.5 MiB"),
        (500 * 2**30, "500 GiB"),
        (None, "—"),
    ],
)
def test_size(value: int | None, expected: str) -> None:
    assert wording.size(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3599.7, "1 h 0 min"),
        (200.0, "3 min 20 s"),
        (7500.0, "2 h 5 min"),
        (273_600.0, "3 d 4 h"),
        (-1.0, "0.0 s"),
        (None, "—"),
    ],
)
def test_duration(seconds: float | None, expected: str) -> None:
    assert wording.duration(seconds) == expected


def test_undefined_is_not_zero() -> None:
    assert wording.rate(None) == "—"
    assert wording.rate(0.0) == "0.000"
    assert wording.share(3, 0) == "—"


def test_a_small_share_is_not_rounded_to_nothing() -> None:
    assert wording.share(0, 1000) == "0.0 %"
    assert wording.share(1, 1_000_000) == "<0.1 %"
    assert wording.share(1, 3) == "33.3 %"


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0 blocks"), (1, "1 block"), (2, "2 blocks"), (1234, "1,234 blocks"), (None, "—")]
)
def test_a_number_has_the_noun_that_it_takes(value: int | None, expected: str) -> None:
    assert wording.counted(value, "block") == expected


def test_a_noun_may_have_its_verb_with_it() -> None:
    assert [wording.counted(number, "entry is", "entries are") for number in (1, 2)] == ["1 entry is", "2 entries are"]
    assert [wording.noun(number, "GPU") for number in (-1, -2)] == ["GPU", "GPUs"]


NOUNS = "block token sequence page cell slot run mute change frame event device kill GPU alert pool rank request move"
PLURAL = re.compile(rf" (?:\w+ )?(?:{'|'.join(NOUNS.split())}|entrie)s\b")


def plurals_after_a_number(source: str) -> Iterator[str]:
    """Pieces of f-strings that write a plural right behind a value, whatever that is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            for value, after in zip(node.values, node.values[1:], strict=False):
                found = PLURAL.match(str(after.value)) if isinstance(after, ast.Constant) else None
                if isinstance(value, ast.FormattedValue) and found:
                    yield f"{ast.unparse(value.value)}{found[0]}"


def test_no_page_writes_a_plural_behind_any_number() -> None:
    """`counted` knows which word a number takes."""
    folder = Path(dashboard.__file__).parent
    found = {path.name: [*plurals_after_a_number(path.read_text())] for path in folder.rglob("*.py")}
    right = {
        "compaction.py": ["ENTRIES entries"],
        "conditions.py": ["engine.pid still runs"],  # a verb
        "requests_table.py": ["totals.owned_blocks / totals.runs blocks"],  # with its decimal
    }
    assert {name: said for name, said in found.items() if said} == right
    assert [*plurals_after_a_number('f"{count(n)} free blocks"')] == ["count(n) free blocks"]


@pytest.mark.parametrize(
    ("value", "expected"), [(1, "1"), (999, "999"), (1024, "1K"), (131_072, "128K"), (2**21, "2M"), (2**30, "1G")]
)
def test_powers_of_two_are_compact(value: int, expected: str) -> None:
    assert wording.power_of_two(value) == expected


def test_long_ids_keep_both_ends() -> None:
    assert wording.shortened("short", 10) == "short"
    assert wording.shortened("cmpl-0123456789abcdef-7", 12) == "cmpl-0…def-7"
    assert len(wording.shortened("x" * 50, 12)) == 12


HIDDEN = "\x00\x1b\x7f\x85\u2028\u202e\u2066\u200f\ud800\u200b\u00ad\u3164\ufe0f"


@pytest.mark.parametrize("hidden", list(HIDDEN))
def test_what_hides_or_turns_a_text_is_shown_as_a_mark(hidden: str) -> None:
    assert wording.visible(f"chat{hidden}cmpl") == "chat\N{REPLACEMENT CHARACTER}cmpl"
    assert wording.escape(f"<b>{hidden}") == "&lt;b&gt;\N{REPLACEMENT CHARACTER}"


def test_other_texts_are_shown_as_they_are() -> None:
    for text in ("chatcmpl-1", "模型 7B", "naïve\n\tnext", "مرحبا"):
        assert wording.visible(text) == text


def test_a_hover_reads_no_html_from_a_name() -> None:
    shown = wording.in_figure("<a href='//e.xy'>k</a>\u202e")
    assert shown == "&lt;a href='//e.xy'&gt;k&lt;/a&gt;\N{REPLACEMENT CHARACTER}"
