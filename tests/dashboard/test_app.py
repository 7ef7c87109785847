"""The page's script against real parts, without a browser: empty and broken states, the picker, and its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import dashboard
from agent.client import AgentClient
from dashboard import figure_component

APP = Path(dashboard.__file__).parent / "app.py"
WARM_UP = 20
REFRESHES = 30
KEPT_BYTES = 20_000


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], AppTest]]:
    """A function that gives the page as it is first seen, for an agent's address."""

    def start(agent_url: str, **query: str) -> AppTest:
        monkeypatch.setenv("KVATLAS_AGENT_URL", agent_url)
        st.cache_resource.clear()
        test = AppTest.from_file(str(APP), default_timeout=60)
        for name, value in query.items():
            test.query_params[name] = value
        return test.run()

    yield start
    st.cache_resource.clear()


@pytest.fixture(scope="module")
def watched(shared_stage: Any) -> tuple[str, list[Any]]:
    """An agent that watches two pools, at rest."""
    pools = [shared_stage.pool("first", 600), shared_stage.pool("second", 9000, "lowest-free")]
    for pool in pools:
        pool.send("churn 40")
    url, _ = shared_stage.agent(interval_seconds="0.2")
    for pool in pools:
        pool.send("hold")
    return url, pools


def html_of(test: AppTest) -> str:
    return "\n".join(element.proto.body for element in test.get("html"))


def figures_of(test: AppTest) -> int:
    return sum(element.proto.component_name == "kvatlas.figure" for element in test.get("bidi_component"))


def test_unreachable_agent_is_said_and_nothing_is_drawn(app: Callable[..., AppTest]) -> None:
    test = app("http://127.0.0.1:9")
    assert not test.exception
    assert len(test.error) == 1
    assert "Agent unreachable" in test.error[0].value
    assert "kvatlas agent" in test.error[0].value
    assert figures_of(test) == 0


def test_no_engine_says_where_the_agent_looks(app: Callable[..., AppTest], stage: Any) -> None:
    url, _ = stage.agent()
    test = app(url)
    assert not test.exception
    assert [str(stage.folder.name) in info.value.replace("\\", "") for info in test.info] == [True]
    assert "No engine found" in test.info[0].value
    assert figures_of(test) == 0


def test_a_live_pool_is_shown_whole(app: Callable[..., AppTest], watched: tuple[str, list[Any]]) -> None:
    url, pools = watched
    test = app(url)
    assert not test.exception
    assert not test.error
    assert test.selectbox[0].options == [pool.id for pool in pools]
    with AgentClient(url) as client:
        rates = {engine.id: engine.fragmentation.rate or 0.0 for engine in client.engines().engines}
    assert test.selectbox[0].value == max(rates, key=lambda id: rates[id])  # the worst of them
    html = html_of(test)
    for words in ("Fragmentation F", "F, free alone", "Largest run", "Tail waste", "Exhaustion", "Snapshot age"):
        assert words in html
    assert "Paged attention needs no contiguity" in html
    assert figures_of(test) == 2


def test_the_choice_stays_over_refreshes_and_is_in_the_address(
    app: Callable[..., AppTest], watched: tuple[str, list[Any]]
) -> None:
    url, pools = watched
    test = app(url, pool=pools[0].id)
    test.selectbox[0].select(pools[1].id).run()
    assert test.query_params["pool"] in (pools[1].id, [pools[1].id])
    for _ in range(3):
        test.run()
        assert test.selectbox[0].value == pools[1].id
    assert "9,000 blocks" in html_of(test)


def test_a_pool_named_by_the_address_is_shown(app: Callable[..., AppTest], watched: tuple[str, list[Any]]) -> None:
    url, pools = watched
    assert app(url, pool=pools[1].id).selectbox[0].value == pools[1].id


def test_a_pool_that_is_not_listed_stays_chosen_and_is_said(
    app: Callable[..., AppTest], watched: tuple[str, list[Any]]
) -> None:
    url, _ = watched
    test = app(url, pool="other.dp0.tp0.pp0.kv")
    assert not test.exception
    assert test.selectbox[0].value == "other.dp0.tp0.pp0.kv"
    assert "no longer lists" in test.warning[0].value
    assert figures_of(test) == 0


def test_an_agent_that_is_not_known_is_said_and_no_other_is_shown(
    app: Callable[..., AppTest], watched: tuple[str, list[Any]]
) -> None:
    url, pools = watched
    test = app(url, pool=pools[0].id, agent="7")
    assert not test.exception
    assert [("agent '7'" in one.value.replace("\\", ""), "one agent" in one.value) for one in test.error] == [
        (True, True)
    ]
    assert "kv-nothing-below" in html_of(test)
    test.selectbox[0].select(pools[0].id).run()
    assert not test.error
    assert test.query_params.get("agent") is None


def test_paused_is_said(app: Callable[..., AppTest], watched: tuple[str, list[Any]]) -> None:
    url, _ = watched
    test = app(url)
    test.toggle[0].set_value(True).run()
    assert any("Paused" in info.value for info in test.info)
    test.toggle[0].set_value(False).run()
    assert not any("Paused" in info.value for info in test.info)


def test_the_charts_keep_their_identity(app: Callable[..., AppTest], watched: tuple[str, list[Any]]) -> None:
    url, pools = watched
    test = app(url)
    before = [element.proto.id for element in test.get("bidi_component")]
    pools[0].send("churn 5")
    pools[0].send("hold")
    test.run()
    assert [element.proto.id for element in test.get("bidi_component")] == before
    assert len(set(before)) == 3  # two charts, and the table of holders


def test_memory_stays_flat_over_many_refreshes(watched: tuple[str, list[Any]]) -> None:
    """Counted in a process of its own, since this one is no quiet place. Tens of KB are sent: kept, they are seen."""
    url, _ = watched
    script = Path(__file__).parent / "refreshing_process.py"
    command = [sys.executable, "-P", str(script), url, str(WARM_UP), str(REFRESHES), str(KEPT_BYTES)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    usual, with_a_leak = (growth / REFRESHES for growth in json.loads(ran.stdout))
    assert usual < KEPT_BYTES / 2 < with_a_leak, f"bytes held a refresh: {usual:.0f}, with a leak {with_a_leak:.0f}"


def test_no_table_loads_pandas_while_a_figure_is_drawn() -> None:
    """Plotly takes it from `sys.modules`, half loaded or not."""
    check = "import sys, {}; sys.exit('pandas' not in sys.modules)"
    for module, loaded in (("dashboard.figure_component", True), ("plotly.graph_objects", False)):
        ran = subprocess.run(
            [sys.executable, "-c", check.format(module)], capture_output=True, timeout=900, check=False
        )
        assert (ran.returncode == 0) == loaded, module


def test_the_script_of_the_charts_is_our_own_copy() -> None:
    assert (figure_component.PLOTLY_FOLDER / "plotly.min.js").is_file()
    assert figure_component.PLOTLY_URL == "component/dashboard.figure_component.plotly/plotly.min.js"
    sources = "".join(path.read_text() for path in APP.parent.rglob("*.[jc]s*"))
    assert "http://" not in sources
    assert "https://" not in sources
    assert httpx.URL(figure_component.PLOTLY_URL).is_relative_url
