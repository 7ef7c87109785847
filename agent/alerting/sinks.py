"""The receivers of alerts that the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agent.alerting.settings import AlertSettings
from alerts.errors import AlertsConfigError
from alerts.sinks.base import Sink
from alerts.sinks.log import LogSink
from engine_shim.errors import SettingsError

if TYPE_CHECKING:
    from pydantic import SecretStr

    from alerts.sinks.http import Proxy
    from alerts.sinks.secret_url import SecretUrl

LOG, SLACK, ALERTMANAGER, WEBHOOK = "log", "slack", "alertmanager", "webhook"
NAMES = (LOG, SLACK, ALERTMANAGER, WEBHOOK)


def make_sinks(settings: AlertSettings, *, only: str | None = None) -> tuple[Sink, ...]:
    """Those that are set up, or of these the one that is called `only`. Raises SettingsError, without an address."""
    sinks = []
    for name in NAMES if only is None else (only,):
        try:
            sink = _make(name, settings)
        except AlertsConfigError as error:
            raise SettingsError(str(error)) from None  # the cause may hold the address
        if sink is not None:
            sinks.append(sink)
    return tuple(sinks)


def _make(name: str, settings: AlertSettings) -> Sink | None:
    """None where nothing is set. What speaks HTTP is loaded only by who uses it: it is megabytes."""
    if name == LOG:
        return LogSink(LOG) if settings.alert_log else None
    if name == SLACK:
        # What a channel's webhook is sent may be read on the way, and whoever reads its URL can write to the channel.
        url = _url("slack_webhook_url", settings.slack_webhook_url, settings.slack_webhook_url_file, plain_http=False)
        if url is None:
            return None
        from alerts.sinks.slack import SlackSink

        proxy = _proxy("slack_proxy", settings.slack_proxy, settings.slack_proxy_file)
        return SlackSink(SLACK, url, timeout_seconds=settings.slack_timeout_seconds, proxy=proxy)
    if name == ALERTMANAGER:
        url = _url("alertmanager_url", settings.alertmanager_url, settings.alertmanager_url_file, plain_http=True)
        if url is None:
            return None
        from alerts.sinks.alertmanager import AlertmanagerSink

        proxy = _proxy("alertmanager_proxy", settings.alertmanager_proxy, settings.alertmanager_proxy_file)
        return AlertmanagerSink(ALERTMANAGER, url, timeout_seconds=settings.alertmanager_timeout_seconds, proxy=proxy)
    url = _url("webhook_url", settings.webhook_url, settings.webhook_url_file, plain_http=True)
    if url is None:
        return None
    from alerts.sinks.webhook import WebhookSink

    proxy = _proxy("webhook_proxy", settings.webhook_proxy, settings.webhook_proxy_file)
    return WebhookSink(WEBHOOK, url, timeout_seconds=settings.webhook_timeout_seconds, proxy=proxy)


def _url(name: str, value: SecretStr | None, file: Path | None, *, plain_http: bool) -> SecretUrl | None:
    from alerts.sinks.secret_url import SecretUrl

    if file is not None:
        return SecretUrl.read(what=name, file=file, plain_http=plain_http)
    return None if value is None else SecretUrl(value.get_secret_value(), what=name, plain_http=plain_http)


def _proxy(name: str, value: str, file: Path | None) -> Proxy:
    from alerts.sinks.secret_url import SecretUrl

    if file is not None:
        return SecretUrl.read(what=name, file=file, plain_http=True)
    if value == "environment":
        return "environment"
    return "none" if value == "none" else SecretUrl(value, what=name, plain_http=True)
