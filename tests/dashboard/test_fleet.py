"""The fleet: which pool comes first, what a card says, and readings of real agents and a real Prometheus."""

from __future__ import annotations

import html
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from agent import wire
from agent.client import AgentClient
from agent.wire.alerts import AlertRecord
from dashboard.fleet import NO_AGENT, Fleet, PoolCard, alert_words, card_of, chosen_of, concern, fleet_html
from dashboard.fleet_reader import FleetReader
from dashboard.palette import LIGHT
from dashboard.prometheus import Prometheus, PrometheusUnavailable, cards_of
from dashboard.views.fleet import silent, summary_text

Summary = Callable[..., wire.EngineSummary]


def fragmentation(rate: float | None) -> wire.Fragmentation:
    return wire.Fragmentation(
        rate=rate,
        strict_rate=rate,
        largest_allocatable_run=1,
        largest_free_run=1,
        allocatable_runs=1,
        run_length_histogram=[1],
    )


def test_the_pool_most_in_need_is_first(summary: Summary) -> None:
    blocked = wire.Forecast(exhaustion_seconds=None, reason="", admission_blocked=True)
    engines = {
        "gone": summary(id="gone", state="gone"),
        "calm": summary(id="calm", fragmentation=fragmentation(0.1)),
        "scattered": summary(id="scattered", fragmentation=fragmentation(0.9)),
        "degraded": summary(id="degraded", degraded=True),
        "blocked": summary(id="blocked", forecast=blocked),
        "stalled": summary(id="stalled", state="stalled"),
    }
    cards = [card_of(engine, 1, "", 0.3, "F is high" if name == "calm" else "") for name, engine in engines.items()]
    found = Fleet.of(cards, [], 1).cards
    assert [card.id for card in found] == ["stalled", "blocked", "degraded", "calm", "scattered", "gone"]
    assert [card.id for card in found if card.in_need] == ["stalled", "blocked", "degraded", "calm", "gone"]


def test_what_a_card_says_is_escaped_and_leads_to_its_pool(summary: Summary) -> None:
    card = card_of(summary(id='a"><b>&.dp0.tp0.pp0.kv', model="<i>"), 2, "host:1", 0.3)
    text = fleet_html([card], LIGHT)
    assert "<i>" not in text.replace('<i style="flex:', "")
    assert "&lt;i&gt;" in text
    assert "agent=2" in text
    choice = re.search(r'data-choice="([^"]*)"', text)
    assert choice is not None
    assert chosen_of(unquote(html.unescape(choice[1]))) == (2, card.id)
    assert "49.9 % of 1,000 held" not in text
    assert "50.0 % of 1,000 held" in text


def test_an_age_that_is_not_known_is_left_out(summary: Summary) -> None:
    known = card_of(summary(snapshot_age_seconds=3.0), 1, "", 0.3)
    assert "5 running, 1 waiting · 3.0 s old<" in fleet_html([known], LIGHT)
    assert "5 running, 1 waiting<" in fleet_html([replace(known, age_seconds=None)], LIGHT)


def test_the_summary_counts_in_words(summary: Summary) -> None:
    card = card_of(summary(), 1, "", 0.3)
    assert summary_text(Fleet.of([card], [], 1)).startswith("1 pool · ")
    assert summary_text(Fleet.of([card] * 2, ["b: no"], 2)).endswith("· 1 of 2 sources answers")
    assert summary_text(Fleet.of([card] * 2, ["c: no"], 3)).endswith("· 2 of 3 sources answer")


def test_a_line_has_gaps_where_nothing_was_known(summary: Summary) -> None:
    card = replace(card_of(summary(), 1, "", 0.3), line=(0.0, 1.0, None, 0.5))
    lines = re.findall(r'points="([^"]*)"', fleet_html([card], LIGHT))
    assert lines == ["0.0,29.0 33.3,1.0", "100.0,15.0 100.0,15.0"]


def test_concerns_are_told_with_the_gravest_first(summary: Summary) -> None:
    assert concern(card_of(summary(state="stalled", reason="no step"), 1, "", 0.3)) == "stalled: no step"
    assert concern(card_of(summary(fragmentation=fragmentation(0.1)), 1, "", 0.3)) == "no block left in 4 min 10 s"
    calm = wire.Forecast(exhaustion_seconds=None, reason="")
    assert concern(card_of(summary(forecast=calm), 1, "", 0.3)) == "F above 0.30"
    assert concern(card_of(summary(forecast=calm), 1, "", 0.6)) == "calm"


@pytest.mark.parametrize(
    ("severity", "changes", "tone"),
    [
        ("critical", {}, "alarm"),
        ("warning", {}, "warning"),
        ("info", {}, "info"),
        ("info", {"degraded": True}, "alarm"),
        ("", {}, ""),
    ],
)
def test_a_concern_is_coloured_as_its_alert(
    summary: Summary, severity: str, changes: dict[str, Any], tone: str
) -> None:
    card = card_of(summary(**changes), 1, "", 0.3, "F is high" if severity else "", severity)
    assert card.tone == tone
    assert f'class="kv-concern {tone}"' in fleet_html([card], LIGHT)


def test_a_replay_is_never_taken_for_an_engine(summary: Summary) -> None:
    badge = ">replay</span>"
    assert badge in fleet_html([card_of(summary(replay=True), 1, "", 0.3)], LIGHT)
    assert badge not in fleet_html([card_of(summary(), 1, "", 0.3)], LIGHT)


def test_who_does_not_answer_is_said_in_words() -> None:
    def told(*troubles: str, sources: int) -> str:
        return silent(Fleet.of([], troubles, sources)).what

    assert told("no answer", sources=1) == "The agent does not answer: no answer"
    assert told("a: no", sources=3) == "1 of 3 sources does not answer: a: no"
    assert told("a: no", "b: no", sources=3) == "2 of 3 sources do not answer: a: no; b: no"


def test_the_only_agent_has_no_name() -> None:
    made = FleetReader([("", AgentClient("http://127.0.0.1:9"))])
    try:
        (trouble,) = made.read().troubles
    finally:
        made.close()
    assert trouble.startswith("no answer")


def test_alerts_are_of_the_pool_that_they_name(summary: Summary) -> None:
    engine = summary()
    labels = {"engine_id": engine.engine_id, "pool": engine.pool, "rank": engine.rank, "model": engine.model}
    record = AlertRecord(
        fingerprint="1",
        rule="pool",
        severity="critical",
        state="firing",
        held="",
        labels=labels,
        value=1.0,
        value_text="1",
        threshold_text="0",
        summary="It is full",
        meaning="",
        action="",
        started_unix=1000.0,
        ended_unix=None,
        reason="",
        link=None,
        runbook_url=None,
    )
    assert alert_words([record], engine, 1090.0) == "It is full, for 1 min 30 s"
    assert alert_words([record], summary(pool="other"), 1090.0) == ""
    assert alert_words([record.model_copy(update={"state": "muted"})], engine, 1090.0) == ""


# ---- real agents -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agents(shared_stage: Any) -> tuple[list[str], list[Any]]:
    """Two pools at rest, watched by two agents; to the page, a fleet of two hosts with the same names."""
    pools = [shared_stage.pool("first", 600), shared_stage.pool("second", 900, "lowest-free")]
    for pool in pools:
        pool.send("churn 30")
    urls = [shared_stage.agent(interval_seconds="0.2")[0] for _ in range(2)]
    for pool in pools:
        pool.send("hold")
    return urls, pools


@pytest.fixture
def reader() -> Iterator[Callable[..., FleetReader]]:
    made: list[FleetReader] = []

    def make(urls: list[str], *rest: Any, **more: Any) -> FleetReader:
        agents = [(f"host {url[-5:]}", AgentClient(url, timeout_seconds=60)) for url in urls]
        made.append(FleetReader(agents, *rest, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_every_agent_s_pools_are_read_with_their_lines(
    agents: tuple[list[str], list[Any]], reader: Callable[..., FleetReader], eventually: Callable[..., Any]
) -> None:
    urls, pools = agents
    now = [100.0]
    made = reader(urls, clock=lambda: now[0])
    fleet = made.read()
    assert sorted((card.agent, card.id) for card in fleet.cards) == sorted(
        (number, pool.id) for number in (1, 2) for pool in pools
    )
    assert fleet.troubles == ()
    with AgentClient(urls[0], timeout_seconds=60) as client:
        for engine in client.engines().engines:
            card = next(card for card in fleet.cards if (card.agent, card.id) == (1, engine.id))
            assert (card.rate, card.blocks) == (engine.fragmentation.rate, engine.blocks.model_dump())
    assert made.read() is fleet  # shared while it is fresh

    def lines_are_there() -> bool:
        now[0] += 40.0
        return all(any(value is not None for value in card.line) for card in made.read().cards)

    eventually(lines_are_there, "each card has a line")


def test_an_agent_that_does_not_answer_is_said_and_costs_the_others_nothing(
    agents: tuple[list[str], list[Any]], reader: Callable[..., FleetReader]
) -> None:
    urls, pools = agents
    now = [100.0]
    made = reader([urls[0], "http://127.0.0.1:9"], clock=lambda: now[0])
    fleet = made.read()
    assert {card.id for card in fleet.cards} == {pool.id for pool in pools}
    assert len(fleet.troubles) == 1
    assert "no answer from the agent" in fleet.troubles[0]
    now[0] += 5.0
    assert made.read().troubles == fleet.troubles


def test_many_threads_share_one_reading(
    agents: tuple[list[str], list[Any]], reader: Callable[..., FleetReader]
) -> None:
    made = reader(agents[0], clock=lambda: 100.0)
    found: list[Fleet] = []
    threads = [threading.Thread(target=lambda: found.append(made.read())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    assert len({id(fleet) for fleet in found}) == 1


# ---- a real Prometheus -----------------------------------------------------------------------------------------------


@pytest.fixture
def prometheus(
    agents: tuple[list[str], list[Any]], prometheus_tools: Path, tmp_path: Path, eventually: Callable[..., Any]
) -> Iterator[str]:
    """Address of a Prometheus that has scraped the first agent."""
    target = agents[0][0].removeprefix("http://")
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms}\n"
        f'scrape_configs: [{{job_name: kvatlas, static_configs: [{{targets: ["{target}"]}}]}}]\n'
    )
    log = tmp_path / "prometheus.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                prometheus_tools / "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=file,
            stderr=file,
            cwd=tmp_path,
        )

    def listening() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(r'msg="?Listening on"?.* address=(127\.0\.0\.1:\d+)', log.read_text())
        return f"http://{found[1]}" if found else None

    try:
        url: str = eventually(listening, "Prometheus listens")

        def scraped() -> bool:
            try:
                answer = httpx.get(f"{url}/api/v1/query", params={"query": "kvatlas_pool_blocks"}, timeout=2)
            except httpx.HTTPError:
                return False
            return answer.status_code == 200 and bool(answer.json()["data"]["result"])

        eventually(scraped, "Prometheus has scraped the agent")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def test_prometheus_knows_what_the_agent_knows(
    agents: tuple[list[str], list[Any]],
    prometheus: str,
    reader: Callable[..., FleetReader],
    eventually: Callable[..., Any],
) -> None:
    urls, pools = agents
    source = Prometheus(prometheus)
    eventually(lambda: all(any(v is not None for v in card.line) for card in source.cards()), "lines are there")
    by_id = {card.id: card for card in source.cards()}
    assert set(by_id) == {pool.id for pool in pools}
    with AgentClient(urls[0], timeout_seconds=60) as client:
        for engine in client.engines().engines:
            card, own = by_id[engine.id], card_of(engine, 1, "", 0.3)
            same = ("id", "kind", "model", "state", "blocks", "running", "waiting", "blocked", "degraded")
            assert {name: getattr(card, name) for name in same} == {name: getattr(own, name) for name in same}
            assert card.rate == pytest.approx(own.rate)
            assert card.where == urls[0].removeprefix("http://")
            assert card.age_seconds is not None
    # Beside agents: a pool that an agent shows is there once, with its link; the rest have none.
    together = reader([urls[0]], source).read().cards
    assert [card.agent for card in together] == [1, 1]
    alone = reader([], source).read().cards
    assert [card.agent for card in alone] == [None, None]
    assert NO_AGENT in fleet_html(alone, LIGHT)
    assert "data-choice" not in fleet_html(alone, LIGHT)
    source.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "AGENT"])
def test_what_is_no_prometheus_is_said(url: str, agents: tuple[list[str], list[Any]]) -> None:
    source = Prometheus(agents[0][0] if url == "AGENT" else url)
    with pytest.raises(PrometheusUnavailable):
        source.cards()
    source.close()


def test_series_of_others_are_left_alone() -> None:
    strange: list[dict[str, Any]] = [
        {"metric": {"__name__": "kvatlas_engine_up"}, "value": [0, "1"]},
        {"metric": {"__name__": "kvatlas_pool_blocks", "engine_id": "e", "rank": "r", "pool": "p"}, "value": [0, "1"]},
    ]
    assert cards_of(strange, [], [], 100.0) == []
    down = {"__name__": "kvatlas_engine_up", "engine_id": "e", "rank": "r", "pool": "p", "instance": "i"}
    (card,) = cards_of([{"metric": down, "value": [0, "0"]}], [], [], 100.0)
    assert isinstance(card, PoolCard)
    assert (card.id, card.state, card.rate, card.blocks) == ("e.r.p", "stale", None, {})
