"""Alerts as a whole: judges views, keeps what came of them, and has it delivered."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from agent.alerting.device_feed import DeviceFeed
from agent.alerting.evaluator import Evaluator
from agent.alerting.feed import PoolFeed
from agent.alerting.own import Delivery, OwnFeed
from agent.alerting.rule_files import load_rules
from agent.alerting.sinks import LOG, SLACK, make_sinks
from agent.alerting.trial import Trial, send_trial
from agent.compaction.driver import CompactionDriver
from agent.config import AgentSettings
from agent.devices.model import NOTHING_READ, DevicesView
from agent.engine_metrics.model import EngineMetricsView
from agent.log import EventLog
from agent.sampling.model import AgentView, Clock
from alerts.lifecycle import LifecycleSettings
from alerts.model import Severity
from alerts.pipeline import Pipeline
from alerts.rules import Rule
from alerts.sinks.base import Sink
from alerts.store import Store
from alerts.tally import Counted

STOP_SECONDS = 2.0


class Alerting:
    """`notice` may come from any thread. `start` begins to evaluate and to deliver; `stop` ends both."""

    def __init__(
        self,
        rules: Sequence[Rule],
        sinks: Sequence[Sink],
        store: Store,
        driver: CompactionDriver,
        *,
        metrics: Callable[[], EngineMetricsView] = EngineMetricsView,
        devices: Callable[[], DevicesView] = lambda: NOTHING_READ,
        clock: Clock | None = None,
        interval_seconds: float = 1.0,
        pool_page: str = "",
        list_page: str = "",
        runbook: str = "",
        agent_name: str = "",
    ) -> None:
        """`pool_page` is an address that a pool's id is put at the end of; "" where there is none, as for the others.
        The store must know the names of the sinks."""
        clock = clock or Clock()
        name = agent_name or socket.gethostname()
        self.store = store
        self._sinks = {sink.name: sink for sink in sinks}
        self._list_page = list_page
        self.pipeline = Pipeline(store, sinks, clock, list_url=lambda: list_page or None)
        self.evaluator = Evaluator(
            rules,
            store,
            PoolFeed(driver.standing_if_known, consumers=driver.settings.consumers, metrics=metrics, link=pool_page),
            OwnFeed(name, interval_seconds, self._deliveries, link=list_page or None),
            devices=DeviceFeed(devices),
            settings=LifecycleSettings(runbook_base=runbook),
            clock=clock,
        )
        self._thread = threading.Thread(target=self.evaluator.run, name="alerting", daemon=True)

    @classmethod
    def from_settings(
        cls,
        settings: AgentSettings,
        driver: CompactionDriver,
        address: str,
        clock: Clock,
        metrics: Callable[[], EngineMetricsView] = EngineMetricsView,
        devices: Callable[[], DevicesView] = lambda: NOTHING_READ,
    ) -> Alerting:
        """As the settings say; `address` is the agent's own, `metrics` what engines say of themselves, `devices` what
        is known of GPUs and host. Raises SettingsError."""
        rules = load_rules(settings.alert_rules)
        sinks = make_sinks(settings)
        names = [sink.name for sink in sinks]
        least = {SLACK: Severity(settings.slack_severity)}
        store = Store(settings.alert_store, names, least=least, clock=clock)
        page = settings.alert_page.rstrip("/")
        return cls(
            rules,
            sinks,
            store,
            driver,
            metrics=metrics,
            devices=devices,
            clock=clock,
            interval_seconds=settings.interval_seconds,
            pool_page=f"{page}/?pool=" if page else f"{address}/v1/engines/",
            list_page=page or f"{address}/v1/alerts",
            runbook=settings.alert_runbook,
        )

    def start(self) -> None:
        told = [name for name in self.pipeline.health() if name != LOG]
        if told and self.store.path is None:
            EventLog(logging.getLogger("kvatlas.alerting")).event(
                "alerts are kept in memory alone",
                level=logging.WARNING,
                sinks=", ".join(told),
                action="set KVATLAS_STATE_DIR: without it a restart tells again what it finds, and loses the rest",
            )
        self.pipeline.start()
        self._thread.start()

    def stop(self) -> None:
        """What is still to be sent waits in the store."""
        self.evaluator.stop()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        self.pipeline.stop()
        self.store.close()

    def notice(self, view: AgentView) -> None:
        """There are new samples; returns at once."""
        self.evaluator.notice(view)

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Open alerts by severity and state."""
        return self.evaluator.counts()

    def outcomes(self) -> Mapping[tuple[str, str], int]:
        """What became of messages and changes, by sink and outcome."""
        return self.pipeline.outcomes()

    def try_sink(self, name: str, asked_for_by: str, now_unix: float) -> Trial:
        """Send one test message to a receiver, and wait for it. Raises KeyError where none is called that.

        Sinks open a connection for each message, so that their couriers need not be asked first.
        """
        told = {"asked_for_by": asked_for_by}
        return send_trial(self._sinks[name], asked_for_by=told, link=self._list_page or None, now_unix=now_unix)

    def _deliveries(self) -> list[Delivery]:
        outcomes = self.pipeline.outcomes()
        return [
            Delivery(
                name,
                health.failing_seconds or 0.0,
                outcomes.get((name, Counted.SENT.value), 0),
                outcomes.get((name, Counted.DEAD_LETTERED.value), 0),
            )
            for name, health in self.pipeline.health().items()
        ]
