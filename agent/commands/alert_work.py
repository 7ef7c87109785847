"""What the commands of alerts do, apart from their options."""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent.alerting.rule_files import DEFAULT_FILE, default_rules, load_rules
from agent.alerting.sinks import NAMES, make_sinks
from agent.alerting.trial import send_trial
from agent.client import AgentClient, agent_address
from agent.config import AgentSettings, variable
from agent.wire import alerts as wire
from alerts.rules import Rule
from alerts.sinks.base import clean
from alerts.units import Unit, parse, tell, tell_seconds
from engine_shim.errors import KvatlasError, SettingsError

CHECK_SCHEMA = "kvatlas.alerts-check/v1"
TEST_SCHEMA = "kvatlas.alerts-test/v1"


class SinkFailed(KvatlasError):
    """A receiver did not take a test message; the text says why."""


def check(file: Path) -> dict[str, Any]:
    """What the agent would judge by with this file. Raises SettingsError with every fault."""
    rules, defaults = load_rules(file), {rule.name: rule for rule in default_rules()}
    names = {rule.name for rule in rules}
    return {
        "schema": CHECK_SCHEMA,
        "file": str(file),
        "rules": [describe_rule(rule) for rule in rules],
        "added": [rule.name for rule in rules if rule.name not in defaults],
        "changed": [rule.name for rule in rules if rule.name in defaults and rule != defaults[rule.name]],
        "disabled": [name for name in defaults if name not in names],
    }


def describe_rule(rule: Rule) -> dict[str, Any]:
    """One rule as plain values."""
    return {
        "name": rule.name,
        "severity": rule.severity.value,
        "number": rule.number,
        "above" if rule.enter.above else "below": rule.enter.value,
        "exit": rule.exit,
        "for_seconds": rule.for_seconds,
        "keep_firing_seconds": rule.keep_firing_seconds,
    }


def render_check(facts: dict[str, Any]) -> str:
    rules = facts["rules"]
    lines = [f"{facts['file']}: {len(rules)} rules, with the {len(default_rules())} of {DEFAULT_FILE} changed by it"]
    lines += [f"  {word}: {', '.join(facts[word])}" for word in ("added", "changed", "disabled") if facts[word]]
    width = max((len(rule["name"]) for rule in rules), default=0)
    for rule in rules:
        side = "above" if "above" in rule else "below"
        lines.append(
            f"  {rule['name']:<{width}}  {rule['severity']:<8}  {rule['number']} {side} {rule[side]:g},"
            f" over at {rule['exit']:g}, for {tell_seconds(rule['for_seconds'])}"
        )
    return "\n".join(lines)


def send_test(name: str, settings: AgentSettings) -> dict[str, Any]:
    """Send one message to a receiver that is set up. Raises SettingsError, or SinkFailed with why it did not arrive."""
    if name not in NAMES:
        # An address is a secret, and is not written back.
        shown = f"there is no receiver {name!r}" if name.isidentifier() else "that is the name of no receiver"
        raise SettingsError(f"{shown}; give one of {', '.join(NAMES)}, and its address in the settings")
    sinks = make_sinks(settings, only=name)
    if not sinks:
        setting = {"log": "alert_log", "alertmanager": "alertmanager_url", "slack": "slack_webhook_url"}
        missing = variable(setting.get(name, "webhook_url"))
        raise SettingsError(f"{name} is not set up; set {missing} as for the agent, or give --config its file")
    made = send_trial(
        sinks[0], asked_for_by={"asked_for_by": _user()}, link=settings.alert_page or None, now_unix=time.time()
    )
    if not made.sent:
        status = f", HTTP {made.status}" if made.status is not None else ""
        raise SinkFailed(f"{name} did not take the message ({made.reason}{status}); {made.then}")
    return {"schema": TEST_SCHEMA, "sink": name, "sent": True, "seconds": round(made.seconds, 3)}


def connect(url: str, token: str | None, token_file: Path | None) -> AgentClient:
    """A client with the token that the agent's own settings would give. Raises SettingsError."""
    address = agent_address(url)
    given = {"token": token} if token else {"token_file": token_file} if token_file else {}
    return AgentClient(address, AgentSettings(**given).read_token() if given else None)


def order_mute(rule: str | None, engine: str | None, lasting: str, author: str | None, comment: str) -> wire.MuteOrder:
    """Raises SettingsError."""
    seconds = parse(lasting, Unit.SECONDS)
    if seconds is None or seconds <= 0:
        raise SettingsError(f"--for {lasting!r} is no duration; write 30m, 2h or 1d")
    if not rule and not engine:
        raise SettingsError("give --rule, --engine, or both: everything cannot be muted")
    return wire.MuteOrder(
        rule=rule or None, engine=engine or None, seconds=seconds, author=author or _user(), comment=comment
    )


def render_alerts(found: wire.AlertList) -> str:
    """A line for each open alert, the last ones that are over, and what is muted."""
    lines = [_alert_line(one, found.now_unix) for one in found.open] or ["no alert is open"]
    lines += [f"over:   {clean(one.summary)} ({clean(one.reason)})" for one in found.recent[:5]]
    lines += [render_mute(one, found.now_unix) for one in found.mutes]
    for sink in found.sinks:
        if sink.failing_seconds is not None:
            lines.append(f"{sink.name} fails for {tell_seconds(sink.failing_seconds)} ({sink.last_failure})")
    return "\n".join(lines)


def render_mutes(mutes: Iterable[wire.MuteRecord]) -> str:
    return "\n".join(render_mute(one, time.time()) for one in mutes) or "nothing is muted"


def render_mute(mute: wire.MuteRecord, now_unix: float) -> str:
    what = " at ".join(clean(part) for part in (mute.rule, mute.engine) if part)
    why = f": {clean(mute.comment)}" if mute.comment else ""
    left = tell(max(0.0, mute.expires_unix - now_unix), Unit.SECONDS)
    return f"muted {mute.id}: {what}, for {left} more, by {clean(mute.author)}{why}"


def _alert_line(one: wire.AlertRecord, now_unix: float) -> str:
    since = tell_seconds(max(0.0, now_unix - one.started_unix))
    held = f" (held: {clean(one.held)})" if one.held else ""
    return f"{one.severity:<8} {one.state:<8} {clean(one.summary)}, for {since}{held}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # KeyError before Python 3.13: a user id without a name
        return "unknown"
