"""The whole screen of `kvatlas top` as lines of text, for a terminal of a given size. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from agent.terminal.detail import bar_columns, detail
from agent.terminal.pools import alert_style, pool_lines
from agent.terminal.reading import Look, told
from agent.terminal.words import Glyphs, count, fold, seconds
from agent.wire.alerts import AlertRecord

KEYS = "q quit   j/k or arrows choose a pool   p pause"
HOLDERS = 8  # where the height is not limited
BAR_ROWS = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """What is to be shown. Without a look: why there is none."""

    look: Look | None
    address: str
    problem: str = ""
    paused: bool = False
    keys: bool = False  # whether anybody can press one


def columns_wanted(width: int, height: int | None) -> int:
    """Columns of the block bar, over all its rows, on a terminal of this size."""
    rows = BAR_ROWS if height is None else max(1, min(8, height // 6))
    return rows * bar_columns(width)


def lay_out(frame: Frame, glyphs: Glyphs, width: int, height: int | None) -> list[Text]:
    """At most `height` lines, None: as many as it takes."""
    foot = [Text(KEYS, "dim")] if frame.keys else []
    if frame.look is None:
        body = [Text(f"kvatlas top {glyphs.plain(frame.address)}", "bold")]
        if not frame.problem:
            body.append(Text("asking the agent ..."))
        else:
            body += fold(Text(glyphs.plain(frame.problem), "bold red"), width)
            body += fold(Text("No numbers are shown: they would not be current. It is asked again."), width)
            body += fold(Text("Is it running? kvatlas agent starts one; --agent names another."), width)
        return _cut(body, foot, height)
    look = frame.look
    said = detail(look, glyphs, width)
    firing = told(look.alerts)
    alerts = [line for one in firing for line in _alert(one, look.listing.now_unix, glyphs, width)]
    pools, holders = len(look.ids), len(said.holders)
    if height is None:
        rows = _Rows(pools, len(alerts), min(holders, HOLDERS))
    else:
        fixed = 2 + len(said.lines) + (said.holders_head is not None) + 1 + len(foot)
        rows = _share(height - fixed, pools, len(alerts), holders)
    body = [_head(frame, look, glyphs), *pool_lines(look, glyphs, width, rows.pools), *said.lines]
    body += [said.holders_head] if said.holders_head is not None else []
    body += said.holders[: rows.holders]
    shown = alerts[: rows.alerts]
    body.append(_alert_head(look, sum(not line.plain.startswith(" ") for line in shown), len(firing), glyphs))
    return _cut([*body, *shown], foot, height)


@dataclass(frozen=True, slots=True)
class _Rows:
    pools: int
    alerts: int
    holders: int


def _share(left: int, pools: int, alerts: int, holders: int) -> _Rows:
    """Lines dealt out one after the other; alerts come before holders, and a pool is always shown."""
    wanted = {"pools": pools, "alerts": alerts, "holders": holders}
    given = dict.fromkeys(wanted, 0)
    while left > 0 and given != wanted:
        for part in wanted:
            if left > 0 and given[part] < wanted[part]:
                given[part] += 1
                left -= 1
    return _Rows(max(1, given["pools"]), given["alerts"], given["holders"])


def _head(frame: Frame, look: Look, glyphs: Glyphs) -> Text:
    now = time.strftime("%H:%M:%S UTC", time.gmtime(look.listing.now_unix))
    line = Text.assemble((f"kvatlas top {glyphs.plain(frame.address)}", "bold"), f"  {now}")
    if (replay := look.listing.agent.replay) is not None:
        line.append(f"  REPLAY of {glyphs.plain(replay.file)}", "bold reverse")
    if frame.paused:
        line.append("  PAUSED", "bold reverse")
    unreadable = len(look.listing.agent.unreadable)
    if unreadable:
        line.append(f"  {count(unreadable)} not readable (kvatlas doctor)", "yellow")
    return line


def _alert_head(look: Look, shown: int, there: int, glyphs: Glyphs) -> Text:
    if look.alerts is None:
        why = look.missing.get("alerts", "they were not asked for")
        return Text(f"alerts not known: {glyphs.plain(why)}", "yellow")
    if not there:
        return Text("no alert fires", "green")
    some = f" ({shown} of {there})" if shown < there else ""
    return Text(f"alerts that fire{some}", "bold underline")


def _alert(one: AlertRecord, now_unix: float, glyphs: Glyphs, width: int) -> list[Text]:
    """What, since when, and what to do; lines after the first are set in."""
    muted = " (muted)" if one.state == "muted" else ""
    held = f" (held: {glyphs.plain(one.held)})" if one.held else ""
    since = seconds(max(0.0, now_unix - one.started_unix))
    what = f"{glyphs.plain(one.summary)}, for {since}{muted}{held}"
    first, *rest = fold(Text(what), width - 9) or [Text()]
    lines = [Text.assemble((f"{one.severity:<8} ", alert_style(one.severity)), first)]
    lines += [Text.assemble(" " * 9, part) for part in rest]
    todo = fold(Text(glyphs.plain(one.action)), width - 4)
    return lines + [Text.assemble("  > " if at == 0 else "    ", part) for at, part in enumerate(todo)]


def _cut(body: Sequence[Text], foot: Sequence[Text], height: int | None) -> list[Text]:
    if height is None:
        return [*body, *foot]
    room = max(0, height - len(foot))
    kept = list(body[:room])
    return [*kept, *(Text() for _ in range(room - len(kept))), *foot][:height]
