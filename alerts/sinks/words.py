"""How alerts are put into words, the same in every sink that people read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from alerts.model import Severity
from alerts.notice import Entry, News, Notice

HEADWORDS = {
    News.RESOLVED: "RESOLVED",
    News.BRIEF: "FIRED AND RESOLVED",
    News.REPEATED: "STILL {severity}",
    News.ESCALATED: "NOW {severity}",
}


def title(entry: Entry) -> str:
    """What, where, in one line."""
    word = HEADWORDS.get(entry.news, "{severity}").format(severity=entry.alert.severity.upper())
    return f"{word}: {entry.alert.summary}"


def headline(notice: Notice) -> str:
    """The whole notice in one line: of several alerts how many there are, and the worst by name."""
    if len(notice.entries) == 1 and not notice.counted:
        return title(notice.entries[0])
    severities = Counter(entry.alert.severity for entry in notice.firing)
    parts = [f"{severities[one]} {one}" for one in reversed(Severity) if severities[one]]
    if notice.over:
        parts.append(f"{len(notice.over)} resolved")
    if counted := sum(notice.counted.values()):
        parts.append(f"{counted} only counted")
    told = ", ".join(parts)
    if not notice.entries:
        return told
    more = len(notice.entries) - 1
    return f"{told}: {notice.entries[0].alert.summary}" + (f", and {more:,} more" if more else "")


def where(labels: Mapping[str, str]) -> str:
    """Every label."""
    return " · ".join(f"{name} {value}" for name, value in labels.items())


def how_bad(entry: Entry) -> str:
    alert = entry.alert
    return f"{alert.value_text} ({alert.threshold_text})" if alert.threshold_text else alert.value_text


def when(entry: Entry, now: float) -> str:
    """Since when, or from when to when."""
    alert = entry.alert
    if alert.ended_at is None:
        text = f"since {moment(alert.started_at, now)} ({duration(now - alert.started_at)} ago)"
    else:
        lasted = duration(alert.ended_at - alert.started_at)
        text = f"lasted {lasted}, from {moment(alert.started_at, now)} to {moment(alert.ended_at, now)}"
    said = 1 if entry.news in (News.FIRING, News.BRIEF) else 0  # by the title
    return f"{text}; fired {_number(entry.firings, 'time')} since the last message" if entry.firings > said else text


def moment(unix: float, now: float) -> str:
    """In UTC; with its date where that is not today's."""
    at, today = time.gmtime(unix), time.gmtime(now)
    form = "%H:%M:%S UTC" if at[:3] == today[:3] else "%Y-%m-%d %H:%M:%S UTC"
    return time.strftime(form, at)


def duration(seconds: float) -> str:
    """Two units at most: "45 s", "3 min 20 s", "2 h 5 min", "4 d 1 h"."""
    whole = max(0, round(seconds))
    for unit, next_unit, size, next_size in (("d", "h", 86_400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            rest = whole % size // next_size
            return f"{whole // size} {unit} {rest} {next_unit}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def by_rule(entries: Iterable[Entry], counted: Mapping[str, int]) -> list[str]:
    """How many alerts of each rule there are, the most first; one line a rule."""
    standing: dict[str, Counter[str]] = {}
    firings: Counter[str] = Counter()
    for entry in entries:
        kind = "resolved" if entry.over else "firing"
        standing.setdefault(entry.alert.rule, Counter())[kind] += 1
        firings[entry.alert.rule] += entry.firings
    for rule, number in counted.items():
        standing.setdefault(rule, Counter())["only counted"] += number
        firings[rule] += number
    lines = []
    for rule in sorted(standing, key=lambda name: (-standing[name].total(), name)):
        parts = [
            f"{standing[rule][kind]} {kind}" for kind in ("firing", "resolved", "only counted") if standing[rule][kind]
        ]
        lines.append(f"{rule}: {', '.join(parts)} ({_number(firings[rule], 'new firing')})")
    return lines


def _number(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
