"""Routes of alerts: what is open and what was, and who wants to hear nothing of what."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

from fastapi import Depends, FastAPI, Path, Request, Response

from agent.alerting.service import Alerting
from agent.sampling.crew import Crew
from agent.sampling.model import Clock
from agent.web.errors import ApiError, json_response
from agent.web.waiting import Answer, off_the_loop
from agent.wire import alerts as wire
from alerts.errors import AlertsConfigError
from alerts.model import Alert, Change, Phase
from alerts.mutes import Mute
from alerts.state import AlertState

MAX_MUTES = 200
TRIALS = 2  # test messages at once: each may take its receiver's whole time
WAITING = 16  # requests that wait for the store at once: it has a lock, which is held while it writes to the disk
MuteId = Annotated[str, Path(description="id of a mute, as GET /v1/mutes lists it", max_length=64)]


def add_alerts(
    app: FastAPI, alerting: Alerting, require_writer: Callable[[Request], Awaitable[None]], clock: Clock
) -> None:
    """`require_writer` raises ApiError for who may not change anything."""
    crew, trials = Crew(WAITING), Crew(TRIALS)

    async def apart(ask: Callable[[], Answer]) -> Answer:
        return await off_the_loop(crew, ask, "api-alerts", f"{WAITING} requests wait for the store of alerts already")

    @app.get("/v1/alerts", response_model=wire.AlertList, tags=["alerts"])
    async def alerts() -> Response:
        """Every open alert and the last ones that are over, with the mutes and how delivery stands."""
        return json_response(await apart(lambda: describe(alerting, clock.wall())))

    @app.post("/v1/alerts/test", response_model=wire.SinkTrial, tags=["alerts"], dependencies=[Depends(require_writer)])
    async def test(order: wire.SinkTrialOrder) -> Response:
        """Send one test message to a receiver, as it is set up, and say whether it took it."""
        names = await apart(lambda: list(alerting.pipeline.health()))
        if order.sink not in names:
            there = ", ".join(names) or "none"
            raise ApiError(404, "not_found", "that receiver is not set up", f"give one that is set up: {there}")
        author = order.author or "the API"
        busy = f"{TRIALS} test messages are under way already"
        ask = partial(alerting.try_sink, order.sink, author, clock.wall())
        made = await off_the_loop(trials, ask, "api-alerts-test", busy)
        return json_response(
            wire.SinkTrial(
                sink=made.sink,
                sent=made.sent,
                seconds=round(made.seconds, 3),
                reason=made.reason,
                status=made.status,
                then=made.then,
            )
        )

    @app.get("/v1/mutes", response_model=wire.MuteList, tags=["alerts"])
    async def mutes() -> Response:
        """Those that have not ended."""
        found = await apart(alerting.store.mutes)
        return json_response(wire.MuteList(mutes=[_mute(one) for one in found]))

    @app.post("/v1/mutes", response_model=wire.MuteRecord, tags=["alerts"], dependencies=[Depends(require_writer)])
    async def mute(order: wire.MuteOrder) -> Response:
        """Say nothing of a rule, of an engine, or of that rule at that engine; it ends by itself."""
        made = await apart(lambda: _add(alerting, order, clock.wall()))
        return json_response(_mute(made))

    @app.delete("/v1/mutes/{id}", response_model=wire.MuteList, tags=["alerts"], dependencies=[Depends(require_writer)])
    async def unmute(id: MuteId) -> Response:
        """End a mute now; what fires still is told then. Answers with the mutes that are left."""
        if not await apart(lambda: alerting.store.remove_mute(id)):
            raise ApiError(
                404,
                "not_found",
                f"no mute {id!r}",
                "kvatlas alerts mutes, or GET /v1/mutes, lists those that there are",
            )
        found = await apart(alerting.store.mutes)
        return json_response(wire.MuteList(mutes=[_mute(one) for one in found]))


def describe(alerting: Alerting, now_unix: float) -> wire.AlertList:
    """How everything stands."""
    standing = alerting.evaluator.standing
    worst_first = sorted(standing.open, key=lambda one: (-one.alert.severity.rank, one.alert.started_at))
    outcomes = alerting.pipeline.outcomes()
    return wire.AlertList(
        now_unix=now_unix,
        open=[_open(one) for one in worst_first],
        recent=[_over(one) for one in standing.resolved],
        mutes=[_mute(one) for one in alerting.store.mutes()],
        sinks=[
            wire.SinkRecord(
                name=name,
                waiting=health.waiting,
                failing_seconds=health.failing_seconds,
                last_failure=health.last_failure,
                outcomes={outcome: count for (sink, outcome), count in outcomes.items() if sink == name},
            )
            for name, health in alerting.pipeline.health().items()
        ],
        kept=alerting.store.durable,
        rules=[rule.name for rule in alerting.evaluator.rules],
    )


def _add(alerting: Alerting, order: wire.MuteOrder, now_unix: float) -> Mute:
    rules = [rule.name for rule in alerting.evaluator.rules]
    if order.rule is not None and order.rule not in rules:
        near = difflib.get_close_matches(order.rule, rules, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(rules)}"
        raise ApiError(400, "bad_request", f"no rule {order.rule!r}", hint)
    if len(alerting.store.mutes()) >= MAX_MUTES:
        raise ApiError(400, "bad_request", f"there are {MAX_MUTES} mutes already", "end one with DELETE /v1/mutes/{id}")
    try:
        made = Mute(
            id=secrets.token_hex(4),
            rule=order.rule,
            engine=order.engine,
            author=order.author,
            comment=order.comment,
            created_at=now_unix,
            expires_at=now_unix + order.seconds,
        )
    except AlertsConfigError as error:
        named = order.rule or order.engine
        hint = "kvatlas alerts mute --help says what it takes" if named else "choose a rule or an engine"
        raise ApiError(400, "bad_request", str(error), hint) from error
    alerting.store.add_mute(made)
    return made


def _open(state: AlertState) -> wire.AlertRecord:
    word: wire.AlertWord = "firing" if state.told is not None else "muted"
    return _record(state.alert, "pending" if state.phase is Phase.PENDING else word, held=state.held)


def _over(change: Change) -> wire.AlertRecord:
    return _record(change.alert, "resolved", reason=change.reason)


def _record(alert: Alert, state: wire.AlertWord, *, held: str = "", reason: str = "") -> wire.AlertRecord:
    return wire.AlertRecord(
        fingerprint=alert.fingerprint,
        rule=alert.rule,
        severity=alert.severity.value,
        state=state,
        held=held,
        labels=dict(alert.labels),
        value=alert.value,
        value_text=alert.value_text,
        threshold_text=alert.threshold_text,
        summary=alert.summary,
        meaning=alert.meaning,
        action=alert.action,
        started_unix=alert.started_at,
        ended_unix=alert.ended_at,
        reason=reason,
        link=alert.link,
        runbook_url=alert.runbook_url,
    )


def _mute(mute: Mute) -> wire.MuteRecord:
    return wire.MuteRecord(
        id=mute.id,
        rule=mute.rule,
        engine=mute.engine,
        author=mute.author,
        comment=mute.comment,
        created_unix=mute.created_at,
        expires_unix=mute.expires_at,
    )
