"""Engines' own metrics over the API of a real agent: beside a map, without one, and where they are not to be had."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import httpx

from agent.client import AgentClient
from agent.wire import EngineList
from tests.agent.engine_metrics.conftest import Endpoint, http

Start = Callable[[Callable[[], bytes | None]], Endpoint]


def text(model: str, *more: str) -> bytes:
    lines = [f'vllm:num_requests_running{{engine="0",model_name="{model}"}} 2', *more]
    return http("\n".join(lines) + "\n")


def test_engines_with_and_without_a_map(
    start_agent: Callable[..., Any], start_engine: Callable[..., Any], endpoint: Start, wait_until: Callable[..., Any]
) -> None:
    writer = start_engine(total_blocks=64)
    writer.step_ended(0, 0)  # and its metrics say that two requests run
    mapped, alone = endpoint(lambda: text("other")), endpoint(lambda: text("far"))
    nobody = "http://127.0.0.1:9/metrics"
    agent = start_agent(
        f"--engine-metrics={writer.id.removesuffix('.dp0.tp0.pp0.kv')}={mapped.url}",
        f"--engine-metrics={alone.url}",
        f"--engine-metrics={nobody}",
        "--engine-metrics-seconds=0.5",
        "--interval-seconds=0.2",
    )
    with AgentClient(agent.url, timeout_seconds=60.0) as client:

        def asked() -> EngineList | None:
            seen = client.engines()
            each = all(one.up or one.fault for one in seen.agent.engine_metrics)
            return seen if each and seen.engines and len(seen.unmapped) == 1 else None

        listed = wait_until(asked)
        (unmapped,) = listed.unmapped
        assert (unmapped.model, unmapped.state, unmapped.block_map) == ("far", "live", False)
        assert client.unmapped(unmapped.id).metrics.values == {"running_requests": 2.0}
        assert [(one.up, one.engines) for one in listed.agent.engine_metrics] == [(True, 1), (True, 1), (False, 0)]
        assert listed.agent.engine_metrics[2].fault == "no connection"
        wait_until(
            lambda: (found := client.engine(writer.id)).metrics_comparison and found.metrics_comparison.disagrees
        )
        engine = client.engine(writer.id)
    assert engine.block_map
    assert engine.metrics is not None
    assert engine.metrics.source == f"{mapped.url}/metrics"
    assert engine.metrics_comparison is not None
    assert [one.quantity for one in engine.metrics_comparison.differences] == ["running_requests"]
    assert engine.metrics_comparison.reason.startswith("running requests: 2 by the engine's metrics, 0 by its map")
    get = partial(httpx.get, timeout=60.0, trust_env=False)

    def ratios() -> list[str]:  # a text may be two seconds old
        lines = get(f"{agent.url}/metrics").text.splitlines()
        return [one.partition("} ")[2] for one in lines if one.startswith("kvatlas_engine_metrics_disagreement_ratio{")]

    assert wait_until(ratios) == ["1.0"]
    answer = get(f"{agent.url}/v1/engines/{unmapped.id}").json()
    assert "fragmentation" not in answer  # absent, not 0
    for route in ("map", "blocks", "requests", "compaction"):
        refusal = get(f"{agent.url}/v1/engines/{unmapped.id}/{route}")
        assert (refusal.status_code, refusal.json()["error"]) == (404, "no_block_map"), route
