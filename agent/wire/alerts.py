"""What the agent says of alerts over HTTP, and what it is asked to mute. Times are Unix seconds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agent.wire import WireModel

Severity = Literal["info", "warning", "critical"]
AlertWord = Literal["pending", "firing", "muted", "resolved"]  # muted: it fires, and nobody was told


class AlertRecord(WireModel):
    """One alert: open, or over."""

    fingerprint: str  # of the rule and the labels, over all episodes
    rule: str
    severity: Severity
    state: AlertWord
    held: str  # why its number is unknown now; "" while it is known
    labels: dict[str, str]
    value: float | None
    value_text: str
    threshold_text: str
    summary: str
    meaning: str
    action: str
    started_unix: float
    ended_unix: float | None
    reason: str  # of one that is over
    link: str | None
    runbook_url: str | None


class MuteRecord(WireModel):
    """Who wants to hear nothing, of what, and until when."""

    id: str
    rule: str | None
    engine: str | None
    author: str
    comment: str
    created_unix: float
    expires_unix: float


class SinkRecord(WireModel):
    """How delivery to one receiver stands."""

    name: str
    waiting: int  # changes that it is still to be told
    failing_seconds: float | None  # since the first failure after the last message that came through
    last_failure: str  # a word of a closed set; "" where the last message came through
    outcomes: dict[str, int]  # messages by what became of them, and changes by what was made of them


class AlertList(WireModel):
    """Open alerts, the worst first; those that are over, newest first."""

    schema_: Literal["kvatlas.alerts/v1"] = Field(default="kvatlas.alerts/v1", alias="schema")
    now_unix: float
    open: list[AlertRecord]
    recent: list[AlertRecord]
    mutes: list[MuteRecord]
    sinks: list[SinkRecord]
    kept: bool  # whether open alerts, what is to be sent, and mutes outlive the agent
    rules: list[str]


class MuteOrder(BaseModel):
    """What to mute: a rule, an engine, or that rule at that engine; for how long, and who asks for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rule: str | None = None
    engine: str | None = None
    seconds: float = Field(gt=0)
    author: str
    comment: str = ""


class MuteList(WireModel):
    schema_: Literal["kvatlas.mutes/v1"] = Field(default="kvatlas.mutes/v1", alias="schema")
    mutes: list[MuteRecord]  # the one that ends first, first


class SinkTrialOrder(BaseModel):
    """Which receiver to send a test message to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sink: str = Field(description="name of a receiver, as in `sinks` of GET /v1/alerts")
    author: str = Field(default="", max_length=200, description="who asks for it; stands in the message")


class SinkTrial(WireModel):
    """What came of one test message."""

    schema_: Literal["kvatlas.alerts-test/v1"] = Field(default="kvatlas.alerts-test/v1", alias="schema")
    sink: str
    sent: bool
    seconds: float
    reason: str  # why it did not arrive: a word of a closed set
    status: int | None  # of HTTP
    then: str  # what the agent would do with an alert after that
