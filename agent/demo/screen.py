"""What the demo shows in the terminal: addresses, one line an engine while it runs, and a table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table

from agent.demo.figures import EngineFigures, live_share
from agent.wire import EngineSummary

PLAIN_SECONDS = 10  # samples between two lines where nobody watches a terminal


class Screen:
    """A live table on a terminal, a line now and then elsewhere; nothing at all when quiet."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, quiet=quiet, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._watched = self._console.is_terminal and not quiet
        self._samples = 0

    def __enter__(self) -> Self:
        if self._watched:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watched:
            self._live.stop()

    def starting(self, trace: str, requests: int, blocks: int) -> None:
        self._console.print(f"Trace {trace}: {requests} requests. Two engines allocate {blocks:,} blocks each ...")

    def say(self, line: str) -> None:
        """One line as it is."""
        self._console.print(line, markup=False)

    def waiting(self, live: int, wanted: int) -> None:
        if self._watched:
            self._live.update(f"{live} of {wanted} engines are up", refresh=True)

    def started(self, agent: str, page: str | None, maps: Path) -> None:
        if page is not None:
            self._console.print(f"Dashboard  {page}")
        self._console.print(f"Agent      {agent}  (metrics at /metrics, API at /docs)")
        self._console.print(f"Maps       {maps}  (other commands find them with KVATLAS_DIR set to that)")
        self._console.print("Ctrl-C ends everything.")

    def show(self, engines: list[EngineSummary], figures: list[EngineFigures]) -> None:
        """The state of each engine now."""
        self._samples += 1
        if self._watched:
            self._live.update(live_table(engines, self._console.width), refresh=True)
        elif self._samples % PLAIN_SECONDS == 1:
            for engine in engines:
                share, rate = live_share(engine), engine.fragmentation.rate
                self._console.print(
                    f"{engine.engine_id}: {engine.state}, {engine.running_requests:,} running, "
                    f"{engine.waiting_requests:,} waiting, live share {_ratio(share)}, fragmentation {_ratio(rate)}"
                )

    def summary(self, rows: list[dict[str, Any]]) -> None:
        """The figures of the run, one column an engine."""
        if not rows:
            self._console.print("Ended before an engine was up.")
            return
        table = Table(title="Summary")
        table.add_column("")
        for row in rows:
            table.add_column(str(row["engine"]), justify="right")
        for key in rows[0]:
            if key != "engine":
                table.add_row(key.replace("_", " "), *(_cell(row[key]) for row in rows))
        self._console.print(table)


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    short: str
    cells: Sequence[str]
    is_text: bool = False


# What a narrow screen does without, step by step; then rules and long headings go too.
_NARROWER: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"waiting"}),
    frozenset({"waiting", "free", "used"}),
    frozenset({"waiting", "free", "used", "running", "cached", "pinned"}),
)


def live_table(engines: Sequence[EngineSummary], width: int) -> Table:
    """The fullest table that fits into `width` columns: a name or a number that is cut short says nothing."""
    columns = _columns(engines)
    console = Console(width=10_000)
    for left_out in _NARROWER:
        kept = [one for one in columns if one.name not in left_out]
        for ruled in (True, False):
            table = _table(kept, ruled=ruled)
            if Measurement.get(console, console.options, table).maximum <= width:
                return table
    return table


def _columns(engines: Sequence[EngineSummary]) -> list[_Column]:
    names = [f"{one.engine_id} ({one.policy})" if one.policy not in one.engine_id else one.engine_id for one in engines]
    columns = [
        _Column("engine", "engine", names, is_text=True),
        _Column("state", "state", [one.state for one in engines], is_text=True),
        _Column("running", "run", [f"{one.running_requests:,}" for one in engines]),
        _Column("waiting", "wait", [f"{one.waiting_requests:,}" for one in engines]),
    ]
    states = ("free", "cached", "used", "pinned")
    return [
        *columns,
        *(_Column(name, name, [f"{getattr(one.blocks, name):,}" for one in engines]) for name in states),
        _Column("live share", "share", [_ratio(live_share(one)) for one in engines]),
        _Column("fragmentation", "F", [_ratio(one.fragmentation.rate) for one in engines]),
    ]


def _table(columns: Sequence[_Column], *, ruled: bool) -> Table:
    table = Table() if ruled else Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.is_text else "right"
        table.add_column(column.name if ruled else column.short, justify=justify, no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else str(value)
