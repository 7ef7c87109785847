"""The agent as a process: wires the parts together, serves until a signal, and ends in good order."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from dataclasses import replace

import numpy.ma  # noqa: F401 - np.median loads it at its first call, which in a running agent looks like a leak

from agent.alerting.families import alert_families
from agent.alerting.service import Alerting
from agent.blackbox.keeper import BlackBoxes
from agent.blackbox.privacy import tell_settings
from agent.blackbox.reading import BoxReader
from agent.compaction.audit import AuditLog
from agent.compaction.driver import CompactionDriver
from agent.config import AgentSettings
from agent.descriptors import raise_limit, share_out
from agent.devices.families import device_families
from agent.devices.monitor import DeviceMonitor
from agent.engine_metrics.presenter import metric_families
from agent.engine_metrics.scraper import MetricsScraper, ScraperSettings
from agent.exporter import LABELS, PREFIX, Exporter
from agent.history import MemoryHistory
from agent.history.families import history_families
from agent.history.keeper import HistoryKeeper
from agent.log import EventLog, configure_logging
from agent.sampling.model import Clock
from agent.sampling.sampler import Sampler
from agent.web.api import ApiContext, create_app
from agent.web.gate import ACTION as REQUEST
from agent.web.gate import Gate, gate_families
from agent.web.listening import SHUTDOWN_SECONDS, address_of, bind, end_on_signal, make_server
from agent.web.security import SHORT_TOKEN, WriteGuard, is_loopback
from engine_shim import __version__
from engine_shim.allocation_map.reader import MapReader


def run_agent(settings: AgentSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises SettingsError or AgentStartError before anything has begun."""
    configure_logging(settings.log_level)
    log = EventLog(logging.getLogger("kvatlas.agent"))
    token = settings.read_token()
    listener = bind(settings)
    shares = share_out(raise_limit())
    address = address_of(listener)
    guard = WriteGuard(token=token, listens_on_loopback=is_loopback(settings.address[0]))
    clock = Clock()
    memory = MemoryHistory(seconds=settings.history_seconds, interval_seconds=settings.interval_seconds)
    keeper = None
    if settings.state_dir is not None:
        keeper = HistoryKeeper(settings.state_dir, settings.state_max_mib * 2**20, memory, clock)
        keeper.attach()
    history = keeper.history if keeper is not None else memory
    sampler = Sampler(
        settings.map_folders,
        MapReader,
        history,
        settings=replace(settings.sampler(), max_open=shares.maps),
        clock=clock,
    )
    audit = AuditLog(
        settings.audit_log,
        listener=keeper.note_decision if keeper is not None else lambda entry: None,
        wanted=lambda entry: entry.action != REQUEST,
    )
    # The same file, and none of the ring: what is asked for over HTTP must not push out what was decided.
    asked = AuditLog(settings.audit_log, ring_entries=1)
    gate = Gate(guard, asked, clock=clock.monotonic, wall=clock.wall)
    driver = CompactionDriver(settings.compaction_driver(), audit, clock=clock)
    sampler.subscribe(lambda: driver.notice(sampler.view))
    scraper = MetricsScraper(
        settings.metrics_sources(),
        lambda: sampler.view,
        settings=ScraperSettings(settings.engine_metrics_seconds, map_interval_seconds=settings.interval_seconds),
        clock=clock,
    )
    sampler.subscribe(scraper.notice)
    monitor = DeviceMonitor(lambda: sampler.view, settings.device_monitor(), clock=clock)
    alerting = Alerting.from_settings(settings, driver, address, clock, lambda: scraper.view, monitor.view)
    sampler.subscribe(lambda: alerting.notice(sampler.view))
    exporter = Exporter(
        lambda: sampler.view,
        clock=clock,
        tallies=driver.tallies,
        more=(
            lambda pools, now: metric_families(scraper.view, pools, now, PREFIX, LABELS),
            lambda pools, now: device_families(monitor.view()),
            lambda pools, now: alert_families(alerting.counts(), alerting.outcomes(), PREFIX),
            lambda pools, now: history_families(keeper.writer if keeper is not None else None, PREFIX),
            lambda pools, now: gate_families(gate.counts(), PREFIX),
        ),
    )
    sampler.subscribe(exporter.refresh)
    if keeper is not None:
        recorder = keeper.recorder
        sampler.subscribe(lambda: recorder.notice(sampler.view))
        alerting.evaluator.subscribe(recorder.notice_alerts)
    boxes = None
    if keeper is not None and settings.state_dir is not None:
        boxes = BlackBoxes(
            settings.state_dir,
            settings.black_boxes,
            history,
            marks=keeper.reader.marks,
            settings=tell_settings(settings),
            max_held=shares.maps // 4,
            clock=clock,
        )
        notice_boxes = boxes.notice
        sampler.subscribe(lambda: notice_boxes(sampler.view))
    context = ApiContext(
        view=lambda: sampler.view,
        exporter=exporter,
        history=history,
        guard=guard,
        compaction=driver,
        alerting=alerting,
        engine_metrics=lambda: scraper.view,
        devices=monitor.view,
        version=__version__,
        interval_seconds=settings.interval_seconds,
        threshold=settings.threshold,
        started_unix=clock.wall(),
        clock=clock,
        past=keeper.reader if keeper is not None else None,
        gate=gate,
        boxes=BoxReader(boxes.folder) if boxes is not None else None,
    )
    server = make_server(create_app(context), most=shares.connections)
    # The sampler computes while the server answers: an answer should wait for it a millisecond, not five.
    sys.setswitchinterval(0.001)
    # What is loaded now stays; a collection need not look at it each time that a scrape makes many small objects.
    gc.collect()
    gc.freeze()

    end_on_signal(server)
    log.event(
        "listening", address=address, version=__version__, writes_enabled=guard.enabled, compaction=settings.compaction
    )
    if not guard.enabled:
        log.event("changes are off: listening beyond loopback without a token", level=logging.WARNING)
    if token is not None and len(token) < SHORT_TOKEN:
        log.event("the token is short: take 16 characters or more at random", level=logging.WARNING)
    thread = threading.Thread(target=sampler.run, name="sampler", daemon=True)
    deciding = threading.Thread(target=driver.run, name="compaction", daemon=True)
    scraping = threading.Thread(target=scraper.run, name="engine-metrics", daemon=True)
    if keeper is not None:
        keeper.start()
    if boxes is not None:
        boxes.start()
    thread.start()
    deciding.start()
    monitor.start()
    alerting.start()
    scraping.start()
    try:
        server.run(sockets=[listener])
    finally:
        sampler.stop()
        driver.stop()
        alerting.stop()
        scraper.stop()
        monitor.stop(SHUTDOWN_SECONDS)
        thread.join(SHUTDOWN_SECONDS)
        deciding.join(SHUTDOWN_SECONDS)
        scraping.join(SHUTDOWN_SECONDS)
        if boxes is not None:
            boxes.stop()
        if keeper is not None:
            keeper.stop()
        audit.close()
        gate.close(SHUTDOWN_SECONDS)
        asked.close()
        if not thread.is_alive():
            sampler.close()
        listener.close()
        log.event("stopped")
