"""A soak with faults: real engines, agent, dashboard and browser, each fault that production has, and a verdict.

    python benchmarks/soak.py [--seconds 300] [--logs FOLDER] [--json FILE]

Six engines serve: one as fast as it goes, one at a steady pace that faults leave alone, one that is killed and
restarted, two whose blocks are moved and one with real tensors. A seventh, as steady as the second, is not watched.
Maps and state lie on two small tmpfs in a mount namespace of the soak's own. docs/reliability.md says what each
fault does and what each line of the verdict means. Needs Linux, `unshare`, a C compiler and Chromium. Exit status 1
where a bar is missed, 2 where the soak itself could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agent.compaction.audit import read_entries  # noqa: E402 - needs the path above
from benchmarks import _soak_faults as faults  # noqa: E402
from benchmarks._soak_verdict import judge  # noqa: E402
from benchmarks._soak_watch import (  # noqa: E402
    ASK_SECONDS,
    GATHER_SECONDS,
    SCRAPE_SECONDS,
    USAGE_SECONDS,
    Asker,
    Pages,
    Samples,
    Scraper,
    Usage,
    Watch,
)
from benchmarks._soak_world import (  # noqa: E402
    SoakBroken,
    World,
    counted_engine,
    moving_engine,
    reference_engine,
)
from tests.alerts.slack_receiver import Answer, Receiver, slack_judge  # noqa: E402

MOUNT = """
mount -t tmpfs -o size=64m tmpfs "$1/maps" && mount -t tmpfs -o size=256m tmpfs "$1/state" && shift && exec "$@"
"""
VIEWS = ("pool", "time", "alerts")
FAST, STEADY, UNLUCKY, UNWATCHED = "engine-0", "engine-1", "engine-2", "engine-3"
MOVERS = ("mover-a", "mover-b")
BLOCKS = 20_000
CALM_SECONDS = 12.0  # between two faults
LAST_SECONDS = 45.0  # without a fault at the end
RESOLVE_SECONDS = 180.0
SHORTEST = 240.0


def schedule(world: World, samples: Samples, receivers: list[Receiver]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Faults by name, without end. The agent is killed once and first, so that what is measured is one process; what it
    has done once before the measurement begins, a black box above all, comes again within."""
    yield "kill -9 of the agent", lambda: faults.kill_agent(world, samples)
    while True:
        yield "kill -9 of an engine", lambda: faults.kill_engine(world, UNLUCKY)
        yield "restart of a moving engine", lambda: faults.restart_engine(world, MOVERS[0])
        yield "corrupt maps", lambda: faults.corrupt_maps(world, UNLUCKY, STEADY)
        yield "SIGSTOP of an engine", lambda: faults.stop_engine(world, UNLUCKY)
        yield "full disk", lambda: faults.fill_state(world)
        yield "full tmpfs", lambda: faults.fill_maps(world)
        yield "clock step", lambda: faults.step_clock(world)
        yield (
            "slow network",
            lambda: faults.slow_network(world, receivers, lambda: faults.kill_engine(world, UNLUCKY)),
        )
        yield "out of descriptors", lambda: faults.out_of_descriptors(world)


def soak(work: Path, seconds: float, browser: str) -> dict[str, Any]:
    """Everything that was seen in so many seconds, for the verdict."""
    slack, webhook = Receiver(slack_judge), Receiver(lambda _: Answer())
    urls = {"KVATLAS_SLACK_WEBHOOK_URL": slack.url, "KVATLAS_WEBHOOK_URL": webhook.url}
    world, watch = World(work, urls), Watch()
    try:
        world.add(FAST, counted_engine(world.maps, 0, BLOCKS, 0))
        for number, name in enumerate((STEADY, UNLUCKY), start=1):
            world.add(name, counted_engine(world.maps, number, BLOCKS, 20))
        world.add(UNWATCHED, counted_engine(world.unwatched, 3, BLOCKS, 20))
        for number, name in enumerate(MOVERS):
            world.add(name, moving_engine(world.maps, name, number))
        world.add("reference", reference_engine(world.maps, "reference"), speaks=False)
        world.start_agent()
        world.start_dashboard()
        usage, scraper = Usage(world), Scraper(world)
        samples, asker = Samples(world, (FAST, STEADY, UNLUCKY, *MOVERS)), Asker(world, MOVERS)
        pages = Pages(world, watch, browser, VIEWS)
        watch.start(pages.run)
        if not pages.shown.wait(180):
            raise SoakBroken(f"the pages were not shown: {watch.faults or 'no error'}; logs in {work}")
        began = world.clock.now()
        end = began + seconds
        for pace, look in (
            (USAGE_SECONDS, usage.look),
            (SCRAPE_SECONDS, scraper.look),
            (GATHER_SECONDS, samples.look),
            (ASK_SECONDS, asker.look),
        ):
            watch.every(pace, look)
        for name, fault in schedule(world, samples, [slack, webhook]):
            if world.clock.now() + LAST_SECONDS > end or watch.faults:
                break
            print(f"{world.clock.now() - began:6.0f} s  {name}", flush=True)
            fault()
            time.sleep(CALM_SECONDS)
        while world.clock.now() < end and not watch.faults:
            time.sleep(0.5)
        samples.look()
        ended = world.clock.now()
        watch.end()
        if watch.faults:
            raise SoakBroken("; ".join(watch.faults))
        engines = {name: {**one.figures, "died": one.died} for name, one in world.engines.items()}
        for name in world.engines:  # whatever still fires about an engine is over when it has ended as it should
            world.end_engine(name, signal.SIGTERM)
        _wait_for_resolves(world, slack, webhook)
        audit = [
            {"at": one.time_unix - world.clock.began_unix, "route": one.asker.route}
            for path in sorted(world.state.glob("audit*"))
            for one in read_entries(path)
        ]
        return {
            "seconds": ended,
            "watched_from": began,
            "faults": world.faults,
            "expected": world.expected,
            "told": told(world, webhook),
            "slack": _slack(slack),
            "samples": {name: sorted(times) for name, times in samples.times.items()},
            "kills": world.kills,
            "asked": asker.asked,
            "asked_outcomes": asker.outcomes,
            "audit": audit,
            "usage": usage.rows,
            "pages": pages.errors,
            "engines": engines,
            "watched": STEADY,
            "unwatched": UNWATCHED,
            "surprises": world.surprises,
            "scrapes": scraper.scrapes,
        }
    finally:
        watch.leaving.set()
        world.close()
        slack.close()
        webhook.close()


def told(world: World, webhook: Receiver) -> list[dict[str, Any]]:
    """Each alert of each message that the webhook took, in order."""
    return [
        {
            "at": world.clock.at(request.at),
            "rule": alert["labels"]["alertname"],
            "engine": alert["labels"].get("engine_id", ""),
            "fingerprint": alert["fingerprint"],
            "starts": alert["startsAt"],
            "firings": int(alert["annotations"]["firings"]),
            "status": alert["status"],
            "summary": alert["annotations"]["summary"],
        }
        for request in list(webhook.requests)
        if request.status == 200
        for alert in request.body["alerts"]
    ]


def _slack(slack: Receiver) -> dict[str, Any]:
    requests = list(slack.requests)
    return {
        "texts": [json.dumps(one.body, ensure_ascii=False) for one in requests if one.status == 200],
        "refused": sum(one.status == 400 for one in requests),
    }


def _wait_for_resolves(world: World, slack: Receiver, webhook: Receiver) -> None:
    """Until every firing that was told is over and no message has come for some time; the verdict judges the rest."""
    deadline = time.monotonic() + RESOLVE_SECONDS
    while time.monotonic() < deadline:
        last = {alert["fingerprint"]: alert["status"] for alert in told(world, webhook)}
        youngest = max((one.at for one in [*slack.requests, *webhook.requests]), default=0.0)
        quiet = time.monotonic() - youngest > 65  # the next message of an engine comes a minute after its last one
        if quiet and all(status == "resolved" for status in last.values()):
            return
        time.sleep(1)


def report(record: dict[str, Any], file: Path | None) -> int:
    """Show the verdict; the result is the exit status."""
    lines = judge(record)
    width = max(len(line.name) for line in lines)
    print()
    for line in lines:
        word = "short" if line.met is None else "" if line.met else "MISSED"
        print(f"{word:>6}  {line.name:<{width}}  {line.value}   (bar {line.bar})")
    if file is not None:
        verdict = [{"name": one.name, "value": one.value, "bar": one.bar, "met": one.met} for one in lines]
        kept = {"schema": "kvatlas.soak/v1", "at": datetime.now().astimezone().isoformat(), "load": os.getloadavg()[0]}
        file.write_text(json.dumps({**kept, "verdict": verdict, "record": record}) + "\n")
    return 1 if any(line.met is False for line in lines) else 0


def inside(options: argparse.Namespace, work: Path) -> int:
    """Run this script again where `work` has two small disks of its own."""
    namespace = ["unshare", "--mount", "--propagation", "private", *(["--map-root-user"] if os.getuid() else [])]
    command = [sys.executable, __file__, "--work", str(work), "--seconds", str(options.seconds)]
    if options.json is not None:
        command += ["--json", str(options.json)]
    return subprocess.run([*namespace, "sh", "-c", MOUNT, "sh", str(work), *command], check=False).returncode


def main() -> int:
    """Run it; the result is the exit status."""
    parser = argparse.ArgumentParser(description="Soak the product under load and faults.")
    parser.add_argument("--seconds", type=float, default=300.0, help=f"{SHORTEST:g} or more; an hour is 3600")
    parser.add_argument("--logs", type=Path, help="folder to copy the logs of agent, dashboard and engines to")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seconds < SHORTEST:
        parser.error(f"--seconds {options.seconds:g}: the faults of one round take longer; give {SHORTEST:g} or more")
    if options.work is None:
        with tempfile.TemporaryDirectory(prefix="kvatlas-soak-") as name:
            work = Path(name)
            (work / "maps").mkdir()
            (work / "state").mkdir()
            status = inside(options, work)
            if options.logs is not None:
                options.logs.mkdir(parents=True, exist_ok=True)
                for log in work.glob("*.log"):
                    shutil.copy(log, options.logs)
        return status
    names = [os.environ.get("KVATLAS_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    browser = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if browser is None:
        print("error: no Chromium; install it, or name it in KVATLAS_CHROMIUM", file=sys.stderr)
        return 2
    try:
        record = soak(options.work, options.seconds, browser)
    except SoakBroken as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return report(record, options.json)


if __name__ == "__main__":
    sys.exit(main())
