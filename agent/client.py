"""A typed client of the agent's HTTP API, for the dashboard and for commands."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import ValidationError

from agent import wire
from agent.wire import alerts as wire_alerts
from agent.wire import blackbox as wire_blackbox
from agent.wire import compaction as wire_compaction
from agent.wire import devices as wire_devices
from agent.wire import history as wire_history
from agent.wire import plan as wire_plan
from agent.wire import profile as wire_profile
from engine_shim.errors import KvatlasError, SettingsError

DEFAULT_URL = "http://127.0.0.1:9477"
SINK_PATIENCE_SECONDS = 30.0  # receivers have 10 s by default
PLAN_SECONDS = 15.0  # advice on a config of thousands of layers
RUN_GRACE_SECONDS = 15.0  # beyond a run's own time: the engine comes to its step boundaries, and the agent answers
BOX_SECONDS = 15.0
LOOK_SECONDS = 8.0  # an engine has two to answer, and a plan of a large pool takes as long

Model = TypeVar("Model", bound=wire.WireModel)


class AgentUnavailable(KvatlasError):
    """No usable answer: the agent is not running, not reachable, or too slow. Ask again later."""


class AgentRefused(KvatlasError):
    """The agent answered with an error; its three parts say what failed, where, and what to do."""

    def __init__(self, status: int, body: wire.ErrorBody) -> None:
        super().__init__(f"{body.message} ({body.action})")
        self.status = status
        self.error = body.error
        self.message = body.message
        self.action = body.action


class AgentClient:
    """Keeps one connection alive; use it from one thread at a time, or make one for each."""

    def __init__(self, base_url: str = DEFAULT_URL, token: str | None = None, timeout_seconds: float = 2.0) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._base_url, self._timeout_seconds = base_url.rstrip("/"), timeout_seconds
        # The agent is a neighbour: a proxy meant for the outside must not stand between.
        self._http = httpx.Client(headers=headers, timeout=timeout_seconds, trust_env=False)
        self._then: tuple[float, float, float] | None = None  # of a recording: its time, this host's, seconds a second

    @property
    def url(self) -> str:
        """The agent's address, with whatever user and password were given in it."""
        return self._base_url

    @property
    def now_unix(self) -> float:
        """Unix time: this host's, or where a recording is played back, its own, reckoned on from the last listing."""
        if self._then is None:
            return time.time()
        position, asked, speed = self._then
        return position + (time.time() - asked) * speed

    def close(self) -> None:
        self._http.close()

    def with_token(self, token: str) -> AgentClient:
        """Another client of the same agent, which may change things; to be closed by itself."""
        return AgentClient(self._base_url, token, self._timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def engines(self) -> wire.EngineList:
        listing = self._get(wire.EngineList, "/v1/engines")
        replay = listing.agent.replay
        if replay is None:
            self._then = None
        else:  # what is now is then; it stands still where the replay does
            speed = 0.0 if replay.paused or replay.at_end else replay.speed
            self._then = listing.now_unix, time.time(), speed
        return listing

    def engine(self, id: str) -> wire.EngineSummary:
        """One pool. An engine without a block map is none, and is an answer of another shape: see `unmapped`."""
        return self._get(wire.EngineSummary, _engine_path(id))

    def unmapped(self, id: str) -> wire.UnmappedEngine:
        """One engine that is known from its own metrics alone."""
        return self._get(wire.UnmappedEngine, _engine_path(id))

    def map(self, id: str, cells: int = 4096, request: str | None = None) -> wire.MapCells:
        """With a `request`, also where its blocks are."""
        query: dict[str, str | int | float] = {"cells": cells}
        if request is not None:
            query["request"] = request
        return self._get(wire.MapCells, _engine_path(id) + "/map", query)

    def profile(self, id: str) -> wire_profile.PoolProfile:
        """How long blocks live and lie idle, and how full pages of memory are."""
        return self._get(wire_profile.PoolProfile, _engine_path(id) + "/profile")

    def blocks(self, id: str, start: int, count: int) -> wire.BlockPage:
        return self._get(wire.BlockPage, _engine_path(id) + "/blocks", {"start": start, "count": count})

    def requests(
        self,
        id: str,
        limit: int = 256,
        *,
        sort: wire.RequestOrder = "blocks",
        ascending: bool = False,
        contains: str = "",
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> wire.RequestPage:
        """The first `limit` live sequences in that order, with totals and groups of all that match."""
        query: dict[str, str | int | float] = {"limit": limit, "sort": sort, "ascending": str(ascending).lower()}
        given = {"contains": contains or None, "lora": lora, "cache_salt": cache_salt}
        query.update({name: value for name, value in given.items() if value is not None})
        return self._get(wire.RequestPage, _engine_path(id) + "/requests", query)

    def history(
        self, id: str, metric: str, seconds: float, points: int = 600, *, until_unix: float | None = None
    ) -> wire.History:
        """The last `seconds` up to now, or up to another time, in at most `points` buckets."""
        end = self.now_unix if until_unix is None else until_unix
        # One bucket fewer than points: a range that does not begin on a whole step touches one more.
        step = max(seconds / max(1, points - 1), 0.001)
        query: dict[str, str | int | float] = {"metric": metric, "from": end - seconds, "to": end, "step": step}
        return self._get(wire.History, _engine_path(id) + "/history", query)

    def frame(self, id: str, at_unix: float | None = None, cells: int = 4096) -> wire_history.FrameCells:
        """The blocks at an earlier time: the newest frame that is not after it; without a time, the newest there is."""
        query: dict[str, str | int | float] = {"cells": cells}
        if at_unix is not None:
            query["at"] = at_unix
        return self._get(wire_history.FrameCells, _engine_path(id) + "/frames", query)

    def frame_times(self, id: str, start_unix: float, end_unix: float, limit: int = 600) -> wire_history.FrameTimes:
        """The instants in that time of which a frame is kept, at most `limit`."""
        query: dict[str, str | int | float] = {"from": start_unix, "to": end_unix, "limit": limit}
        return self._get(wire_history.FrameTimes, _engine_path(id) + "/frames/times", query)

    def marks(self, id: str, start_unix: float, end_unix: float, *, holds: bool = True) -> wire_history.MarkList:
        """What happened to a pool and was decided for it in that time; the newest 1,000. Without `holds`, decisions to
        do nothing are left out."""
        query: dict[str, str | int | float] = {"from": start_unix, "to": end_unix, "holds": str(holds).lower()}
        return self._get(wire_history.MarkList, _engine_path(id) + "/marks", query)

    def black_boxes(self, engine: str | None = None, limit: int = 100) -> wire_blackbox.BoxList:
        """Engines that ended, of which a black box is kept; the last one first."""
        query: dict[str, str | int | float] = {"limit": limit}
        if engine is not None:
            query["engine"] = engine
        return self._get(wire_blackbox.BoxList, "/v1/black-boxes", query)

    def black_box(self, name: str, cells: int = 4096, events: int = 200) -> wire_blackbox.BlackBox:
        """What is in one of them, with its newest `events`. A large map takes the agent some seconds to unpack."""
        path, query = "/v1/black-boxes/" + quote(name, safe=""), {"cells": cells, "events": events}
        return self._ask(wire_blackbox.BlackBox, "GET", path, params=query, timeout=BOX_SECONDS)

    def compaction(
        self, id: str, *, plan: bool = False, target: float | None = None, max_moves: int | None = None
    ) -> wire_compaction.CompactionState:
        """The policy's state; with `plan`, also what a run would move. The engine is asked how it stands."""
        query: dict[str, str | int | float] = {"plan": "true" if plan else "false"}
        if target is not None:
            query["target"] = target
        if max_moves is not None:
            query["max_moves"] = max_moves
        path = _engine_path(id) + "/compaction"
        return self._ask(wire_compaction.CompactionState, "GET", path, params=query, timeout=LOOK_SECONDS)

    def compact(self, id: str, order: wire_compaction.CompactionOrder | None = None) -> wire_compaction.CompactionRun:
        """Have a run made, and wait for its end; needs the token where the agent has one."""
        order = order or wire_compaction.CompactionOrder()
        path, patience = _engine_path(id) + "/compaction", order.max_seconds + RUN_GRACE_SECONDS
        return self._ask(wire_compaction.CompactionRun, "POST", path, json=order.model_dump(), timeout=patience)

    def switch_moving_off(self, id: str) -> wire_compaction.CompactionSwitch:
        """The kill switch; needs the token where the agent has one."""
        path = _engine_path(id) + "/compaction"
        return self._ask(wire_compaction.CompactionSwitch, "DELETE", path, timeout=RUN_GRACE_SECONDS)

    def switch_relocation(self, id: str, on: bool) -> wire_compaction.RelocationSwitch:
        """Relocating allocation on or off; needs the token where the agent has one."""
        order, path = wire_compaction.RelocationOrder(on=on), _engine_path(id) + "/relocation"
        return self._ask(
            wire_compaction.RelocationSwitch, "POST", path, json=order.model_dump(), timeout=RUN_GRACE_SECONDS
        )

    def compactions(self, engine: str | None = None, limit: int = 100) -> wire_compaction.CompactionList:
        """What was decided and asked for, newest first."""
        query: dict[str, str | int | float] = {"limit": limit}
        if engine is not None:
            query["engine"] = engine
        return self._get(wire_compaction.CompactionList, "/v1/compactions", query)

    def alerts(self) -> wire_alerts.AlertList:
        """Open alerts and the last ones that are over, with the mutes and how delivery stands."""
        return self._get(wire_alerts.AlertList, "/v1/alerts")

    def test_sink(self, order: wire_alerts.SinkTrialOrder) -> wire_alerts.SinkTrial:
        """Have a test message sent, and wait for the receiver; needs the token where the agent has one."""
        return self._ask(
            wire_alerts.SinkTrial, "POST", "/v1/alerts/test", json=order.model_dump(), timeout=SINK_PATIENCE_SECONDS
        )

    def devices(self) -> wire_devices.DeviceList:
        """GPUs and who holds their memory, the host's memory, and torch's allocators."""
        return self._get(wire_devices.DeviceList, "/v1/devices")

    def plan_choices(self) -> wire_plan.PlanChoices:
        """What a plan can name: models, GPUs, number formats."""
        return self._get(wire_plan.PlanChoices, "/v1/plan")

    def plan(self, asked: Mapping[str, Any]) -> wire_plan.PlanAnswer:
        """A plan for the fields that POST /v1/plan takes; needs the token where the agent has one."""
        return self._ask(wire_plan.PlanAnswer, "POST", "/v1/plan", json=dict(asked), timeout=PLAN_SECONDS)

    def advice(self, id: str) -> wire_plan.LiveAdvice:
        """What to change in an engine that runs, from its map."""
        return self._get(wire_plan.LiveAdvice, _engine_path(id) + "/advice")

    def mutes(self) -> wire_alerts.MuteList:
        return self._get(wire_alerts.MuteList, "/v1/mutes")

    def mute(self, order: wire_alerts.MuteOrder) -> wire_alerts.MuteRecord:
        """Needs the token where the agent has one, as does the end of a mute."""
        return self._ask(wire_alerts.MuteRecord, "POST", "/v1/mutes", json=order.model_dump())

    def unmute(self, id: str) -> wire_alerts.MuteList:
        """End a mute; returns those that are left."""
        return self._ask(wire_alerts.MuteList, "DELETE", f"/v1/mutes/{quote(id, safe='')}")

    def _get(self, model: type[Model], path: str, query: Mapping[str, str | int | float] | None = None) -> Model:
        return self._ask(model, "GET", path, params=query)

    def _ask(self, model: type[Model], method: str, path: str, **request: Any) -> Model:
        url = self._base_url + path
        try:
            response = self._http.request(method, url, **request)
        except httpx.HTTPError as error:
            raise AgentUnavailable(f"no answer from the agent at {self._base_url}: {_describe(error)}") from error
        except (httpx.InvalidURL, ValueError) as error:  # ValueError: among others, a name that no host can have
            raise AgentUnavailable(f"{self._base_url!r} is not the address of an agent: {error}") from error
        try:
            if response.status_code == httpx.codes.OK:
                return model.model_validate_json(response.content)
            body = wire.ErrorBody.model_validate_json(response.content)
        except ValidationError as error:
            what = f"HTTP {response.status_code} at {url} is not an answer of this version's agent"
            raise AgentUnavailable(f"{what}: {error.error_count()} fields differ") from error
        raise AgentRefused(response.status_code, body)


def checked_address(url: str, setting: str = "KVATLAS_AGENT_URL") -> str:
    """The address of a `setting` as it is; ValueError where it cannot be one. A password in it is not repeated."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # fails where a part of the name is too long, or empty
        httpx.URL(url)
        problem = "" if parts.scheme in ("http", "https") and host and port != 0 else "it must be http://HOST:PORT"
    except (ValueError, httpx.InvalidURL) as error:
        problem = str(error)
    if problem:
        what = "an agent" if setting == "KVATLAS_AGENT_URL" else "a server"
        raise ValueError(f"{setting} is no address of {what} ({problem}); give one such as {DEFAULT_URL}")
    return url


def agent_address(url: str) -> str:
    """As `checked_address`, for a command. Raises SettingsError."""
    try:
        return checked_address(url)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _engine_path(id: str) -> str:
    return "/v1/engines/" + quote(id, safe="")


def _describe(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
