"""One answer over HTTP: within its time and its size, whatever the other side does."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import pytest

from agent.engine_metrics.exposition import NotMetrics
from agent.engine_metrics.fetch import NoAnswer, fetch
from agent.engine_metrics.names import Quantity
from agent.engine_metrics.sources import MetricsSource
from tests.agent.engine_metrics.conftest import Endpoint, http

TEXT = 'vllm:num_requests_running{model_name="m"} 3\n'
Start = Callable[[Callable[[], bytes | None]], Endpoint]


def test_an_answer(endpoint: Start) -> None:
    one = endpoint(lambda: http(TEXT))
    (engine,) = fetch(MetricsSource.parse(one.url)).engines
    assert engine.total[Quantity.RUNNING] == 3
    (request,) = one.asked
    assert request.startswith(b"GET /metrics HTTP/1.1\r\n")
    assert b"accept-encoding: identity" in request.lower()


def test_ollama_s_list(endpoint: Start) -> None:
    one = endpoint(lambda: http('{"models": [{"name": "q", "size": 5}]}'))
    (engine,) = fetch(MetricsSource.parse(one.url + "/api/ps")).engines
    assert (engine.kind, engine.model) == ("ollama", "q")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(http("no", "500 Internal Server Error"), "HTTP 500", id="500"),
        pytest.param(http("", "302 Found", "Location: http://127.0.0.1:1/"), "HTTP 302", id="a redirect"),
        pytest.param(http(TEXT, length=len(TEXT) + 100), "broke off", id="half a body"),
        pytest.param(b"what?\r\n\r\n", "not HTTP", id="another protocol"),
        pytest.param(b"", "broke off", id="nothing"),
        pytest.param(http(gzip.compress(b"0" * 1000), "200 OK", "Content-Encoding: gzip"), "is gzip", id="compressed"),
        pytest.param(http("x" * 20_000), "longer than 10,000 bytes", id="too long"),
    ],
)
def test_a_bad_answer_is_none(endpoint: Start, answer: bytes, said: str) -> None:
    one = endpoint(lambda: answer)
    with pytest.raises(NoAnswer, match=said):
        fetch(MetricsSource.parse(one.url), max_bytes=10_000)


@pytest.mark.parametrize("body", [b"\xff\xfe", TEXT[:-9].encode()])
def test_a_body_that_is_no_text_or_is_cut_off(endpoint: Start, body: bytes) -> None:
    one = endpoint(lambda: http(body))
    with pytest.raises(NotMetrics):
        fetch(MetricsSource.parse(one.url))


def test_silence_is_not_waited_for(endpoint: Start) -> None:
    one = endpoint(lambda: None)
    with pytest.raises(NoAnswer, match=r"no answer within 0\.2 s"):
        fetch(MetricsSource.parse(one.url), seconds=0.2)


def test_nobody_listens() -> None:
    with pytest.raises(NoAnswer, match="no connection") as caught:
        fetch(MetricsSource.parse("http://user:secret@127.0.0.1:9/metrics"))
    assert "secret" not in str(caught.value)
