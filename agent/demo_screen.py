"""What the demo shows in the terminal: addresses, one line an engine while it runs, and a table at the end."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agent.demo_figures import EngineFigures, live_share
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

    def waiting(self, live: int, wanted: int) -> None:
        if self._watched:
            self._live.update(f"{live} of {wanted} engines are up", refresh=True)

    def started(self, agent: str, page: str | None) -> None:
        if page is not None:
            self._console.print(f"Dashboard  {page}")
        self._console.print(f"Agent      {agent}  (metrics at /metrics, API at /docs)")
        self._console.print("Ctrl-C ends everything.")

    def show(self, engines: list[EngineSummary], figures: list[EngineFigures]) -> None:
        """The state of each engine now."""
        self._samples += 1
        if self._watched:
            self._live.update(_table(engines), refresh=True)
        elif self._samples % PLAIN_SECONDS == 1:
            for engine in engines:
                share, rate = live_share(engine), engine.fragmentation.rate
                self._console.print(
                    f"{engine.engine_id}: {engine.state}, {engine.running_requests} running, "
                    f"{engine.waiting_requests} waiting, live share {_ratio(share)}, fragmentation {_ratio(rate)}"
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


def _table(engines: list[EngineSummary]) -> Table:
    table = Table()
    for name in ("engine", "state", "policy", "running", "waiting", "free", "cached", "used", "pinned", "live", "F"):
        table.add_column(name, justify="left" if name in ("engine", "state", "policy") else "right")
    for engine in engines:
        blocks = engine.blocks
        counts = (
            engine.running_requests,
            engine.waiting_requests,
            blocks.free,
            blocks.cached,
            blocks.used,
            blocks.pinned,
        )
        table.add_row(
            engine.engine_id,
            engine.state,
            engine.policy,
            *(f"{count:,}" for count in counts),
            _ratio(live_share(engine)),
            _ratio(engine.fragmentation.rate),
        )
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else str(value)
