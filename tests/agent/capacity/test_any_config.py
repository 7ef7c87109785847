"""Whatever stands in a config.json, it is planned, or refused with an error of ours: nothing else comes out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agent import capacity
from agent.capacity import families
from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import Deployment
from agent.capacity.planner import plan
from agent.capacity.words import render, to_json
from engine_shim.errors import KvatlasError
from tests.agent.capacity.conftest import CASES_FILE

PACKAGE = Path(capacity.__file__).parent
CASES = json.loads(CASES_FILE.read_text(encoding="utf-8"))
SOURCES = ("config_reader", "feed_forward", "fields", "formats", "layer_rules", "parameters", "state_rules")
NAME = re.compile(r'"([A-Za-z_]{3,40})"')
# Every field that the code may read, and some that it does not: any other text of it does no harm here.
FIELDS = sorted(
    {name for case in CASES.values() for name in case["config"]}
    | {name for source in SOURCES for name in NAME.findall((PACKAGE / f"{source}.py").read_text(encoding="utf-8"))}
)
PLACES = Deployment(memory_bytes=80 << 30, max_num_seqs=3)
odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-4, 300),
    st.just(10**30),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-1, 9), st.text(max_size=4), st.none()), max_size=5),
    st.dictionaries(st.sampled_from(FIELDS), st.integers(-2, 64), max_size=3),
)
quick = settings(max_examples=300)


def plan_or_refuse(config: dict[str, Any]) -> None:
    try:
        found = plan(read_geometry(config), PLACES)
    except KvatlasError:
        return
    json.dumps(to_json(found), allow_nan=False)
    assert render(found)
    assert found.kv_bytes_per_token >= found.kv_bytes_per_token_ideal >= 0
    assert found.ideal_bytes_per_sequence >= 0


@quick
@given(
    base=st.sampled_from(sorted(CASES)),
    changed=st.dictionaries(st.sampled_from(FIELDS), odd_values, max_size=4),
    removed=st.lists(st.sampled_from(FIELDS), max_size=3),
)
def test_known_configs_with_odd_fields(base: str, changed: dict[str, Any], removed: list[str]) -> None:
    config = CASES[base]["config"] | changed
    plan_or_refuse({name: value for name, value in config.items() if name not in removed})


@quick
@given(
    kind=st.sampled_from(sorted(families.KNOWN | families.ENCODERS)),
    config=st.dictionaries(st.sampled_from(FIELDS), odd_values, max_size=10),
)
def test_any_fields_of_any_type(kind: str, config: dict[str, Any]) -> None:
    plan_or_refuse(config | {"model_type": kind})
