"""A store that is damaged byte by byte: what can be read of it is, and the alerts go on, whatever it holds."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

from alerts.encoding import RowUnreadable, dump_change, dump_mute, load_alert, load_change, load_mute
from alerts.errors import AlertsConfigError
from alerts.grouping import Waiting, compose, group_of
from alerts.lifecycle import Lifecycle
from alerts.model import Change
from alerts.mutes import Mute
from alerts.outbox import Standing
from alerts.readings import Reading
from alerts.rule_files import read_rules
from alerts.sinks.slack_message import full_message
from alerts.sinks.webhook import payload
from alerts.state import AlertState, StateUnreadable
from alerts.store import Store
from tests.alerts.conftest import START, TurnedClock, fired, make_alert, resolved
from tests.alerts.test_rule_files import CATALOGUE

RULES = """
rules:
  - {name: full, number: used_ratio, above: 50%, exit: 40%, severity: warning, summary: s, meaning: m, action: a}
"""
DIGITS = b'0123456789eE.-+"nul{}[],:\xff'


def reading(value: float | None = 0.9) -> Reading:
    labels = {"engine_id": "e1", "model": "m"}
    return Reading(source="s1", labels=labels, numbers={"used_ratio": value}, incarnation="1")


def judge(states: Mapping[str, AlertState]) -> list[Change]:
    """What an agent that found these states makes of the next minutes; the stored form is made of each too."""
    lifecycle = Lifecycle(read_rules(RULES, file="rules.yml", catalogue=CATALOGUE)[1], states)
    changes: list[Change] = []
    for number, value in enumerate((0.9, None, 0.9, 0.1)):
        step = lifecycle.evaluate([reading(value)], START + 600 + number, elapsed_seconds=5.0)
        for state in step.states.values():
            assert AlertState.from_json(state.to_json()) == state
        changes += step.changes
        lifecycle = lifecycle.after(step)
    return changes


def open_state() -> str:
    lifecycle = Lifecycle(read_rules(RULES, file="rules.yml", catalogue=CATALOGUE)[1], {})
    [state] = lifecycle.evaluate([reading()], START + 0.123).states.values()
    return state.to_json()


def damaged(text: str, random: Random) -> str:
    raw = bytearray(text.encode())
    for _ in range(random.choice((1, 1, 3))):
        raw[random.randrange(len(raw))] = random.choice(DIGITS)
    return raw.decode("latin-1")


def test_a_damaged_state_is_refused_or_can_be_gone_on_with() -> None:
    whole, random, refused = open_state(), Random(4), 0
    for _ in range(3000):
        try:
            state = AlertState.from_json(damaged(whole, random))
        except StateUnreadable:
            refused += 1
        else:
            judge({state.fingerprint: state})
    assert 0 < refused < 3000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("true_seconds", "many"),
        ("quiet_seconds", None),
        ("clear_seconds", 1e999),
        ("held", 3),
        ("phase", "resolved"),
        ("more", 1),
        ("alert.started_at", 1e999),
        ("alert.started_at", -1e12),
        ("alert.started_at", "today"),
        ("alert.value", 1e999),
        ("alert.summary", None),
        ("alert.ended_at", START),
        ("alert.labels", ["engine_id"]),
    ],
)
def test_a_state_of_wrong_values_is_refused(name: str, value: object) -> None:
    plain = json.loads(open_state())
    inner, _, field = name.rpartition(".")
    (plain[inner] if inner else plain)[field] = value
    with pytest.raises(StateUnreadable):
        AlertState.from_json(json.dumps(plain))
    judge({state.fingerprint: state for state in [AlertState.from_json(open_state())]})  # the negative control


def test_damaged_rows_are_refused_or_can_be_told() -> None:
    """Of changes, and of what a sink was told; what passes can be written by every sink."""

    random = Random(5)
    alert = make_alert(started_at=START + 0.123)
    for whole in (dump_change(fired(alert, START + 0.5)), dump_change(resolved(alert, START + 9.5))):
        for _ in range(3000):
            try:
                change = load_change(1, damaged(whole, random))
            except RowUnreadable:
                continue
            notice = compose([Waiting(change, group_of(change.alert), 0.0)], {}, at=START + 10)
            json.dumps([full_message(notice), payload(notice, "hook")], allow_nan=False)


def test_a_damaged_mute_is_refused_or_is_one() -> None:
    random = Random(6)
    whole = dump_mute(
        Mute(id="a1", rule="full", engine=None, author="Zoë", comment="", created_at=START, expires_at=START + 60)
    )
    refused = 0
    for _ in range(3000):
        try:
            mute = load_mute(damaged(whole, random))
        except (RowUnreadable, AlertsConfigError):
            refused += 1
        else:
            assert isinstance(mute.author, str)
            mute.active(START)
    assert 0 < refused < 3000


def test_a_damaged_standing_is_refused_or_is_one(clock: TurnedClock) -> None:
    random, whole = Random(7), Standing(sent_at=1.0, not_before=2000.0).to_json(clock)
    for _ in range(3000):
        try:
            standing = Standing.from_json(damaged(whole, random), clock)
        except RowUnreadable:
            continue
        json.loads(standing.to_json(clock), parse_constant=pytest.fail)


def test_a_change_that_contradicts_itself_is_refused() -> None:
    plain = json.loads(dump_change(resolved(make_alert(), START)))
    assert not load_change(1, json.dumps(plain)).alert.firing
    plain["alert"]["ended_at"] = None
    with pytest.raises(RowUnreadable):
        load_change(1, json.dumps(plain))
    with pytest.raises(RowUnreadable):
        load_alert("null")


def test_a_file_that_is_damaged_anywhere_stops_no_store(tmp_path: Path) -> None:
    """The pages, the schema, the texts: every byte that is not 0 may be another one."""
    path = tmp_path / "alerts.sqlite"

    def opened() -> Store:
        return Store(path, ["slack"], mend_seconds=0.0)

    store = opened()
    now = time.time()
    store.add_mute(Mute(id="a", rule="full", engine=None, author="a", comment="", created_at=now, expires_at=now + 60))
    for number in range(5):
        alert = make_alert(engine=f"e{number}", started_at=now)
        store.commit({f"{number}": open_state()}, [fired(alert, now)])
    store.close()
    whole = path.read_bytes()
    places, random = [index for index, byte in enumerate(whole) if byte], Random(8)
    kept = 0
    for _ in range(60):
        raw = bytearray(whole)
        for _ in range(random.choice((1, 3, 20))):
            raw[random.choice(places)] = random.randrange(256)
        for file in tmp_path.iterdir():
            file.unlink()
        path.write_bytes(raw)
        store = opened()
        kept += len(store.load_states())
        store.commit({"new": "{}"}, [fired(make_alert(engine="new"), now)])
        assert store.durable
        store.close()
        again = opened()
        assert again.load_states()["new"] == "{}"
        again.close()
    assert kept > 60  # most of it is read


def test_a_text_that_is_no_utf8_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "alerts.sqlite"
    store = Store(path, ["slack"])
    store.commit({"a": '"aaaaaaaaaaaaaaaa"', "b": '"bbbbbbbbbbbbbbbb"'}, [])
    store.close()
    raw = path.read_bytes()
    assert b'"aaaaaaaaaaaaaaaa"' in raw
    path.write_bytes(raw.replace(b'"aaaaaaaaaaaaaaaa"', b'"\xffaaaaaaaaaaaaaaa"'))
    again = Store(path, ["slack"])
    assert again.durable
    assert again.load_states()["b"] == '"bbbbbbbbbbbbbbbb"'
    again.close()
