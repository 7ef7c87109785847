"""What engines say of themselves on the page: beside a map, and in place of one."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import dashboard
from agent import wire
from agent.client import AgentClient
from dashboard import engine_metrics

TEXT = b"""# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="org/m<1>",tp_rank="0"} 0.62
sglang:full_token_usage{model_name="org/m<1>",tp_rank="0"} 0.1
sglang:mamba_usage{model_name="org/m<1>",tp_rank="0"} 0.62
sglang:num_used_tokens{model_name="org/m<1>",tp_rank="0"} 2000.0
sglang:max_total_num_tokens{model_name="org/m<1>",tp_rank="0"} 20000.0
sglang:num_running_reqs{model_name="org/m<1>",tp_rank="0"} 3.0
"""


def metrics(**values: float) -> wire.EngineMetrics:
    return wire.EngineMetrics(
        source="http://127.0.0.1:8000/metrics", age_seconds=2.0, frozen_seconds=0.0, rank=0, values=values, notes=[]
    )


def compared(*, disagrees: bool) -> wire.MetricsComparison:
    reason = "KV usage: 0.420 by the engine's metrics, 0.100 to 0.120 by its map" if disagrees else ""
    return wire.MetricsComparison(
        compared=True,
        why_not="",
        disagrees=disagrees,
        disagreement_ratio=0.3 if disagrees else 0.0,
        reason=reason,
        differences=[],
    )


def test_a_disagreement_is_a_banner_with_both_numbers(summary: Callable[..., wire.EngineSummary]) -> None:
    engine = summary(metrics=metrics(kv_usage_ratio=0.42), metrics_comparison=compared(disagrees=True))
    (banner,) = engine_metrics.disagreement(engine)
    assert "0.420" in banner.what
    assert "0.100 to 0.120" in banner.what
    assert "http://127.0.0.1:8000/metrics" in banner.action
    assert "disagree with the map" in engine_metrics.line_html(engine)


def test_agreement_and_silence_have_no_banner(summary: Callable[..., wire.EngineSummary]) -> None:
    agreeing = summary(metrics=metrics(running_requests=3.0), metrics_comparison=compared(disagrees=False))
    assert engine_metrics.disagreement(agreeing) == []
    assert ": agree with the map · 3 running" in engine_metrics.line_html(agreeing)
    assert engine_metrics.disagreement(summary()) == []
    assert engine_metrics.line_html(summary()) == ""


@pytest.fixture
def source() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(TEXT)))
            self.end_headers()
            self.wfile.write(TEXT)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_engine_without_a_map_is_shown_as_such(
    stage: Any, source: str, eventually: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = stage.agent(engine_metrics=source, engine_metrics_seconds="0.5")
    with AgentClient(url) as client:
        (engine,) = eventually(lambda: client.engines().unmapped, "the engine without a map")
    assert not engine.block_map
    monkeypatch.setenv("KVATLAS_AGENT_URL", url)
    st.cache_resource.clear()
    page = AppTest.from_file(str(Path(dashboard.__file__).parent / "app.py"), default_timeout=60).run()
    st.cache_resource.clear()
    assert not page.exception
    assert page.selectbox[0].value == source.removeprefix("http://")
    html = "\n".join(element.proto.body for element in page.get("html"))
    assert "no block map" in html
    assert "2,000 of 20,000 tokens · full attention 0.100 · state 0.620" in html
    assert "org/m&lt;1&gt;" in html
    assert "Fragmentation F" not in html
    assert len(page.get("bidi_component")) == 0  # no map and no history to draw
    assert "No block map" in page.info[0].value
