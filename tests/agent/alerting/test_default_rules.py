"""Each default rule where a reference engine makes it so: it fires, Slack is told the right thing, and it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent.alerting.rule_files import default_rules
from agent.devices.model import (
    CgroupMemory,
    DeviceSample,
    DeviceState,
    DevicesView,
    DeviceView,
    EngineProcess,
    HostMemory,
    LibraryState,
    NvmlReading,
)
from agent.engine_metrics.model import (
    Comparison,
    Difference,
    EngineMetricsView,
    EngineReading,
    JoinedReading,
    RankReading,
    SourceReading,
)
from agent.engine_metrics.names import Quantity
from agent.engine_metrics.sources import MetricsSource
from alerts.courier import Courier
from alerts.model import Change, ChangeKind, Severity
from alerts.sinks.secret_url import SecretUrl
from alerts.sinks.slack import SlackSink
from engine_shim.compaction.run import RunSettings
from engine_shim.reference.block_copy import BlockCopier

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = Path(__file__).with_name("golden")
MakeScene = Callable[..., Any]
Golden = Callable[[Change, Change], None]


def test_every_default_rule_has_a_golden_message() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == {rule.name for rule in default_rules()}


# Room


def test_pool_nearly_full(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine(headroom=0.0, prefix_cache=False)
    served.ask(16 * 15, 600, number=8)
    fired = here.fires("pool-nearly-full")
    served.drain()
    golden(fired, here.ends("pool-nearly-full"))


def test_pool_exhaustion(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine(blocks=1024, headroom=0.0)
    others = served.engine.pool.allocate(820).blocks
    served.ask(64, 3000, number=4)
    served.steps = 2
    fired = here.fires("pool-exhaustion", most=60)
    assert fired.alert.severity is Severity.WARNING
    worse = here.until("pool-exhaustion", ChangeKind.ESCALATED)
    assert worse.alert.severity is Severity.CRITICAL
    assert worse.alert.value is not None
    assert worse.alert.value < 120
    served.drain()
    served.engine.pool.release(others)
    over = here.ends("pool-exhaustion")
    assert over.alert.severity is Severity.CRITICAL
    golden(fired, over)


def test_a_pool_that_warms_up_is_not_exhausted_soon(scene: MakeScene) -> None:
    """The negative control: the same trend in a pool that is half empty."""
    here = scene()
    served = here.engine(blocks=1024, headroom=0.0)
    served.ask(64, 3000, number=4)
    served.steps = 8
    here.tick(60)
    assert here.numbers()[served.id]["pool_exhaustion_seconds"] < 600
    assert here.changes == []


def test_headroom_breached(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine(headroom=0.1)
    served.ask(16 * 14, 100, number=8)
    fired = here.fires("headroom-breached")
    served.drain()
    golden(fired, here.ends("headroom-breached"))


def test_preemption_storm(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine(blocks=64, headroom=0.0)
    served.ask(64, 200, number=30)
    served.steps = 4
    fired = here.fires("preemption-storm")
    served.drain()
    golden(fired, here.ends("preemption-storm"))


def test_prefix_cache_thrashing(scene: MakeScene, golden: Golden) -> None:
    """Three prefixes fit and are found again; then twelve take turns in room for three."""
    here = scene()
    served = here.engine(blocks=160)
    served.steps = 6
    turn = iter(range(10_000))

    def serve(prefixes: int) -> Callable[[], None]:
        return lambda: served.ask(528, 4, prefix=next(turn) % prefixes)

    for _ in range(150):
        serve(3)()
        here.tick()
    assert here.numbers()[served.id]["prefix_hit_ratio"] > 0.9
    assert here.changes == []
    fired = here.fires("prefix-cache-thrashing", each=serve(12))
    assert fired.alert.value is not None
    golden(fired, here.ends("prefix-cache-thrashing", each=serve(3)))


def test_a_cache_that_never_had_a_hit_does_not_thrash(scene: MakeScene) -> None:
    """The negative control: as many evictions, and nothing that anybody would have found."""
    here = scene()
    served = here.engine(blocks=160)
    served.steps = 6
    for _ in range(400):
        served.ask(528, 4)
        here.tick()
    assert here.numbers()[served.id]["prefix_evictions_per_allocation"] > 0.9
    assert "prefix-cache-thrashing" not in {change.alert.rule for change in here.changes}


# Blocks that are held for nothing


def test_leak_suspected(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine()
    served.ask(64, 10, number=4)
    lost = served.engine.pool.allocate(5).blocks  # nobody will give these back
    served.drain()
    fired = here.fires("leak-suspected", most=70)
    assert fired.alert.value == 5
    served.engine.pool.release(lost)
    golden(fired, here.ends("leak-suspected"))


def test_a_drained_engine_with_a_warm_cache_has_no_leak(scene: MakeScene) -> None:
    here = scene()
    served = here.engine()
    served.ask(64, 10, number=4)
    served.drain()
    here.tick(90)
    assert here.view.samples[served.id].report.cached_blocks > 0
    assert here.changes == []


def test_pinned_too_long(scene: MakeScene, golden: Golden, tmp_path: Path, wait_until: Callable[..., Any]) -> None:
    """The other side of a transfer takes the connection and reads nothing, and at last goes away."""
    peer = socket.socket(socket.AF_UNIX)
    peer.bind(str(tmp_path / "peer"))
    peer.listen()
    here = scene()
    served = here.engine(
        blocks=64, model_geometry="stories260K", dtype="float32", transfer_peer=f"unix:{tmp_path / 'peer'}"
    )
    served.ask(512, 4)
    served.drain()
    fired = here.fires("pinned-too-long", most=200)
    peer.close()
    transfers = served.engine._transfers
    assert transfers is not None
    wait_until(lambda: not transfers._sent.empty())
    golden(fired, here.ends("pinned-too-long", most=3))


def test_tail_waste(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine(blocks=16, block_tokens=512, headroom=0.0)
    served.ask(10, 400, number=12)
    fired = here.fires("tail-waste")
    served.drain()
    golden(fired, here.ends("tail-waste"))


# Fragmentation


def strew(served: Any) -> None:
    """Free blocks between those of requests that run on, and grow slowly."""
    for _ in range(50):
        served.ask(40, 5)
        served.ask(40, 300)
    for _ in range(10):
        served.engine.step()
    served.every = 2


def test_fragmentation_stays(scene: MakeScene, golden: Golden) -> None:
    here = scene(relocation=False)
    served = here.engine(blocks=512, moving=False)
    strew(served)
    fired = here.fires("fragmentation-stays", most=80)
    assert fired.alert.severity is Severity.INFO
    golden(fired, here.ends("fragmentation-stays", each=served.drain))


def test_fragmentation_is_worse_where_somebody_pays_for_it(scene: MakeScene) -> None:
    here = scene(relocation=False, consumers=("nixl",))
    served = here.engine(blocks=512, moving=False)
    strew(served)
    fired = here.fires("fragmentation-stays", most=80)
    assert fired.alert.severity is Severity.WARNING
    assert "consumers: nixl" in fired.alert.meaning


def test_fragmentation_that_the_agent_sees_to_is_no_alert(scene: MakeScene) -> None:
    """The negative control: the same pool where live blocks may be moved."""
    here = scene(relocation=False, written_share=1.0)
    served = here.engine(blocks=512)
    strew(served)
    seen = []
    for _ in range(80):
        here.tick()
        seen.append(here.numbers()[served.id]["pool_fragmentation_ratio"])
    assert max(seen[:5]) > 0.3
    assert min(seen) < 0.2
    assert "fragmentation-stays" not in {change.alert.rule for change in here.changes}


def test_compaction_check_failed(scene: MakeScene, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that was left out is found before it is committed; only a restart allows moves again."""
    copy = BlockCopier.copy
    monkeypatch.setattr(BlockCopier, "copy", lambda self, sources, places: copy(self, sources[:-1], places[:-1]))
    here = scene(relocation=False)
    served = here.engine(blocks=512, compaction=RunSettings(verify=True))
    strew(served)
    fired = here.fires("compaction-check-failed", most=60)
    served.close()
    here.engine(blocks=512)
    golden(fired, here.ends("compaction-check-failed"))
    assert "compaction-failed" not in {change.alert.rule for change in here.changes}


def test_compaction_failed(scene: MakeScene, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(self: BlockCopier, sources: Any, places: Any) -> None:
        raise RuntimeError("out of memory")

    here = scene(relocation=False)
    served = here.engine(blocks=512)
    strew(served)
    with monkeypatch.context() as patch:
        patch.setattr(BlockCopier, "copy", out_of_memory)
        fired = here.fires("compaction-failed", most=60)
    assert "out of memory" in fired.alert.meaning
    served.close()
    here.engine(blocks=512)
    golden(fired, here.ends("compaction-failed"))


def test_compaction_backs_off(scene: MakeScene, golden: Golden) -> None:
    """Under vLLM's order of allocation F springs back as long as there is traffic."""
    here = scene(relocation=False, written_share=1.0, cooldown_seconds=5.0, backoff_seconds=5.0)
    served = here.engine(blocks=512)
    strew(served)

    def traffic() -> None:
        served.ask(40, 5, number=3)

    fired = here.fires("compaction-backs-off", each=traffic)
    golden(fired, here.ends("compaction-backs-off", each=served.drain))


# The engine and its map


def reference_process(folder: Path) -> subprocess.Popen[str]:
    """A reference engine in a process of its own, with a map and nothing to do."""
    command = [sys.executable, "-m", "engine_shim.reference", "--engine-id", "engine", "--model-geometry", "test-tiny"]
    command += ["--blocks", "64", "--requests", "1", "--speed", "1000", "--device", "cpu", "--map-folder", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)


def test_engine_gone(scene: MakeScene, golden: Golden, wait_until: Callable[..., Any]) -> None:
    here = scene()

    def state() -> list[str]:
        return [one.state for one in here.sampler.tick().samples.values()]

    engine = reference_process(here.folder)
    try:
        wait_until(lambda: state() == ["live"])
        assert here.tick(5) == []
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        fired = here.fires("engine-gone", most=3)
        engine = reference_process(here.folder)
        wait_until(lambda: state() == ["live"])
        golden(fired, here.ends("engine-gone", most=3))
    finally:
        engine.kill()
        engine.wait()


def test_an_engine_that_ends_in_good_order_is_no_alert(scene: MakeScene) -> None:
    here = scene()
    served = here.engine()
    served.ask(64, 300)
    here.tick(5)
    served.close(keep=True)
    here.tick(30)
    assert here.view.samples[served.id].state == "gone"
    assert here.changes == []


def test_engine_stalled(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine()
    served.ask(64, 300)
    here.tick(3)
    served.steps = 0
    fired = here.fires("engine-stalled", most=15)
    served.steps = 1
    golden(fired, here.ends("engine-stalled", most=3))


def test_map_stale(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine()
    here.tick(3)
    served.stopped = True
    fired = here.fires("map-stale", most=20)
    served.stopped = False
    golden(fired, here.ends("map-stale", most=3))


def test_map_torn(scene: MakeScene, golden: Golden) -> None:
    """Three of four looks meet the map within a publish; a map that never gives a whole snapshot is stale instead."""
    here = scene()
    served = here.engine()
    here.tick(3)
    torn = False

    def tear_three_of_four() -> None:
        nonlocal torn
        served.stopped = wanted = int(here.now) % 4 != 0
        if wanted != torn:
            served.tear(wanted)
            torn = wanted

    fired = here.fires("map-torn", each=tear_three_of_four)
    if torn:
        served.tear(False)
    served.stopped = False
    golden(fired, here.ends("map-torn"))


def test_map_degraded(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine()
    here.tick(3)
    served.observer.moved([1], [10**6], live=False)  # no such block: the shim must not go on as if it knew the pool
    fired = here.fires("map-degraded", most=3)
    served.close()
    here.engine()
    golden(fired, here.ends("map-degraded"))


def test_engine_metrics_disagree(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine()
    here.tick(3)

    def compared(*differences: Difference, reason: str = "") -> EngineMetricsView:
        comparison = Comparison(served.id, here.now, "", differences, bool(differences), reason)
        engine = EngineReading("vllm", "org/model", (), {})
        reading = SourceReading(MetricsSource.parse("http://127.0.0.1:8000"), up=True, fault="")
        joined = JoinedReading("engine", reading, engine, RankReading(0, {}), comparison)
        return EngineMetricsView(by_pool={served.id: joined})

    usage = Difference(Quantity.KV_USAGE, metrics=0.41, map_low=0.10, map_high=0.12, ratio=0.29, beyond=True)
    here.metrics = compared(usage, reason="usage is 41 % by the metrics and 10 to 12 % by the map")
    fired = here.fires("engine-metrics-disagree", most=40)
    here.metrics = compared()
    golden(fired, here.ends("engine-metrics-disagree", most=3))


# Devices and the memory of the host


def seen(
    now: float, nvml: LibraryState, *devices: DeviceSample, reason: str = "", engines: tuple[EngineProcess, ...] = ()
) -> DevicesView:
    views = tuple(DeviceView(one, None, ()) for one in devices)
    host = HostMemory(100, 50, 50, 40, 0, 0)
    return DevicesView(now, now, NvmlReading(nvml, reason, devices), views, host, "", None, "no limit", engines)


def test_device_lost(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    served = here.engine()
    card = DeviceSample(0, "GPU-12345678", "H100", "00:1", DeviceState.OK, "")
    here.devices = seen(here.now, LibraryState.OK, card)
    here.tick(15)
    assert not here.open
    lost = replace(card, state=DeviceState.LOST, reason="GPU is lost")
    here.devices = seen(here.now, LibraryState.OK, lost)
    fired = here.fires("device-lost", most=15)
    assert fired.alert.labels["gpu"] == "GPU-12345678"
    here.devices = seen(here.now, LibraryState.FAILED, reason="Unknown Error")  # nothing is known of it: held
    here.tick(5)
    assert "device-lost" in here.open
    here.devices = seen(here.now, LibraryState.OK, card)
    golden(fired, here.ends("device-lost", most=3))
    served.close()


def test_nvml_failed(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    here.engine()
    here.devices = seen(here.now, LibraryState.NO_LIBRARY, reason="no library here")
    here.tick(70)
    assert not here.open  # a host without a GPU is no fault
    here.devices = seen(here.now, LibraryState.FAILED, reason="Driver/library version mismatch")
    fired = here.fires("nvml-failed", most=70)
    assert "mismatch" in fired.alert.meaning
    here.devices = seen(here.now, LibraryState.OK)
    golden(fired, here.ends("nvml-failed", most=3))


def test_memory_limit_near(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    here.engine()

    def using(share: int) -> DevicesView:
        group = CgroupMemory(2, "/pod", 100, 99, share, 0)
        process = EngineProcess("engine", "dp0.tp0.pp0", 1, 50, group)
        return seen(here.now, LibraryState.NO_LIBRARY, engines=(process,))

    here.devices = using(94)
    here.tick(70)
    assert not here.open
    here.devices = using(97)
    fired = here.fires("memory-limit-near", most=70)
    here.devices = using(92)
    here.tick(5)
    assert "memory-limit-near" in here.open  # until it is at the exit
    here.devices = using(80)
    golden(fired, here.ends("memory-limit-near", most=3))


# The agent itself


def test_agent_sampling_late(scene: MakeScene, golden: Golden) -> None:
    """While the sampler hangs nothing is known of any pool: what is open there is held."""
    here = scene()
    served = here.engine(headroom=0.0, prefix_cache=False)
    held = served.engine.pool.allocate(125).blocks
    here.fires("pool-nearly-full")
    late = [change for _ in range(20) for change in here.tick(sample=False)]
    (fired,) = [change for change in late if change.kind is ChangeKind.FIRED]
    assert fired.alert.rule == "agent-sampling-late"
    assert here.open["pool-nearly-full"].held == "the agent takes no samples"
    over = here.ends("agent-sampling-late", most=5)
    assert here.open["pool-nearly-full"].held == ""
    served.engine.pool.release(held)
    golden(fired, over)


def test_maps_unreadable(scene: MakeScene, golden: Golden) -> None:
    here = scene()
    here.engine()
    foreign = here.folder / "foreign.kvmap"
    foreign.write_bytes(b"hello")
    fired = here.fires("maps-unreadable", most=70)
    assert "foreign.kvmap" in fired.alert.meaning
    foreign.unlink()
    golden(fired, here.ends("maps-unreadable"))


class Answers(BaseHTTPRequestHandler):
    """Says what its server is told to say."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.server.says  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing."""


@pytest.fixture
def receiver() -> Iterator[Any]:
    """A receiver on loopback; `says` is the status and the body of its next answers."""
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def slack_at(server: Any) -> SlackSink:
    return SlackSink(
        "slack", SecretUrl(f"http://127.0.0.1:{server.server_port}/services/x", what="a test"), proxy="none"
    )


@pytest.mark.parametrize(
    ("rule", "says"),
    [("notifications-failing", (503, b"later")), ("notifications-lost", (404, b"no_service"))],
)
def test_notifications_that_do_not_arrive(
    scene: MakeScene, golden: Golden, receiver: Any, rule: str, says: tuple[int, bytes]
) -> None:
    """Slack takes nothing; then it does, and the message that tells of it is the one that ends it."""
    sink = slack_at(receiver)
    here = scene(sinks=[sink])
    courier = Courier(here.store, sink, here.clock, random=Random(1))
    served = here.engine(headroom=0.0)
    held = served.engine.pool.allocate(125).blocks
    receiver.says = says

    def deliver() -> None:
        courier.step()

    fired = here.fires(rule, each=deliver)
    assert "slack" in fired.alert.meaning
    receiver.says = (200, b"ok")
    served.engine.pool.release(held)
    here.now += 3600.0  # one that refuses for good is left alone for so long
    golden(fired, here.ends(rule, each=deliver))
    both = {"notifications-failing", "notifications-lost"}
    assert {change.alert.rule for change in here.changes} & both == {rule}
