"""Slack, through an incoming webhook."""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from slack_sdk.webhook import WebhookClient, WebhookResponse

from alerts.clock import SYSTEM_CLOCK, Clock
from alerts.grouping import Cadence
from alerts.notice import Notice
from alerts.sinks.base import Outcome, Permanent, Reason, Retry, Sent, Shrink
from alerts.sinks.http import TIMEOUT_SECONDS, Poster, Proxy, Reply, Unanswered, classify, is_page
from alerts.sinks.secret_url import SecretUrl
from alerts.sinks.slack_message import full_message, short_message

# Slack's words for a webhook that will not work again, whatever the status beside them.
GONE: Final = ("no_service", "no_team", "team_disabled", "channel_not_found", "channel_is_archived", "invalid_token")
FORBIDDEN: Final = ("action_prohibited", "posting_to_general_channel_denied", "user_not_found")
INVALID: Final = ("invalid_payload", "invalid_blocks", "no_text", "too_many_attachments")


class SlackSink:
    """Sends each notice as one message."""

    def __init__(
        self,
        name: str,
        url: SecretUrl,
        *,
        cadence: Cadence | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        proxy: Proxy = "environment",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Raises AlertsConfigError for a proxy that cannot be used."""
        self.name = name
        self.cadence = cadence or Cadence()
        self._clock = clock
        self._client = _Client(Poster(url, timeout_seconds=timeout_seconds, proxy=proxy, what=name))

    def send(self, notice: Notice, *, plain: bool = False) -> Outcome:
        """Once."""
        try:
            response = self._client.send_dict(short_message(notice) if plain else full_message(notice))
        except Unanswered as error:
            return Retry(error.reason)
        body = response.body.strip()
        reply = Reply(response.status_code, response.headers, body.encode())
        outcome = classify(reply, self._clock.wall)
        if not isinstance(outcome, Sent | Shrink):
            return outcome
        if body in GONE:
            return Permanent(Reason.GONE, reply.status)
        if body in FORBIDDEN:
            return Permanent(Reason.FORBIDDEN, reply.status)
        if body in INVALID:
            return Shrink(Reason.INVALID_MESSAGE, reply.status)
        # Slack says "ok", and those that speak like it at least answer neither with a page nor with a refusal.
        refused = is_page(reply) or '"ok":false' in body.replace(" ", "")
        return Retry(Reason.NOT_A_RECEIVER) if isinstance(outcome, Sent) and refused else outcome

    def __repr__(self) -> str:
        return f"<Slack sink {self.name!r}>"


class _Client(WebhookClient):
    """slack-sdk's client over a Poster: it neither retries, nor logs, nor keeps the URL where a traceback shows it, and
    it takes the sink's proxy instead of the environment's."""

    def __init__(self, poster: Poster) -> None:
        silent = logging.Logger("slack", logging.CRITICAL + 1)  # outside the tree: no setting of the process reaches it
        super().__init__(repr(poster.url), proxy="none", logger=silent, retry_handlers=[])
        self._poster = poster

    def send_dict(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> WebhookResponse:
        """Raises Unanswered."""
        headers = {**self.default_headers, **(headers or {}), "Content-Type": "application/json; charset=utf-8"}
        reply = self._poster.post(json.dumps(body).encode("ascii"), headers)
        return WebhookResponse(url=self.url, status_code=reply.status, body=reply.text, headers=dict(reply.headers))
