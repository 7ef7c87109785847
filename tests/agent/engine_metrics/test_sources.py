"""Addresses as operators write them, and which engine each belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent.config import load_settings
from agent.engine_metrics.exposition import parse_exposition
from agent.engine_metrics.joining import join
from agent.engine_metrics.model import SourceReading
from agent.engine_metrics.sources import MAX_SOURCES, MetricsSource, parse_sources
from agent.sampling.model import PoolSample
from engine_shim.errors import SettingsError
from engine_shim.snapshot import MapSnapshot
from tests.agent.test_exporter import sample_of

Make = Callable[..., MapSnapshot]


@pytest.mark.parametrize(
    ("text", "url", "name", "engine_id"),
    [
        ("http://h:8000", "http://h:8000/metrics", "http://h:8000/metrics", ""),
        ("http://h:8000/", "http://h:8000/metrics", "http://h:8000/metrics", ""),
        ("a=http://h/x?a=b", "http://h/x?a=b", "http://h/x", "a"),
        ("http://h/x?a=b", "http://h/x?a=b", "http://h/x", ""),
        ("https://u:secret@h/m", "https://u:secret@h/m", "https://h/m", ""),
        ("http://[::1]:80/m", "http://[::1]:80/m", "http://[::1]:80/m", ""),
    ],
)
def test_an_address_and_its_name(text: str, url: str, name: str, engine_id: str) -> None:
    source = MetricsSource.parse(text)
    assert (source.url, source.name, source.engine_id) == (url, name, engine_id)


@pytest.mark.parametrize(
    "text", ["", "h:8000", "ftp://h/", "http://", "=http://h/", "a=", "http://h:99999/", "http://h:0/", "http://[::/"]
)
def test_what_is_no_address_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(ValueError, match="give http://HOST:PORT/metrics, or ENGINE_ID=URL"):
        MetricsSource.parse(text)


def test_an_id_that_no_address_of_the_api_could_hold() -> None:
    with pytest.raises(ValueError, match="no '/'"):
        MetricsSource.parse("a/b=http://h")


def test_too_many_and_twice() -> None:
    with pytest.raises(ValueError, match="given twice"):
        parse_sources(["http://h/metrics", "http://h"])
    with pytest.raises(ValueError, match="at most 64"):
        parse_sources([f"http://h{i}" for i in range(MAX_SOURCES + 1)])


def test_settings_take_them_from_each_layer() -> None:
    settings = load_settings({}, environment={"KVATLAS_ENGINE_METRICS": "http://a:1, b=http://b:2"})
    assert [one.name for one in settings.metrics_sources()] == ["http://a:1/metrics", "http://b:2/metrics"]
    settings = load_settings({"engine_metrics": ["http://c:3"]}, environment={"KVATLAS_ENGINE_METRICS": "http://a:1"})
    assert [one.place for one in settings.metrics_sources()] == ["c:3"]
    assert load_settings({}, environment={}).metrics_sources() == ()


def test_a_wrong_one_is_told_without_its_password() -> None:
    with pytest.raises(SettingsError, match=r"engine_metrics=.*ENGINE_ID=URL") as caught:
        load_settings({"engine_metrics": ["ftp://user:secret@h/"]}, environment={})
    assert "secret" not in str(caught.value)


# ---- which map -------------------------------------------------------------------------------------------------------


def reading(address: str, *models: str, kind: str = "vllm", ranks: int = 1) -> SourceReading:
    text = "".join(
        f'{kind}:num_requests_running{{engine="{rank}",model_name="{model}"}} 1\n'
        for model in models
        for rank in range(ranks)
    )
    return SourceReading(MetricsSource.parse(address), True, "", 1.0, 1.1, parse_exposition(text).engines)


@pytest.fixture
def pools(make_snapshot: Make) -> Callable[..., dict[str, PoolSample]]:
    def make(*pools: dict[str, Any], **changes: Any) -> dict[str, PoolSample]:
        made = {}
        for pool in pools:
            kind = {"kind": "vllm", "engine_id": "e", "model": "m", "pool": "kv", "data_parallel_rank": 0} | pool
            state = kind.pop("state", "live")
            sample = sample_of(make_snapshot([0, 2], **kind), state=state)
            id = f"{kind['engine_id']}.dp{kind['data_parallel_rank']}.tp0.pp0.{kind['pool']}"
            made[id] = sample_of(sample.snapshot, state=state, id=id)
        return made

    return make


Pools = Callable[..., dict[str, PoolSample]]


def test_the_only_engine_of_kind_and_model_is_meant(pools: Pools) -> None:
    matches, unmapped = join([reading("http://127.0.0.1:1", "m")], pools({}, {"engine_id": "x", "model": "other"}))
    assert [match.pool_id for match in matches] == ["e.dp0.tp0.pp0.kv"]
    assert unmapped == ()


@pytest.mark.parametrize(
    ("address", "others"),
    [
        pytest.param("http://127.0.0.1:1", [{}, {"engine_id": "f"}], id="two engines could be meant"),
        pytest.param("http://10.0.0.7:1", [{}], id="another host"),
        pytest.param("http://127.0.0.1:1", [{"kind": "sglang"}], id="another kind"),
        pytest.param("http://127.0.0.1:1", [{"state": "gone"}], id="its map is of an engine that ended"),
        pytest.param("x=http://127.0.0.1:1", [{}], id="it was given to another engine"),
    ],
)
def test_nothing_is_guessed(pools: Pools, address: str, others: list[dict[str, Any]]) -> None:
    matches, unmapped = join([reading(address, "m")], pools(*others))
    assert matches == ()
    assert len(unmapped) == 1


def test_a_given_engine_is_taken_whatever_its_model_is_called(pools: Pools) -> None:
    matches, unmapped = join([reading("e=http://10.0.0.7:1", "another name")], pools({}, {"pool": "host"}))
    assert [match.pool_id for match in matches] == ["e.dp0.tp0.pp0.kv"]
    assert unmapped == ()


def test_each_rank_s_map_has_its_own_numbers(pools: Pools) -> None:
    both = [{"data_parallel_rank": rank} for rank in (0, 1)]
    matches, _ = join([reading("http://localhost:1", "m", ranks=2)], pools(*both))
    assert [(match.pool_id, match.rank.rank) for match in matches] == [
        ("e.dp0.tp0.pp0.kv", 0),
        ("e.dp1.tp0.pp0.kv", 1),
    ]


def test_engines_without_a_map_have_ids_of_their_own(pools: Pools) -> None:
    readings = [
        reading("http://h:1", "org/a", "b"),
        reading("one=http://h:2", "m"),
        reading("one=http://h:3", "m"),
        reading("http://h:4", "m"),
    ]
    _, unmapped = join(readings, pools())
    assert [one.id for one in unmapped] == ["h:1.b", "h:1.a", "one", "one-2", "h:4"]
    assert [one.engine_id for one in unmapped][2:4] == ["one", "one"]
