"""`kvatlas demo`: two engines on one recorded trace, the agent that watches them, and the dashboard."""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from agent.client import AgentClient
from agent.demo.figures import EngineFigures, require_positive, suggest_blocks
from agent.demo.screen import Screen
from agent.demo.supervisor import Child, ChildFailed, Supervisor, free_address, joined, url
from agent.demo.watching import StopOnSignal, await_true, live_engines, watch
from engine_shim.errors import SettingsError
from engine_shim.workload import load_workload

SCHEMA = "kvatlas.demo/v1"
ENGINES = (("demo-vllm", "vllm"), ("demo-relocating", "relocating"))  # id, policy
START_SECONDS = 120.0  # two torch imports on a slow disk
LEAST_KV_MIB = 512
VERIFY_EVERY = 120  # steps between two checks of what the blocks hold
TRANSFER_EVERY = 4
TRANSFER_BYTES_PER_SECOND = 16_000_000  # a slow link, busy half of the time: so blocks in transfer can be seen


def demo(
    trace: Annotated[
        str, typer.Option(envvar="KVATLAS_DEMO_TRACE", help="A bundled trace by name, or a trace file.")
    ] = "mooncake-conversation",
    speed: Annotated[float, typer.Option(envvar="KVATLAS_DEMO_SPEED", help="Trace seconds a second.")] = 2.0,
    blocks: Annotated[
        int | None, typer.Option(envvar="KVATLAS_DEMO_BLOCKS", help="Blocks of each pool; by default from the trace.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(envvar="KVATLAS_DEMO_SECONDS", help="End after so long; by default at Ctrl-C.")
    ] = None,
    listen: Annotated[
        str, typer.Option(envvar="KVATLAS_DEMO_LISTEN", help="HOST:PORT of the agent, or the next free port.")
    ] = "127.0.0.1:9477",
    dashboard_listen: Annotated[
        str, typer.Option(envvar="KVATLAS_DEMO_DASHBOARD_LISTEN", help="HOST:PORT of the page, or the next free port.")
    ] = "127.0.0.1:8501",
    no_dashboard: Annotated[
        bool, typer.Option("--no-dashboard", envvar="KVATLAS_DEMO_NO_DASHBOARD", help="Start no dashboard.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="KVATLAS_JSON", help="Print the summary as one JSON object.")
    ] = False,
) -> None:
    """Serve a recorded trace from two real KV pools, watched live by the agent and the dashboard."""
    require_positive("speed", speed)
    require_positive("blocks", blocks)
    require_positive("seconds", seconds)
    _require_packages(dashboard=not no_dashboard)
    workload = load_workload(trace)
    pool_blocks = blocks or suggest_blocks(workload)
    # A pool that was made small on purpose stays small; else the model is one that fills the memory promised.
    geometry = "stories260K" if blocks else "auto"
    served = ["engine_shim.reference", "--trace", trace, "--loop", "--speed", str(speed)]
    served += ["--blocks", str(pool_blocks), "--model-geometry", geometry, "--least-kv-mib", str(LEAST_KV_MIB)]
    agent_address = free_address(listen)
    page_address = None if no_dashboard else free_address(dashboard_listen)
    stop = StopOnSignal()
    screen = Screen(quiet=as_json)
    figures = [EngineFigures(engine_id, policy) for engine_id, policy in ENGINES]
    with Supervisor() as supervisor:
        engines = []
        for engine_id, policy in ENGINES:
            transfers = supervisor.scratch / f"{engine_id}.transfers"
            arguments = [*served, *_engine_arguments(engine_id, policy, transfers)]
            engines.append(supervisor.start(engine_id, arguments, OMP_NUM_THREADS="1"))
        # The first engine stays as it is, to compare with: the agent acts on the others alone.
        watching = ["engine_shim.launcher", "agent", "--listen", joined(agent_address)]
        others = ",".join(engine_id for engine_id, _ in ENGINES[1:])
        supervisor.start("agent", [*watching, "--compaction", others])
        if page_address is not None:
            page = ["dashboard", "--listen", joined(page_address), "--agent", url(agent_address)]
            supervisor.start("dashboard", page)
        with AgentClient(url(agent_address)) as client, screen:
            screen.starting(trace, len(workload.requests), pool_blocks)
            wanted = len(ENGINES)

            def missing() -> str:
                live = len(live_engines(client))
                screen.waiting(live, wanted)
                return f"the agent sees {live} of {wanted} engines" if live < wanted else ""

            await_true(missing, supervisor, stop, START_SECONDS)
            begun = time.monotonic()
            if not stop.requested:
                page_url = None if page_address is None else url(page_address)
                screen.started(url(agent_address), page_url, supervisor.maps)
            deadline = None if seconds is None else begun + seconds
            watch(client, supervisor, stop, deadline, lambda engine_list: screen.show(engine_list, figures), figures)
        supervisor.stop(engines)
        reports = [_report(child) for child in engines]
    summary = [figure.summary(report) for figure, report in zip(figures, reports, strict=True) if report is not None]
    if as_json:
        print(json.dumps({"schema": SCHEMA, "trace": trace, "speed": speed, "blocks": pool_blocks, "engines": summary}))
    else:
        screen.summary(summary)
    if any(row["mismatched_blocks"] for row in summary):
        raise ChildFailed("blocks did not hold what they must; the engine's own check found it")


def _engine_arguments(engine_id: str, policy: str, transfers: Path) -> list[str]:
    arguments = ["--engine-id", engine_id, "--policy", policy, "--verify-every", str(VERIFY_EVERY)]
    arguments += ["--transfer-dir", str(transfers), "--transfer-every", str(TRANSFER_EVERY)]
    return [*arguments, "--transfer-rate", str(TRANSFER_BYTES_PER_SECOND)]


def _require_packages(*, dashboard: bool) -> None:
    if find_spec("torch") is None:
        raise SettingsError("the demo's engines need torch; pip install 'kvatlas[engine]'")
    if dashboard and find_spec("streamlit") is None:
        raise SettingsError(
            "the dashboard is not in this environment; pip install 'kvatlas[dashboard]' or --no-dashboard"
        )


def _report(child: Child) -> dict[str, Any] | None:
    """An engine's last word; None where it was stopped before it could serve."""
    lines = Path(child.output).read_text().splitlines()
    if not lines:
        if child.process.returncode > 0:  # ended by our own signal before it was ready: as asked for
            print(f"warning: {child.name} ended with status {child.process.returncode}", file=sys.stderr)
        return None
    report: dict[str, Any] = json.loads(lines[-1])
    return report
